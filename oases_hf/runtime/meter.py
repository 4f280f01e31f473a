"""Counts what training does between two readings, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..parallel.mesh import Pending
from .watch import Clock

Lap = tuple[Any, Any]


@dataclass(frozen=True)
class Reading:
    """What was counted.

    Attributes:
        ms: in which the model was trained.
        tokens: that it was trained on, padding included.
        pairs: of tokens of one row, each with all of them.
        exposed: of the step that was sampled, the part in which computation waited for collectives of blocks; None
            when none was waited for under our eyes.
    """

    ms: float
    tokens: int
    pairs: int
    exposed: float | None


class Meter:
    """Counts from shapes and points of time, so that nothing waits for the device but a reading.

    Time counts from the first forward in training on, also between steps; from :meth:`stop`, or a forward that is not
    for training, to the next one that is, it does not. Waits are timed in the first step after a reading only.

    Args:
        clock: of the device that trains.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: Any = None
        self._laps: list[Lap] = []
        self._sampling_since: Any = None
        self._sampled: Lap | None = None
        self._waits: list[Lap] = []
        self._completed = False
        self._tokens = self._pairs = 0

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the base model: training goes on, or something else begins."""
        if not _trains(module):
            self.stop()
            return
        if self._since is None:
            self._since = self._clock.now()
        if self._sampling_since is None and self._sampled is None:
            self._sampling_since = self._clock.now()
        elif self._completed:
            self._end_sample()
        self._completed = False

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the base model: count the tokens of its last hidden tensor, ``[B, S, H]``."""
        if _trains(module):
            rows, sequence = output[0].shape[:2]
            self._tokens += rows * sequence
            self._pairs += rows * sequence**2

    def complete(self) -> None:
        """Note that the last backward of a step is done."""
        self._completed = True

    def wait(self, work: Pending) -> None:
        """Wait for a collective of a block."""
        if self._sampling_since is None or self._clock.stands:
            work.wait()
            return
        begin = self._clock.now()
        work.wait()
        self._waits.append((begin, self._clock.now()))

    def stop(self) -> None:
        """Let time not count until training goes on."""
        self._end_sample()
        if self._since is not None:
            self._laps.append((self._since, self._clock.now()))
            self._since = None

    def read(self) -> Reading:
        """What was counted since the last reading; waits for the device."""
        running = self._since is not None
        self.stop()
        if running:
            self._since = self._clock.now()
        reading = Reading(self._ms(self._laps), self._tokens, self._pairs, self._exposed())
        sampled = [] if self._sampled is None else [self._sampled]
        self._clock.reuse(point for lap in (*self._laps, *sampled, *self._waits) for point in lap)
        self._laps, self._sampled, self._waits = [], None, []
        self._tokens = self._pairs = 0
        return reading

    def _end_sample(self) -> None:
        if self._sampling_since is not None:
            self._sampled = self._sampling_since, self._clock.now()
            self._sampling_since = None

    def _exposed(self) -> float | None:
        step_ms = self._ms([self._sampled] if self._sampled else [])
        return self._ms(self._waits) / step_ms if self._waits and step_ms else None

    def _ms(self, laps: list[Lap]) -> float:
        return sum(self._clock.ms(*lap) for lap in laps)


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()
