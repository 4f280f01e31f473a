"""Reading training state back, on any ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..models.converted import converted
from . import random_state
from .agreement import together
from .export import unique_tensors
from .manifest import Manifest
from .places import OPTIMIZER, PARAMETERS, RANDOM, parameter_names, read_part
from .state import finish
from .stored import Stored

SETTINGS_OF_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of an optimizer that say how it computes, and not what: a resumed run keeps its own."""


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
            if world.rank == 0:
                finish(folder)
        with self._together():
            self.manifest = Manifest.read(folder)
            for name in sorted(self.manifest.files)[world.rank :: world.size]:
                self.manifest.check_content(folder, name)
            self._stored = Stored(self.manifest.tensor_files(folder))
            self._beginning: dict[str, list[str]] = {}  # names, by all but the last of their parts
            for name in self._stored.parts:
                self._beginning.setdefault(name.rpartition("/")[0], []).append(name)

    def load_parameters(self) -> None:
        """Overwrite the parameters and buffers of the model; raises CheckpointError when one is missing."""
        with self._together(), torch.no_grad():
            for name, tensor in unique_tensors(self._model):
                tensor.copy_(read_part(self._stored, f"{PARAMETERS}/{name}", self._state, name, tensor))

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
            stored = self._beginning.get(f"{RANDOM}/{self._state.mesh.world.rank % self.manifest.world_size}", [])
            random_state.restore({each.rpartition("/")[2]: self._stored.read(each) for each in stored})
            self._state.dropout.restore(self.manifest.dropout)

    def _optimizer_state(self, optimizer: Optimizer, number: int) -> dict[str, Any]:
        """What ``load_state_dict`` takes."""
        names = parameter_names(self._model)
        try:
            saved = self.manifest.optimizers[number]
        except IndexError as error:
            raise CheckpointError(f"{self._folder} has no optimizer {number}") from error
        if len(saved) != len(optimizer.param_groups):
            raise CheckpointError(
                f"{self._folder}: the optimizer has {len(optimizer.param_groups)} groups of parameters, and the "
                f"checkpoint's had {len(saved)}; train the same parameters, in the same groups"
            )
        groups: list[dict[str, Any]] = []
        kept: dict[int, dict[str, Tensor]] = {}
        count = 0
        for i, group in enumerate(optimizer.param_groups):
            own = [names[p] for p in group["params"]]
            theirs = saved[i]["names"]
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
        stored = self._beginning.get(f"{OPTIMIZER}/{number}/{name}", [])
        return {each.rpartition("/")[2]: self._moment(each, name).clone() for each in stored}

    def _moment(self, stored: str, name: str) -> Tensor:
        if not self._stored.parts[stored][0].shape:
            return self._stored.read(stored)
        return read_part(self._stored, stored, self._state, name, self._model.state_dict()[name])

    def _together(self) -> AbstractContextManager[None]:
        return together(self._state.mesh, f"{self._folder} cannot be loaded")
