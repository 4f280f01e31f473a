"""Clusters from data sheets: by hand, and the way from a config to a plan."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oases_hf import cli
from oases_hf.costs import CostTable, Slowdown
from oases_hf.errors import ConfigError
from oases_hf.plan import Plan
from oases_hf.planner import Problem, solve
from oases_hf.profiler import Architecture, Estimate
from oases_hf.schedule import kind
from oases_hf.simulator import simulate
from oases_hf.simulator.cluster import ClusterSpec, Gpu, Link, shipped

CLUSTER = ClusterSpec(
    "by hand",
    Gpu("a card", {"float32": 10.0}, 0.5, 24, 1000, launch_us=10),
    8,
    (Link(2, 5, 50.0), Link(8, 10, 10.0)),
    Slowdown(1.1, 1.2),
    "nowhere",
)


def llama(layers: int = 2, heads: int = 8, scale: int = 1) -> Architecture:
    config = LlamaConfig(
        hidden_size=256 * scale,
        intermediate_size=688 * scale,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=1000,
        max_position_embeddings=128,
    )
    config._attn_implementation = "sdpa"
    return Architecture(LlamaForCausalLM, config, torch.float32)


def estimated(tmp_size: int, model: Architecture | None = None, data_size: int = 1) -> Estimate:
    return Estimate(model or llama(), tmp_size, 64, 8, nullcontext, data_size)


def test_collectives_by_hand() -> None:
    """8 MB over two ranks: 4 MB there and back over NVLink; over four, 2 MB six times over the slower link."""
    assert CLUSTER.all_reduce_ms(2, 8e6) == pytest.approx(2 * (0.005 + 4e6 / 50e6))
    assert CLUSTER.all_reduce_ms(4, 8e6) == pytest.approx(6 * (0.010 + 2e6 / 10e6))
    assert CLUSTER.all_gather_ms(4, 8e6) == pytest.approx(3 * (0.010 + 2e6 / 10e6))
    assert CLUSTER.all_reduce_ms(1, 8e6) == 0.0
    assert CLUSTER.all_reduce_ms(8, 8e2) == pytest.approx(2 * (3 * 0.010 + 8e2 / 10e6)), "a tree, for small messages"


def test_computation_by_hand() -> None:
    assert CLUSTER.compute_ms(10e9, 5e6, "float32", 3) == pytest.approx(2.0 + 0.005 + 0.03)
    with pytest.raises(ConfigError, match="a card has no figure for int4, only float32"):
        CLUSTER.compute_ms(1, 1, "int4")


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_operations_are_counted(degree: int) -> None:
    """Of a LLaMA: two for each weight and token, and two matmuls of all tokens by all tokens."""
    work = estimated(4).work("float32")
    assert work.linear["attention"][degree] == 2 * 64 * 4 * 256 * 256 / degree
    assert work.last_matmul["attention"][degree] == 2 * 64 * 256 * 256 / degree
    assert work.operations["attention"][degree] - work.linear["attention"][degree] == 2 * 2 * 64 * 64 * 256 / degree
    assert work.operations["mlp"][degree] == work.linear["mlp"][degree] == 2 * 64 * 3 * 256 * 688 / degree


def test_a_table_with_times() -> None:
    table = estimated(4).on(CLUSTER, 8, (1, 2, 16), "float32")
    (attention, _), work = table.kinds, estimated(4).work("float32")
    assert set(attention.timings[2]) == {1, 2}
    timing = attention.timings[2][2]
    rows = 8 // 2 // 2  # two sub-batches, two replicas
    moved = 2 * timing.graph_bytes
    expected = CLUSTER.compute_ms(rows * work.operations["attention"][2], moved, "float32", work.kernels)
    assert timing.forward_ms == pytest.approx(expected)
    assert timing.recompute_ms < timing.forward_ms < timing.backward_ms
    assert table.all_reduce_ms(4, 2**20) == pytest.approx(CLUSTER.all_reduce_ms(4, 2**20))
    assert table.slowdown == CLUSTER.slowdown
    with pytest.raises(ConfigError, match="has 8 GPUs, and 16 ranks are asked for"):
        estimated(4, data_size=4).on(CLUSTER, 8, (1,), "float32")


def test_json() -> None:
    assert ClusterSpec.from_json(CLUSTER.to_json()) == CLUSTER
    for name in shipped():
        cluster = ClusterSpec.load(name)
        assert cluster.name == name
        assert cluster.source
    with pytest.raises(ConfigError, match=r"cluster nowhere: .*choose a file, or rtx3090x4"):
        ClusterSpec.load("nowhere")
    named = {**json.loads(CLUSTER.to_json()), "gpu": "RTX 4090"}
    assert ClusterSpec.from_json(json.dumps(named)) == replace(CLUSTER, gpu=ClusterSpec.load("rtx4090x4").gpu)
    with pytest.raises(ConfigError, match="there is no GPU 'RTX 0'; choose one of RTX 3090, "):
        ClusterSpec.from_json(json.dumps({**named, "gpu": "RTX 0"}))
    with pytest.raises(ConfigError, match="this is no cluster"):
        ClusterSpec.from_json("{}")
    with pytest.raises(ConfigError, match=r"links of \[8\] ranks; name the nearest first, up to 16"):
        replace(CLUSTER, gpus=16, links=(Link(8, 1, 1),))


def test_a_plan_for_a_thousand_ranks() -> None:
    cluster = replace(CLUSTER, gpus=1024, links=(Link(8, 5, 50.0), Link(1024, 20, 10.0)))
    model = llama(layers=96, heads=32)
    table = estimated(16, model, data_size=64).on(cluster, 8, (1, 2), "float32")
    found = solve(Problem(table, 96, 24.0, accumulation=8, sub_batches=(1, 2)))
    assert len(found.degrees) == 192


def test_overlap_pays_on_what_is_shipped() -> None:
    for name in ("rtx3090x4", "rtx4090x4"):
        table = estimated(4, llama(scale=16)).on(ClusterSpec.load(name), 8, (1, 2), "float32")
        problem = Problem(table, 8, 1e9)
        times = {
            schedule: simulate(problem, Plan("m", 4, (4,) * 16, schedule, kind(schedule).sub_batches)).step_ms
            for schedule in ("megatron", "merak", "cross_pass", "oases")
        }
        assert sorted(times.values(), reverse=True) == list(times.values())


def test_from_a_config_to_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on the command line: estimate for a cluster, plan, and simulate."""
    fields = {**llama().config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    config, costs, plan = (str(tmp_path / name) for name in ("config.json", "costs.json", "plan.json"))
    Path(config).write_text(json.dumps(fields))
    model = ["--config", config, "--tmp-size", "4", "--batch", "8", "--seq", "64"]
    assert cli.main(["estimate", *model, "--cluster", "rtx3090x4", "--out", costs]) == 0
    assert CostTable.load(costs).fingerprint["device"] == "RTX 3090"
    assert cli.main(["plan", costs, "--json", plan]) == 0
    trace, picture, degrees = (tmp_path / name for name in ("t.json", "t.png", "p.svg"))
    pictures = ["--trace", str(trace), "--plot", str(picture), "--plot-plan", str(degrees)]
    assert cli.main(["simulate", costs, "--plan", plan, *pictures]) == 0
    said = capsys.readouterr().out
    assert "waiting for collectives" in said
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"F0.0", "B3.0", "optimizer", "embedding, head and loss", "memory"} <= names or "G0.0" in names
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in degrees.read_text()
    assert cli.main(["estimate", *model, "--cluster", "rtx3090x4"]) == 2
    assert cli.main(["simulate", costs, "--plan", plan, "--degree", "2"]) == 2
    assert cli.main(["simulate", str(tmp_path / "none.json")]) == 2
    assert cli.main(["simulate", costs, "--plot", str(tmp_path / "t.foo")]) == 2
    assert cli.main(["simulate", costs, "--trace", "/proc/t.json"]) == 2
    assert "error: --plan and --degree are both given" in capsys.readouterr().err
