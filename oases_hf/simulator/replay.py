"""A step in time: the very schedule that the runtime executes, on the lanes of a rank.

Ranks are alike: each runs the same list, and a cost table has the figures of the most loaded one. So one rank is
replayed. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import Plan
from ..planner import Problem
from ..schedule import Instruction, ReduceGrads, StartAsync, Step, Sync, plan_step
from .costing import Cost, Costs
from .lanes import Lanes, Span

OUTSIDE, OPTIMIZER = "embedding, head and loss", "optimizer"
"""What spans are called that are no instructions."""


@dataclass(frozen=True)
class Simulation:
    """One optimizer step of a rank.

    Attributes:
        spans: in the order of their end; ms from the start.
        step_ms: until the optimizer is done.
        exposed_ms: for how long the compute lane waits for collectives.
        memory: (ms, bytes), whenever that changes: everything that training keeps, and temporaries.
        instructions: that were replayed.
    """

    spans: tuple[Span, ...]
    step_ms: float
    exposed_ms: float
    memory: tuple[tuple[float, int], ...]
    instructions: int

    @property
    def utilization(self) -> float:
        """The part of the step in which the compute lane computes."""
        return 1.0 - self.exposed_ms / self.step_ms

    @property
    def peak_bytes(self) -> int:
        """The most memory at once."""
        return max(size for _, size in self.memory)


def simulate(problem: Problem, plan: Plan, *, defer_weight_grads: bool = False) -> Simulation:
    """Replay an optimizer step of ``plan``.

    Args:
        problem: supplies the cost table, the layers and the micro-batches of a step.
        plan: any, with a schedule of any name.
        defer_weight_grads: as in :class:`OasesConfig`.

    Raises:
        ConfigError: the plan is not for so many blocks, or something was not measured.
    """
    blocks = len(problem.blocks)
    plan.check(plan.model, blocks, problem.costs.tmp_size)
    step = Step(
        plan.schedule,
        plan.sub_batches,
        len(problem.costs.kinds),
        plan.degrees,
        plan.tmp_size,
        plan.graphs_kept,
        defer_weight_grads,
    )
    return Replay(Costs(problem, plan, plan_step(step, 0)), plan).run()


class Replay:
    """A step that is being replayed."""

    def __init__(self, costs: Costs, plan: Plan) -> None:
        self._costs, self._plan = costs, plan
        self._lanes = Lanes(costs.table.slowdown)
        terms = costs.terms
        # As the planner counts: gradients of hidden tensors live while backward runs.
        static = terms.constant_bytes() + sum(
            block.terms.parameter_bytes + block.terms.gradient_bytes + block.terms.optimizer_bytes
            for block in costs.blocks
        )
        self._held = static
        self._memory: list[tuple[float, int]] = [(0.0, static)]
        self._instructions = 0

    def run(self) -> Simulation:
        """All micro-batches, and the optimizer."""
        lanes, terms, ready = self._lanes, self._costs.terms, self._costs.ready
        accumulation = terms.problem.accumulation
        plain, early = (self._costed(half) for half in (ready.schedule.backward, ready.early.backward))
        forward = self._costed(ready.schedule.forward)
        for micro in range(accumulation):
            reducing = micro == accumulation - 1 or self._plan.shard_optimizer == "reduce"
            self._execute(forward)
            self._outside()
            self._execute(early if reducing else plain)
        lanes.start(OUTSIDE, "gradients of embedding and head", terms.outside_sync_ms(), behind=True)
        lanes.wait_all()
        update_ms = sum(block.terms.update_ms for block in self._costs.blocks) + terms.outside_update_ms()
        lanes.compute(OPTIMIZER, update_ms)
        return Simulation(tuple(lanes.spans), lanes.now_ms, lanes.idle_ms, tuple(self._memory), self._instructions)

    def _costed(self, ops: Sequence[Instruction]) -> list[tuple[Instruction, Cost]]:
        known: dict[Instruction, Cost] = {}
        return [(op, known.setdefault(op, self._costs.of(op))) for op in ops]

    def _execute(self, ops: Sequence[tuple[Instruction, Cost]]) -> None:
        lanes = self._lanes
        for op, cost in ops:
            if isinstance(op, StartAsync):
                lanes.start(op.collective, op, cost.ms)
            elif isinstance(op, Sync):
                lanes.wait(op.collective)
            elif isinstance(op, ReduceGrads):
                if cost.ms:
                    lanes.start(op, op, cost.ms, behind=True)
            elif cost.ms:
                self._hold(cost.during_bytes)
                lanes.compute(op, cost.ms)
                self._hold(cost.kept_bytes - cost.during_bytes)
        self._instructions += len(ops)

    def _outside(self) -> None:
        size_bytes = self._costs.terms.least_runtime_bytes
        self._hold(size_bytes)
        self._lanes.compute(OUTSIDE, self._costs.table.outside.ms)
        self._hold(-size_bytes)

    def _hold(self, size_bytes: int) -> None:
        if size_bytes:
            self._held += size_bytes
            self._memory.append((self._lanes.now_ms, self._held))
