"""What ranks and copies were found to do, and what they said of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Step:
    """What a process does next; after ``limit_s`` it hangs."""

    name: str
    limit_s: float


@dataclass(frozen=True)
class Joined:
    """The ranks have found each other.

    Attributes:
        ranks: how many there are.
        device: that each has one of.
    """

    ranks: int
    device: Literal["cpu", "cuda"]


@dataclass(frozen=True)
class AllReduce:
    """All-reduces of one size in all groups of ``ranks`` neighbours at once.

    Attributes:
        ms: of the slowest rank, at the median.
        wrong: elements of the results that were not the sum, of each rank of the world.
    """

    ranks: int
    size_bytes: int
    ms: float
    wrong: tuple[int, ...]

    @property
    def bus_gb_per_s(self) -> float:
        """What each rank sends per second, and receives, in a ring."""
        return self.size_bytes / self.ms / 1e6 * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Copy:
    """Copies from one GPU to another.

    Attributes:
        direct: from memory to memory, not through the host's.
        wrong: elements that did not arrive as they were.
    """

    source: int
    target: int
    size_bytes: int
    ms: float
    direct: bool
    wrong: int

    @property
    def gb_per_s(self) -> float:
        """Of the copy."""
        return self.size_bytes / self.ms / 1e6


@dataclass(frozen=True)
class Prediction:
    """Simulated steps of the user's model, every block split over ``degree`` ranks and recomputed."""

    model: str
    degree: int
    megatron_ms: float
    oases_ms: float


@dataclass(frozen=True)
class Hang:
    """Processes that did not get on in time.

    Attributes:
        step: that was not done in time, and in which ``ranks`` were.
        limit_s: that it had.
        elsewhere: steps that other ranks were in, and they.
    """

    step: str
    ranks: tuple[int, ...]
    limit_s: float
    elsewhere: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Failure:
    """A process that ended before it was done.

    Attributes:
        code: that it ended with; negative for a signal.
        log: what it wrote last.
    """

    step: str
    rank: int
    code: int
    log: str
