"""`oases-hf profile`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oases_hf import cli
from oases_hf.commands.measured import table
from oases_hf.costs import CostTable

from ..command_line import as_rank, assert_refused
from ..families import FAMILIES
from ..launch import run_launcher
from ..planner.examples import by_hand

GPT2 = ["--tmp-size", "2", "--batch", "4", "--seq", "16"]

REPORT = r"""GPT2LMHeadModel from \S+
1 × 2 ranks, batch 4 × 16 tokens, float32 on cpu
costs: degree 1 \(1 of 2\)
costs: degree 2 \(2 of 2\)
costs: links
costs: written to \S+\.json

block      degree  sub-batches  forward ms  recompute ms  backward ms  spread
((attention|mlp)  +[12] +[12]( +\d+\.\d\d){3} +\d+%
){8}
all-reduce of 2 ranks: \d+\.\d\d ms for 64 KiB, \d+\.\d\d GB/s at 64 MiB
all-gather of 2 ranks: \d+\.\d\d ms for 64 KiB, \d+\.\d\d GB/s at 64 MiB
exchange with owners of 2 ranks: \d+\.\d\d ms for 64 KiB, \d+\.\d\d GB/s at 64 MiB

\d+\.\d s
"""


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with 5 heads."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    FAMILIES["gpt2"].model().save_pretrained(folder)
    return folder


@pytest.mark.dist
def test_it_measures_then_remembers_and_what_it_writes_can_be_planned(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, environment = tmp_path / "costs.json", {"XDG_CACHE_HOME": str(tmp_path)}
    command: list[str | Path] = [
        "-m",
        "oases_hf.cli",
        "profile",
        gpt2,
        *GPT2,
        "--sub-batches",
        "1,2",
        "--device",
        "cpu",
        "--out",
        costs,
    ]
    done = run_launcher(command, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(REPORT, done.stdout), done.stdout
    first = costs.read_text()
    costs.unlink()
    again = run_launcher(command, env=environment)
    assert (again.returncode, again.stderr) == (0, "")
    assert "costs: as measured before, " in again.stdout
    assert costs.read_text() == first
    assert cli.main(["plan", str(costs), "--json", str(tmp_path / "plan.json"), "--compare"]) == 0
    assert CostTable.load(costs).fingerprint["layers"] == "2"
    assert "ratio" in capsys.readouterr().out


def test_the_table_says_what_a_whole_batch_takes() -> None:
    printed = table(by_hand(2))
    assert "block           1            4       32.00         24.00        64.00      0%" in printed
    assert "all-reduce of 2 ranks: 3.00 ms for 0.000976562 KiB" in printed


REFUSED = {
    "no such folder": (["/nowhere/model"], "there is no folder /nowhere/model; give that of a model, or a hub id"),
    "too long": (["MODEL", "--seq", "65"], "--seq 65: the model takes up to 64 tokens"),
    "no GPUs": (["MODEL", "--device", "cuda"], "--device cuda: 2 ranks on 0 GPUs, each needs one; choose --device cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_usage(
    case: str, gpt2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[case]
    assert_refused("profile", [*GPT2, *arguments], message, gpt2, monkeypatch, capsys)


def test_ranks_that_are_no_worlds_of_that_size(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(monkeypatch, 0, 1)
    assert cli.main(["profile", str(gpt2), *GPT2]) == 2
    said = capsys.readouterr().err
    assert said == "oases-hf profile: error: tmp_size=2 does not divide the 1 ranks; choose one of [1]\n"


@pytest.mark.parametrize("command", ["profile", "plan", "estimate", "doctor"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main([command, "--help"])
    assert raised.value.code == 0
    assert f"usage: oases-hf {command} " in capsys.readouterr().out
