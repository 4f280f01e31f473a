"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oases_hf import cli
from oases_hf.verify.settings import PRECISIONS

from ..command_line import as_rank, assert_refused
from ..families import FAMILIES
from ..launch import launch, run_launcher


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with 5 heads."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    FAMILIES["gpt2"].model().save_pretrained(folder)
    return folder


REPORT = r"""GPT2LMHeadModel from \S+gpt2, \d+\.\d k parameters
1 AdamW step at learning rate 0\.001, batch 4 × 16 tokens, float32 on cpu, dropout 0, seed 0

  one process  +\d+\.\d s  sdpa attention
  noise        +\d+\.\d s  one process again: eager attention, batch in 2 micro-batches
  2 ranks      +\d+\.\d s  oases schedule, 2 sub-batches, \d\d\.\d% of the parameters split

                one process      2 ranks   difference     noise   allowed  worst parameter
loss 1      ( +\d\.\d{6}){2}( +\d\.\de[+-]\d\d){2}   5\.0e-06
gradients 1 ( +\d\.\de[+-]\d\d){3}  transformer\.\S+
update 1    ( +\d\.\de[+-]\d\d){3}  transformer\.\S+

PASS: 2 ranks and one process differ by no more than is allowed
"""
OPTIONS = ("--steps", "1", "--seq", "16", "--device", "cpu")


@pytest.mark.dist
def test_it_starts_ranks_and_prints_nothing_but_the_report(gpt2: Path) -> None:
    done = run_launcher(["-m", "oases_hf.cli", "verify", gpt2, *OPTIONS])
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(REPORT, done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.dist
def test_started_by_a_launcher_it_is_one_of_the_ranks(gpt2: Path) -> None:
    first, second = launch(2, ["-m", "oases_hf.cli", "verify", gpt2, *OPTIONS])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert re.fullmatch(REPORT, first.stdout), first.stdout
    assert second.stdout == ""


@pytest.mark.gpu
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_on_gpus(gpt2: Path, dtype: str) -> None:
    environment = {"ACCELERATE_USE_CPU": "false"}
    done = run_launcher(["-m", "oases_hf.cli", "verify", gpt2, "--device", "cuda", "--dtype", dtype], env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{dtype} on cuda" in done.stdout


REFUSED = {
    "no such folder": (["/nowhere/model"], "there is no folder /nowhere/model; give that of a model, or a hub id"),
    "not in the hub": (["nobody/nothing"], "the hub's nobody/nothing cannot be read as a model's config: "),
    "no such file": (
        ["--config", "/nowhere/config.json"],
        "--config /nowhere/config.json cannot be read as a model's config: ",
    ),
    "too many ranks": (["MODEL", "--tmp-size", "6"], "5 heads cannot be split over 6 ranks; choose a degree up to 5"),
    "too many layers": (["MODEL", "--layers", "7"], "--layers 7: the model has 2 layers"),
    "too long": (["MODEL", "--seq", "65"], "--seq 65: the model takes up to 64 tokens"),
    "no GPUs": (["MODEL", "--device", "cuda"], "--device cuda: 2 ranks on 0 GPUs, each needs one; choose --device cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_usage(
    case: str, gpt2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[case]
    assert_refused("verify", arguments, message, gpt2, monkeypatch, capsys)


def test_weights_that_cannot_be_read(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    as_rank(monkeypatch, 0, 1)
    assert cli.main(["verify", str(tmp_path), "--tmp-size", "1", *OPTIONS]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"oases-hf verify: error: {tmp_path} cannot be loaded: ")
    assert said.count("\n") == 1


SENSELESS = {
    "nothing": ([], "give a model (hub id or folder), or --config with a config.json, and not both"),
    "both": (["model", "--config", "file"], "give a model (hub id or folder), or --config with a config.json, and not"),
    "no ranks": (["model", "--tmp-size", "0"], "--tmp-size 0: choose 1 or more"),
    "no time": (["model", "--time-limit-s", "0"], "--time-limit-s 0: choose a number above 0"),
    "one token": (["model", "--seq", "1"], "--seq 1: a row needs 2 tokens to have something to predict"),
}


@pytest.mark.parametrize("case", SENSELESS)
def test_senseless_settings(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = SENSELESS[case]
    assert cli.main(["verify", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"oases-hf verify: error: {message}")


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["verify", "model", "--dtype", "int8"], ["verify", "--tmp-size", "x"]]
)
def test_what_argparse_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert "oases-hf" in capsys.readouterr().err


HELP = """
import sys
from oases_hf.cli import main
try:
    main(["verify", "--help"])
finally:
    print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""


def test_help_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert "--tmp-size T" in done.stdout
    assert done.stdout.endswith("[]\n"), done.stderr
