"""The schedule benchmark on two fresh ranks: what it counts, never what it times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from oases_hf.profiler.stopwatch import peak_bytes
from scripts.bench.contenders import Work, hugging_face, scheduled
from scripts.bench.schedules import check_alike, compared
from scripts.bench.timing import World

from ..launch import launch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "schedules.py"
HIDDEN, LAYERS, BATCH, SEQ = 32, 2, 4, 8
WORK = [f"--hidden={HIDDEN}", "--heads=4", "--ffn=48", f"--layers={LAYERS}", f"--batch={BATCH}", f"--seq={SEQ}"]
HIDDEN_BYTES = BATCH * SEQ * HIDDEN * 8
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """The rows of one run with both peers, by name."""
    file = tmp_path_factory.mktemp("bench") / "rows.json"
    done = launch(2, [SCRIPT, *WORK, "--dtype=fp64", "--rounds=1", "--peers=hf,fsdp", f"--json={file}"])
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr + done[1].stderr
    assert "megatron_5" in done[0].stdout
    assert done[1].stdout == ""
    return {row["name"]: row for row in json.loads(file.read_text())}


@pytest.mark.dist
def test_every_contender_has_a_row(rows: dict[str, Row]) -> None:
    assert list(rows) == ["megatron", "megatron_5", "wang", "merak", "cross_pass", "oases", "hf", "fsdp"]
    for row in rows.values():
        assert row.keys() >= {"name", "ms", "ratio_to_megatron", "bytes", "peak_memory_bytes"}
        assert row["ms"] > 0
        assert row["peak_memory_bytes"] > 0
    assert rows["megatron"]["ratio_to_megatron"] == 1.0


@pytest.mark.dist
def test_bytes_are_those_of_the_all_reduces(rows: dict[str, Row]) -> None:
    per_layer = {"megatron": 6, "megatron_5": 5, "wang": 6, "merak": 6, "cross_pass": 5, "oases": 4}
    for name, count in per_layer.items():
        assert rows[name]["layer_bytes"] == count * LAYERS * HIDDEN_BYTES
        # Besides the layers, all send the same: the embedding, sums of gradients, token ids.
        assert (
            rows[name]["bytes"] - rows[name]["layer_bytes"]
            == rows["megatron"]["bytes"] - rows["megatron"]["layer_bytes"]
        )
    assert rows["hf"]["bytes"] > rows["megatron"]["layer_bytes"]
    assert rows["hf"]["bytes"] % HIDDEN_BYTES == 0


def test_peak_is_of_what_is_held_at_once() -> None:
    def step() -> None:
        first, second = torch.empty(1 << 10), torch.empty(1 << 10)
        del first
        torch.empty(1 << 9)
        del second

    with peak_bytes(torch.device("cpu")) as peak:
        step()
    assert peak() == 4 * (1 << 11)


def test_wrong_contender_is_an_error() -> None:
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=99
    )
    world = World(0, 1, torch.device("cpu"), None)
    work = Work(config, torch.float64, BATCH, SEQ, world.device)
    contenders = [*scheduled(["oases"], None, 1, False, work, world), hugging_face(work, world, 1)]
    check_alike(contenders, compared(work.shapes()), 1e-5)
    contenders[1].model.get_parameter("layers.1.mlp.up_proj.weight").data.mul_(1.01)
    with pytest.raises(ArithmeticError, match=r"^hf: the gradient of .* off that of oases; 1e-05 is tolerated"):
        check_alike(contenders, compared(work.shapes()), 1e-5)
