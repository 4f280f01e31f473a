"""Dropout masks that are the same in recompute, and that leave the global generators untouched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def seed_of(*parts: object) -> int:
    """A seed that depends on all of ``parts``."""
    return random.Random("/".join(map(str, parts))).getrandbits(63)


@dataclass
class DropoutSeeds:
    """Seeds of one rank's dropout masks in a stack, by forward, block, sub-batch and piece.

    Attributes:
        rank: of this rank in the world, which no other rank draws like.
        world: the TMP world of this rank, whose ranks draw some masks alike.
        base: what the user seeded, the same on all ranks.
        forwards: how many forwards there were.
    """

    rank: int
    world: int
    base: int = 0
    forwards: int = 0

    def next_forward(self) -> int:
        """Count a forward; returns its number."""
        self.forwards += 1
        return self.forwards

    def own(self, forward: int, *where: int) -> int:
        """The seed of masks that differ between all ranks."""
        return seed_of(self.base, "rank", self.rank, forward, *where)

    def shared(self, forward: int, *where: int) -> str:
        """What the seeds of masks that are alike within a TMP world begin with."""
        return "/".join(map(str, (self.base, "world", self.world, forward, *where)))


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers inside from ``seed``, and put the global generators back; nothing when it is None."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed)
        yield
