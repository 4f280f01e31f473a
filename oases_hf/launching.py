"""Commands that run on several ranks: each started process is one, or else starts them all on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, UnsupportedModelError

PASS, FAIL, USAGE, BROKEN = 0, 1, 2, 3

GRACE_S = 5.0
"""What is left to the other ranks when one has failed, and to all of them to end when asked to."""

POLL_S = 0.05
LOG_LINES = 40


@dataclass(frozen=True)
class Rank:
    """A process that is a rank, and the file of what it writes."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class Seat:
    """What a process knows of the ranks that it is one of.

    Attributes:
        rank: of this process.
        size: how many there are.
        rendezvous: where they meet, as torch.distributed's ``init_method``.
    """

    rank: int
    size: int
    rendezvous: str


def on_ranks(
    title: str,
    arguments: Sequence[str],
    size: int,
    time_limit_s: float,
    rendezvous: str | None,
    run_rank: Callable[[Seat], int],
) -> int:
    """Run a command on ``size`` ranks: start them, or be one under a launcher (torchrun, accelerate launch).

    Args:
        title: of the command, before its messages: ``oases-hf verify``.
        arguments: the command line, which the ranks get too.
        size: of the ranks to start; a launcher has started as many as it was told.
        time_limit_s: after which ranks started here are ended.
        rendezvous: the value of the option ``--rendezvous``, which ranks started here are given.
        run_rank: what a rank does; returns the exit code. Where it raises ConfigError or UnsupportedModelError the
            usage is wrong, which rank 0 says.

    Returns:
        The exit code of all ranks together, or of this one.
    """
    if not under_launcher():
        return run_ranks(title, [sys.executable, "-m", "oases_hf.cli", *arguments], size, time_limit_s)
    return as_rank(title, rendezvous, run_rank)


def under_launcher() -> bool:
    """Whether this process was started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def as_rank(title: str, rendezvous: str | None, run_rank: Callable[[Seat], int]) -> int:
    """Do what the rank does that this process is, as RANK and WORLD_SIZE say, or else the only one there is.

    Args:
        title: as in :func:`on_ranks`, like ``run_rank``.
        rendezvous: the value of the option ``--rendezvous``, if it was given.
        run_rank: what to do.

    Returns:
        The exit code of this rank.
    """
    seat = Seat(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), rendezvous or "env://")
    try:
        return run_rank(seat)
    except (ConfigError, UnsupportedModelError) as error:
        if seat.rank == 0:
            print(f"{title}: error: {error}", file=sys.stderr)
        return USAGE
    except Exception:
        traceback.print_exc()
        print(f"{title}: rank {seat.rank} of {seat.size} failed", file=sys.stderr, flush=True)
        os._exit(BROKEN)  # the ranks are not left in order, which a plain exit would wait for


def run_ranks(title: str, command: Sequence[str], size: int, time_limit_s: float) -> int:
    """Run ``command`` as each of ``size`` ranks, with ``--rendezvous`` added; returns the exit code.

    Standard output is that of rank 0; what ranks write to standard error shows when they fail. None is left running.
    """
    with tempfile.TemporaryDirectory(prefix="oases-hf-") as folder:
        arguments = [*command, "--rendezvous", rendezvous_in(Path(folder))]
        ranks: list[Rank] = []
        try:
            for number in range(size):
                ranks.append(start(arguments, number, environment_of(number, size), Path(folder), heard=number == 0))
            return _verdict(title, ranks, _wait(ranks, time_limit_s), time_limit_s)
        finally:
            end(ranks)


def rendezvous_in(folder: Path) -> str:
    """Where ranks on this machine meet, as ``--rendezvous`` takes it."""
    return f"file://{folder / 'rendezvous'}"


def start(
    command: Sequence[str], number: int, environment: Mapping[str, str], folder: Path, *, heard: bool = False
) -> Rank:
    """Start a rank that writes to a file in ``folder``; when ``heard``, its standard output is that of this process."""
    log = folder / f"rank{number}.log"
    with log.open("wb") as errors:
        output = None if heard else errors
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
    return Rank(number, process, log)


def environment_of(number: int, size: int) -> dict[str, str]:
    """The variables of one of ``size`` ranks on this machine."""
    threads = max(1, (os.cpu_count() or 1) // size)
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **os.environ}
    environment |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # unused: they meet in a file
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    return environment


def _wait(ranks: Sequence[Rank], time_limit_s: float) -> Rank | None:
    """Wait until all ranks have ended, at most a little longer than the first that fails; returns that one."""
    deadline, failed = time.monotonic() + time_limit_s, None
    while time.monotonic() < deadline:
        codes = [rank.process.poll() for rank in ranks]
        if failed is None and any(codes):
            failed = next(rank for rank, code in zip(ranks, codes, strict=True) if code)
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if None not in codes:
            break
        time.sleep(POLL_S)
    return failed


def _verdict(title: str, ranks: Sequence[Rank], failed: Rank | None, time_limit_s: float) -> int:
    """The exit code of all ranks together; says on standard error what went wrong."""
    codes = [rank.process.poll() for rank in ranks]
    if USAGE in codes:  # others may have failed for want of that rank
        print(ranks[codes.index(USAGE)].log.read_text(errors="replace").strip(), file=sys.stderr)
        return USAGE
    if failed is None:
        if None not in codes:
            return PASS
        print(f"{title}: not done after {time_limit_s:g} s; raise --time-limit-s", file=sys.stderr)
        return BROKEN
    code = failed.process.poll()
    if code == FAIL:
        return FAIL
    lines = failed.log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
    print(f"{title}: rank {failed.number} of {len(ranks)} ended with exit code {code}", file=sys.stderr)
    return BROKEN


def end(ranks: Sequence[Rank]) -> None:
    """End those that still run; one that not even a kill ends, as in a driver that hangs, is left."""
    running = [rank.process for rank in ranks if rank.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
