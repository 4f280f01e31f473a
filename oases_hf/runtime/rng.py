"""Dropout masks that are the same in recompute, and that leave the global generators untouched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class DropoutSeeds:
    """Seeds of one rank's dropout masks, one per forward, block and sub-batch.

    Attributes:
        base: what the user seeded, the same on all ranks.
        lane: tells apart ranks whose masks must differ.
        forwards: how many forwards there were.
    """

    base: int
    lane: int
    forwards: int = 0

    def next_forward(self) -> int:
        """Count a forward; returns its number."""
        self.forwards += 1
        return self.forwards

    def seed(self, forward: int, block: int, sub_batch: int) -> int:
        """The seed for one block and sub-batch of one forward."""
        return random.Random(f"{self.base}/{self.lane}/{forward}/{block}/{sub_batch}").getrandbits(63)


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers inside from ``seed``, and put the global generators back; nothing when it is None."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed)
        yield
