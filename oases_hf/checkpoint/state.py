"""Training state: each rank writes its share of parameters and optimizer state.

What several ranks hold is written by one of them. Every tensor is stored under its Hugging Face name, with its place
in the full tensor, so that another plan, degree or number of ranks finds the slices that it needs.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..models.converted import Converted, converted
from ..owners import Held, deal
from ..parallel.sharding import Slice
from . import random_state
from .agreement import FREE_SPACE, together
from .export import save_config, unique_tensors
from .files import TensorFile, Written, digest, pieces, sync_file, sync_folder
from .manifest import Manifest, is_whole
from .names import names_in_exports
from .places import OPTIMIZER, PARAMETERS, RANDOM, parameter_names, place_of
from .stored import PLACES, place_text


@dataclass(frozen=True)
class Entry:
    """A tensor to write, and its place in the full one."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    place: Slice | None


class Saving:
    """A training checkpoint that is being written; every rank must make it, and call :meth:`finish`.

    It is written to another folder beside ``folder``, and takes its name when it is whole.

    Args:
        model: converted.
        optimizers: of its parameters.
        folder: what is there by then is replaced.
        beside: called on every rank with the folder that is written to; what it writes becomes part of the checkpoint.
        rows_per_step: sequences of an optimizer step.
        behind: write in another thread, from a copy in the host's memory.

    Raises:
        DistributedError: not all ranks made it.
        CheckpointError: some rank could not write; all ranks raise, and ``folder`` is as it was.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizers: Sequence[Optimizer],
        folder: Path,
        beside: Callable[[Path], object],
        rows_per_step: int | None = None,
        *,
        behind: bool = False,
    ) -> None:
        self._folder, self._there, self._what = folder, unfinished(folder), f"{folder} could not be written"
        state = converted(model)
        state.pause()
        self._mesh, world = state.mesh, state.mesh.world
        self._mesh.meet(f"saving {folder}")
        with self._together():
            if world.rank == 0:
                shutil.rmtree(self._there, ignore_errors=True)
                self._there.mkdir(parents=True)
                save_config(model, self._there)
        with self._together():
            beside(self._there)
        names = parameter_names(model)
        with self._together():
            groups = [_groups(optimizer, names) for optimizer in optimizers]
            plan, dropout = asdict(state.plan), state.dropout.state()
            self._manifest = Manifest(plan, world.size, rows_per_step, groups, dropout, {}, names_in_exports(model))
            entries = sorted(_entries(model, state, optimizers, names), key=lambda each: -each.tensor.element_size())
            self._file = self._there / f"oases-{world.rank:05}-of-{world.size:05}.safetensors"
            self._written: Future[Written] = Future()
            if behind:
                entries = [replace(each, tensor=each.tensor.detach().to("cpu", copy=True)) for each in entries]
        if behind:
            threading.Thread(target=self._write, args=(entries,), name="oases-saving").start()
        else:
            self._write(entries)

    @property
    def done(self) -> bool:
        """Whether this rank has written its part, or failed to."""
        return self._written.done()

    def finish(self) -> None:
        """Wait until everything is written, and make it a checkpoint; raises CheckpointError as above."""
        with self._together():
            written = {self._file.name: self._written.result()}
        everywhere = self._mesh.from_all(written)
        with self._together():
            if self._mesh.world.rank == 0:
                files = {name: each for rank in everywhere for name, each in rank.items()}
                for path in sorted(self._there.iterdir()):
                    if path.is_file() and path.name not in files:
                        sync_file(path)
                        files[path.name] = digest(path)
                manifest = replace(self._manifest, files=files)
                manifest.check_sizes(self._there)  # the files of other ranks must be on a disk that all see
                manifest.write(self._there)
                _publish(self._there, self._folder)

    def _write(self, entries: Sequence[Entry]) -> None:
        failure = ""
        try:
            self._written.set_result(_write(self._file, entries))
        except Exception as error:
            failure = str(error)
        if failure:  # not the error itself: its traceback would keep all that was to be written
            self._written.set_exception(CheckpointError(failure))

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            with together(self._mesh, self._what, FREE_SPACE):
                yield
        except CheckpointError:
            if self._mesh.world.rank == 0:
                _remove(self._there)
            raise


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return folder.parent / ".unfinished" / folder.name


def finish(folder: Path) -> None:
    """Give a checkpoint that is whole its name, if a crash kept it from that: one rank calls it, before loading."""
    if not folder.exists() and is_whole(unfinished(folder)):
        _publish(unfinished(folder), folder)


def numbered(folder: Path, begin: str) -> list[Path]:
    """The folders whose names are ``begin`` and a number, in the order of these, once all that can be are finished."""

    def found(there: Path) -> dict[int, Path]:
        numbers = ((path.name.removeprefix(begin), path) for path in there.glob(f"{begin}*") if path.is_dir())
        return {int(number): path for number, path in numbers if number.isdigit()}

    for path in found(unfinished(folder / begin).parent).values():
        finish(folder / path.name)
    return [path for _, path in sorted(found(folder).items())]


def _publish(whole: Path, final: Path) -> None:
    """Give a folder its name, in the place of what has it."""
    replaced = whole.with_name(f"{whole.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.rename(final, replaced)
    os.rename(whole, final)
    sync_folder(final.parent)
    _remove(replaced)


def _remove(folder: Path) -> None:
    """Remove a folder, and the one that it is in if that is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def _entries(
    model: PreTrainedModel, state: Converted, optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]
) -> Iterator[Entry]:
    """What this rank writes."""
    rank, ownership = state.mesh.world.rank, state.gradients.ownership
    tensors = dict(unique_tensors(model))
    held = [Held(tensor.nbytes, _holders(state, name)) for name, tensor in tensors.items()]
    writers = dict(zip(tensors, deal(held), strict=True))
    writers.update({names[parameter]: owner for parameter, owner in ownership.owners.items()})
    for name, tensor in tensors.items():
        if writers[name] == rank:
            yield _entry(state, f"{PARAMETERS}/{name}", name, tensor)
    for number, optimizer in enumerate(optimizers):
        for parameter, kept in cast(Mapping[nn.Parameter, Mapping[str, Any]], optimizer.state).items():
            name = names[parameter]
            if writers[name] == rank:
                yield from _moments(state, f"{OPTIMIZER}/{number}/{name}", name, parameter, kept, optimizer)
    for kind, tensor in random_state.capture().items():
        yield Entry(f"{RANDOM}/{rank}/{kind}", tensor, tuple(tensor.shape), None)


