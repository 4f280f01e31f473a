"""How long the planner takes where memory binds: seconds on one core, with a gap of 0.5 % and with none.

    taskset -c 0 python -m scripts.bench.solve_time [--ilp]

The costs are the published profile of BERT-1.3B with random factors per kind and degree (so that nothing is equal by
luck) and kept graphs of a plausible size. Memory binds at a part of the range between the leanest and the fastest plan.
``--ilp`` also times the ILP alone, for comparison: no search, only the multiplier's bound and plan to start from.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

from oases_hf.costs import CostTable, KindCosts, Timing
from oases_hf.planner import Problem, Solution, solve
from oases_hf.planner.feasible import least_bytes
from oases_hf.planner.problem import GIB
from oases_hf.planner.search import MAX_LABELS
from scripts.bench.paper_plans import cost_table

REPEATS, GAPS, ILP_LIMIT_S = 5, (0.005, 0.0), 20.0
CASES = [
    # layers, recompute, sub_batches, shard_optimizer
    (24, "full", (2,), ("off",)),
    (24, "auto", (2,), ("off",)),
    (96, "full", (2,), ("off",)),
    (96, "auto", (2,), ("off",)),
    (24, "auto", (1, 2, 4), ("off", "keep", "reduce")),
]


def varied(table: CostTable, seed: int = 0) -> CostTable:
    draw = random.Random(seed)

    def timing(known: Timing, degree: int) -> Timing:
        factor = draw.uniform(0.9, 1.1)
        return replace(
            known,
            forward_ms=known.forward_ms * factor,
            recompute_ms=known.recompute_ms * factor * 0.8,
            backward_ms=known.backward_ms * factor,
            graph_bytes=int(table.hidden_elements(degree, table.sub_batch_rows(degree, 2)) * 4 * draw.uniform(2, 3)),
            runtime_bytes=int(known.runtime_bytes * draw.uniform(0.9, 1.1)),
        )

    def kind(known: KindCosts) -> KindCosts:
        rows = {d: {k: timing(t, d) for k, t in row.items()} for d, row in known.timings.items()}
        return replace(known, timings=rows)

    return replace(table, kinds=tuple(kind(known) for known in table.kinds))


def timed(problem: Problem, gap: float, repeats: int = REPEATS, max_labels: int = MAX_LABELS) -> Solution:
    """The solution whose time is the median of the repeats."""
    solutions = [solve(problem, gap=gap, time_limit_s=ILP_LIMIT_S, max_labels=max_labels) for _ in range(repeats)]
    return sorted(solutions, key=lambda solution: solution.seconds)[repeats // 2]


def main() -> None:
    table = varied(cost_table(hidden=2048, rows=128, sub_batches=(1, 2, 4)))
    print(f"{'layers':>6} {'recompute':>9} {'modes':>5} {'binds at':>8} {'s':>7} {'gap':>7} {'status':>10} solver")
    for layers, recompute, sub_batches, shard_optimizer in CASES:
        roomy = Problem(
            table,
            layers,
            memory_limit_gib=1e6,
            accumulation=8,
            sub_batches=sub_batches,
            recompute=recompute,  # type: ignore[arg-type]
            shard_optimizer=shard_optimizer,  # type: ignore[arg-type]
        )
        least, most = least_bytes(roomy), solve(roomy).prediction.memory.total
        for part in (0.05, 0.1, 0.2):
            problem = replace(roomy, memory_limit_gib=(least + part * (most - least)) / GIB)
            answers = [timed(problem, gap) for gap in GAPS]
            if "--ilp" in sys.argv:
                answers.append(timed(problem, GAPS[0], repeats=1, max_labels=0))
            for found in answers:
                print(
                    f"{layers:6} {recompute:>9} {len(list(problem.modes())):5} {part:8.0%} {found.seconds:7.3f} "
                    f"{found.gap:7.3%} {found.status:>10} {found.solver}"
                )


if __name__ == "__main__":
    main()
