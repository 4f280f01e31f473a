"""What sub-batches have in common is in memory once, from the first forward to the last backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oases_hf.costs import CostTable
from oases_hf.plan import Plan, Recompute
from oases_hf.planner import Problem, predict
from oases_hf.simulator import simulate

from ..planner.examples import by_hand

LAYERS, SHARED_BYTES = 3, 30


def table(shared_bytes: int) -> CostTable:
    """Whose graphs are of 100 bytes."""
    costs = by_hand(2)
    (kind,) = costs.kinds
    timings = {
        degree: {number: replace(timing, shared_bytes=shared_bytes) for number, timing in row.items()}
        for degree, row in kind.timings.items()
    }
    return replace(costs, kinds=(replace(kind, timings=timings),))


@pytest.mark.parametrize("sub_batches", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_it_is_held_once(sub_batches: int, recompute: Recompute) -> None:
    plan = Plan("by hand", 2, (2,) * LAYERS, "oases", sub_batches, (recompute,) * LAYERS)
    problems = [Problem(table(shared_bytes), LAYERS, 1.0, sub_batches=(sub_batches,)) for shared_bytes in (0, 30)]
    alone, shared = (simulate(problem, plan) for problem in problems)
    own, common = (predict(problem, plan.degrees, plan.recompute, sub_batches).memory for problem in problems)
    spared = (sub_batches - 1) * LAYERS * SHARED_BYTES if recompute == "none" else 0
    assert own.total - common.total == alone.peak_bytes - shared.peak_bytes == spared
    assert shared.memory[-1][1] == shared.memory[0][1], "all of it is let go"
