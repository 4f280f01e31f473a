"""`oases-hf estimate`: what it prints, and its exit codes; that the bytes are right is tested with the profiler."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from oases_hf import cli
from oases_hf.commands.estimated import DryRun
from oases_hf.costs import CostTable, ElementBytes
from oases_hf.planner import Problem
from oases_hf.planner.prediction import predict_uniform
from oases_hf.planner.problem import GIB
from oases_hf.profiler import Architecture, Estimate

from ..families import FAMILIES

GPT2 = ["--tmp-size", "2", "--batch", "4", "--seq", "16"]

TABLE = r"""GPT2LMHeadModel from \S+, 2 layers
1 × 2 ranks, batch 4 × 16 tokens in 2 sub-batches, {dtype}; GiB of a rank

degree  recompute  parameters  gradients  optimizer    saved  temporaries  outside    total{largest}
(1            full( +0\.00\d){{7}}{rows}
1            none( +0\.00\d){{7}}{rows}
2            full( +0\.00\d){{7}}{rows}
2            none( +0\.00\d){{7}}{rows}
)"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a GPT-2 with 5 heads."""
    file = tmp_path / "config.json"
    FAMILIES["gpt2"].model().config.save_pretrained(tmp_path)
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "architectures": ["GPT2LMHeadModel"]}))
    return file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
def test_it_prints_a_row_per_choice(config: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", str(config.parent), *GPT2, "--dtype", dtype]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(TABLE.format(dtype=dtype, largest="", rows=""), said.out), said.out
    assert said.err == ""


def test_the_largest_batch_that_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It fits, and one row more does not."""
    assert cli.main(["estimate", "--config", str(config), *GPT2, "--memory-gib", "0.002"]) == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(TABLE.format(dtype="float32", largest="  largest batch", rows=r" +\d+"), printed), printed
    model = Architecture.of(FAMILIES["gpt2"].model(dtype=torch.float32))
    dry = DryRun(Estimate(model, 2, 16, 8, nullcontext), 2, 2)
    for line, choice in zip(printed.splitlines()[4:], dry.choices(), strict=True):
        most = int(line.split()[-1])
        assert dry.figures(choice, most)[-1] <= 0.002 * GIB < dry.figures(choice, most + 1)[-1]


def test_nothing_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "--config", str(config), *GPT2, "--memory-gib", "1e-6"]) == 0
    assert {line.split()[-1] for line in capsys.readouterr().out.splitlines()[4:]} == {"0"}


def test_a_plan_by_the_cost_table_takes_what_was_printed(config: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "costs.json", Architecture.of(FAMILIES["gpt2"].model(dtype=torch.float32))
    asked = ["estimate", "--config", str(config), *GPT2, "--dtype", "float32", "--cluster", "rtx3090x4"]
    assert cli.main([*asked, "--out", str(out)]) == 0
    dry = DryRun(Estimate(model, 2, 16, 8, nullcontext), 2, 2)
    problem = Problem(CostTable.load(out), 2, 1.0)
    for choice in dry.choices():
        assert predict_uniform(problem, choice, 2).memory.total == dry.figures(choice, 4)[-1]


def test_a_cost_table_of_rounded_sums(config: Path, tmp_path: Path) -> None:
    asked = ["estimate", "--config", str(config), *GPT2, "--cluster", "rtx3090x4", "--dtype", "mixed"]
    for option, comm in ([], None), (["--comm-dtype", "bf16"], 2):
        out = tmp_path / f"{comm}.json"
        assert cli.main([*asked, *option, "--out", str(out)]) == 0
        assert CostTable.load(out).element_bytes == ElementBytes(4, 2, 4, 4, 4, 8, comm)


REFUSED = {
    "no such file": (["--config", "/nowhere/config.json"], "--config /nowhere/config.json cannot be read as a model's"),
    "too long": (["--config", "CONFIG", "--seq", "65"], "--seq 65: the model takes up to 64 tokens"),
    "no class": (["--config", "NAMELESS"], "the config names no architectures; add "),
    "no such class": (["--config", "STRANGE"], "the config's architecture GPT9 is not a model of transformers "),
    "no family": (["--config", "OTHER"], "model_type 't5' has no family declaration; served are: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_usage(case: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads(config.read_text())
    changes = {
        "NAMELESS": {**fields, "architectures": None},
        "STRANGE": {**fields, "architectures": ["GPT9"]},
        "OTHER": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    }
    words = {"CONFIG": str(config)}
    for name, changed in changes.items():
        words[name] = str(config.with_name(f"{name}.json"))
        Path(words[name]).write_text(json.dumps(changed))
    arguments, message = REFUSED[case]
    assert cli.main(["estimate", *GPT2, *(words.get(word, word) for word in arguments)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"oases-hf estimate: error: {message}"), said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "arguments",
    [GPT2, ["model", "--config", "file", *GPT2], ["model", "--tmp-size", "2"], ["model", *GPT2, "--batch", "0"]],
)
def test_what_argparse_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["estimate", *arguments])
    assert raised.value.code == 2
    assert "oases-hf estimate: error: " in capsys.readouterr().err
