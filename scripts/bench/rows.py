"""What a benchmark found of its contenders: rows, as a table, as JSON and as a bar chart."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Literal

Recomputed = Literal["full", "none", "some"]

ACROSS = 4
"""Settings beside each other in a chart."""


@dataclass(frozen=True)
class Row:
    """What is known of one contender; figures are None where it failed, or where they were not taken.

    Attributes:
        ms: median time of a step, on the slowest rank.
        ratio_to_megatron: how many times as fast as the megatron schedule that recomputes as much, the better of
            several; None when that did not run, or for a plan that recomputes some blocks only.
        bytes: handed to collectives in a step by one rank; see :class:`~scripts.bench.timing.Wire` for gathers.
        collectives: how many those were.
        layer_bytes: of ``bytes``, those of the layers' own all-reduces, without embedding and gradient sums.
        peak_memory_bytes: of parameters, gradients and activations in a step, on the fullest rank.
        rounds_ms: the time of each round; those of one round can be compared across rows of a setting.
        recompute: ``full``: a block's input is kept, the rest computed again; ``none``; ``some``: by block.
        setting: what the contenders ran on, where a benchmark has several of that.
        failure: why there are no figures.
    """

    name: str
    what: str
    ms: float | None = None
    ratio_to_megatron: float | None = None
    bytes: int | None = None
    collectives: int | None = None
    layer_bytes: int | None = None
    peak_memory_bytes: int | None = None
    rounds_ms: tuple[float, ...] = ()
    recompute: Recomputed = "full"
    setting: str = ""
    failure: str = ""


def in_a_word(recompute: Collection[Literal["full", "none"]]) -> Recomputed:
    """What is recomputed, of the choices for all blocks."""
    choices = set(recompute)
    return choices.pop() if len(choices) == 1 else "some"


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows, one line each."""
    widest = max(len(row.name) for row in rows)
    print(f"{'':{widest}}  recompute  median ms  × megatron  MB sent  collectives  peak MB")
    for row in rows:
        print(f"{row.name:{widest}}  {row.recompute:>9}  {row.failure or _figures(row)}")


def write_json(rows: Sequence[Row], file: Path) -> None:
    """Write the rows as a list of objects."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def read_json(file: Path) -> list[Row]:
    """The rows that :func:`write_json` wrote."""
    return [Row(**{**row, "rounds_ms": tuple(row["rounds_ms"])}) for row in json.loads(file.read_text())]


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draw the milliseconds of every row as a bar, a chart for each setting."""
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(row.setting for row in rows))
    across = min(ACROSS, len(settings))
    down = math.ceil(len(settings) / across)
    most = max(sum(row.setting == setting for row in rows) for setting in settings)
    figure = Figure(figsize=(5 * across, down * (1 + 0.25 * most)), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flat
    for axes, setting in zip(grid, settings, strict=False):
        bars = [row for row in rows if row.setting == setting]
        drawn = axes.barh(range(len(bars)), [row.ms or 0.0 for row in bars], color="tab:blue")
        axes.bar_label(drawn, [shorten(row.failure, 40) or f" {row.ms:.0f}" for row in bars])
        axes.set_yticks(range(len(bars)), [row.name if row.recompute == "full" else _long(row) for row in bars])
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set(title=setting, xlabel="ms per step")
    for axes in list(figure.axes)[len(settings) :]:
        axes.remove()
    figure.savefig(file, dpi=100)


def _long(row: Row) -> str:
    return f"{row.name}, recompute {row.recompute}"


def _figures(row: Row) -> str:
    speed = "–" if row.ratio_to_megatron is None else f"{row.ratio_to_megatron:.2f}"
    sent, peak = ("–" if n is None else f"{n / 1e6:.1f}" for n in (row.bytes, row.peak_memory_bytes))
    calls = "–" if row.collectives is None else row.collectives
    return f"{row.ms:9.1f}  {speed:>10}  {sent:>7}  {calls:>11}  {peak:>7}  {row.what}"
