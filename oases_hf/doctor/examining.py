"""Has processes look at a machine and its ranks, ends those that hang, and says what they found."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from ..launching import USAGE, Rank, end, environment_of, rendezvous_in, start, under_launcher
from .diagnosis import Examination, diagnose, exit_code
from .facts import Machine, transports
from .measurements import AllReduce, Copy, Failure, Hang, Joined
from .report import lines_of, transports_line, verdict
from .watching import watch

T = TypeVar("T")

TITLE = "oases-hf doctor"


@dataclass(frozen=True)
class Watching:
    """What a process found, what went wrong, and all that the processes wrote."""

    found: tuple[object, ...]
    trouble: Hang | Failure | None
    logs: tuple[str, ...]

    def of(self, kind: type[T]) -> tuple[T, ...]:
        """What was found of one kind."""
        return tuple(each for each in self.found if isinstance(each, kind))


def examine(command: Sequence[str], ranks: int | None, asked: Literal["cpu", "cuda"] | None) -> int:
    """Examine this machine and its ranks, or, under a launcher, those that it started; returns the exit code.

    Under a launcher each process watches the rank of its place, and the first of each machine speaks; others do when
    that rank does not get to its end.

    Args:
        command: does a part: ``--part machine`` or ``--part ranks``, with ``--told FOLDER``, is added.
        ranks: to start; None for one per GPU, or two without GPUs.
        asked: the device; None for GPUs if there are enough.
    """
    speaks = not under_launcher() or os.environ.get("LOCAL_RANK", "0") == "0"
    say = print_line if speaks else _keep_quiet
    looked = _watched([*command, "--part", "machine"], {0: os.environ}, say)
    machine = next(iter(looked.of(Machine)), None)
    found = Examination(machine, asked, _ranks_here(ranks, machine), looked.of(Copy), looked.trouble)
    if machine is not None:
        worked = _watched([*command, "--part", "ranks"], _places(found.ranks_here), say)
        if isinstance(worked.trouble, Failure) and worked.trouble.code == USAGE:
            refused = [line for log in worked.logs for line in log.splitlines() if line.startswith(TITLE)]
            print("".join(f"{line}\n" for line in refused), end="", file=sys.stderr)
            return USAGE
        found = _with_ranks(found, worked)
        if found.joined and found.joined.device == "cuda":
            say(transports_line(found.transports))
    findings = diagnose(found)
    for line in verdict(findings):
        if speaks or found.on_ranks:
            print(line, flush=True, file=sys.stdout if speaks else sys.stderr)
    return exit_code(findings)


def print_line(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


def _keep_quiet(line: str) -> None:
    """Leave it to the first process of the machine."""


def _ranks_here(ranks: int | None, machine: Machine | None) -> int:
    """How many ranks are, or will be, on this machine."""
    if under_launcher():
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ranks or (machine and len(machine.gpus)) or 2


def _places(ranks: int) -> dict[int, Mapping[str, str]]:
    """The environments of the ranks to start, by their numbers; under a launcher that of its one.

    NCCL logs how it sends, where the user has not said what to log, which changes nothing else.
    """
    if under_launcher():
        return {int(os.environ["RANK"]): {"NCCL_DEBUG": "INFO", **os.environ}}
    return {number: {"NCCL_DEBUG": "INFO", **environment_of(number, ranks)} for number in range(ranks)}


def _with_ranks(found: Examination, worked: Watching) -> Examination:
    return replace(
        found,
        joined=next(iter(worked.of(Joined)), None),
        all_reduces=worked.of(AllReduce),
        on_ranks=worked.trouble,
        transports=transports("\n".join(worked.logs)),
    )


def _watched(command: Sequence[str], places: Mapping[int, Mapping[str, str]], say: Callable[[str], None]) -> Watching:
    """Start a process for each number, in its environment, and watch them; none is left running."""
    found: list[object] = []

    def hear(what: object) -> None:
        found.append(what)
        for line in lines_of(what):
            say(line)

    with tempfile.TemporaryDirectory(prefix="oases-hf-") as name:
        folder = Path(name)
        meet = [] if under_launcher() else ["--rendezvous", rendezvous_in(folder)]
        ranks: list[Rank] = []
        try:
            for number, environment in places.items():
                ranks.append(start([*command, "--told", name, *meet], number, environment, folder))
            trouble = watch(ranks, folder, hear)
        finally:
            end(ranks)
        return Watching(tuple(found), trouble, tuple(rank.log.read_text(errors="replace") for rank in ranks))
