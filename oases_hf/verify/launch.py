"""Starting the ranks of a verification on this machine, and waiting for them, never longer than the time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PASS, FAIL, USAGE, BROKEN = 0, 1, 2, 3

GRACE_S = 5.0
"""What is left to the other ranks when one has failed, and to all of them to end when asked to."""

POLL_S = 0.05
LOG_LINES = 40


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path


def run_ranks(command: Sequence[str], size: int, time_limit_s: float) -> int:
    """Run ``command`` as each of ``size`` ranks, with ``--rendezvous`` added; returns the exit code.

    Standard output is that of rank 0; what ranks write to standard error shows when they fail. None is left running.
    """
    with tempfile.TemporaryDirectory(prefix="oases-hf-verify-") as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(size):
                ranks.append(_start(command, number, size, Path(folder)))
            return _verdict(ranks, _wait(ranks, time_limit_s), time_limit_s)
        finally:
            _end(ranks)


def _start(command: Sequence[str], number: int, size: int, folder: Path) -> _Rank:
    log = folder / f"rank{number}.log"
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
    with log.open("wb") as errors:
        output = None if number == 0 else errors
        arguments = [*command, "--rendezvous", f"file://{folder / 'rendezvous'}"]
        process = subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
    return _Rank(number, process, log)


def _wait(ranks: Sequence[_Rank], time_limit_s: float) -> _Rank | None:
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


def _verdict(ranks: Sequence[_Rank], failed: _Rank | None, time_limit_s: float) -> int:
    """The exit code of all ranks together; says on standard error what went wrong."""
    codes = [rank.process.poll() for rank in ranks]
    if USAGE in codes:  # others may have failed for want of that rank
        print(ranks[codes.index(USAGE)].log.read_text(errors="replace").strip(), file=sys.stderr)
        return USAGE
    if failed is None:
        if None not in codes:
            return PASS
        print(f"oases-hf verify: not done after {time_limit_s:g} s; raise --time-limit-s", file=sys.stderr)
        return BROKEN
    code = failed.process.poll()
    if code == FAIL:
        return FAIL
    lines = failed.log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
    print(f"oases-hf verify: rank {failed.number} of {len(ranks)} ended with exit code {code}", file=sys.stderr)
    return BROKEN


def _end(ranks: Sequence[_Rank]) -> None:
    running = [rank.process for rank in ranks if rank.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
