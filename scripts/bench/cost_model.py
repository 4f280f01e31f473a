"""Does the planner's cost model rank plans as the ranks do, and does its plan pay?

    torchrun --nproc-per-node 4 scripts/bench/cost_model.py --png plans.png --json plans.json

All ranks profile one LLaMA layer, the planner plans under a memory limit into which uniform degrees 1 and 2 do not fit,
and its plan, the uniform plans and randomly drawn ones that fit are trained for a few optimizer steps each, through
Accelerate as users do. The first two kinds also with optimizer state that one rank owns, which takes less memory and
has a limit of its own, the uniform ones also by megatron's schedule, with and without deferred weight gradients. On
GPUs, limits are enforced for what fits: a rank may use as much more as the planner spares. The random plans are, of
many that fit, those whose predicted times are farthest apart: of plans that are equally fast noise would say which is
faster. Printed are predicted and measured step times, the rank correlation of the random plans, and how much faster the
planner's plan is than the best uniform plans that fit. Ranks are meant to sit behind slow links; torch's threads should
be one per core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist

from oases_hf import OasesPlugin, Plan
from oases_hf.integrations.planning import SPARE
from oases_hf.plan import Recompute, ScheduleName
from oases_hf.planner import Prediction, Problem, plan_of, predict, solve
from oases_hf.simulator import Simulation, simulate
from scripts.bench.training import SEED, measure, profiled

SUB_BATCHES = (1, 2, 4)
RECOMPUTE: tuple[Recompute, ...] = ("full", "none")
DRAWN_PER_PLAN = 25
OWNED = ", owned"
DEFERRED = {"": False, ", deferred": True}
RIVALS = (
    ("uniform plan", "uniform", False),
    ("uniform plan with owned state", "uniform", True),
    ("of megatron's schedule", "megatron", False),
)
"""What, in words, planned ones are compared with."""


@dataclass(frozen=True)
class Contender:
    """A plan that is to be measured.

    Attributes:
        name: ``planned``, ``degree d``, each also ``…, owned``, ``degree d, megatron``, or ``random i``.
        kind: ``planned``, ``uniform``, ``megatron`` or ``random``.
        plan: the plan.
        problem: into whose memory limit it is to fit.
        defer: weight gradients are deferred.
    """

    name: str
    kind: str
    plan: Plan
    problem: Problem
    defer: bool = False

    @property
    def owned(self) -> bool:
        """Optimizer state has owners."""
        return self.plan.shard_optimizer != "off"

    @cached_property
    def prediction(self) -> Prediction:
        """What the cost model says."""
        return predicted(self.problem, self.plan)

    @cached_property
    def simulation(self) -> Simulation | None:
        """What says how long a schedule takes that the cost model is not for."""
        return simulate(self.problem, self.plan, defer_weight_grads=self.defer) if self.kind == "megatron" else None

    @property
    def step_ms(self) -> float:
        """The predicted time of an optimizer step."""
        return self.prediction.step_ms if self.simulation is None else self.simulation.step_ms

    @property
    def memory_bytes(self) -> int:
        """That is predicted to be needed."""
        return self.prediction.memory.total

    @property
    def fits(self) -> bool:
        """Into the memory limit."""
        return self.memory_bytes <= self.problem.memory_limit_gib * 2**30

    def row(self, options: argparse.Namespace) -> Row:
        """Measure it, on all ranks."""
        limit_gib = self.problem.memory_limit_gib / SPARE if self.fits else math.inf
        measured = measure(options, OasesPlugin(plan=self.plan, defer_weight_grads=self.defer), limit_gib)
        return Row(
            self.name,
            self.kind,
            self.owned,
            self.step_ms,
            measured.ms,
            self.memory_bytes / 2**20,
            measured.peak_bytes / 2**20,
            self.fits,
            self.plan.summary(),
        )


@dataclass
class Row:
    """A plan, what was predicted of it and what was measured.

    Attributes:
        name: of the contender.
        kind: of it.
        owned: its optimizer state has owners.
        predicted_ms: of an optimizer step.
        measured_ms: median, on the slowest rank.
        memory_mib: predicted.
        measured_mib: on the fullest rank, as ``timing.held_bytes`` counts; 0 on CPUs.
        fits: into the memory limit.
        plan: in a few words.
    """

    name: str
    kind: str
    owned: bool
    predicted_ms: float
    measured_ms: float
    memory_mib: float
    measured_mib: float
    fits: bool
    plan: str


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    sizes = {"hidden": 512, "heads": 8, "ffn": 1376, "layers": 8, "seq": 128, "batch": 8, "vocab": 1024}
    for name, default in {**sizes, "accumulation": 8, "plans": 20, "steps": 2}.items():
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    # The least that degree 2 everywhere needs is 218.4, and 176.2 with owned state.
    add("--memory-mib", type=float, default=217.0, help="that a rank may use (default: 217)")
    add("--owned-memory-mib", type=float, default=175.8, help="the same with owned optimizer state (default: 175.8)")
    add("--mixed-precision", choices=("no", "bf16"), default="no", help="default: no")
    add("--png", type=Path, help="write a scatter plot of predicted and measured times")
    add("--json", type=Path, help="write the rows")
    return parser.parse_args(argv)


def drawn(problem: Problem, model: str, count: int) -> list[Plan]:
    """Of plans drawn at random from those that fit, so many whose predicted times are as far apart as can be."""
    times = {plan: predicted(problem, plan).step_ms for plan in _drawn(problem, model, DRAWN_PER_PLAN * count)}
    chosen: list[Plan] = []
    apart = 0.1
    while len(chosen) < count:
        chosen = []
        for plan in sorted(times, key=times.__getitem__):
            if not chosen or times[plan] >= times[chosen[-1]] * (1 + apart):
                chosen.append(plan)
        apart *= 0.95
    return chosen[:count]


def _drawn(problem: Problem, model: str, count: int) -> Iterator[Plan]:
    """Plans drawn at random from those that fit, the same ones every time."""
    draw, blocks = random.Random(SEED), len(problem.blocks)
    tried, found = 0, set[Plan]()
    while len(found) < count:
        tried += 1
        if tried > 1000 * count:
            raise SystemExit(f"only {len(found)} of {tried} random plans fit; raise --memory-mib")
        # Each plan has a share of its own of every degree and of blocks that are not recomputed.
        weights, kept = [draw.random() ** 2 for _ in problem.choosable_degrees], draw.random() ** 2
        degrees = tuple(draw.choices(problem.choosable_degrees, weights, k=blocks))
        recompute = tuple(draw.choices(RECOMPUTE, (1 - kept, kept), k=blocks))
        plan = Plan(model, problem.costs.tmp_size, degrees, "oases", draw.choice(SUB_BATCHES), recompute)
        if plan not in found and predicted(problem, plan).memory.fits(problem):
            found.add(plan)
            yield plan


def predicted(problem: Problem, plan: Plan) -> Prediction:
    """What the cost model says of ``plan``."""
    return predict(problem, plan.degrees, plan.recompute, plan.sub_batches, plan.shard_optimizer)


def planned_and_uniform(problem: Problem, model: str) -> Iterator[Contender]:
    """The planner's plan, and for every degree the uniform one that is predicted fastest of those that fit."""
    (way,) = problem.shard_optimizer
    suffix = OWNED * (way != "off")
    yield Contender(f"planned{suffix}", "planned", plan_of(solve(problem), model), problem)
    for degree in problem.choosable_degrees:
        every = [
            Contender(f"degree {degree}{suffix}", "uniform", plan, problem)
            for plan in _uniform(problem, model, degree, "oases", SUB_BATCHES)
        ]
        yield min([each for each in every if each.fits] or every, key=lambda each: each.step_ms)


