"""What each instruction of a schedule takes, in time and memory, by a cost table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from ..costs import Timing
from ..plan import Plan
from ..planner.problem import Choice, Problem
from ..planner.terms import BlockTerms, Terms
from ..schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    Instruction,
    Project,
    Ready,
    Recompute,
    ReduceGrads,
    Slice,
    StartAsync,
    Sync,
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one instruction.

    Attributes:
        ms: on its lane, when the other is idle.
        kept_bytes: what is kept from its end on; negative when it lets go.
        during_bytes: of temporaries, while it runs.
    """

    ms: float
    kept_bytes: int = 0
    during_bytes: int = 0


@dataclass(frozen=True)
class BlockCosts:
    """What one block costs, in the terms that the planner has, and as measured."""

    terms: BlockTerms
    timing: Timing
    hidden_bytes: int
    saved_bytes: int  # of one sub-batch, when its input is kept
    norm_bytes: int  # of one sub-batch, beside its graph

    def kept_bytes(self, *, shared: bool) -> int:
        """Of a sub-batch whose graph is kept, with what it shares or without."""
        return (self.timing.graph_bytes if shared else self.timing.own_bytes) + self.norm_bytes


class Costs:
    """The costs of a plan's instructions.

    Args:
        problem: supplies the cost table and the layers.
        plan: for these.
        ready: its schedule.

    Raises:
        ConfigError: something was not measured.
    """

    def __init__(self, problem: Problem, plan: Plan, ready: Ready) -> None:
        self.table, self.ready = problem.costs, ready
        self.terms = Terms.of_plan(problem, plan.degrees, plan.sub_batches, plan.shard_optimizer, plan.message_bytes)
        self._rows = rows = self.terms.mode.rows
        known: dict[tuple[str, Choice], BlockCosts] = {}
        self.blocks: list[BlockCosts] = []
        for kind, degree, recompute in zip(problem.blocks, plan.degrees, plan.recompute, strict=True):
            choice = Choice(degree, recompute)
            if (kind.name, choice) not in known:
                hidden = self.terms.hidden_bytes(degree, self.table.element_bytes.forward)
                known[kind.name, choice] = BlockCosts(
                    self.terms.block(kind, choice),
                    self.table.timing(kind, degree, plan.sub_batches, rows),
                    hidden,
                    kind.saved_hiddens * hidden,
                    kind.norm_hiddens * hidden,
                )
            self.blocks.append(known[kind.name, choice])
        self._graphs_kept = plan.graphs_kept
        self._around = (plan.tmp_size, *plan.degrees, plan.tmp_size)

    def of(self, op: Instruction) -> Cost:
        """Of one instruction."""
        match op:
            case Forward(block, k, pieces, keep):
                of = self.blocks[block]
                kept = {"input": of.saved_bytes, "graph": of.kept_bytes(shared=k == 0), "nothing": 0}[keep]
                # In pieces, the last matmul is left to what projects them: recompute is without it too.
                ms = of.timing.forward_ms if pieces == 1 else of.timing.recompute_ms
                return Cost(ms, kept, of.timing.runtime_bytes)
            case Recompute(block, k, pieces):
                of = self.blocks[block]
                sent = Collective(block, k, "recomputed") in self.ready.sent
                ms = of.timing.forward_ms if sent else of.timing.recompute_ms
                remade = 0 if (block, k) in self.ready.kept else of.hidden_bytes
                return Cost(ms, of.timing.graph_bytes + remade, of.timing.runtime_bytes)
            case Backward(block, k) | BackwardInput(block, k):
                of = self.blocks[block]
                ms = of.timing.backward_ms - (of.timing.weight_ms if isinstance(op, BackwardInput) else 0.0)
                # What the planner counts beside the graph: gradients of hidden tensors, buffers of reductions.
                graph = 0 if block in self._graphs_kept else of.timing.graph_bytes
                return Cost(ms, -self._held(block, k), of.terms.runtime_bytes - graph)
            case BackwardWeight(block):
                return Cost(self.blocks[block].timing.weight_ms)
            case Project(collective):
                timing = self.blocks[collective.block].timing
                return Cost((timing.forward_ms - timing.recompute_ms) / collective.pieces)
            case StartAsync(collective):
                return Cost(self._comm_ms(collective))
            case ReduceGrads(block):
                return Cost(self.blocks[block].terms.reduce_ms)
            case Sync() | Slice():
                return Cost(0.0)
            case _:
                assert_never(op)

    def _held(self, block: int, k: int) -> int:
        """What the backward of a block lets go."""
        of = self.blocks[block]
        if block in self._graphs_kept:
            return of.kept_bytes(shared=k == self.terms.mode.sub_batches - 1)
        return of.timing.graph_bytes + (of.saved_bytes if (block, k) in self.ready.kept else of.hidden_bytes)

    def _comm_ms(self, collective: Collective) -> float:
        size = self.table.element_bytes
        if collective.moves_rows:
            before, after = self._around[collective.block : collective.block + 2]
            low, high = sorted((before, after))
            each = size.gradient if collective.tensor == "grad" else size.forward
            return self.table.all_gather_ms(high // low, self.table.hidden_elements(high, self._rows) * each)
        degree = self.blocks[collective.block].terms.degree
        each = size.sent_gradient if collective.tensor == "input_grad" else size.sent_partial
        elements = self.table.hidden_elements(degree, self._rows)
        return self.terms.all_reduce_ms(degree, elements * each / collective.pieces)
