"""Solve a planning problem: split it until what is left is a shortest path with one memory row, then search.

The parts: every mode (sub-batches, sharding of the optimizer), every longest chain of degrees, and every value that
the peak of the runtime bytes can take. With the peak given, choices above it are left out and the rest of the memory is
a sum, so the maximum in the memory row is handled exactly. A part whose bound is not below the incumbent is skipped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from ..plan import Plan, Recompute, ScheduleName, ShardOptimizer
from ..schedule import kind
from .dual import Dual, bound
from .feasible import graphs, infeasible
from .graph import Graph, Path
from .prediction import Prediction, predict
from .problem import GIB, Mode, Problem
from .search import MAX_LABELS, search

Status = Literal["optimal", "within_gap", "time_limit"]


@dataclass(frozen=True)
class Solution:
    """A plan, and how good it is known to be.

    Attributes:
        problem: that was solved.
        degrees: of each block.
        recompute: of each block.
        sub_batches: that the batch is split into.
        shard_optimizer: who keeps optimizer state.
        message_bytes: of the messages that all-reduces of blocks are sent in; None: as a whole.
        prediction: of exactly this plan; ``prediction.step_ms`` is the objective.
        lower_bound_ms: no plan that fits is faster.
        gap: relative distance of the objective from the bound.
        status: ``optimal`` (the gap is 0), ``within_gap`` (of what was asked for), or ``time_limit`` (it is not).
        solver: what proved it: ``search``, or the ILP solver's name.
        seconds: that it took.
    """

    problem: Problem
    degrees: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    sub_batches: int
    shard_optimizer: ShardOptimizer
    message_bytes: int | None
    prediction: Prediction
    lower_bound_ms: float
    gap: float
    status: Status
    solver: str
    seconds: float


@dataclass(frozen=True)
class _Part:
    mode: Mode
    graph: Graph
    capacity: float
    dual: Dual


@dataclass(frozen=True)
class _Best:
    part: _Part
    path: Path
    ms: float


def solve(problem: Problem, *, gap: float = 0.0, time_limit_s: float = 30.0, max_labels: int = MAX_LABELS) -> Solution:
    """Find the fastest plan that fits into memory (paper equations 5 and 6).

    Args:
        problem: what to plan.
        gap: relative, between the plan and the bound, that is good enough; 0 takes little more time than 0.5 %.
        time_limit_s: of the ILP solver, that is asked where the search gives up.
        max_labels: of the search, per block.

    Raises:
        ConfigError: nothing fits (says by how much, and what would help), or a cost was not measured.
    """
    started = time.perf_counter()
    parts = _parts(problem)
    if not parts:
        raise ConfigError(infeasible(problem))
    first = min(parts, key=lambda part: part.dual.upper_ms)
    best = _Best(first, first.dual.path, first.dual.upper_ms)
    open_parts, lower_ms, solver = [], best.ms, "search"
    for part in sorted(parts, key=lambda part: part.dual.lower_ms):
        if part.dual.lower_ms >= best.ms * (1 - gap):
            lower_ms = min(lower_ms, part.dual.lower_ms)
            continue
        found = search(part.graph, part.capacity, part.dual, best.ms, gap, max_labels)
        if found.path is not None:
            best = _Best(part, found.path, found.upper_ms)
        open_parts.append((found.lower_ms, part))
    for part_lower_ms, part in open_parts:
        if part_lower_ms < best.ms * (1 - gap):
            left_s = time_limit_s - (time.perf_counter() - started)
            best, part_lower_ms, solver = _by_ilp(part, part_lower_ms, best, gap, left_s)
        lower_ms = min(lower_ms, part_lower_ms)
    return _solution(problem, best, lower_ms, gap, solver, started)


def plan_of(solution: Solution, model: str) -> Plan:
    """The plan that ``solution`` found, for what ``convert.describe`` calls ``model``."""
    return Plan(
        model,
        solution.problem.costs.tmp_size,
        solution.degrees,
        "oases",
        solution.sub_batches,
        solution.recompute,
        solution.shard_optimizer,
        solution.message_bytes,
    )


def uniform_plan(problem: Problem, schedule: ScheduleName, degree: int, model: str = "the model") -> Plan:
    """One degree for all blocks, all recomputed, in as many sub-batches as ``schedule`` is made for."""
    degrees = (degree,) * len(problem.blocks)
    return Plan(model, problem.costs.tmp_size, degrees, schedule, kind(schedule).sub_batches)


def _parts(problem: Problem) -> list[_Part]:
    parts = []
    for terms, whole in graphs(problem):
        for peak_bytes in whole.peaks():
            graph = whole.below(peak_bytes)
            capacity = problem.memory_limit_gib * GIB - whole.constant_bytes - peak_bytes
            dual = bound(graph, capacity) if graph is not None else None
            if graph is not None and dual is not None:
                parts.append(_Part(terms.mode, graph, capacity, dual))
    return parts


def _by_ilp(part: _Part, lower_ms: float, best: _Best, gap: float, time_limit_s: float) -> tuple[_Best, float, str]:
    """What the ILP makes of a part that the search left open: the best plan, the part's bound, the solver."""
    from .ilp import solve_ilp  # seldom needed, and slow to import

    start = best.path if best.part is part else part.dual.path
    answer = solve_ilp(part.graph, part.capacity, part.dual.price, start, gap, max(time_limit_s, 1.0))
    ms = part.graph.path_ms(answer.path)
    if ms < best.ms:
        best = _Best(part, answer.path, ms)
    return best, max(lower_ms, ms * (1 - gap)) if answer.proven else lower_ms, answer.solver


def _solution(problem: Problem, best: _Best, lower_ms: float, gap: float, solver: str, started: float) -> Solution:
    choices = [best.part.graph.choices[block][index] for block, index in enumerate(best.path)]
    degrees = tuple(choice.degree for choice in choices)
    recompute = tuple(choice.recompute for choice in choices)
    mode = best.part.mode
    reached = max(0.0, 1 - lower_ms / best.ms)
    status: Status = "optimal" if reached < 1e-9 else "within_gap" if reached <= gap + 1e-9 else "time_limit"
    return Solution(
        problem=problem,
        degrees=degrees,
        recompute=recompute,
        sub_batches=mode.sub_batches,
        shard_optimizer=mode.shard_optimizer,
        message_bytes=mode.message_bytes,
        prediction=predict(problem, degrees, recompute, mode.sub_batches, mode.shard_optimizer, mode.message_bytes),
        lower_bound_ms=lower_ms,
        gap=reached,
        status=status,
        solver=solver,
        seconds=time.perf_counter() - started,
    )
