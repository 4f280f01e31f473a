"""Schedules that several tests look at: every builder, alone and with passes applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oases_hf.schedule import (
    SCHEDULES,
    Move,
    Schedule,
    blocking,
    defer_weight_grads,
    in_pieces,
    keep_graphs,
    kind,
    moves,
    reduce_grads,
    reshard,
    stop_early,
)

Pass = Callable[[Schedule], Schedule]

PASSES: dict[str, Pass] = {
    "as_built": lambda schedule: schedule,
    "blocking": blocking,
    "defer_weight_grads": defer_weight_grads,
    "reduce_grads": reduce_grads,
    "reduce_deferred_grads": lambda schedule: reduce_grads(defer_weight_grads(schedule)),
    "stop_early": stop_early,
    "in_3_pieces": lambda schedule: in_pieces(schedule, 3),
    "some_graphs_kept": lambda schedule: keep_graphs(schedule, {0, 3}),
    "all_graphs_kept": lambda schedule: keep_graphs(schedule, range(schedule.blocks)),
    "early_in_pieces": lambda schedule: in_pieces(stop_early(schedule), 2),
}

# A schedule that is in pieces already is not cut again.
COMBINATIONS = [(name, change) for name in SCHEDULES for change in PASSES if name != "wang" or "pieces" not in change]


def build(name: str, blocks: int = 4, sub_batches: int = 2, blocks_per_layer: int = 2) -> Schedule:
    """The schedule called ``name``, by default two layers of two blocks, and two sub-batches."""
    return kind(name).build(blocks, sub_batches, blocks_per_layer)


# Degrees of four blocks, on four ranks.
DEGREES = {"falling": (4, 2, 2, 1), "rising": (1, 1, 2, 4), "mixed": (2, 4, 1, 2)}


def mixed(schedule: Schedule, degrees: Sequence[int]) -> tuple[Schedule, dict[int, Move]]:
    """The schedule with rows that move between blocks of these degrees on four ranks, and how they move."""
    changes = moves(degrees, 4)
    return reshard(schedule, changes), changes
