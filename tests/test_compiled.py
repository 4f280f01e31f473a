"""Compiled blocks compute what one plain process does, and are compiled once for all layers that are alike.

By a backend that needs no C++ compiler, as ranks can start none; once by the one that users get.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from oases_hf import convert as converting
from oases_hf.models.converted import converted
from oases_hf.plan import SCHEDULE_NAMES
from oases_hf.runtime import compiled
from oases_hf.runtime.graphs import WARM

from .families import FAMILIES, Padding, most_different
from .integrations.looping import set_up
from .parallel import full_gradients, one_step, parallel
from .parity import assert_gradients, assert_loss, gradient_deviation
from .ranks import Worlds
from .reference import loss_of, reference
from .replaying import Recorder
from .test_compute import counted, step_of
from .tiny import Batch, tiny_llama

ROWS, SEQ, SUB_BATCHES = 4, 12, 2
VARIANTS = 2  # of a kind of block: forward without, recompute with gradients

Expected = tuple[float, dict[str, Tensor]]


@contextmanager
def compiling(backend: str = "aot_eager") -> Iterator[None]:
    """Compile afresh, and count."""
    torch._dynamo.reset()
    counters.clear()
    limit = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    with mock.patch.object(compiled, "BACKEND", backend), limit:
        yield


def graphs() -> int:
    """How many graphs were compiled; fails when one of them is a part of a block only."""
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


def kinds(name: str) -> int:
    """Blocks of a layer."""
    return 1 if name == "neox" else 2


def rows_of(name: str, seq: int = SEQ, padding: Padding = "right") -> Batch:
    return FAMILIES[name].batch(ROWS, seq, padding=padding)


def expected(name: str, data: Batch, **settings: Any) -> Expected:
    """Loss and gradients of one process that compiles nothing."""
    run = reference(FAMILIES[name].model(**settings), [data], steps=1)
    return run.losses[0], run.gradients


def check(model: Any, data: Batch, wanted: Expected) -> None:
    """On a rank: a step is that of one process."""
    assert_loss(one_step(model, [data]), wanted[0])
    assert_gradients(full_gradients(model), wanted[1])


def all_schedules(name: str, wanted: Expected) -> int:
    model = FAMILIES[name].model().train()
    with compiling():
        stack = parallel(model, 2, compile=True).stack
        for i, schedule in enumerate(SCHEDULE_NAMES):
            stack.schedule, stack.defer, stack.sub_batches = schedule, bool(i % 2), SUB_BATCHES
            check(model, rows_of(name), wanted)
        return graphs()


@pytest.mark.parametrize("name", most_different(FAMILIES))
def test_gradients_of_all_schedules(ranks: Worlds, name: str) -> None:
    """Which pieces there are, which output has a reader, and what is put off, is outside of what is compiled."""
    for found in ranks(2).run(all_schedules, name, expected(name, rows_of(name)), timeout_s=80):
        assert found == VARIANTS * kinds(name)


def three_steps(layers: int, degrees: Sequence[int], recompute: Sequence[Any], wanted: Expected) -> int:
    model = FAMILIES["llama"].model(num_hidden_layers=layers).train()
    with compiling():
        parallel(model, 2, degrees=degrees, recompute=recompute, compile=True)
        for _ in range(3):
            check(model, rows_of("llama"), wanted)
        return graphs()


@pytest.mark.parametrize(
    ("degrees", "recompute", "number"),
    [
        ((2, 2), ("full", "full"), VARIANTS * 2),
        ((2, 2) * 4, ("full", "full") * 4, VARIANTS * 2),
        ((2, 2) * 4, ("none", "none") * 4, 2),  # with gradients only
        ((1, 2) * 2 + (2, 1) * 2, ("full", "full") * 4, VARIANTS * 2 * 2),
    ],
    ids=["one layer", "four layers", "not recomputed", "two degrees"],
)
def test_blocks_that_are_alike_are_compiled_once(
    ranks: Worlds, degrees: Sequence[int], recompute: Sequence[Any], number: int
) -> None:
    wanted = expected("llama", rows_of("llama"), num_hidden_layers=len(degrees) // 2)
    assert ranks(2).run(three_steps, len(degrees) // 2, degrees, recompute, wanted) == [number] * 2


SHAPES = ((5, 12), (4, 9), (5, 10), (6, 7), (4, 11), (7, 8), (5, 6))


def many_shapes(name: str, wanted: list[tuple[Batch, Expected]]) -> list[int]:
    model = FAMILIES[name].model().train()
    found = []
    with compiling():
        parallel(model, 2, compile=True)
        for data, expectation in wanted:
            check(model, data, expectation)
            found.append(graphs())
    return found


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_shapes_that_change(ranks: Worlds, name: str) -> None:
    """Rows and lengths, and whether there is padding, without which attention is of another kind, and has no mask."""
    paddings: tuple[Padding, ...] = ("right", "none")
    data = [FAMILIES[name].batch(*shape, padding=paddings[i // 2 % 2]) for i, shape in enumerate(SHAPES)]
    for found in ranks(2).run(many_shapes, name, [(rows, expected(name, rows)) for rows in data], timeout_s=80):
        assert found[4:] == [found[4]] * len(found[4:])


def evaluated() -> tuple[list[int], float]:
    """Graphs after a step, an evaluation, and both once more; how far the evaluation is off."""
    model, plain = (FAMILIES["llama"].model().train() for _ in range(2))
    data, found, losses = rows_of("llama"), [], [0.0, 0.0]
    with compiling():
        parallel(model, 2, compile=True)
        parallel(plain, 2)
        for _ in range(2):
            one_step(model.train(), [data])
            found.append(graphs())
            with torch.no_grad():
                losses = [float(loss_of(each.eval(), data)) for each in (model, plain)]
            found.append(graphs())
    return found, losses[0] - losses[1]


def test_evaluation(ranks: Worlds) -> None:
    for found, off in ranks(2).run(evaluated):
        assert found == [4, 6, 6, 6]
        assert off == 0.0


def masked(name: str, probability: str) -> tuple[int, float, float, list[str]]:
    """Graphs; how far gradients are off those of blocks not compiled, and those without dropout; what was said."""
    found, said = [], list[str]()
    with compiling():
        for compile, dropout in ((True, 0.3), (False, 0.3), (False, 0.0)):
            torch.manual_seed(5)
            settings: dict[str, Any] = {probability: dropout}
            model = FAMILIES[name].model(**settings).train()
            state = parallel(model, 2, compile=compile)
            one_step(model, [rows_of(name)])
            found.append(full_gradients(model))
            said += sorted(state.stack._said)
    same, other = (gradient_deviation(found[0], wanted).ratio for wanted in found[1:])
    return graphs(), same, other, said


@pytest.mark.parametrize(
    ("name", "probability", "attention"),
    [
        ("gpt2", "resid_pdrop", False),
        ("neox", "hidden_dropout", False),
        ("bert", "hidden_dropout_prob", False),
        pytest.param("phi3", "resid_pdrop", False, marks=pytest.mark.slow),
        ("gpt2", "attn_pdrop", True),
        ("llama", "attention_dropout", True),
    ],
)
def test_dropout(ranks: Worlds, name: str, probability: str, attention: bool) -> None:
    """The masks are those of blocks that are not compiled: what would draw others is not."""
    for number, same, other, said in ranks(2).run(masked, name, probability):
        assert same <= 1 < other
        assert number == (0 if attention else VARIANTS * kinds(name))
        assert said == ["dropout on attention weights: blocks are not compiled"] * attention


def hooked(wanted: Expected) -> tuple[int, list[str], int]:
    """A hook that comes when blocks are compiled already."""
    model: Any = FAMILIES["llama"].model().train()
    seen: list[Any] = []
    with compiling():
        state = parallel(model, 2, compile=True)
        check(model, rows_of("llama"), wanted)
        model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: seen.append(1))
        check(model, rows_of("llama"), wanted)
        return graphs(), sorted(state.stack._said), len(seen)


def test_hooks_are_called(ranks: Worlds) -> None:
    for found in ranks(2).run(hooked, expected("llama", rows_of("llama"))):
        assert found == (VARIANTS * 2, ["hooks inside a layer: blocks are not compiled"], 2 * SUB_BATCHES)


def in_bfloat16() -> tuple[int, float, float]:
    """Graphs under autocast; how far gradients are off those of blocks that are not compiled, and of float32."""
    found = []
    with compiling():
        for compile, enabled in ((True, True), (False, True), (False, False)):
            model: Any = FAMILIES["llama"].model(dtype=torch.float32).train()
            parallel(model, 1, compile=compile)
            with torch.autocast("cpu", torch.bfloat16, enabled):
                loss = loss_of(model, rows_of("llama"))
            loss.backward()
            found.append(full_gradients(model))
    same, other = (gradient_deviation(found[0], wanted, relative=1e-5).ratio for wanted in found[1:])
    return graphs(), same, other


def test_autocast(ranks: Worlds) -> None:
    ((number, same, other),) = ranks(1).run(in_bfloat16)
    assert number == VARIANTS * 2
    assert same <= 1 < other


def recorded(wanted: Expected) -> tuple[int, int]:
    """Graphs when all is recorded, and how often a recording was replayed."""
    recorder = Recorder()
    with compiling(), mock.patch.object(converting, "cuda_recorder", return_value=recorder):
        model = FAMILIES["llama"].model().train()
        parallel(model, 2, compile=True)
        for _ in range(WARM + 2):
            check(model, rows_of("llama"), wanted)
        return graphs(), recorder.replays


def test_recordings(ranks: Worlds) -> None:
    """Compiled blocks warm up, and are recorded."""
    assert ranks(2).run(recorded, expected("llama", rows_of("llama"))) == [(VARIANTS * 2, 2 * 2)] * 2


def test_masks_are_laid_out_alike() -> None:
    """One for all rows, as it comes and as it is copied to be recorded; of the first sub-batch and the second."""
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).expand(4, -1, -1, -1)
    parts = [compiled._laid_out(part) for whole in (mask, mask.clone()) for part in whole.tensor_split(2)]
    assert {(part.stride(), part.storage_offset()) for part in parts} == {((9, 9, 3, 1), 0)}


def left_behind() -> tuple[list[int], list[int]]:
    """Tensors there are after each of a few steps; operations of a step (while these are counted, nothing compiles)."""
    model, plain = (tiny_llama(attn="eager").train() for _ in range(2))
    with compiling():
        parallel(model, 1, compile=True)
        parallel(plain, 1)
        alive = []
        for _ in range(4):
            step_of(model)()
            model.zero_grad()
            alive.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
        assert graphs() == VARIANTS * 2
    return alive, [counted(step_of(each)) for each in (model, plain)]


def test_a_step_leaves_nothing_behind_and_computes_nothing_in_vain(ranks: Worlds) -> None:
    ((alive, operations),) = ranks(1).run(left_behind)
    assert alive[1:] == [alive[1]] * 3
    assert operations[0] == operations[1]


def compiles(settings: dict[str, Any]) -> bool:
    return converted(set_up(settings)[1]).stack.compiled is not None


def test_the_setting(ranks: Worlds) -> None:
    assert ranks(2).run(compiles, {"compile": True}) == [True] * 2
    assert ranks(2).run(compiles, {}) == [False] * 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # as torch imports it
def test_the_backend_that_users_get() -> None:
    """In this process, which may start a compiler: also in float64, so the criterion is that of kernels one by one."""
    wanted, model = expected("llama", rows_of("llama")), FAMILIES["llama"].model().train()
    with compiling(compiled.BACKEND):
        parallel(model, 1, compile=True)
        for _ in range(2):
            check(model, rows_of("llama"), wanted)
        assert graphs() == VARIANTS * 2
