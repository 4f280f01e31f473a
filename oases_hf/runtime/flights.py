"""Collectives on their way, from where they start to where their result is needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..parallel.actions import Outside
from ..parallel.mesh import Pending
from ..schedule import Collective
from .watch import Wait


class Flights:
    """What flies, and the tensors that must stay as they are until it has landed.

    Args:
        wait: waits for a collective.
        outside: does actions, at this point of the order.
    """

    def __init__(self, wait: Wait, outside: Outside) -> None:
        self._wait, self._outside = wait, outside
        self._tensors: dict[Collective, tuple[Tensor, ...]] = {}
        self._pending: dict[Collective, Pending] = {}
        self._grounded: set[Collective] = set()

    def start(self, collective: Collective, begin: Callable[..., Pending], *tensors: Tensor) -> None:
        """Begin a collective on tensors, of which the last one becomes its result."""
        self._tensors[collective] = tensors
        self._outside(partial(self._begin, collective, begin), *tensors)

    def ground(self, collective: Collective, tensor: Tensor) -> None:
        """Take a tensor for the result of a collective in which nobody else takes part."""
        self._tensors[collective] = (tensor,)
        self._grounded.add(collective)

    def land(self, collective: Collective) -> Tensor:
        """Wait for a collective; returns its result."""
        if collective in self._grounded:
            self._grounded.remove(collective)
        else:
            self._outside(partial(self._end, collective))
        return self._tensors.pop(collective)[-1]

    def _begin(self, collective: Collective, begin: Callable[..., Pending], *tensors: Tensor) -> None:
        self._pending[collective] = begin(*tensors)

    def _end(self, collective: Collective) -> None:
        self._wait(self._pending.pop(collective))
