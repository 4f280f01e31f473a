"""A plan as a table for a terminal, and the uniform plans to compare it with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import get_args

from ..costs import CostTable
from ..errors import ConfigError
from ..plan import ShardOptimizer
from ..planner import BlockPrediction, Choice, Prediction, Problem, Solution, explain, message_choices, predict_uniform
from ..planner.problem import GIB

MIB = 2**20

_COLUMNS = f"{'layers':<9}{'block':<11}{'degree':>6}{'recompute':>11}"
_FIGURES = f"{'compute ms':>12}{'comm ms':>10}{'exposed ms':>12}{'memory MiB':>12}"
_LABEL = len(_COLUMNS)


def problem_of(options: argparse.Namespace) -> Problem:
    """What the options of ``oases-hf plan`` ask; raises ConfigError where the cost table cannot answer."""
    costs = CostTable.load(options.costs)
    layers = layers_of(costs, options)
    measured = _sub_batches(costs)
    asked = options.sub_batches or measured
    if missing := set(asked) - set(measured):
        raise ConfigError(
            f"--sub-batches: {', '.join(map(str, sorted(missing)))} not measured, only "
            f"{', '.join(map(str, measured))}; choose of these, or profile it"
        )
    return Problem(
        costs,
        layers,
        options.memory_gib,
        options.accumulation,
        asked,
        options.recompute,
        get_args(ShardOptimizer) if options.shard_optimizer == "auto" else (options.shard_optimizer,),
        options.objective,
        message_bytes=message_choices(costs),
    )


def layers_of(costs: CostTable, options: argparse.Namespace) -> int:
    """Of the model, as the option says or else the table; raises ConfigError when neither does."""
    layers = options.layers or costs.fingerprint.get("layers")
    if layers is None:
        raise ConfigError(f"cost table {options.costs} does not say how many layers the model has; give --layers")
    return int(layers)


def _sub_batches(costs: CostTable) -> tuple[int, ...]:
    """The numbers that were measured for every kind and degree."""
    rows = [set(kind.timings[degree]) for kind in costs.kinds for degree in costs.degrees()]
    return tuple(sorted(set.intersection(*rows)))


def model_of(problem: Problem) -> str:
    """What a plan for ``problem`` is for; raises ConfigError unless the cost table is of that model."""
    marks = problem.costs.fingerprint
    if "model" not in marks:
        raise ConfigError("--json: the cost table does not say what model it is of; profile it again")
    if marks.get("layers") != str(problem.layers):
        raise ConfigError(
            f"--json: a plan of {problem.layers} layers is not for the model of the cost table, {marks['model']}; "
            f"leave --layers out, or profile the model that it is for"
        )
    return marks["model"]


def report(solution: Solution) -> str:
    """The table of a plan, its totals, and why it is what it is."""
    step, kinds = solution.prediction, len(solution.problem.costs.kinds)
    layers = [_Layer(solution, first) for first in range(0, len(step.blocks), kinds)]
    lines = [_COLUMNS + _FIGURES]
    number = 1
    for _, group in groupby(layers, key=lambda layer: layer.choices):
        run = list(group)
        lines += _rows(run, number)
        number += len(run)
    return "\n".join([*lines, *_totals(step), "", explain(solution)])


class _Layer:
    """One layer of a solution: the choices for its blocks, and what they come to."""

    def __init__(self, solution: Solution, first: int) -> None:
        of_layer = slice(first, first + len(solution.problem.costs.kinds))
        self.names = tuple(kind.name for kind in solution.problem.costs.kinds)
        self.choices = tuple(map(Choice, solution.degrees[of_layer], solution.recompute[of_layer]))
        self.blocks = solution.prediction.blocks[of_layer]


def _rows(run: list[_Layer], first: int) -> Iterator[str]:
    """A row for each block of a run of layers that are planned alike: sums over the run."""
    name = f"{first}–{first + len(run) - 1}" if len(run) > 1 else str(first)
    for i, (block, choice) in enumerate(zip(run[0].names, run[0].choices, strict=True)):
        label = f"{name if i == 0 else '':<9}{block:<11}{choice.degree:>6}{choice.recompute:>11}"
        yield label + _figures([layer.blocks[i] for layer in run])


def _figures(blocks: list[BlockPrediction]) -> str:
    times = [sum(getattr(block, name) for block in blocks) for name in ("compute_ms", "comm_ms", "exposed_ms")]
    kept_bytes = sum(block.kept_bytes for block in blocks)
    return "{:>12.1f}{:>10.1f}{:>12.1f}".format(*times) + f"{kept_bytes / MIB:>12.1f}"


def _totals(step: Prediction) -> list[str]:
    """What a step is the sum of."""
    blocks_bytes = sum(block.kept_bytes for block in step.blocks)
    ends_bytes = step.memory.total - step.memory.runtime - blocks_bytes
    rows = [
        ("last all-reduces of each direction", step.tail_ms, None),
        ("resharding between degrees", step.reshard_ms, None),
        ("gradients of replicas", step.gradient_sync_ms, None),
        ("optimizer", step.update_ms, None),
        ("embedding, head and loss", step.outside_ms, ends_bytes),
        ("temporaries, at the peak", None, step.memory.runtime),
    ]
    lines = [_total(name, ms, size) for name, ms, size in rows if ms or size]
    return [*lines, _total("step", step.step_ms, step.memory.total)]


def _total(name: str, ms: float | None, size_bytes: int | None) -> str:
    """A row with its time in the column of what the compute lane waits for."""
    time = "" if ms is None else f"{ms:.1f}"
    size = "" if size_bytes is None else f"{size_bytes / MIB:.1f}"
    return f"{name:<{_LABEL}}{time:>34}{size:>12}".rstrip()


def comparison(solution: Solution) -> str:
    """The plan, and below it every plan of one choice for all blocks, each with its best number of sub-batches."""
    problem, chosen = solution.problem, solution.prediction
    lines = [f"{'plan':<12}{'recompute':>11}{'sub-batches':>13}{'step ms':>11}{'GiB':>9}{'fits':>6}{'ratio':>8}"]
    lines.append(_compared("planned", "", solution.sub_batches, chosen, problem, 1.0))
    for choice in problem.choices(problem.choosable_degrees):
        sub_batches, step = _uniform(solution, choice)
        name = f"degree {choice.degree}"
        ratio = step.step_ms / chosen.step_ms
        lines.append(_compared(name, choice.recompute, sub_batches, step, problem, ratio))
    return "\n".join(lines)


def _uniform(solution: Solution, choice: Choice) -> tuple[int, Prediction]:
    """The fastest number of sub-batches that fits, or the fastest of all, for one choice for all blocks.

    Optimizer state is kept, and messages are as long, as the plan has it.
    """
    problem, ways = solution.problem, (solution.shard_optimizer, solution.message_bytes)
    steps = [(number, predict_uniform(problem, choice, number, *ways)) for number in problem.sub_batches]
    return min(steps, key=lambda each: (not each[1].memory.fits(problem), each[1].step_ms))


def _compared(name: str, recompute: str, sub_batches: int, step: Prediction, problem: Problem, ratio: float) -> str:
    fits = "yes" if step.memory.fits(problem) else "no"
    return (
        f"{name:<12}{recompute:>11}{sub_batches:>13}{step.step_ms:>11.1f}{step.memory.total / GIB:>9.2f}"
        f"{fits:>6}{ratio:>8.3f}"
    )
