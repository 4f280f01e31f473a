"""Processes that tell what they do, and one that watches them: a hang cannot be ended from inside."""

from __future__ import annotations

import base64
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from ..launching import GRACE_S, LOG_LINES, POLL_S, Rank
from .measurements import Failure, Hang, Step

START_LIMIT_S = 120.0
"""For what waits for imports, of this rank or of another."""


class Teller:
    """Tells what this process does and finds, in a file that another reads."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = _told_by(folder, number)

    def step(self, name: str, limit_s: float) -> None:
        """Say what is done next, and how long that may take."""
        self.found(Step(name, limit_s))

    def found(self, what: object) -> None:
        """Say what was found."""
        with self._path.open("ab") as file:
            file.write(base64.b64encode(pickle.dumps(what)) + b"\n")


class _Watched:
    """What a process has told."""

    def __init__(self, rank: Rank, folder: Path) -> None:
        self.rank = rank
        self.step = Step("starting", START_LIMIT_S)
        self._path, self._read, self._since = _told_by(folder, rank.number), 0, time.monotonic()

    def news(self) -> list[object]:
        """What it has told since the last call, whole lines of it."""
        told = self._path.read_bytes()[self._read :] if self._path.exists() else b""
        lines = told[: told.rfind(b"\n") + 1]
        self._read += len(lines)
        records = [pickle.loads(base64.b64decode(line)) for line in lines.splitlines()]
        for record in records:
            self._since = time.monotonic()
            self.step = record if isinstance(record, Step) else self.step
        return records

    @property
    def late(self) -> bool:
        """Whether its step takes too long."""
        return self.rank.process.poll() is None and time.monotonic() - self._since > self.step.limit_s


def watch(ranks: Sequence[Rank], folder: Path, found: Callable[[object], None]) -> Hang | Failure | None:
    """Watch until all have ended, one hangs, or a little longer than until the first fails.

    Args:
        ranks: that tell in files of ``folder``.
        folder: of the files.
        found: is given what the first of them has found, in order.

    Returns:
        What went wrong, None for nothing.
    """
    watched = [_Watched(rank, folder) for rank in ranks]
    failed: _Watched | None = None
    deadline = float("inf")
    while True:
        codes = [rank.process.poll() for rank in ranks]  # before what they told last is read
        news = [each.news() for each in watched]
        for record in news[0]:
            found(record)
        if failed is None and any(codes):
            # Of several, one that was killed, or refused: others may have failed for want of it.
            ended = [each for each, code in zip(watched, codes, strict=True) if code]
            failed = min(ended, key=lambda each: each.rank.process.returncode)
            deadline = time.monotonic() + GRACE_S
        if None not in codes or time.monotonic() > deadline:
            return None if failed is None else _failure(failed)
        if failed is None and (late := next((each for each in watched if each.late), None)):
            return _hang(late.step, watched)
        time.sleep(POLL_S)


def _hang(step: Step, watched: Sequence[_Watched]) -> Hang:
    """Of those that run, by what they do."""
    where: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for each in watched:
        if each.rank.process.poll() is None:
            where[each.step.name] += (each.rank.number,)
    stuck = where.pop(step.name, ())
    return Hang(step.name, stuck, step.limit_s, tuple(where.items()))


def _failure(failed: _Watched) -> Failure:
    lines = failed.rank.log.read_text(errors="replace").splitlines()
    code = failed.rank.process.returncode
    return Failure(failed.step.name, failed.rank.number, code, "\n".join(lines[-LOG_LINES:]))


def _told_by(folder: Path, number: int) -> Path:
    return folder / f"rank{number}.told"
