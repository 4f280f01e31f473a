"""Watching processes that hang, fail, and tell; without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oases_hf.doctor import watching
from oases_hf.doctor.measurements import Failure, Hang, Step
from oases_hf.doctor.watching import Teller, watch
from oases_hf.launching import Rank, end, start

TELL = """
import os, sys, time
from pathlib import Path
from oases_hf.doctor.watching import Teller
rank = int(sys.argv[2])
teller = Teller(Path(sys.argv[1]), rank)
"""


class Started:
    """Processes in a folder, which are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranks, self.heard = folder, list[Rank](), list[object]()

    def watch(self, *bodies: str) -> Hang | Failure | None:
        for number, body in enumerate(bodies):
            command = [sys.executable, "-c", TELL + body, str(self.folder), str(number)]
            self.ranks.append(start(command, number, os.environ, self.folder))
        return watch(self.ranks, self.folder, self.heard.append)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    processes = Started(tmp_path)
    yield processes
    end(processes.ranks)
    assert all(rank.process.poll() is not None for rank in processes.ranks)


def test_what_the_first_has_found_is_heard_in_order(started: Started) -> None:
    body = "for number in range(100): teller.found((rank, number))"
    assert started.watch(body, body) is None
    assert started.heard == [(0, number) for number in range(100)]


def test_a_hang_says_what_all_of_them_do(started: Started) -> None:
    trouble = started.watch(
        "teller.step('waiting', 1000); time.sleep(1000)",
        "teller.step('before', 1000); teller.step('copying', 0.5); time.sleep(1000)",
        "teller.step('done', 1000)",
    )
    assert trouble == Hang("copying", (1,), 0.5, (("waiting", (0,)),))


def test_a_process_that_gets_on_does_not_hang(started: Started) -> None:
    assert started.watch("for i in range(20): teller.step(f'{i}', 1.5); time.sleep(0.1)") is None


def test_one_that_never_begins(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "START_LIMIT_S", 1.0)
    started.ranks.append(start(["sleep", "1000"], 0, os.environ, started.folder))
    assert started.watch() == Hang("starting", (0,), 1.0)


def test_one_that_fails_while_another_waits_for_it(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "GRACE_S", 0.2)
    trouble = started.watch(
        "teller.step('waiting', 1000); time.sleep(1000)",
        "teller.step('copying', 1000); print('what', file=sys.stderr); sys.exit(7)",
    )
    assert trouble == Failure("copying", 1, 7, "what")


def test_a_killed_one_is_why_another_failed(started: Started) -> None:
    for number, body in enumerate(["sys.exit(3)", "os.kill(os.getpid(), 9)"]):
        started.ranks.append(start([sys.executable, "-c", f"import os, sys; {body}"], number, {}, started.folder))
        started.ranks[-1].process.wait()
    assert started.watch() == Failure("starting", 1, -9, "")


def test_lines_that_are_not_whole_yet_are_left(tmp_path: Path) -> None:
    Teller(tmp_path, 0).step("one", 1.0)
    whole = (tmp_path / "rank0.told").read_bytes()
    (tmp_path / "rank0.told").write_bytes(whole + whole[:10])
    process = start([sys.executable, "-c", ""], 0, os.environ, tmp_path)
    heard: list[object] = []
    assert watch([process], tmp_path, heard.append) is None
    assert heard == [Step("one", 1.0)]
