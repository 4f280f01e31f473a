"""Traces of chosen steps as they ran, with the names that simulated ones have."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..runtime.watch import Clock, Watch, unwatched
from ..schedule import Instruction, ReduceGrads, Slice, StartAsync, Sync
from ..simulator import Span
from ..simulator.trace import write_trace
from .leaving import Progress


class Tracer:
    """Watches the instructions of one rank, and writes a file for each chosen step.

    A collective is on its lane from its start until the compute lane has it: where it was there before it was asked
    for, its end is not known.

    Args:
        folder: where to write.
        steps: optimizer steps to trace, counted from 1.
        rank: this one.
        device: of this rank.
        progress: tells which step runs.

    Raises:
        ConfigError: ``folder`` cannot be made.
    """

    def __init__(
        self, folder: Path, steps: Collection[int], rank: int, device: torch.device, progress: Progress
    ) -> None:
        self._folder, self._steps, self._rank, self._progress = folder, frozenset(steps), rank, progress
        self._clock = Clock(device)
        self._ran: list[tuple[Instruction, Any, Any]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"trace={str(folder)!r}: {error}; choose another folder") from error

    def watch(self) -> Watch:
        """What watches the instructions of the step that runs."""
        return self._timed if self._progress.step in self._steps else unwatched

    def complete(self) -> None:
        """Write what ran, at the end of a step's last backward."""
        if not self._ran:
            return
        path = self._folder / f"step{self._progress.step}-rank{self._rank}.json"
        write_trace(path, {f"rank {self._rank}": spans_of(self._ran, self._clock)})
        self._ran.clear()

    @contextmanager
    def _timed(self, op: Instruction) -> Iterator[None]:
        begin = self._clock.now()
        yield
        self._ran.append((op, begin, self._clock.now()))


def spans_of(ran: list[tuple[Instruction, Any, Any]], clock: Clock) -> list[Span]:
    """What instructions occupied, from when each began and ended by ``clock``; the first began at 0 ms."""
    origin = ran[0][1]
    spans: list[Span] = []
    flying: dict[Any, tuple[Instruction, float]] = {}
    end_ms = 0.0
    for op, begin, end in ran:
        begin_ms, end_ms = clock.ms(origin, begin), clock.ms(origin, end)
        match op:
            case StartAsync(collective):
                flying[collective] = op, begin_ms
            case ReduceGrads():
                flying[op] = op, begin_ms
            case Sync(collective):
                start, started_ms = flying.pop(collective)
                spans.append(Span(start, "comm", started_ms, end_ms))
            case Slice():
                pass
            case _:
                spans.append(Span(op, "compute", begin_ms, end_ms))
    spans += [Span(start, "comm", started_ms, end_ms) for start, started_ms in flying.values()]
    return spans
