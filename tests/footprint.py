"""The bytes that a rank keeps for training, by the definition of owned optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oases_hf.owners import Held, deal
from oases_hf.plan import ShardOptimizer


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
