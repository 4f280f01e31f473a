"""What the planner is asked: costs, limits, and which choices it may make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal, get_args

from ..costs import CostTable, KindCosts
from ..errors import ConfigError
from ..messages import best_message_bytes
from ..plan import Recompute, ShardOptimizer

Objective = Literal["overlap", "no_overlap"]
GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """What is chosen for one block: how many ranks split it, and whether backward recomputes it."""

    degree: int
    recompute: Recompute


@dataclass(frozen=True)
class Mode:
    """What is chosen for all blocks at once.

    Attributes:
        sub_batches: of a micro-batch.
        shard_optimizer: who keeps optimizer state.
        rows: of a sub-batch, filled up for the replicas of the lowest degree.
        message_bytes: of the messages that all-reduces of blocks are sent in; None: as a whole.
    """

    sub_batches: int
    shard_optimizer: ShardOptimizer
    rows: int
    message_bytes: int | None = None


@dataclass(frozen=True)
class Problem:
    """Plan a model of ``layers`` equal layers (paper section IV).

    Attributes:
        costs: of one layer's blocks, and of collectives.
        layers: of the model; the blocks are ``layers`` times ``costs.kinds``.
        memory_limit_gib: that a rank may use.
        accumulation: micro-batches per optimizer step.
        sub_batches: numbers of sub-batches to choose from.
        recompute: ``auto`` chooses for each block.
        shard_optimizer: ways of sharding the optimizer to choose from.
        objective: ``no_overlap`` adds communication to computation, as planners for blocking schedules do.
        degrees: to choose from; None for all that the costs were measured at.
        message_bytes: sizes of messages to choose from, such as :func:`message_choices`.

    Raises:
        ConfigError: there is nothing to choose from, or a degree does not divide ``costs.tmp_size``.
    """

    costs: CostTable
    layers: int
    memory_limit_gib: float
    accumulation: int = 1
    sub_batches: tuple[int, ...] = (2,)
    recompute: Literal["auto", "full", "none"] = "auto"
    shard_optimizer: tuple[ShardOptimizer, ...] = ("off",)
    objective: Objective = "overlap"
    degrees: tuple[int, ...] | None = None
    message_bytes: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        """Refuse what no plan can answer; raises ConfigError."""
        if min(self.layers, self.accumulation, *self.sub_batches) < 1:
            raise ConfigError("planner: layers, accumulation and sub_batches must be 1 or more")
        if not (self.sub_batches and self.shard_optimizer and self.choosable_degrees and self.message_bytes):
            raise ConfigError(
                "planner: give at least one of each: sub_batches, shard_optimizer, degrees, message_bytes"
            )
        for degree in self.choosable_degrees:
            if degree < 1 or self.costs.tmp_size % degree:
                raise ConfigError(
                    f"planner: degree {degree} does not divide tmp_size={self.costs.tmp_size}; leave it out of degrees"
                )

    @property
    def choosable_degrees(self) -> tuple[int, ...]:
        """Degrees to choose from, growing."""
        return self.costs.degrees() if self.degrees is None else tuple(sorted(set(self.degrees)))

    @property
    def blocks(self) -> tuple[KindCosts, ...]:
        """The kind of every block, in order."""
        return self.costs.kinds * self.layers

    def modes(self) -> Iterator[Mode]:
        """All that can be chosen for all blocks at once."""
        for sub_batches in self.sub_batches:
            rows = {self.costs.sub_batch_rows(degree, sub_batches) for degree in self.choosable_degrees}
            ways = product(self.shard_optimizer, sorted(rows), self.message_bytes)
            yield from (Mode(sub_batches, *way) for way in ways)

    def degrees_in(self, mode: Mode) -> tuple[int, ...]:
        """Degrees whose replicas can share the rows of ``mode``'s sub-batches, growing."""
        size = self.costs.tmp_size
        return tuple(degree for degree in self.choosable_degrees if mode.rows % (size // degree) == 0)

    def choices(self, degrees: tuple[int, ...]) -> tuple[Choice, ...]:
        """All that can be chosen for a block that may have one of ``degrees``."""
        recomputes = get_args(Recompute) if self.recompute == "auto" else (self.recompute,)
        return tuple(Choice(degree, recompute) for degree in degrees for recompute in recomputes)


def message_choices(costs: CostTable) -> tuple[int | None, ...]:
    """Whole tensors, and the sizes of messages that were measured to be faster in groups that share a block."""
    groups = set(costs.degrees()) & set(costs.all_reduce)
    best = {best_message_bytes(costs.all_reduce[ranks].points) for ranks in groups}
    return (None, *sorted(size for size in best if size is not None))


def is_chain(degrees: tuple[int, ...]) -> bool:
    """Whether each of the growing ``degrees`` divides the next, so that the groups of ranks nest."""
    return all(high % low == 0 for low, high in pairwise(degrees))


def chains(degrees: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The longest chains in the growing ``degrees``; every plan's degrees lie in one of them."""
    found: list[tuple[int, ...]] = [()]
    for degree in degrees:
        found += [(*chain, degree) for chain in found if not chain or degree % chain[-1] == 0]
    return tuple(chain for chain in found if chain and not any(set(chain) < set(other) for other in found))
