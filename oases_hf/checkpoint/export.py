"""Export: a standard Hugging Face folder of sharded safetensors, written by several ranks in parallel."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..models.converted import Converted, converted
from ..parallel.mesh import Axis
from ..parallel.sharding import Layout
from . import files
from .agreement import FREE_SPACE, agree, noting
from .files import TensorFile, write_durably
from .names import names_in_exports

PLAN_NAME = "oases_plan.json"
MAX_SHARD_SIZE = "5GB"


def save_pretrained(model: PreTrainedModel, folder: str | Path, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
    """Write ``model`` as a folder that ``from_pretrained`` reads; every rank must call it.

    Files are dealt out to the ranks of the first TMP world, each of which gathers one tensor at a
    time. Tensors have HF names, full shapes and the dtype trained in. The plan that was trained by
    is written beside them, as ``oases_plan.json``.

    Args:
        model: a converted model.
        folder: made if it is not there.
        max_shard_size: the most bytes of one file, as HF's ``save_pretrained`` takes it.

    Raises:
        DistributedError: not all ranks called it.
        CheckpointError: some rank could not write; all ranks raise.
    """
    state = converted(model)
    state.pause()
    state.mesh.meet("save_pretrained (or Trainer.save_model)")
    failures: list[Exception] = []
    if state.mesh.data.rank == 0:
        with noting(failures):
            _write(model, state, Path(folder), max_shard_size, failures)
    agree(state.mesh, failures, f"{folder} could not be written", FREE_SPACE)


def _write(
    model: PreTrainedModel, state: Converted, folder: Path, max_shard_size: int | str, failures: list[Exception]
) -> None:
    """Write this rank's files; a failure is noted, and the gathering goes on, since other ranks take part in it."""
    tensors, layouts, shapes = dict[str, Tensor](), dict[str, Layout | None](), dict[str, Tensor]()
    renamed = names_in_exports(model)
    for own, tensor in unique_tensors(model):
        name, layout = renamed.get(own, own), state.layouts.get(own)
        tensors[name], layouts[name] = tensor, layout
        shapes[name] = torch.empty(tensor.shape if layout is None else layout.shape, dtype=tensor.dtype, device="meta")
    split = into_files(shapes, max_shard_size)
    axis = state.mesh.tmp
    with noting(failures):
        folder.mkdir(parents=True, exist_ok=True)
    for number, (filename, names) in enumerate(split.filename_to_tensors.items()):
        writer = number % axis.size
        rows = (rows for name in names for rows in _gather_rows(tensors[name], layouts[name], axis, writer))
        if axis.rank == writer:
            with (
                noting(failures),
                TensorFile(folder / filename, {name: shapes[name] for name in names}, {"format": "pt"}) as file,
            ):
                file.add_all(filter(torch.is_tensor, rows))
        for _ in rows:  # the others', and what is left after an error: those who send are waited for
            pass
    if axis.rank == 0:
        with noting(failures):
            _write_rest(model, folder, split)
            (folder / PLAN_NAME).write_text(state.plan.to_json() + "\n")


def _write_rest(model: PreTrainedModel, folder: Path, split: StateDictSplit) -> None:
    """Configuration and index; files of an earlier export that are not of this one go."""
    save_config(model, folder)
    stale = {*folder.glob("model-*.safetensors"), folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME}
    for path in stale:
        if path.name not in split.filename_to_tensors:
            path.unlink(missing_ok=True)
    write_index(folder, split)


def into_files(shapes: dict[str, Tensor], max_shard_size: int | str) -> StateDictSplit:
    """Which files a model's tensors go to."""
    return split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )


def write_index(folder: Path, split: StateDictSplit) -> None:
    """Write which file has which tensor, if there are several."""
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_durably(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the configuration of a converted model as it was before, and how it generates."""
    state, config = converted(model), copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if state.use_cache is not None:
        config.use_cache = state.use_cache
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def full_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """The full ``state_dict`` on rank 0's CPU, empty elsewhere; every rank must call it.

    Raises:
        DistributedError: not all ranks called it.
    """
    state = converted(model)
    state.mesh.meet("get_state_dict")
    if state.mesh.data.rank:
        return {}
    gathered = {
        name: _gather(tensor, state.layouts.get(name), state.mesh.tmp, 0) for name, tensor in model.state_dict().items()
    }
    return {name: tensor for name, tensor in gathered.items() if tensor is not None}


def unique_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write, tied ones under their first name only."""
    return ((names[0], tensor.detach()) for names, tensor in named_tensors(model))


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """The tensors of a model's ``state_dict``, each with all names it has."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return ((names[key], tensor) for key, tensor in tensors.items())


def _gather_rows(tensor: Tensor, layout: Layout | None, axis: Axis, writer: int) -> Iterator[Tensor | None]:
    """The full tensor, a few rows after the other, as :func:`_gather` has it."""
    shape = tuple(tensor.shape) if layout is None else layout.shape
    number = shape[0] if shape else 1
    step = max(1, files.PIECE_BYTES * number // max(1, math.prod(shape) * tensor.element_size()))
    if number <= step:
        yield _gather(tensor, layout, axis, writer)
        return
    for lo in range(0, number, step):
        hi = min(number, lo + step)
        if layout is None or not layout.sharded:
            yield _gather(tensor[lo:hi], None, axis, writer)
        else:
            own = layout.slices[axis.rank].own_rows(lo, hi)
            yield _gather(tensor[own.lo : own.hi], layout.rows(lo, hi), axis, writer)


def _gather(tensor: Tensor, layout: Layout | None, axis: Axis, writer: int) -> Tensor | None:
    """The full tensor on the CPU of ``writer``; None on other ranks. Parts held twice travel once."""
    if layout is None or not layout.sharded or axis.group is None:
        return tensor.detach().cpu().contiguous() if axis.rank == writer else None
    sources = {layout.slices[rank]: rank for rank in reversed(range(axis.size)) if layout.slices[rank].size}
    if layout.slices[writer].size:
        sources[layout.slices[writer]] = writer
    full = torch.empty(layout.shape, dtype=tensor.dtype) if axis.rank == writer else None
    for place, source in sources.items():
        part = tensor.detach()
        if full is not None:
            if source != writer:
                part = tensor.new_empty(layout.local_shape(source))
                dist.recv(part, src=axis.ranks[source], group=axis.group)
            place.put(full, part.cpu())
        elif axis.rank == source:
            dist.send(part.contiguous(), dst=axis.ranks[writer], group=axis.group)
    return full
