"""The report of a verification, as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from ..models.converted import converted
from .alone import Expected
from .outcome import Row
from .settings import Settings

_RUN = "  {:<12}{:>8.1f} s  {}"
_COLUMNS = f"{'':<14}{{:>13}}{{:>13}}{'difference':>13}{'noise':>10}{'allowed':>10}  worst parameter"


class Report:
    """What was compared, and how it went; lines are given to ``say`` as they come.

    Attributes:
        rows: all comparisons; empty until :meth:`end`.
    """

    def __init__(self, settings: Settings, seq: int, device: str, say: Callable[[str], None]) -> None:
        self.rows: tuple[Row, ...] = ()
        self._settings = settings
        self._seq = seq
        self._device = device
        self._say = say

    @property
    def ok(self) -> bool:
        """Whether every difference is allowed."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def begin(self, expected: Expected) -> None:
        """Say what is compared, when one process is done."""
        settings, say = self._settings, self._say
        say(f"{expected.model} from {settings.name}, {_count(expected.parameters)} parameters")
        say(
            f"{settings.steps} AdamW step{'s' * (settings.steps > 1)} at learning rate {settings.learning_rate:g}, "
            f"batch {settings.batch} × {self._seq} tokens, {settings.dtype} on {self._device}, "
            f"dropout 0, seed {settings.seed}"
        )
        say("")
        say(_RUN.format("one process", expected.seconds[0], f"{expected.attention} attention"))
        say(_RUN.format("noise", expected.seconds[1], f"one process again: {expected.kernels}"))

    def end(self, rows: Sequence[Row], model: PreTrainedModel, seconds: float) -> None:
        """Say how it went."""
        self.rows = tuple(rows)
        state, say = converted(model), self._say
        parts = min(state.plan.sub_batches, self._settings.batch)
        split = f"{state.plan.schedule} schedule, {parts} sub-batch{'es' * (parts > 1)}"
        say(_RUN.format(self._ranks, seconds, f"{split}, {state.sharded_fraction:.1%} of the parameters split"))
        say("")
        say(_COLUMNS.format("one process", self._ranks))
        for row in self.rows:
            say(_line(row))
        say("")
        say(self._verdict())

    @property
    def _ranks(self) -> str:
        size = self._settings.tmp_size
        return f"{size} rank{'s' * (size > 1)}"

    def _verdict(self) -> str:
        bad = [row for row in self.rows if not row.ok]
        if not bad:
            return f"PASS: {self._ranks} and one process differ by no more than is allowed"
        # What is wrong first, by parameter rather than in the loss, tells most; the rest follows from it.
        row = min(bad, key=lambda row: (row.parameter is None, row.step, row.what))
        what = f"{row.what} of {row.parameter}" if row.parameter else row.what
        return f"FAIL: {what}: off by {row.difference:.1e} at step {row.step}, allowed is {row.allowed:.1e}"


def _line(row: Row) -> str:
    values = "".join(f"{value:>13.6f}" for value in row.values) if row.values else " " * 26
    figures = f"{row.difference:>13.1e}{row.noise:>10.1e}{row.allowed:>10.1e}"
    worst = f"{row.parameter or ''}{'' if row.ok else '  FAIL'}"
    return f"{f'{row.what} {row.step}':<14}{values}{figures}  {worst}".rstrip()


def _count(number: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
