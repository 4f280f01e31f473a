"""The paper's tables beside what the simulator says of them.

    python scripts/paper.py

Computation is the published profile of one RTX 3090 (scripts/bench/data), for hidden sizes 1024-4096; above, it is
extrapolated from 4096 by operations. Collectives are those of ``rtx3090x32`` and ``rtx3090x32-nvlink`` in
``oases_hf/simulator/clusters.json``, a constant per kind of link, none per model. All in float32, as many sequences as
the paper trains at once; each TMP world has the paper's degree, the others run data parallel. The paper does not say
how often gradients are reduced, and its cost model leaves that out: everything is printed for steps of one micro-batch,
and of 64, which amortise it. Embedding, head, loss and optimizer are left out: they were not profiled. The profile has
no recompute without the last matmul, so recompute is priced as a forward. The planner's objective is a sum over blocks;
where a uniform plan is simulated to be faster, that is taken.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from oases_hf.costs import CostTable, Timing
from oases_hf.plan import Plan, ScheduleName
from oases_hf.planner import Problem, plan_of, solve
from oases_hf.planner.problem import GIB
from oases_hf.schedule import kind
from oases_hf.simulator import Simulation, simulate
from oases_hf.simulator.cluster import ClusterSpec
from scripts.bench.paper_plans import DATA, GPUS, MATRICES, cost_table, runs

Paper = dict[str, Any]

CLUSTERS = {"NVLink 3090": "rtx3090x32-nvlink", "3090": "rtx3090x32"}
PROFILED = 4096
SCHEDULES: dict[str, ScheduleName] = {
    "megatron": "megatron",
    "merak": "merak",
    "cross_pass": "cross_pass",
    "+fine_grained_recompute": "oases",
}
MEMORY_GIB = 24e9 / GIB


@dataclass(frozen=True)
class Model:
    """A row of the paper's table of models: layers, and what a TMP world trains at once."""

    name: str
    hidden: int
    layers: int
    degree: int
    batch: int

    @property
    def profiled(self) -> bool:
        """Whether its blocks were measured."""
        return self.hidden <= PROFILED

    def problem(self, cluster: ClusterSpec, accumulation: int = 1) -> Problem:
        """What is trained, on a cluster, so many micro-batches per step."""
        rows = self.batch * self.degree // GPUS
        profiled = cost_table(self.hidden, rows, (1, 2), self.degree) if self.profiled else None
        table = profiled or _larger(self.hidden, rows, self.degree)
        groups = {n * m for n in _divisors(self.degree) for m in (1, GPUS // self.degree)} - {1}
        costs = cluster.linked(table, groups)
        return Problem(costs, self.layers, MEMORY_GIB, accumulation, recompute="full")

    def uniform(self, problem: Problem, schedule: ScheduleName) -> Simulation:
        """A step at the paper's degree."""
        degrees = (self.degree,) * len(problem.blocks)
        return simulate(problem, Plan(self.name, self.degree, degrees, schedule, kind(schedule).sub_batches))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _larger(hidden: int, rows: int, degree: int) -> CostTable:
    """A table of a hidden size beyond those that were profiled, of degrees up to ``degree``.

    Matmuls of a rank take as long per operation as at the largest hidden size that was profiled, where they have about
    as many operations: of twice the hidden size, those of a fourth of the degree.
    """
    scale = (hidden / PROFILED) ** 2
    timings: list[dict[int, dict[int, Timing]]] = [{} for _ in MATRICES]
    for of in _divisors(degree):
        near = min(_divisors(GPUS), key=lambda other: abs(math.log(other * scale / of)))
        source = cost_table(PROFILED, max(1, rows * of // degree), (1, 2), near)
        for found, each in zip(timings, source.kinds, strict=True):
            found[of] = {number: time.scaled(scale * near / of) for number, time in each.timings[near].items()}
    whole = cost_table(PROFILED, rows, (1, 2), degree)
    kinds = tuple(
        replace(each, parameters={of: round(n * scale) for of, n in each.parameters.items()}, timings=found)
        for each, found in zip(whole.kinds, timings, strict=True)
    )
    return replace(whole, hidden=hidden, kinds=kinds)


def models(paper: Paper) -> Iterator[Model]:
    """Those of the paper."""
    for row in paper["models"]:
        yield Model(*row)


def mark(model: Model) -> str:
    """How much of a row was measured."""
    return "profiled" if model.profiled else "extrapolated"


def ablation(paper: Paper, cluster_name: str, cluster: ClusterSpec, accumulation: int) -> list[float]:
    """Print speed-ups over Megatron; returns the relative errors of profiled rows."""
    errors = []
    for model in models(paper):
        printed = paper["ablation_k_tokens_per_s"][cluster_name].get(model.name)
        problem = model.problem(cluster, accumulation)
        steps = {name: model.uniform(problem, schedule) for name, schedule in SCHEDULES.items()}
        solution = solve(replace(problem, sub_batches=(2,)), gap=0.0)
        planned = simulate(problem, plan_of(solution, model.name))
        steps["+planner"] = min(planned, steps["+fine_grained_recompute"], key=lambda step: step.step_ms)
        steps["wang"] = model.uniform(problem, "wang")
        blocking = solve(replace(problem, sub_batches=(1,), objective="no_overlap"), gap=0.0)
        steps["no overlap, planned"] = simulate(problem, replace(plan_of(blocking, model.name), schedule="megatron"))
        ours = [steps["megatron"].step_ms / step.step_ms for step in steps.values()]
        print(f"  {model.name:10}  {mark(model):12}  {figures(ours)}  {runs(solution.degrees)}")
        if printed:
            theirs = [value / printed[0] for value in printed]
            each = [ratio / other - 1 for ratio, other in zip(ours[1:5], theirs[1:], strict=True)]
            order = "as in the paper" if ours[:5] == sorted(ours[:5]) else "not as in the paper"
            print(f"  {'':10}  {'paper':12}  {figures(theirs)}")
            print(f"  {'':10}  {'error':12}  {'':5}  {'  '.join(f'{error:+5.0%}' for error in each)}  order {order}")
            errors += each if model.profiled else []
    return errors


def figures(ratios: Sequence[float]) -> str:
    """In columns."""
    return "  ".join(f"{ratio:5.2f}" for ratio in ratios)


def utilization(paper: Paper, cluster_name: str, cluster: ClusterSpec, accumulation: int) -> None:
    """Print the part of a step in which devices compute."""
    print(f"  {'':10}  " + "  ".join(f"{model.name:>11}" for model in models(paper)))
    schedules: tuple[ScheduleName, ...] = ("megatron", "oases")
    for schedule in schedules:
        cells = []
        printed = paper["device_utilization_percent"][cluster_name][schedule]
        for model, theirs in zip(models(paper), printed, strict=True):
            ours = 100 * model.uniform(model.problem(cluster, accumulation), schedule).utilization
            cells.append(f"{ours:4.0f} ({theirs:4.0f})")
        print(f"  {schedule:10}  {'  '.join(cells)}")


def density(paper: Paper) -> None:
    """Print how much longer two halves of a batch compute than the whole."""
    for model in models(paper):
        if model.profiled:
            problem = model.problem(ClusterSpec.load("rtx3090x32"))
            row = [each.timings[model.degree] for each in problem.costs.kinds]
            whole, halves = (sum(t[k].forward_ms + t[k].backward_ms for t in row) * k for k in (1, 2))
            print(f"  {model.name:10}  {halves / whole - 1:+.1%}")


def main() -> None:
    """Print everything."""
    paper: Paper = json.loads((DATA / "paper.json").read_text())
    columns = ", ".join([*SCHEDULES, "+planner", "wang", "no overlap, planned"])
    for accumulation in (1, 64):
        errors: list[float] = []
        print(f"== gradients reduced every {accumulation} micro-batches")
        for name, file in CLUSTERS.items():
            cluster = ClusterSpec.load(file)
            print(f"{name}: speed-up over megatron: {columns}; the planner's degrees × layers")
            errors += ablation(paper, name, cluster, accumulation)
            print(f"{name}: percent of a step in which devices compute, the paper's in brackets")
            utilization(paper, name, cluster, accumulation)
        median, worst = statistics.median(map(abs, errors)), max(map(abs, errors))
        print(f"speed-ups of profiled rows: median error {median:.0%}, worst {worst:.0%}")
    print("how much longer two halves of a batch compute than the whole (paper: below 20 %)")
    density(paper)


if __name__ == "__main__":
    main()
