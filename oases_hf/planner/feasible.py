"""What the leanest plan needs, and what to change where that is too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from ..plan import ShardOptimizer
from .graph import Graph, build
from .problem import GIB, Problem, chains
from .terms import Terms


def graphs(problem: Problem) -> Iterator[tuple[Terms, Graph]]:
    """One graph per mode and longest chain of degrees; raises ConfigError where costs were not measured."""
    for mode in problem.modes():
        terms = Terms(problem, mode)
        for degrees in chains(problem.degrees_in(mode)):
            yield terms, build(terms, degrees)


def least_bytes(problem: Problem) -> float:
    """The memory that the leanest plan needs, at its peak."""
    return min(
        whole.constant_bytes + peak_bytes + sum(float(kept.min()) for kept in graph.kept_bytes)
        for _, whole in graphs(problem)
        for peak_bytes in whole.peaks()
        if (graph := whole.below(peak_bytes)) is not None
    )


def infeasible(problem: Problem) -> str:
    """By how much nothing fits, and what would."""
    short_gib = least_bytes(problem) / GIB - problem.memory_limit_gib
    every = get_args(ShardOptimizer)
    wider = {
        "recompute='auto'": replace(problem, recompute="auto"),
        f"degrees up to {problem.costs.degrees()[-1]}": replace(problem, degrees=None),
        f"shard_optimizer={every}": replace(problem, shard_optimizer=every),
    }
    together = replace(problem, recompute="auto", degrees=None, shard_optimizer=every)
    helps = [name for name, other in wider.items() if _fits(other)]
    if helps:
        advice = f"allow {' or '.join(helps)}"
    elif _fits(together):
        advice = f"allow {', '.join(wider)} together"
    else:
        advice = "profile a smaller micro-batch or a larger tmp_size"
    return (
        f"planner: the leanest of the allowed plans needs {short_gib:.2f} GiB more than memory_limit_gib="
        f"{problem.memory_limit_gib:g}; {advice}"
    )


def _fits(problem: Problem) -> bool:
    return least_bytes(problem) <= problem.memory_limit_gib * GIB
