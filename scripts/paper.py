"""The paper's tables beside what the simulator says of them.

    python scripts/paper.py

What is computed how, and from which constants, says scripts/bench/paper_models.py. All in float32 but the table of
V100s, as many sequences as the paper trains at once; each TMP world has the paper's degree, the others run data
parallel. The paper does not say how often gradients are reduced, and its cost model leaves that out: the ablation and
utilization are printed for steps of one micro-batch, and of 64, which amortise it. Embedding, head, loss and optimizer
are left out: they were not profiled. The profile has no recompute without the last matmul, so recompute is priced as a
forward. The planner's objective is a sum over blocks; where a uniform plan is simulated to be faster, that is taken.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from oases_hf.plan import ScheduleName
from oases_hf.planner import plan_of, predict, solve
from oases_hf.simulator import simulate
from oases_hf.simulator.cluster import ClusterSpec
from scripts.bench.paper_models import Paper, models, read
from scripts.bench.paper_plans import fully, runs

CLUSTERS = {"NVLink 3090": "rtx3090x32-nvlink", "3090": "rtx3090x32"}
SCHEDULES: dict[str, ScheduleName] = {
    "megatron": "megatron",
    "merak": "merak",
    "cross_pass": "cross_pass",
    "+fine_grained_recompute": "oases",
}
COMPARED: tuple[ScheduleName, ...] = ("megatron", "oases")


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
        print(f"  {model.name:10}  {model.mark:12}  {figures(ours)}  {runs(solution.degrees)}")
        if printed:
            theirs = [value / printed[0] for value in printed]
            each = [ratio / other - 1 for ratio, other in zip(ours[1:5], theirs[1:], strict=True)]
            order = "as in the paper" if ours[:5] == sorted(ours[:5]) else "not as in the paper"
            plan = "+".join(f"[{degree}]×{layers}" for degree, layers in paper["plans"][model.name]["degrees"])
            print(f"  {'':10}  {'paper':12}  {figures(theirs)}{plan:>{len(plan) + 16}}")
            print(f"  {'':10}  {'error':12}  {'':5}  {'  '.join(f'{error:+5.0%}' for error in each)}  order {order}")
            errors += each if model.profiled else []
    return errors


def figures(ratios: Sequence[float]) -> str:
    """In columns."""
    return "  ".join(f"{ratio:5.2f}" for ratio in ratios)


def utilization(paper: Paper, cluster_name: str, cluster: ClusterSpec, accumulation: int) -> None:
    """Print the part of a step in which devices compute."""
    print(f"  {'':10}  " + "  ".join(f"{model.name:>11}" for model in models(paper)))
    for schedule in COMPARED:
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


def motivation(paper: Paper) -> None:
    """Print how much of a step four GPUs communicate, of the models that the paper trains on four."""
    first, second = paper["motivation_comm_percent_4x3090"]
    print(
        f"percent of a step that four 3090s under megatron communicate (paper: {first} and {second}, of unnamed models)"
    )
    for model in models(paper):
        if model.degree == 4:
            problem = model.problem(ClusterSpec.load("rtx3090x4"), gpus=4)
            theirs, ours = (model.uniform(problem, schedule) for schedule in COMPARED)
            shorter = ours.step_ms < theirs.exposed_ms
            print(
                f"  {model.name:10}  {100 * theirs.exposed_ms / theirs.step_ms:4.1f}; a step of oases "
                f"{ours.step_ms:6.0f} ms, {'less' if shorter else 'not less'} than the {theirs.exposed_ms:.0f} of that"
            )


def grid_search(paper: Paper) -> None:
    """Print what megatron trains at each degree, where that fits."""
    for name, file in CLUSTERS.items():
        print(f"{name}: megatron, thousand tokens/s at each degree that fits; the paper's best degree")
        for model in models(paper):
            found = {}
            for degree in (1, 2, 4, 8):
                at = replace(model, degree=degree)
                problem = at.problem(ClusterSpec.load(file))
                degrees = (degree,) * len(problem.blocks)
                if at.rows and predict(problem, degrees, fully(degrees), 1).memory.fits(problem):
                    found[degree] = at.k_tokens_per_s(problem, at.uniform(problem, "megatron"))
            best = max(found, key=found.__getitem__, default=None)
            cells = "  ".join(f"{degree}: {rate:5.1f}" for degree, rate in found.items())
            print(f"  {model.name:10}  {cells:40}  best {best}, paper {model.degree}")


def weak_scaling(paper: Paper) -> None:
    """Print what part of linear scaling is reached, batches and GPUs growing together."""
    for name, file in CLUSTERS.items():
        cluster = ClusterSpec.load(file)
        print(f"{name}: percent of linear scaling, from one TMP world to {cluster.gpus} GPUs")
        for model in models(paper):
            if model.profiled:
                sizes = [model.degree * 2**power for power in range(6) if model.degree * 2**power <= cluster.gpus]
                for schedule in COMPARED:
                    rates = [
                        model.k_tokens_per_s(problem, model.uniform(problem, schedule)) / size
                        for size in sizes
                        for problem in [model.problem(cluster, gpus=size)]
                    ]
                    cells = "  ".join(
                        f"{size:2}: {rate / rates[0]:4.0%}" for size, rate in zip(sizes, rates, strict=True)
                    )
                    print(f"  {model.name:10}  {schedule:8}  {cells}")


def v100(paper: Paper) -> None:
    """Print throughput and communication on eight V100s, and the paper's.

    Of hidden size 6144, its tokens would take 1.8 times the GPUs' peak: it does not seem to count each token once.
    """
    cluster = ClusterSpec.load("v100x8")
    print("8 V100s, from their data sheet: thousand tokens/s, speed-up, percent waiting (megatron, oases); the paper's")
    table = paper["v100_nvlink"]
    for model in models(paper):
        layers, degree, *theirs = table[model.name]
        at = replace(model, layers=layers, degree=degree)
        problem = at.from_data_sheet(cluster, "float16")
        steps = [at.uniform(problem, schedule) for schedule in COMPARED]
        ours = [at.k_tokens_per_s(problem, step) for step in steps]
        ours += [100 - 100 * step.utilization for step in steps]
        cells = (
            f"{before:6.1f} {after:6.1f}  {after / before:4.2f}  {first:5.1f} {second:5.1f}"
            for before, after, first, second in (ours, theirs)
        )
        print(f"  {model.name:10}  {';  '.join(cells)}")


def main() -> None:
    """Print everything."""
    paper = read()
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
    motivation(paper)
    grid_search(paper)
    weak_scaling(paper)
    v100(paper)


if __name__ == "__main__":
    main()
