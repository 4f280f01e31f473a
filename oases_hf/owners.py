"""Who owns the optimizer state of what several ranks hold. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter, or a part of one, as a rank holds it.

    Attributes:
        bytes: of it.
        ranks: those that hold the same, work on other rows, and of which one may own it; the rank alone where all
            that hold it step it.
    """

    bytes: int
    ranks: tuple[int, ...]


def deal(held: Sequence[Held]) -> list[int]:
    """The owner of each of ``held``: the same on all ranks that hold the same.

    Those of the same ranks are dealt out together: the largest first, to the rank with the fewest bytes so far.
    """
    owners = [0] * len(held)
    dealt: dict[tuple[int, ...], dict[int, int]] = {}
    for i in sorted(range(len(held)), key=lambda i: held[i].bytes, reverse=True):
        of_ranks = dealt.setdefault(held[i].ranks, dict.fromkeys(held[i].ranks, 0))
        owners[i] = min(of_ranks, key=of_ranks.__getitem__)
        of_ranks[owners[i]] += held[i].bytes
    return owners
