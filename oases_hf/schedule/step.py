"""The schedule of a step: a builder's, after the passes that its plan asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from .builders import kind
from .check import check
from .instructions import (
    Backward,
    BackwardInput,
    Collective,
    Forward,
    Instruction,
    Project,
    Recompute,
    Schedule,
    StartAsync,
    Tensor,
)
from .passes import defer_weight_grads, keep_graphs, moves, reduce_grads, reshard, without_backward_below


@dataclass(frozen=True)
class Step:
    """What the schedule of a step depends on.

    Attributes:
        name: which schedule.
        sub_batches: parts of the batch.
        blocks_per_layer: the granularity of recompute of the schedules that have one.
        degrees: of every block.
        tmp_size: the ranks that share the batch.
        graphs_kept: the blocks that are not recomputed.
        defer: put weight gradients off.
    """

    name: str
    sub_batches: int
    blocks_per_layer: int
    degrees: tuple[int, ...]
    tmp_size: int
    graphs_kept: frozenset[int]
    defer: bool


@dataclass(frozen=True)
class Ready:
    """The checked schedule of a step, and what it asks of tensors.

    Attributes:
        schedule: the instructions.
        early: the same, gradients reduced early.
        sent: the collectives there are.
        kept: the blocks and sub-batches whose input is kept for recompute.
        deferring: weight gradients are put off.
        kept_joins: the blocks and sub-batches behind which what a norm was of is kept: where it has a backward, and
            recompute does not make it again.
        last: by the last instruction, of all sub-batches, that applies a block's weights in a pass: which tensor that
            pass makes, and the block.
    """

    schedule: Schedule
    early: Schedule
    sent: frozenset[Collective]
    kept: frozenset[tuple[int, int]]
    deferring: bool
    kept_joins: frozenset[tuple[int, int]]
    last: Mapping[Instruction, tuple[Tensor, int]]

    @classmethod
    def of(cls, schedule: Schedule, early: Schedule) -> Ready:
        """Gather what ``schedule`` asks for."""
        every = (*schedule.forward, *schedule.backward)
        sent = frozenset(op.collective for op in every if isinstance(op, StartAsync))
        kept = frozenset((op.block, op.sub_batch) for op in every if isinstance(op, Forward) and op.keep == "input")
        backward = {(op.block, op.sub_batch) for op in every if isinstance(op, Backward | BackwardInput)}
        remade = {(c.block, c.sub_batch) for c in sent if c.tensor == "recomputed"}
        deferring = any(isinstance(op, BackwardInput) for op in every)
        latest = {applied: op for op in every if (applied := _applied(op)) is not None}
        last = {op: applied for applied, op in latest.items()}
        return cls(schedule, early, sent, kept, deferring, frozenset(backward - remade), last)


def _applied(op: Instruction) -> tuple[Tensor, int] | None:
    """The tensor that an instruction applies weights for, and the block that they are of."""
    match op:
        case Forward(block):
            return "output", block
        case Recompute(block):
            return "recomputed", block
        case Project(collective):
            return collective.tensor, collective.block
        case _:
            return None


@cache
def plan_step(step: Step, first: int) -> Ready:
    """The schedule of a step.

    Args:
        step: what it depends on.
        first: the first block that needs a backward; the number of blocks when none does.
    """
    blocks = len(step.degrees)
    schedule = kind(step.name).build(blocks, step.sub_batches, step.blocks_per_layer)
    schedule, first = without_backward_below(keep_graphs(schedule, step.graphs_kept), first)
    if step.defer:
        schedule = defer_weight_grads(schedule)
    changes = moves(step.degrees, step.tmp_size)
    both = (reshard(each, changes) for each in (schedule, reduce_grads(schedule)))
    return Ready.of(*(check(each, blocks, step.sub_batches, first, changes) for each in both))
