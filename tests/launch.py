"""Fresh processes for tests of what reused ranks cannot show: exit codes, crashes, launchers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .environment import SHARED, rank_environment

Argument = str | Path
Completed = subprocess.CompletedProcess[str]

_ROOT = Path(__file__).parent.parent
_ABORT_S = 1.0  # enough to write a stack
_KILL_S = 5.0
_MARK = "OASES_HF_TEST_LAUNCH"


class LaunchTimeout(AssertionError):
    """Some processes did not end in time; the message holds the output and the stack of each."""


def launch(
    size: int, argv: Sequence[Argument], *, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> list[Completed]:
    """Run ``python *argv`` as each rank of a world of ``size`` and return the results in rank order.

    The ranks get the variables that a launcher would set, then ``env``. Exit codes are the caller's to check.
    Raises LaunchTimeout when not all have ended in time, and leaves none of them running.
    """
    port = _free_port()
    return _run_all(argv, [rank_environment(rank, size, port) | dict(env or {}) for rank in range(size)], timeout_s)


def run_launcher(
    argv: Sequence[Argument], *, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> Completed:
    """Run ``python *argv`` once, without the variables of a rank: for launchers, which start ranks themselves."""
    (completed,) = _run_all(argv, [SHARED | dict(env or {})], timeout_s)
    return completed


def _run_all(argv: Sequence[Argument], environments: Sequence[Mapping[str, str]], timeout_s: float) -> list[Completed]:
    mark = f"{_MARK}={uuid.uuid4()}"
    with tempfile.TemporaryDirectory(prefix="oases-hf-launch-") as folder:
        processes: list[_Process] = []
        try:
            for index, environment in enumerate(environments):
                processes.append(_Process(argv, _complete(environment, mark), Path(folder) / str(index)))
            deadline = time.monotonic() + timeout_s
            if all(process.ended(deadline) for process in processes):
                return [process.completed() for process in processes]
            _signal_all(mark, signal.SIGABRT)  # makes faulthandler print the stacks
            time.sleep(_ABORT_S)
            raise LaunchTimeout(f"not all done after {timeout_s:g} s\n" + "\n".join(map(str, processes)))
        finally:
            deadline = time.monotonic() + _KILL_S
            while _signal_all(mark, signal.SIGKILL) and time.monotonic() < deadline:
                time.sleep(0.01)
            for process in processes:
                process.ended(deadline)


class _Process:
    """A python process and the files that take its output."""

    def __init__(self, argv: Sequence[Argument], environment: Mapping[str, str], output: Path) -> None:
        self._stdout, self._stderr = output.with_suffix(".out"), output.with_suffix(".err")
        command = [sys.executable, *map(str, argv)]
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr)

    def __str__(self) -> str:
        done = self.completed()
        return f"--- pid {self._process.pid}: exit code {done.returncode}\n{done.stdout}{done.stderr}".rstrip()

    def ended(self, deadline: float) -> bool:
        """Wait for the end of the process, at most until the deadline."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        return self._process.returncode is not None

    def completed(self) -> Completed:
        output, errors = (path.read_text(errors="replace") for path in (self._stdout, self._stderr))
        return Completed(self._process.args, self._process.poll() or 0, output, errors)


def _complete(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    name, value = mark.split("=")
    return dict(os.environ) | {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", name: value} | dict(environment)


def _signal_all(mark: str, number: signal.Signals) -> int:
    """Signal the live processes that have the mark in their environment; return how many there are.

    Launchers put their ranks into sessions of their own and may die before them: only the inherited mark finds all.
    """
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # Reads as empty for a zombie.
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), number)
                count += 1
    return count


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