def megatron(problem: Problem, model: str) -> Iterator[Contender]:
    """For every degree that fits, megatron's schedule with what is predicted to be the better recompute choice."""
    for degree, (suffix, defer) in itertools.product(problem.choosable_degrees, DEFERRED.items()):
        every = [
            Contender(f"degree {degree}, megatron{suffix}", "megatron", plan, problem, defer)
            for plan in _uniform(problem, model, degree, "megatron", (1,))
        ]
        if fitting := [each for each in every if each.fits]:
            yield min(fitting, key=lambda each: each.step_ms)


def _uniform(
    problem: Problem, model: str, degree: int, schedule: ScheduleName, sub_batches: Sequence[int]
) -> Iterator[Plan]:
    blocks, (way,) = len(problem.blocks), problem.shard_optimizer
    for number, recompute in itertools.product(sub_batches, RECOMPUTE):
        yield Plan(model, problem.costs.tmp_size, (degree,) * blocks, schedule, number, (recompute,) * blocks, way)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The rank correlation of two sequences without ties."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(i) for i in range(len(values))]

    n = len(first)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(ranks(first), ranks(second), strict=True)) / (n * (n**2 - 1))


def off(predicted: float, measured: float) -> str:
    """By how much of what was measured a prediction is wrong."""
    return f"{predicted / measured - 1:+5.0%}"


