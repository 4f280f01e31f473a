"""What the leanest plan needs, and what to change where that is too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from .graph import Graph, build
from .problem import GIB, Problem, ShardOptimizer, chains
from .terms import Terms


def graphs(problem: Problem) -> Iterator[tuple[Terms, Graph]]:
    """One graph per mode and longest chain of degrees; raises ConfigError where costs were not measured."""
    for mode in problem.modes():
        terms = Terms(problem, mode)
        for degrees in chains(problem.choosable_degrees):
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
    wider = {
        "recompute='auto'": replace(problem, recompute="auto"),
        "degrees up to " + str(problem.costs.degrees()[-1]): replace(problem, degrees=None),
        f"shard_optimizer={get_args(ShardOptimizer)}": replace(problem, shard_optimizer=get_args(ShardOptimizer)),
    }
    helps = [name for name, other in wider.items() if least_bytes(other) <= problem.memory_limit_gib * GIB]
    advice = f"allow {' or '.join(helps)}" if helps else "profile a smaller micro-batch or a larger tmp_size"
    return (
        f"planner: the leanest of the allowed plans needs {short_gib:.2f} GiB more than memory_limit_gib="
        f"{problem.memory_limit_gib:g}; {advice}"
    )
