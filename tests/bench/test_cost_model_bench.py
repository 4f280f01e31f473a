"""The benchmark of the cost model: runs on tiny ranks, and says what it is for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.bench.cost_model import spearman

from ..launch import launch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "cost_model.py"
SIZES = {"hidden": 32, "heads": 4, "ffn": 64, "layers": 2, "seq": 16, "batch": 4, "vocab": 64}


@pytest.mark.dist
@pytest.mark.slow
def test_it_compares_predicted_and_measured_times(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    sizes = [str(part) for name, size in SIZES.items() for part in (f"--{name}", size)]
    few = ("--plans", "3", "--steps", "1", "--accumulation", "1", "--memory-mib", "20")
    first, second = launch(2, [SCRIPT, *sizes, *few, "--json", rows, "--png", tmp_path / "plot.png"], timeout_s=240)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    names = [row["name"] for row in json.loads(rows.read_text())]
    kinds = ["planned", "degree 1", "degree 2"]
    megatron = [f"degree {degree}, megatron{suffix}" for degree in (1, 2) for suffix in ("", ", deferred")]
    randoms = [f"random {number}" for number in range(3)]
    assert names == [*kinds, *(f"{kind}, owned" for kind in kinds), *megatron, *randoms]
    assert re.search(r"rank correlation of 3 random plans -?[01]\.\d+; median error \d+\.\d%", first.stdout)
    for name in ("planned", "planned, owned"):
        assert re.search(rf"{name} is \d+\.\d\d x as fast as degree [12], the best uniform plan that", first.stdout)
        assert re.search(rf"{name} is \d+\.\d\d x as fast as degree [12], megatron.*, the best of", first.stdout)
    assert re.search(r"owned is \d+\.\d\d x as fast as degree [12], owned, the best uniform plan with", first.stdout)
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == 1.0
    assert spearman([1, 2, 3], [30, 20, 10]) == -1.0
    assert spearman([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
