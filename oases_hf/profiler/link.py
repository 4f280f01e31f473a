"""How long collectives take between the real ranks, by the size of the group and of the message."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..costs import Curve, Slowdown
from ..parallel.mesh import Axis, Mesh, Pending
from ..runtime.watch import Clock

SIZES = tuple(2**power for power in (16, 18, 20, 22, 23, 24, 25, 26))
"""Bytes of the messages timed: 64 KiB to 64 MiB."""

SLOWDOWN_ROUNDS, IN_A_ROW = 9, 8
"""What lanes cost each other is a small difference of times: how often it is taken, each time of so many in a row."""

BUDGET_S = 0.5
"""A message is timed until this is spent, at least twice and at most thirty times."""

Start = Callable[[Tensor], Pending]


class LinkProfile:
    """Times collectives over the axes of a mesh; every rank must make and use it alike.

    Args:
        mesh: the ranks.
        device: of this rank.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._clock = Clock(device)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Each value, on the rank where it is most."""
        most: list[float] = self._mesh.control.all_reduce(
            torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX
        ).tolist()
        return most

    def mean(self, value: float) -> float:
        """Of all ranks."""
        return float(self._mesh.control.all_reduce(torch.tensor(value, dtype=torch.float64))) / self._mesh.world.size

    def all_reduce(self, axis: Axis) -> Curve:
        """The all-reduce over ``axis``, all groups of its size at once, by the bytes of the tensor."""
        return self._curve(axis.start_all_reduce, 1)

    def all_gather(self, axis: Axis) -> Curve:
        """The gathering of rows over ``axis``, by the bytes of the gathered tensor."""
        return self._curve(lambda part: axis.start_gather_rows(part, axis.whole_rows(part)), axis.size)

    def exchange(self, axis: Axis) -> Curve:
        """An exchange over ``axis``, all ranks owning equally much, by the bytes of what all of them hold."""

        def start(held: Tensor) -> Pending:
            counts = [len(held) // axis.size] * axis.size
            counts[axis.rank] = 0
            return axis.start_exchange(held.flatten()[: sum(counts)], counts, counts)[1]

        return self._curve(start, 1)

    def _curve(self, start: Start, parts: int) -> Curve:
        return Curve(tuple((size, self._message_ms(start, size // parts)) for size in SIZES))

    def _message_ms(self, start: Start, size_bytes: int) -> float:
        message = torch.zeros(size_bytes // 4, 1, device=self._device)
        self.once(start, message)  # connections are made at the first
        (first_ms,) = self.slowest([self.once(start, message)])
        count = int(min(29, max(1, BUDGET_S * 1e3 / first_ms)))
        times = [first_ms, *(self.once(start, message) for _ in range(count))]
        return self.slowest([statistics.median(times)])[0]

    def once(self, start: Start, message: Tensor) -> float:
        """Milliseconds of one collective, all ranks beginning together."""
        self.together()
        begin = self._clock.now()
        start(message).wait()
        return self._clock.ms(begin, self._clock.now())

    def together(self) -> None:
        """Wait for the device, and for every rank."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._mesh.control.all_reduce(torch.zeros(1))

    def slowdown(self, work: Callable[[], object], axis: Axis, message_bytes: int) -> Slowdown:
        """How much longer ``work`` takes beside all-reduces over ``axis``, and the reverse.

        ``work`` is repeated until it takes about half as long as an all-reduce, and runs inside of it, time after time
        as in training: ranks fall out of step then, and where they share cores, that is to their good.
        """
        if axis.size == 1:
            return Slowdown()
        message = torch.zeros(max(1, message_bytes // 4), 1, device=self._device)
        collective_ms = statistics.median(self.once(axis.start_all_reduce, message) for _ in range(SLOWDOWN_ROUNDS))
        work_ms = statistics.median(self._work_ms(work, 1) for _ in range(SLOWDOWN_ROUNDS))
        collective_ms, work_ms = self.slowest([collective_ms, work_ms])
        repeats = max(1, round(collective_ms / work_ms / 2))
        # As blocks are timed: alone, who is slowest each time; beside collectives, ranks are not slow together.
        alone_ms = statistics.median(self.slowest([self._work_ms(work, repeats) for _ in range(SLOWDOWN_ROUNDS)]))
        beside = [self._beside(work, repeats, axis, message) for _ in range(SLOWDOWN_ROUNDS)]
        worked, both = (statistics.median(times) for times in zip(*beside, strict=True))
        work_beside, (both,) = max(alone_ms, self.mean(worked)), self.slowest([both])
        # While work runs, a collective slowed down f times does 1/f of what it would: the rest comes on top.
        lost = min(0.9, max(0.0, both - collective_ms) / min(work_beside, both))
        return Slowdown(work_beside / alone_ms, 1 / (1 - lost))

    def _work_ms(self, work: Callable[[], object], repeats: int) -> float:
        self.together()
        begin = self._clock.now()
        for _ in range(repeats):
            work()
        return self._clock.ms(begin, self._clock.now())

    def _beside(self, work: Callable[[], object], repeats: int, axis: Axis, message: Tensor) -> tuple[float, float]:
        """Milliseconds of the work, and of work and collective together: means of several in a row."""
        self.together()
        begin, worked = self._clock.now(), []
        for _ in range(IN_A_ROW):
            pending = axis.start_all_reduce(message)
            start = self._clock.now()
            for _ in range(repeats):
                work()
            worked.append((start, self._clock.now()))
            pending.wait()
        both_ms = self._clock.ms(begin, self._clock.now())
        return sum(self._clock.ms(*each) for each in worked) / IN_A_ROW, both_ms / IN_A_ROW
