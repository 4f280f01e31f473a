"""Starting ranks, and what their ends mean; with ranks that do nothing else."""

from __future__ import annotations

import sys
import time

import pytest

from oases_hf import launching
from oases_hf.launching import BROKEN, FAIL, PASS, USAGE, run_ranks

START = "import os, sys, time; rank = int(os.environ['RANK']); size = int(os.environ['WORLD_SIZE']); "


def run(body: str, size: int = 2, time_limit_s: float = 30.0) -> int:
    return run_ranks("oases-hf verify", [sys.executable, "-c", START + body], size, time_limit_s)


def test_all_is_well(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("print('rank', rank, 'of', size, sys.argv[1:2]); print('noise', file=sys.stderr)") == PASS
    assert capfd.readouterr() == ("rank 0 of 2 ['--rendezvous']\n", "")


def test_a_difference(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("print('noise', file=sys.stderr); sys.exit(1)") == FAIL
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("others", ["", "time.sleep(0 if rank else 1); rank and sys.exit(3); "])
def test_wrong_usage_is_said_once(others: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{others}rank or print('no such model', file=sys.stderr); sys.exit(2)") == USAGE
    assert capfd.readouterr() == ("", "no such model\n")


def test_one_rank_breaks(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "GRACE_S", 0.5)
    began = time.monotonic()
    assert run("print('what', file=sys.stderr); rank and sys.exit(7); time.sleep(60)") == BROKEN
    assert time.monotonic() - began < 20
    assert capfd.readouterr() == ("", "what\noases-hf verify: rank 1 of 2 ended with exit code 7\n")


def test_too_late(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert run("time.sleep(60)", time_limit_s=0.5) == BROKEN
    assert time.monotonic() - began < 20
    assert capfd.readouterr().err == "oases-hf verify: not done after 0.5 s; raise --time-limit-s\n"


def test_ranks_that_will_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "GRACE_S", 0.5)
    began = time.monotonic()
    assert run("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", 1, 1.0) == BROKEN
    assert time.monotonic() - began < 20
