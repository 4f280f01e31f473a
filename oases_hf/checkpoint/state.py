"""Training state: each rank writes its share of parameters and optimizer state, any ranks read it back.

What several ranks hold is written by one of them. Every tensor is stored under its Hugging Face name, with its place
in the full tensor, so that another plan, degree or number of ranks finds the slices that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from .export import FREE_SPACE, agree, noting, save_config, unique_tensors
from .files import TensorFile, Written, digest, sync_file
from .manifest import MANIFEST_NAME, Manifest, withdraw
from .places import parameter_names, place_of
from .stored import PLACES, Stored, place_text

PARAMETERS, OPTIMIZER, RANDOM = "parameters", "optimizer", "random"
SETTINGS_OF_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of an optimizer that say how it computes, and not what: a resumed run keeps its own."""


@dataclass(frozen=True)
class Entry:
    """A tensor to write, and its place in the full one."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    place: Slice | None


def save_state(
    model: PreTrainedModel, optimizers: Sequence[Optimizer], folder: Path, rows_per_step: int | None = None
) -> None:
    """Write a training checkpoint; every rank must call it.

    Other files that are in ``folder`` by then become part of it.

    Args:
        model: converted.
        optimizers: of its parameters.
        folder: made if it is not there; a checkpoint in it is none from the start.
        rows_per_step: sequences of an optimizer step.

    Raises:
        DistributedError: not all ranks called it.
        CheckpointError: some rank could not write; all ranks raise, and the folder is no checkpoint.
    """
    state = converted(model)
    world = state.mesh.world
    state.mesh.meet(f"saving {folder}")
    failures: list[Exception] = []
    with noting(failures):
        if world.rank == 0:
            withdraw(folder)
            save_config(model, folder)
    agree(state, failures, f"{folder} could not be written", FREE_SPACE)
    names = parameter_names(model)
    written: dict[str, Written] = {}
    groups: list[list[dict[str, Any]]] = []
    with noting(failures):
        groups = [_groups(optimizer, names) for optimizer in optimizers]
        entries = list(_entries(model, state, optimizers, names))
        file = folder / f"oases-{world.rank:05}-of-{world.size:05}.safetensors"
        written[file.name] = _write(file, entries)
    everywhere = state.mesh.from_all(written)
    agree(state, failures, f"{folder} could not be written", FREE_SPACE)
    with noting(failures):
        if world.rank == 0:
            files = {name: each for rank in everywhere for name, each in rank.items()}
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.name not in {*files, MANIFEST_NAME}:
                    sync_file(path)
                    files[path.name] = digest(path)
            plan, dropout = asdict(state.plan), state.dropout.state()
            Manifest(plan, world.size, rows_per_step, groups, dropout, files).write(folder)
    agree(state, failures, f"{folder} could not be written", FREE_SPACE)


class Checkpoint:
    """A training checkpoint to read; every rank must make it, and call its methods.

    Args:
        folder: where it is.
        model: converted, by any plan.

    Raises:
        CheckpointError: it is not whole, or a file is not as it was written; all ranks raise.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._model, self._state, self._folder = model, converted(model), folder
        world = self._state.mesh.world
        with self._together():
            self.manifest = Manifest.read(folder)
            for name in sorted(self.manifest.files)[world.rank :: world.size]:
                self.manifest.check_content(folder, name)
            self._stored = Stored(self.manifest.tensor_files(folder))

    def load_parameters(self) -> None:
        """Overwrite the parameters and buffers of the model; raises CheckpointError when one is missing."""
        with self._together(), torch.no_grad():
            for name, tensor in unique_tensors(self._model):
                tensor.copy_(self._stored.read(f"{PARAMETERS}/{name}", place_of(self._state, name)))

    def load_optimizer(self, optimizer: Optimizer, number: int = 0) -> None:
        """Give ``optimizer`` the state of the checkpoint's optimizer of that number.

        Raises:
            CheckpointError: it trains other parameters, or in other groups.
        """
        with self._together():
            optimizer.load_state_dict(self._optimizer_state(optimizer, number))

    def load_randomness(self) -> None:
        """Put random generators, and what dropout masks are drawn from, where they were.

        A rank beyond those that wrote the checkpoint goes on like one of them.
        """
        with self._together():
            begin = f"{RANDOM}/{self._state.mesh.world.rank % self.manifest.world_size}/"
            kinds = (name.removeprefix(begin) for name in self._stored.parts if name.startswith(begin))
            random_state.restore({kind: self._stored.read(begin + kind) for kind in kinds})
            self._state.dropout.restore(self.manifest.dropout)

    def _optimizer_state(self, optimizer: Optimizer, number: int) -> dict[str, Any]:
        """What ``load_state_dict`` takes."""
        names = parameter_names(self._model)
        try:
            saved = self.manifest.optimizers[number]
        except IndexError as error:
            raise CheckpointError(f"{self._folder} has no optimizer {number}") from error
        groups: list[dict[str, Any]] = []
        kept: dict[int, dict[str, Tensor]] = {}
        count = 0
        for i, group in enumerate(optimizer.param_groups):
            own = [names[p] for p in group["params"]]
            theirs = saved[i]["names"] if i < len(saved) else []
            if set(own) != set(theirs):
                odd = sorted(set(own) ^ set(theirs))
                raise CheckpointError(
                    f"{self._folder}: group {i} of the optimizer differs from the checkpoint's in {', '.join(odd[:3])}"
                    f"{' and more' if len(odd) > 3 else ''}; train the same parameters, in the same groups"
                )
            settings = {key: value for key, value in saved[i].items() if key not in {"names", *SETTINGS_OF_KERNELS}}
            computing = {key: value for key, value in group.items() if key in SETTINGS_OF_KERNELS}
            groups.append({**settings, **computing, "params": list(range(count, count + len(own)))})
            for parameter, name in zip(group["params"], own, strict=True):
                if not self._state.gradients.ownership.elsewhere(parameter):
                    kept[count] = self._moments(number, name)
                count += 1
        return {"state": {i: each for i, each in kept.items() if each}, "param_groups": groups}

    def _moments(self, number: int, name: str) -> dict[str, Tensor]:
        """What the optimizer keeps of a parameter; nothing of one that it never stepped."""
        begin = f"{OPTIMIZER}/{number}/{name}/"
        stored = [each for each in self._stored.parts if each.startswith(begin)]
        place = place_of(self._state, name)
        return {
            each.removeprefix(begin): self._stored.read(each, place if self._stored.parts[each][0].shape else None)
            for each in stored
        }

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Raise on all ranks what one of them finds."""
        failures: list[Exception] = []
        with noting(failures):
            yield
        agree(self._state, failures, f"{self._folder} cannot be loaded")


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
        if not torch.is_tensor(value) or value.shape not in (parameter.shape, torch.Size()):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {key} of {name} as {_described(value)}: only tensors of the "
                f"parameter's shape, and single numbers as tensors, can be split for other ranks"
            )
        if value.shape == parameter.shape:
            yield _entry(state, f"{begin}/{key}", name, value)
        else:
            yield Entry(f"{begin}/{key}", value, (), None)


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
        for entry in entries:
            writer.add(entry.tensor)
    return writer.written
