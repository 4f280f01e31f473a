"""Pictures of a step and of a plan; the ending of a file's name says whether it is SVG, PNG or PDF.

They need matplotlib, which the extra ``plots`` installs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..plan import Plan
from ..planner import Problem, predict
from ..planner.problem import GIB
from .lanes import Span
from .replay import Simulation
from .trace import name_of

_FORWARD, _RECOMPUTE, _BACKWARD, _WEIGHT = "#4c78a8", "#9ecae9", "#f58518", "#ffbf79"
COLOURS = {**dict.fromkeys("FfG", _FORWARD), "R": _RECOMPUTE, **dict.fromkeys("BI", _BACKWARD), "W": _WEIGHT}
COMMUNICATION, REST, PARTS = "#54a24b", "#bab0ac", ("parameters", "gradients", "optimizer", "saved", "runtime")


def plot_timeline(path: Path, simulation: Simulation, until_ms: float | None = None) -> None:
    """Draw the two lanes of a step, and its memory.

    Args:
        path: the file to write.
        simulation: what to draw.
        until_ms: where to stop; the end of the step when None.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    until_ms = until_ms or simulation.step_ms
    figure, (lanes, memory) = pyplot.subplots(2, 1, sharex=True, figsize=(14, 4), height_ratios=(2, 1))
    for row, lane in enumerate(("comm", "compute")):
        shown = [span for span in simulation.spans if span.lane == lane and span.begin_ms < until_ms]
        bars = [(span.begin_ms, span.end_ms - span.begin_ms) for span in shown]
        lanes.broken_barh(bars, (row - 0.4, 0.8), facecolors=[_colour(span) for span in shown], linewidth=0)
    lanes.set(yticks=(0, 1), yticklabels=("communication", "computation"), xlim=(0, until_ms))
    lanes.set_title(
        f"{simulation.step_ms:.1f} ms; computing {simulation.utilization:.0%}, waiting {simulation.exposed_ms:.1f} ms"
    )
    memory.step([ms for ms, _ in simulation.memory], [size / GIB for _, size in simulation.memory], where="post")
    memory.set(xlabel="ms", ylabel="GiB", ylim=(0, None))
    _save(figure, path)


def plot_plan(path: Path, problem: Problem, plan: Plan) -> None:
    """Draw the degree of every block, and a rank's memory against the limit; raises ConfigError as above."""
    pyplot = _pyplot()
    memory = predict(problem, plan.degrees, plan.recompute, plan.sub_batches, plan.shard_optimizer).memory
    figure, (degrees, bar) = pyplot.subplots(2, 1, figsize=(10, 4), height_ratios=(3, 1))
    kept = [COLOURS["B"] if choice == "none" else COLOURS["F"] for choice in plan.recompute]
    degrees.bar(range(len(plan.degrees)), plan.degrees, color=kept)
    degrees.set(xlabel="block (orange: not recomputed)", ylabel="degree", yticks=sorted(set(plan.degrees)))
    begin = 0.0
    for part in PARTS:
        size = getattr(memory, part) / GIB
        bar.barh(0, size, left=begin, label=part)
        begin += size
    if math.isfinite(problem.memory_limit_gib):
        bar.axvline(problem.memory_limit_gib, color="black", linestyle="--")
    bar.set(yticks=(), xlabel="GiB of a rank" + "; dashed: the limit" * math.isfinite(problem.memory_limit_gib))
    bar.legend(ncols=len(PARTS), fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.6))
    _save(figure, path)


def _colour(span: Span) -> str:
    if span.lane == "comm":
        return COMMUNICATION
    return COLOURS.get(name_of(span)[0], REST) if not isinstance(span.what, str) else REST


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, bbox_inches="tight")
    except ValueError as error:  # no such format
        raise ConfigError(f"{path}: {error}") from error
    finally:
        _pyplot().close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'oases_hf[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