def _moments(
    state: Converted, begin: str, name: str, parameter: nn.Parameter, kept: Mapping[str, Any], optimizer: Optimizer
) -> Iterator[Entry]:
    for key, value in kept.items():
        if value is None:
            continue
        if not storable(parameter, value):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {key} of {name} as {_described(value)}: only tensors of the "
                f"parameter's shape, and single numbers as tensors, can be split for other ranks"
            )
        if value.shape == parameter.shape:
            yield _entry(state, f"{begin}/{key}", name, value)
        else:
            yield Entry(f"{begin}/{key}", value, (), None)


def storable(parameter: Tensor, value: object) -> bool:
    """Whether what an optimizer keeps of ``parameter`` can be split as that is."""
    return value is None or (torch.is_tensor(value) and value.shape in (parameter.shape, torch.Size()))


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"


def _entry(state: Converted, key: str, name: str, tensor: Tensor) -> Entry:
    place = place_of(state, name)
    return Entry(key, tensor, tuple(tensor.shape) if place is None else state.layouts[name].shape, place)


def _holders(state: Converted, name: str) -> tuple[int, ...]:
    """The ranks of the world that hold the same part of a tensor as this one."""
    tmp, worlds, place = state.mesh.tmp, state.mesh.data.size, place_of(state, name)
    alike = [rank for rank in range(tmp.size) if place is None or state.layouts[name].slices[rank] == place]
    return tuple(world * tmp.size + rank for world in range(worlds) for rank in alike)


def _groups(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, as JSON has them, and the names of their parameters."""
    found = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        numbers = {key: value.item() if torch.is_tensor(value) else value for key, value in settings.items()}
        found.append({**numbers, "names": [names[parameter] for parameter in group["params"]]})
    return found


def _write(file: Path, entries: Sequence[Entry]) -> Written:
    places = {entry.name: place_text(entry.shape, entry.place) for entry in entries if entry.place is not None}
    metadata = {"format": "pt", PLACES: json.dumps(places, separators=(",", ":"))}
    with TensorFile(file, {entry.name: entry.tensor for entry in entries}, metadata) as writer:
        writer.add_all(piece for entry in entries for piece in pieces(entry.tensor))
    return writer.written
