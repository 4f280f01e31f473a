"""Who owns the optimizer state of what several ranks hold, and what memory a rank then needs. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import ShardOptimizer


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


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one rank keeps for training, activations aside.

    Attributes:
        parameters: of what it holds.
        gradients: when they are most; without the gradients of the one or two blocks whose reduction runs.
        states: of the optimizer.
    """

    parameters: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.states


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


def footprint(held: Sequence[Held], rank: int, how: ShardOptimizer, state_bytes_per_byte: float = 2.0) -> Footprint:
    """What ``rank``, which holds ``held``, keeps.

    Args:
        held: all that is trained.
        rank: one of the ranks of each.
        how: the plan's ``shard_optimizer``.
        state_bytes_per_byte: optimizer state per parameter byte, both in bytes: 2 for AdamW in the parameters' type.
    """
    everything = sum(each.bytes for each in held)
    owned = sum(each.bytes for each, owner in zip(held, deal(held), strict=True) if owner == rank)
    stepped = everything if how == "off" else owned
    gradients = owned if how == "reduce" else everything
    return Footprint(everything, gradients, round(stepped * state_bytes_per_byte))
