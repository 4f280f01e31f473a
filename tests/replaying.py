"""CUDA graphs on CPUs, as far as their contract goes: what is recorded is done again, on the very same tensors.

Recording runs, but leaves no trace: tensors that existed before are put back. Replaying reads and writes the memory
that was recorded, and runs no Python of the library but for what was said to be outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class Recorded(TorchDispatchMode):
    """Notes every operator that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], None]] = []
        self._made: dict[int, Tensor] = {}  # held, so that no other storage gets its identity
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func.namespace != "c10d", "collectives are no part of a graph"
        for tensor in _tensors((args, kwargs)):
            if _storage(tensor) not in self._made:
                self._before.setdefault(_storage(tensor), (tensor, _whole(tensor).clone()))
        result = func(*args, **kwargs)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        self._made.update({_storage(t): t for t in _tensors(result) if _storage(t) not in given | set(self._before)})
        self.steps.append(partial(_again, func, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Put back what was there before, and spoil what was made: on a GPU it has no value yet."""
        for tensor, was in self._before.values():
            _whole(tensor).copy_(was)
        for tensor in self._made.values():
            _whole(tensor).fill_(255)  # NaN in every type of floating point


@torch.no_grad()
def _again(func: Any, args: Any, kwargs: Any, before: Any) -> None:
    """Run an operator once more; what it returned ``before`` is what it returns now."""
    result = func(*args, **kwargs)
    given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
    for old, new in zip(_tensors(before), _tensors(result), strict=True):
        if _storage(new) not in given:
            old.copy_(new)


class Recorder:
    """What ``oases_hf.runtime.graphs`` asks of a recorder; counts what it did.

    Attributes:
        recordings: that were made.
        replays: of all of them.
        outsides: actions that are no part of any graph, and end one.
    """

    def __init__(self) -> None:
        self.recordings = self.replays = self.outsides = 0
        self._replaying = False
        self._recorded = Recorded()

    def __call__(self, work: Callable[[], T]) -> tuple[T, list[Callable[[], None]]]:
        self._recorded = recorded = Recorded()
        with recorded:
            result = work()
        recorded.undo()
        self.recordings += 1
        return result, [self._count, *recorded.steps]

    def outside(self, action: Callable[..., None], *tensors: Tensor) -> None:
        self._recorded.steps.append(partial(action, *tensors))
        self.outsides += 1

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self._replaying = True
        yield
        self._replaying = False

    def _count(self) -> None:
        assert self._replaying, "steps have a place of their own"
        self.replays += 1


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf)]


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, whatever part the tensor is."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
