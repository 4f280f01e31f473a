"""Watches on a running schedule: how long instructions take, what they keep, and what they need meanwhile."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from ..schedule import Backward, Instruction, Recompute

Key = tuple[type[Instruction], int]


class Clock:
    """Time on a device, in ms."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        """A point of time, behind what the device was given so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two points; waits for the device."""
        if not self._cuda:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))


class Stopwatch:
    """Times every instruction, by its kind and block.

    Attributes:
        times: ms of each time that an instruction ran.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._spans: list[tuple[Key, Any, Any]] = []
        self.times: dict[Key, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, op: Instruction) -> Iterator[None]:
        """Time ``op``."""
        start = self._clock.now()
        yield
        block = getattr(op, "block", -1)
        self._spans.append(((type(op), block), start, self._clock.now()))

    def read(self) -> float:
        """Sort what was timed since the last reading into :attr:`times`; returns the sum of it."""
        total = 0.0
        for key, start, end in self._spans:
            self.times[key].append(self._clock.ms(start, end))
            total += self.times[key][-1]
        self._spans.clear()
        return total


class KeptBytes:
    """Counts what the graph of each block keeps for backward, parameters aside, as its recompute makes it.

    Attributes:
        bytes: by block, of its last sub-batch.
    """

    def __init__(self, parameters: Iterator[Tensor]) -> None:
        self._held = {p.untyped_storage().data_ptr() for p in parameters}
        self.bytes: dict[int, int] = {}

    @contextmanager
    def __call__(self, op: Instruction) -> Iterator[None]:
        """Count while a Recompute runs."""
        if not isinstance(op, Recompute):
            yield
            return
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._held:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.bytes[op.block] = sum(kept.values())


class PeakBytes:
    """The most that an instruction allocates beyond what was there before.

    Attributes:
        bytes: by kind of instruction and block, of its last sub-batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: dict[Key, int] = {}

    @contextmanager
    def __call__(self, op: Instruction) -> Iterator[None]:
        """Watch recompute and backward."""
        if not isinstance(op, Recompute | Backward):
            yield
            return
        with peak_bytes(self._device) as peak:
            yield
        self.bytes[type(op), op.block] = peak()


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Count the most bytes of tensors that are held at once inside, beyond what was there before; call the result.

    On GPUs torch's allocator counts, on CPUs the allocations that the profiler records.
    """
    peak = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: peak
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield lambda: peak
    results = getattr(profiler.profiler, "kineto_results")  # noqa: B009 - mypy knows no such attribute
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: int(e.start_ns()))
    held = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
