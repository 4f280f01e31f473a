"""With ``compile=True``, what is measured are compiled blocks; what is only counted is as ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oases_hf import OasesPlugin
from oases_hf.costs import CostTable, Slowdown
from oases_hf.parallel.mesh import Mesh
from oases_hf.profiler import Architecture, Running, Workload, profile
from oases_hf.profiler.layer import LayerProfile

from ..families import FAMILIES
from ..integrations.test_planned import in_a_hurry
from ..ranks import Worlds
from ..test_compiled import VARIANTS, compiling, graphs, kinds
from ..tiny import tiny_llama
from .asking import asked_for, profiled

DEGREES, NUMBERS = (1, 2), (1, 2)
ROWS = 12  # sub-batches of one row would be compiled for anyway: torch takes 1 for a size that never changes

Measured = tuple[CostTable, list[tuple[str, int]], list[str]]


def measured(cache: Path, compile: bool, **settings: Any) -> Measured:
    """On a rank: a table; of every step, what watched it, and how many graphs it compiled; and what was said."""
    in_a_hurry(cache)
    model, said = FAMILIES["llama"].model(dtype=torch.float32, **settings), list[str]()
    what = (Architecture.of(model), Mesh.build(2), Workload(ROWS, 8, NUMBERS))
    steps, step = list[tuple[str, int]](), LayerProfile._step

    def counting(layer: LayerProfile, watch: Any) -> None:
        before = graphs()
        step(layer, watch)
        steps.append((type(watch).__name__, graphs() - before))

    before = torch.get_rng_state()
    with compiling(), mock.patch.object(LayerProfile, "_step", counting):
        table = profile(*what, Running(torch.device("cpu"), compile=compile), say=said.append)
    assert torch.equal(torch.get_rng_state(), before)
    return table, steps, said


def both(cache: Path) -> tuple[Measured, Measured, Measured]:
    """On a rank: not compiled, compiled, and the same again."""
    return measured(cache, False), measured(cache, True), measured(cache, True)


def counted(table: CostTable) -> CostTable:
    """What is neither timed nor depends on how blocks run."""
    return replace(
        table,
        fingerprint={},
        kinds=tuple(replace(kind, timings={}) for kind in table.kinds),
        all_reduce={},
        all_gather={},
        exchange={},
        slowdown=Slowdown(),
        outside=replace(table.outside, ms=0.0),
        optimizer_ms=0.0,
    )


def test_compiled_blocks_are_measured_and_kept_apart(ranks: Worlds, tmp_path: Path) -> None:
    for (plain, as_it_is, _), (table, steps, said), (again, more, repeated) in ranks(2).run(both, tmp_path):
        at_once = VARIANTS * kinds("llama")
        assert [step for step in steps if step[1]] == [("Stopwatch", at_once)] * len(DEGREES) * len(NUMBERS)
        assert [watch for watch, _ in steps].count("Lead") >= 3 * len(DEGREES) * len(NUMBERS), "steps that are timed"
        assert not any(number for _, number in as_it_is)
        assert said[0] == "costs: degree 1 (1 of 2), compiling for each number of sub-batches"
        assert [each.fingerprint["blocks"] for each in (plain, table)] == ["not compiled", "compiled"]
        assert (table, more) == (again, [])
        assert repeated[0].startswith("costs: as measured before")
        assert counted(plain) == counted(table)
        for kinds_of in zip(table.kinds, plain.kinds, strict=True):
            for degree, number in ((degree, number) for degree in DEGREES for number in NUMBERS):
                compiled, other = (kind.timings[degree][number] for kind in kinds_of)
                assert 0 < compiled.graph_bytes <= other.graph_bytes
    assert len(list(tmp_path.glob("oases_hf/costs/*.json"))) == 2


def with_dropout(cache: Path) -> tuple[Measured, Measured]:
    return measured(cache, True, attention_dropout=0.3), measured(cache, False, attention_dropout=0.3)


def test_what_cannot_be_compiled_is_measured_as_it_runs(ranks: Worlds, tmp_path: Path) -> None:
    for (table, steps, said), (same, _, repeated) in ranks(2).run(with_dropout, tmp_path):
        assert not any(number for _, number in steps)
        assert table.fingerprint["blocks"] == "not compiled"
        assert said[:2] == [
            "costs: dropout on attention weights: blocks are not compiled",
            "costs: degree 1 (1 of 2)",
        ]
        assert table == same
        assert repeated[0].startswith("costs: as measured before")


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_a_plan_is_for_blocks_as_they_will_run(compile: bool, hooks: bool) -> None:
    model: Any = tiny_llama()
    if hooks:
        model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *_: None)
    plugin = OasesPlugin(degree="auto", compile=compile, batch_size=4, sequence_length=8)
    assert asked_for(plugin, model).compile is (compile and not hooks)


def test_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with compiling():
        costs = profiled(tmp_path, monkeypatch, "--compile")
        assert graphs() == VARIANTS * kinds("gpt2")
    assert "batch 2 × 8 tokens, float32 on cpu, compile=True" in capsys.readouterr().out
    assert costs.fingerprint["blocks"] == "compiled"
