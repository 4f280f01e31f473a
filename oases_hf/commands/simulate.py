"""The options of ``oases-hf simulate``: a step on two lanes, as a trace and as a picture."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from ..errors import ConfigError
from ..plan import SCHEDULE_NAMES, Plan, Recompute, ScheduleName, ShardOptimizer
from .options import above_zero, count, new_file

if TYPE_CHECKING:
    from ..planner import Problem

SUMMARY = "replay the step of a plan on a compute and a communication lane"
DESCRIPTION = """Replay an optimizer step of a plan, or of one degree for all blocks, on a compute and a communication
lane: how long it takes, what it waits for, its memory over time. COSTS.json is what `oases-hf profile --out` writes.
Nothing is run on ranks or GPUs. Exit code: 0 done, 2 wrong usage."""

DONE, USAGE = 0, 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("costs", metavar="COSTS.json", help="cost table")
    add("--plan", type=Path, metavar="PLAN.json", help="what `oases-hf plan --json` writes")
    add("--degree", type=count, metavar="D", help="of all blocks, without a plan (default: all ranks of a batch)")
    add("--schedule", choices=SCHEDULE_NAMES, help="default: that of the plan, or oases")
    add("--sub-batches", type=count, metavar="K", help="default: those of the plan, or what the schedule is made for")
    add("--recompute", choices=get_args(Recompute), help="of all blocks (default: that of the plan, or full)")
    add("--shard-optimizer", choices=get_args(ShardOptimizer), help="default: that of the plan, or off")
    add("--defer-weight-grads", action="store_true", help="as OasesConfig's")
    add("--layers", type=count, metavar="N", help="of the model (default: what the table says)")
    add("--accumulation", type=count, metavar="A", default=1, help="micro-batches per optimizer step (default: 1)")
    add("--trace", type=new_file, metavar="T.json", help="write a trace for chrome://tracing or ui.perfetto.dev")
    add("--plot", type=new_file, metavar="T.png", help="draw the lanes and the memory: .png, .svg or .pdf")
    add("--plot-plan", type=new_file, metavar="P.png", help="draw degrees and memory")
    add("--until-ms", type=above_zero, metavar="MS", help="of --plot, where to stop")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Simulate, and print what came of it; returns the exit code."""
    from ..costs import CostTable
    from ..planner import Problem
    from ..simulator import simulate
    from ..simulator.pictures import plot_plan, plot_timeline
    from ..simulator.trace import write_trace
    from .planned import layers_of

    try:
        costs = CostTable.load(options.costs)
        problem = Problem(costs, layers_of(costs, options), math.inf, options.accumulation)
        plan = _plan(options, problem)
        found = simulate(problem, plan, defer_weight_grads=options.defer_weight_grads)
        if options.trace:
            write_trace(options.trace, {"simulated": found.spans}, {"simulated": found.memory})
        if options.plot:
            plot_timeline(options.plot, found, options.until_ms)
        if options.plot_plan:
            plot_plan(options.plot_plan, problem, plan)
    except ConfigError as error:
        print(f"oases-hf simulate: error: {error}", file=sys.stderr)
        return USAGE
    print(plan.summary())
    print(
        f"step {found.step_ms:.1f} ms, of which computing {found.utilization:.1%}, waiting for collectives "
        f"{found.exposed_ms:.1f} ms; memory at the peak {found.peak_bytes / 2**30:.2f} GiB"
    )
    return DONE


def _plan(options: argparse.Namespace, problem: Problem) -> Plan:
    from ..planner import uniform_plan

    if options.plan:
        if options.degree:
            raise ConfigError("--plan and --degree are both given; the plan has degrees: leave one out")
        plan = Plan.load(options.plan)
    else:
        schedule = cast(ScheduleName, options.schedule or "oases")
        plan = uniform_plan(problem, schedule, options.degree or problem.costs.tmp_size)
    asked = {
        "schedule": options.schedule,
        "sub_batches": options.sub_batches,
        "recompute": options.recompute and (options.recompute,) * len(problem.blocks),
        "shard_optimizer": options.shard_optimizer,
    }
    return replace(plan, **{name: value for name, value in asked.items() if value is not None})
