"""Looking on while instructions run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..parallel.mesh import Pending
from ..schedule import Instruction

Watch = Callable[[Instruction], AbstractContextManager[None]]
Wait = Callable[[Pending], object]
_NOTHING = nullcontext()
CYCLES_PER_S = 2e9
"""Of a GPU's clock, about."""


def unwatched(op: Instruction) -> AbstractContextManager[None]:
    """Watch nothing."""
    return _NOTHING


def just_wait(work: Pending) -> object:
    """Wait for a collective, and time nothing."""
    return work.wait()


class Clock:
    """Time on a device, in ms."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spare: list[Any] = []

    @property
    def stands(self) -> bool:
        """Whether what the device is given now is recorded as a CUDA graph, and runs later."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def now(self) -> Any:
        """A point of time, behind what the device was given so far."""
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two points; waits for the device."""
        if not self._cuda:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))

    def hold(self, seconds: float) -> None:
        """Keep a GPU from beginning what it is given for so long, so that it is given much before it begins."""
        if self._cuda:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def reuse(self, points: Iterable[Any]) -> None:
        """Take back points that nobody asks for any more."""
        if self._cuda:
            self._spare += points
