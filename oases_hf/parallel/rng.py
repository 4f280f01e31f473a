"""Dropout masks that are the same in recompute, and that leave the global generators untouched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .actions import Outside, at_once

Seed = Callable[[], int]
"""Asked when it is needed."""


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


@dataclass
class Masks:
    """The seeds of one forward's masks; asked when they are needed, since a recorded forward becomes others later.

    Attributes:
        seeds: None where there is no dropout.
        number: of the forward.
    """

    seeds: DropoutSeeds | None = None
    number: int = 0

    def own(self, *where: int) -> Seed | None:
        """Of masks that differ between ranks."""
        seeds = self.seeds
        return None if seeds is None else lambda: seeds.own(self.number, *where)

    def shared(self, *where: int) -> Callable[[], str]:
        """What seeds of masks that are alike begin with."""
        seeds = self.seeds
        return str if seeds is None else lambda: seeds.shared(self.number, *where)


class _Drawing:
    """Random numbers of a device from a seed of their own, for a time."""

    def __init__(self, seed: Seed, device: torch.device) -> None:
        self._seed = seed
        self._generator = _generator(device)
        self._before: Tensor | None = None

    def begin(self) -> None:
        """Draw from the seed from here on."""
        self._before = self._generator.get_state()
        self._generator.manual_seed(self._seed())

    def end(self) -> None:
        """Go on as if nothing had been drawn."""
        if self._before is not None:
            self._generator.set_state(self._before)
            self._before = None


def _generator(device: torch.device) -> torch.Generator:
    """The global generator of a device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


@contextmanager
def seeded(seed: Seed | None, device: torch.device, outside: Outside = at_once) -> Iterator[None]:
    """Draw the random numbers of ``device`` inside from a seed, and put its generator back; nothing when it is None."""
    if seed is None:
        yield
        return
    drawing = _Drawing(seed, device)
    outside(drawing.begin)
    try:
        yield
    except BaseException:
        drawing.end()
        raise
    outside(drawing.end)
