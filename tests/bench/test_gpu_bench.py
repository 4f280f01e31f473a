"""The benchmark for GPUs, on CPU ranks: what it runs and counts, and what it makes of contenders that fail."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oases_hf.launching import BROKEN, FAIL, PASS
from scripts.bench import gpu, gpu_rank
from scripts.bench.gpu import REGIMES, main, parse_options, run_job, with_ratios
from scripts.bench.gpu_rank import why
from scripts.bench.rows import Row, in_a_word, read_json
from scripts.bench.tasks import OUT_OF_MEMORY, Entry, Job, Shape, Task, entries, paper_shapes

TINY = ["--device=cpu", "--ranks=2", "--hidden=64", "--heads=4", "--layers=2", "--batch=4", "--seq=16", "--vocab=128"]


OURS = ("megatron", "oases", "megatron, deferred", "oases, deferred")


def job(folder: Path, *names: str) -> Job:
    shape = Shape("tiny", 64, 256, 4, 2, 4)
    tasks = tuple(Task("layers", shape, Entry(name)) for name in names)
    return Job(folder, "no-p2p-fp32", "fp32", 16, 128, 1, 24.0, 60.0, tasks)


@pytest.mark.dist
@pytest.mark.parametrize("auto", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers(auto: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, chart = tmp_path / "rows.json", tmp_path / "rows.png"
    names = "megatron,oases,hf,fsdp" + ",auto" * auto
    few = ["--rounds=1", "--regimes=no-p2p-fp32", "--parts=layers", f"--names={names}"]
    code = main([*TINY, *few, f"--json={file}", f"--png={chart}"])
    out, err = capfd.readouterr()
    rows = read_json(file)
    assert code == PASS, out + err
    ours = [*OURS, "oases, computing only", "oases, all-reduces only"]
    planned = ["auto", "auto", "auto, by block"] * auto
    assert [row.name for row in rows] == [*ours, *ours, "hf", "hf", "fsdp", "fsdp", *planned]
    assert Counter(row.recompute for row in rows[:18]) == {"full": 8 + auto, "none": 8 + auto}
    for row in rows:
        assert row.ms
        assert len(row.rounds_ms) == 1
        assert row.recompute == "some" or row.ratio_to_megatron
    layer_bytes = 4 * 16 * 64 * 4 * 2  # of one all-reduce in each of two layers
    whole = [row for row in rows[:12] if "only" not in row.name]
    assert [row.layer_bytes for row in whole] == [n * layer_bytes for n in (6, 4, 6, 4, 4, 4, 4, 4)]
    for complete, computing, all_reduces in ((1, 4, 5), (7, 10, 11)):
        assert rows[computing].bytes == 0
        assert 4 * layer_bytes < (rows[all_reduces].bytes or 0) <= (rows[complete].bytes or 0)
    for full, none in ((0, 6), (1, 7), (12, 13), (14, 15)):
        assert (rows[full].peak_memory_bytes or 0) < (rows[none].peak_memory_bytes or 0), rows[full].name
    assert chart.stat().st_size > 0
    assert "== hidden 64, no-p2p-fp32\n" in out
    for of in ("oases, recompute full", "oases, recompute none", "oases, deferred, recompute full"):
        near = rf"^{of}: \d\.\d\d x the longer of computing and all-reduces, -?\d+\.\d% exposed$"
        assert re.search(near, out, re.MULTILINE)
    as_planned = re.findall(r"^as planned, recompute and all: \d+\.\d\d x as fast as megatron", out, re.MULTILINE)
    assert len(as_planned) == auto


@pytest.mark.slow
@pytest.mark.dist
def test_whole_models(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    few = ["--rounds=2", "--regimes=no-p2p-fp32", "--parts=whole", "--names=megatron,oases,hf,fsdp,auto"]
    code = main([*TINY, *few, f"--json={file}"])
    out, err = capfd.readouterr()
    rows = read_json(file)
    assert [(row.name, row.recompute) for row in rows[:-1]] == [
        (name, recompute)
        for names in ((*OURS, "oases, bare loop"), ("hf",), ("fsdp",), ("auto",))
        for recompute in ("full", "none")
        for name in names
    ], out + err
    assert {row.failure for row in rows if row.name in ("hf", "fsdp")} == {
        "Trainer has no tensor parallelism on CPUs",
        "Trainer has no FSDP2 on CPUs",
    }
    assert code == FAIL
    assert all(row.ms and len(row.rounds_ms) == 2 for row in rows if not row.failure)
    assert sum(not row.failure for row in rows) == 13
    assert (
        len(re.findall(r"^oases, recompute \w+: through Trainer \d\.\d\d x the speed of a bare loop$", out, re.M)) == 2
    )
    assert {row.setting for row in rows} == {"hidden 64, no-p2p-fp32, Trainer"}


def test_a_contender_that_fails_is_a_row_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = job(tmp_path, "megatron", "merak", "wang", "oases", "hf")

    def ranks(title: str, command: object, size: int, time_limit_s: float) -> int:
        begun = Job.load(wanted.file)
        begun.begin()
        for task in begun.tasks[len(begun.rows) :]:
            match task.entry.name:
                case "merak":
                    begun.say_why(OUT_OF_MEMORY)
                    begun.say_why("the other rank is gone")
                    return BROKEN
                case "wang":
                    return FAIL
                case "oases":
                    return BROKEN
            begun.add(Row(task.entry.title, "", 1.0))
        return PASS

    monkeypatch.setattr(gpu, "run_ranks", ranks)
    run_job(wanted, [], 2)
    assert [(row.name, row.failure) for row in wanted.rows] == [
        ("megatron", ""),
        ("merak", OUT_OF_MEMORY),
        ("wang", "did not end within 60 s"),
        ("oases", "a rank was ended"),
        ("hf", ""),
    ]


@pytest.mark.dist
def test_a_contender_that_hangs_is_ended(tmp_path: Path) -> None:
    wanted = replace(job(tmp_path, "oases"), time_limit_s=0.001)
    rank = ["env", "ACCELERATE_USE_CPU=true", sys.executable, gpu_rank.__file__, str(wanted.file)]
    run_job(wanted, rank, 2)
    assert [row.failure for row in wanted.rows] == ["did not end within 0.001 s"]


def test_ranks_that_never_begin_end_the_run(tmp_path: Path) -> None:
    wanted = job(tmp_path, "megatron")
    with pytest.raises(SystemExit, match="did not begin"):
        run_job(wanted, [sys.executable, "-c", "import sys; sys.exit(5)"], 2)


def test_rows_of_an_interrupted_run_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(begun: Job, command: object, ranks: int) -> None:
        begun.add(Row("megatron", "", 2.0, rounds_ms=(2.0,), setting="tiny"))
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run_job", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*TINY, f"--json={tmp_path / 'rows.json'}"])
    (row,) = read_json(tmp_path / "rows.json")
    assert row.ratio_to_megatron == 1.0


def test_ratios_are_at_equal_recompute() -> None:
    rows = [
        Row("megatron", "", 8.0, rounds_ms=(8.0,), setting="a"),
        Row("megatron", "", 6.0, rounds_ms=(6.0,), setting="a", recompute="none"),
        Row("oases", "", 4.0, rounds_ms=(4.0,), setting="a"),
        Row("oases", "", 4.0, rounds_ms=(4.0,), setting="a", recompute="none"),
        Row("auto", "", 4.0, rounds_ms=(4.0,), setting="a", recompute="some"),
        Row("hf", "", failure=OUT_OF_MEMORY, setting="a"),
        Row("oases", "", 4.0, rounds_ms=(4.0,), setting="b"),
        Row("megatron, deferred", "", 10.0, rounds_ms=(10.0,), setting="a"),
        Row("megatron, deferred", "", 5.0, rounds_ms=(5.0,), setting="a", recompute="none"),
    ]
    found = [row.ratio_to_megatron for row in with_ratios(rows)]
    assert found == [1.0, 5 / 6, 2.0, 1.25, None, None, None, 0.8, 1.0], "the better of two megatrons counts"


def test_entries_of_one_model_follow_each_other() -> None:
    named = [
        (entry.title, entry.recompute) for entry in entries(["megatron", "megatron_5", "hf", "auto"], "layers", "bf16")
    ]
    assert named == [
        ("megatron", "full"),
        ("megatron_5", "full"),
        ("megatron, deferred", "full"),
        ("megatron", "none"),
        ("megatron, deferred", "none"),
        ("hf", "full"),
        ("hf", "none"),
        ("auto", "full"),
        ("auto", "none"),
        ("auto, by block", "auto"),
    ]
    for dtype, variants in (("bf16", {"", "bare loop", "bf16 sums"}), ("fp32", {"", "bare loop"})):
        assert {entry.variant for entry in entries(["oases"], "whole", dtype)} == variants
    assert not any(entry.name == "megatron_5" for entry in entries(["megatron_5"], "whole", "bf16"))


def test_shapes_are_the_papers() -> None:
    shapes = paper_shapes(None)
    llama = shapes["LLaMA-7B"]
    assert (llama.hidden, llama.ffn, llama.heads, llama.layers, llama.rows) == (4096, 11008, 32, 16, 4)
    assert (len(shapes), shapes["LLaMA-65B"].ffn) == (7, 22016)
    assert {shape.layers for shape in paper_shapes(3).values()} == {3}


def test_regimes() -> None:
    assert [(r.dtype, r.environment()) for r in REGIMES.values()] == [
        ("bf16", ("-u", "NCCL_P2P_DISABLE")),
        ("bf16", ("NCCL_P2P_DISABLE=1",)),
        ("fp32", ("NCCL_P2P_DISABLE=1",)),
    ]


def test_quick_is_one_shape_and_regime_unless_told() -> None:
    options = parse_options(["--device=cpu", "--ranks=2", "--quick", "--layers=3"])
    (shape,), (regime,) = options.shapes, options.regimes
    assert (shape.name, shape.layers, regime.name, options.parts) == ("LLaMA-7B", 3, "no-p2p-bf16", ["layers"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("--shapes=GPT-5", "GPT-5 unknown; choose from BERT-large"), ("--ranks=1", "needs 2 or more")],
)
def test_wrong_usage(wrong: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--device=cpu", "--ranks=2", wrong])
    assert said in capsys.readouterr().err


def test_why() -> None:
    assert why(torch.OutOfMemoryError("CUDA out of memory. Tried to")) == OUT_OF_MEMORY
    assert why(ArithmeticError("off\nby one")) == "ArithmeticError: off"
    assert in_a_word(["none", "none"]) == "none"
    assert in_a_word(["none", "full"]) == "some"
