"""The slow-link benchmark on tiny ranks: it runs all contenders, and leaves nothing behind when interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oases_hf.launching import USAGE
from scripts.bench.rows import read_json
from scripts.bench.slow_link import INTERRUPTED, main, parse_options

from .test_links import clean, network, on_links

__all__ = ["clean"]

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "slow_link.py"
TINY = ["--hidden=32", "--heads=4", "--ffn=48", "--layers=2", "--batch=4", "--seq=8", "--rounds=1"]


@on_links
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.usefixtures("clean")
def test_all_contenders_at_every_rate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows, chart = tmp_path / "rows.json", tmp_path / "rows.png"
    few = ["--ranks=2", "--mbit-per-s=900,800", "--schedules=megatron,oases", f"--json={rows}", f"--png={chart}"]
    assert main([*TINY, *few]) == 0, capfd.readouterr().err
    each = ["megatron", "oases", "hf", "fsdp"]
    settings = ["2 ranks, 900 Mbit/s", "2 ranks, 800 Mbit/s"]
    assert [(row.setting, row.name) for row in read_json(rows)] == [(s, name) for s in settings for name in each]
    assert chart.stat().st_size > 0
    assert "oases is" in capfd.readouterr().out


@on_links
@pytest.mark.dist
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_nothing_is_left_when_interrupted(number: signal.Signals) -> None:
    before = network()
    process = subprocess.Popen([sys.executable, SCRIPT, *TINY, "--ranks=2", "--mbit-per-s=900"])
    try:
        deadline = time.monotonic() + 60
        while network() == before and time.monotonic() < deadline:
            time.sleep(0.05)
        name = f"oases{process.pid}-"
        assert name in network()[0]
        os.kill(process.pid, number)
        assert process.wait(30) == INTERRUPTED
    finally:
        process.kill()


@on_links
@pytest.mark.dist
@pytest.mark.usefixtures("clean")
def test_ranks_that_fail_say_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--ranks=3", "--mbit-per-s=900", "--schedules=oases", "--peers=fsdp"]) == USAGE
    assert "--batch 4 does not divide evenly over 3 data-parallel parts" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--ranks=1", "--ranks 2 or more"),
        ("--mbit-per-s=slow", "give whole numbers"),
        ("--peers=domino", "domino unknown"),
        ("--speed=3", "unrecognized arguments: --speed=3"),
    ],
)
def test_wrong_usage(wrong: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options([wrong])
    assert said in capsys.readouterr().err


def test_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([]) == USAGE
    assert capsys.readouterr().err.startswith("slow_link: error: rate-limited links are")
