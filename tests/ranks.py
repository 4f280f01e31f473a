"""Worlds of ranks that start once and run many tests: ``world(2).run(function, *args)``.

The function, picklable by reference, runs on every rank of a gloo world; its results come back in rank order.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal, TypeVar, cast

from .environment import SHARED, environment
from .pickling import dumps
from .rank_process import DUMP_SIGNAL, STOP, Outcome, Seat, serve

R = TypeVar("R")
State = Literal["returned", "raised", "died", "hanging"]

START_LIMIT_S = 120.0
GRACE_S = 1.0
# Else the resource tracker, started here too, warns of the semaphores of ranks that had to be killed.
_KILLED_RANKS_LEAK = "ignore::UserWarning:multiprocessing.resource_tracker"
_PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.device_mesh",
    "transformers",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "datasets",
]


@dataclass(frozen=True, slots=True)
class Report:
    """How one rank fared in a run that failed."""

    rank: int
    pid: int | None
    state: State
    error: str
    details: str

    def __str__(self) -> str:
        head = f"--- rank {self.rank} (pid {self.pid}): {self.state} {self.error}".rstrip()
        return f"{head}\n{self.details}".rstrip()


class RankError(AssertionError):
    """A run failed on some rank; the message holds the state, traceback and output of every rank."""

    def __init__(self, summary: str, reports: Sequence[Report] = ()) -> None:
        super().__init__("\n".join([summary, *map(str, reports)]))
        self.summary = summary
        self.reports = tuple(reports)


class World:
    """A world of ``size`` ranks; it starts when first used, and again after a failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., R], *args: object, timeout_s: float = 60.0, **kwargs: object) -> list[R]:
        """Call the function on every rank and return the results in rank order.

        Raises RankError when a rank raises, dies or is not done in time; the world then starts anew at the next run.
        """
        task = dumps((function, args, kwargs))
        if not self._ranks:
            self._start()
        try:
            return cast(list[R], self._call(task, timeout_s))
        except BaseException:
            self.kill()
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the ranks leave in order; kill those that do not."""
        for rank in self._ranks:
            rank.send(STOP)
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks at once."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        warm_up()
        self._folder = tempfile.TemporaryDirectory(prefix="oases-hf-ranks-", ignore_cleanup_errors=True)
        try:
            for index in range(self.size):
                self._ranks.append(_start_rank(Seat(index, self.size, Path(self._folder.name))))
            self._collect(START_LIMIT_S)
        except BaseException:
            self.kill()
            raise

    def _call(self, task: bytes, timeout_s: float) -> list[object]:
        for rank in self._ranks:
            rank.send(task)
        return [outcome.value for outcome in self._collect(timeout_s)]

    def _collect(self, timeout_s: float) -> list[Outcome]:
        outcomes = _gather(self._ranks, timeout_s)
        good = {index: outcome for index, outcome in outcomes.items() if outcome and outcome.error is None}
        if len(good) < self.size:
            raise _failure(self._ranks, outcomes, timeout_s)
        counts = [good[index].collectives for index in range(self.size)]
        if len(set(counts)) > 1:  # the next run would pair the wrong ones
            raise RankError(f"ranks differ in the number of collectives they called on the world: {counts}")
        return [good[index] for index in range(self.size)]


class Worlds:
    """The worlds of a test session, one per size: ``worlds(2)`` is always the same world of two ranks."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        return self._worlds.setdefault(size, World(size))

    def close(self) -> None:
        """Shut down every world."""
        for world in self._worlds.values():
            world.close()


def warm_up() -> None:
    """Start the server that ranks are forked from; it imports torch and transformers on its own time."""
    with environment(SHARED | {"PYTHONWARNINGS": _KILLED_RANKS_LEAK}):
        multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()


class _Rank:
    """The test process's side of one rank."""

    def __init__(self, seat: Seat, process: ForkServerProcess, connection: Connection[bytes, bytes]) -> None:
        self.seat = seat
        self.process = process
        self.connection = connection
        self._log_start = 0

    @property
    def handles(self) -> list[Connection[bytes, bytes] | int]:
        """What becomes ready when the rank answers or dies."""
        return [self.connection, self.process.sentinel]

    def send(self, task: bytes) -> None:
        self._log_start = self.seat.log.stat().st_size if self.seat.log.exists() else 0
        with suppress(OSError):  # a dead rank shows when its answer is awaited
            self.connection.send_bytes(task)

    def receive(self) -> Outcome | None:
        """Return the answer that waits, or None when the rank died without one."""
        try:
            answer: Outcome | None = pickle.loads(self.connection.recv_bytes()) if self.connection.poll() else None
            return answer
        except (EOFError, OSError):
            return None

    def output(self) -> str:
        """What the rank wrote during the last task."""
        if not self.seat.log.exists():
            return ""
        return self.seat.log.read_bytes()[self._log_start :].decode(errors="replace")

    def dump_stack(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, DUMP_SIGNAL)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5.0)
        self.connection.close()


def _start_rank(seat: Seat) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(seat, theirs), name=f"rank {seat.rank} of {seat.size}", daemon=True)
    process.start()
    theirs.close()
    return _Rank(seat, process, ours)


def _gather(ranks: Sequence[_Rank], timeout_s: float) -> dict[int, Outcome | None]:
    """Collect answers as they come; after the first failure the others have a short grace."""
    outcomes: dict[int, Outcome | None] = {}
    waiting = list(ranks)
    deadline = time.monotonic() + timeout_s
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        ready = wait([handle for rank in waiting for handle in rank.handles], left_s)
        for rank in [rank for rank in waiting if any(handle in ready for handle in rank.handles)]:
            waiting.remove(rank)
            outcome = outcomes[rank.seat.rank] = rank.receive()
            if _state(outcome) != "returned":
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return outcomes


def _state(outcome: Outcome | None) -> State:
    if outcome is None:
        return "died"
    return "returned" if outcome.error is None else "raised"


def _failure(ranks: Sequence[_Rank], outcomes: dict[int, Outcome | None], timeout_s: float) -> RankError:
    hanging = [rank for rank in ranks if rank.seat.rank not in outcomes]
    for rank in hanging:
        rank.dump_stack()
    if hanging:
        time.sleep(0.3)  # for the stacks to reach the logs
    reports = {rank.seat.rank: _report(rank, outcomes) for rank in ranks}
    failed = [index for index, outcome in outcomes.items() if _state(outcome) != "returned"]
    if failed:
        first = reports[failed[0]]
        summary = f"rank {first.rank} of {len(ranks)} {first.state}: {first.error}"
    else:
        summary = f"ranks {[rank.seat.rank for rank in hanging]} of {len(ranks)} are not done after {timeout_s:g} s"
    return RankError(summary, list(reports.values()))


def _report(rank: _Rank, outcomes: dict[int, Outcome | None]) -> Report:
    index = rank.seat.rank
    pid, output = rank.process.pid, rank.output()
    if index not in outcomes:
        return Report(index, pid, "hanging", "", output)
    outcome = outcomes[index]
    if outcome is None:
        rank.process.join(1.0)
        return Report(index, pid, "died", f"exit code {rank.process.exitcode}", output)
    return Report(index, pid, _state(outcome), outcome.error or "", outcome.traceback + output)