def report(rows: Sequence[Row]) -> None:
    """Print the rows and what follows from them."""
    print(f"{'':16}  predicted ms  measured ms  error  predicted MiB  measured MiB  error  plan")
    for row in rows:
        measured = (
            f"{row.measured_mib:12.1f}  {off(row.memory_mib, row.measured_mib)}" if row.measured_mib else " " * 19
        )
        error = off(row.predicted_ms, row.measured_ms)
        print(
            f"{row.name:16}  {row.predicted_ms:12.0f}  {row.measured_ms:11.0f}  {error}"
            f"  {row.memory_mib:13.1f}  {measured}  {'' if row.fits else 'too large: '}{row.plan}"
        )
    fitting = [row for row in rows if row.fits]
    by_chance = [row for row in fitting if row.kind == "random"]
    modelled = [row for row in fitting if row.kind != "megatron"]
    best = min((row for row in modelled if not row.owned), key=lambda row: row.measured_ms)
    errors = [abs(row.predicted_ms / row.measured_ms - 1) for row in modelled]
    print(
        f"rank correlation of {len(by_chance)} random plans "
        f"{spearman([row.predicted_ms for row in by_chance], [row.measured_ms for row in by_chance]):.3f}; "
        f"median error {statistics.median(errors):.1%}; planned / best measured "
        f"{rows[0].measured_ms / best.measured_ms:.3f}"
    )
    for planned, (what, kind, owned) in itertools.product([row for row in fitting if row.kind == "planned"], RIVALS):
        rivals = [row for row in fitting if row.kind == kind and row.owned == owned]
        if owned <= planned.owned and rivals:
            rival = min(rivals, key=lambda row: row.measured_ms)
            faster = rival.measured_ms / planned.measured_ms
            print(f"{planned.name} is {faster:.2f} x as fast as {rival.name}, the best {what} that fits")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the scatter plot."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    top = 1.05 * max(max(row.predicted_ms, row.measured_ms) for row in rows)
    axes.plot([0, top], [0, top], color="grey", linewidth=0.8)
    for kind, marker in (("random", "o"), ("uniform", "s"), ("megatron", "v"), ("planned", "*")):
        chosen = [row for row in rows if row.kind == kind]
        axes.scatter(
            [row.predicted_ms for row in chosen], [row.measured_ms for row in chosen], marker=marker, label=kind
        )
    axes.set(xlabel="predicted ms per step", ylabel="measured ms per step", xlim=(0, top), ylim=(0, top))
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _say(line: str) -> None:
    """On the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark on the ranks that a launcher started."""
    options = parse_options(argv)
    costs, name, mesh = profiled(options, SUB_BATCHES, say=_say)
    first = mesh.world.rank == 0
    problem = Problem(costs, options.layers, options.memory_mib / 1024, options.accumulation, SUB_BATCHES)
    # Owners of optimizer state; at the last micro-batch, which costs the least traffic.
    keeping = replace(problem, memory_limit_gib=options.owned_memory_mib / 1024, shard_optimizer=("keep",))
    contenders = [
        *planned_and_uniform(problem, name),
        *planned_and_uniform(keeping, name),
        *megatron(problem, name),
        *(
            Contender(f"random {i}", "random", plan, problem)
            for i, plan in enumerate(drawn(problem, name, options.plans))
        ),
    ]
    rows = []
    for contender in contenders:
        rows.append(row := contender.row(options))
        memory = f"; {row.measured_mib:.0f} MiB, predicted {row.memory_mib:.0f}" * (row.measured_mib > 0)
        _say(f"{row.name}: {row.measured_ms:.0f} ms, predicted {row.predicted_ms:.0f}{memory}")
    if first:
        report(rows)
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        if options.png:
            plot(rows, options.png)


if __name__ == "__main__":
    main()
