"""The options of ``oases-hf plan``: the fastest plan for measured costs."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from ..errors import ConfigError
from ..plan import ShardOptimizer
from .options import above_zero, count, counts, fraction, new_file

if TYPE_CHECKING:
    from ..planner.problem import Objective

SUMMARY = "find the fastest plan that fits into memory, from measured costs"
DESCRIPTION = """Find the degree of every block, and whether to recompute it, that make a step fastest within the memory
of a rank. COSTS.json is what `oases-hf profile --out` writes. Nothing is run on ranks or GPUs.
Exit code: 0 there is a plan, 1 nothing fits, 2 wrong usage."""

FOUND, NOTHING_FITS, USAGE = 0, 1, 2

OBJECTIVES: tuple[Objective, ...] = ("overlap", "no_overlap")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("costs", metavar="COSTS.json", help="cost table")
    add("--layers", type=count, metavar="N", help="of the model (default: what the table says)")
    add("--memory-gib", type=above_zero, metavar="M", default=math.inf, help="that a rank may use (default: no limit)")
    add("--accumulation", type=count, metavar="A", default=1, help="micro-batches per optimizer step (default: 1)")
    add("--sub-batches", type=counts, metavar="1,2,…", help="to choose from (default: all that were measured)")
    add("--recompute", choices=("auto", "full", "none"), default="auto", help="auto: chosen per block (default: auto)")
    ways = ("auto", *get_args(ShardOptimizer))
    add("--shard-optimizer", choices=ways, default="auto", help="as OasesConfig's; auto: chosen (default: auto)")
    add("--objective", choices=OBJECTIVES, default="overlap", help="no_overlap: as for blocking schedules")
    add("--gap", type=fraction, default=0.0, metavar="G", help="to the best step time that is good enough (default: 0)")
    add("--json", type=new_file, metavar="FILE", help="write the plan for OasesConfig(plan=FILE)")
    add("--compare", action="store_true", help="print every plan of one degree for all blocks beside it")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Plan, and print the plan; returns the exit code."""
    from ..planner import plan_of, solve
    from .planned import comparison, model_of, problem_of, report

    try:
        problem = problem_of(options)
        model = model_of(problem) if options.json else ""
    except ConfigError as error:
        print(f"oases-hf plan: error: {error}", file=sys.stderr)
        return USAGE
    try:
        solution = solve(problem, gap=options.gap)
    except ConfigError as error:
        print(f"oases-hf plan: {error}", file=sys.stderr)
        return NOTHING_FITS
    print(report(solution))
    if options.compare:
        print(f"\n{comparison(solution)}")
    if options.json:
        options.json.write_text(plan_of(solution, model).to_json() + "\n")
    return FOUND
