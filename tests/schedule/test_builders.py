"""What tells the schedules apart: how often they communicate, what they keep, what hides what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from oases_hf.errors import ConfigError
from oases_hf.schedule import (
    SCHEDULES,
    Backward,
    Collective,
    Forward,
    Instruction,
    Project,
    Recompute,
    Schedule,
    StartAsync,
    Sync,
    block_of,
    kind,
)
from oases_hf.schedule.builders import WANG_PIECES
from oases_hf.schedule.instructions import Communicate, Tensor

from .examples import PASSES, build
from .interpreter import run

Ops = Sequence[Instruction]
Pass = tuple[str, int]  # recompute or backward, and of which layer


def sent(schedule: Schedule) -> list[Collective]:
    """Every all-reduce, in the order of their starts."""
    return [op.collective for op in (*schedule.forward, *schedule.backward) if isinstance(op, StartAsync)]


def pending(ops: Ops) -> dict[Collective, Ops]:
    """For each all-reduce what runs between its start and its Sync."""
    syncs = {op.collective: i for i, op in enumerate(ops) if isinstance(op, Sync)}
    starts = {op.collective: i for i, op in enumerate(ops) if isinstance(op, StartAsync)}
    return {collective: ops[start + 1 : syncs[collective]] for collective, start in starts.items()}


def computes(ops: Ops) -> list[Forward | Recompute | Backward]:
    return [op for op in ops if isinstance(op, Forward | Recompute | Backward)]


def assert_hidden_by_the_other(ops: Ops) -> None:
    """Every all-reduce but the last has compute of another sub-batch under it; the last has nothing left."""
    *others, last = pending(ops).items()
    for collective, under in others:
        assert {op.sub_batch for op in computes(under)} - {collective.sub_batch}, str(collective)
    assert not computes(last[1])


# --- how often they communicate, and what they keep -------------------------------------------------

PER_LAYER = {
    ("megatron", "as_built"): 6,
    ("megatron", "stop_early"): 5,
    ("merak", "as_built"): 6,
    ("cross_pass", "as_built"): 5,
    ("oases", "as_built"): 4,
}


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
@pytest.mark.parametrize(("variant", "count"), PER_LAYER.items())
def test_all_reduces_per_layer_and_sub_batch(variant: tuple[str, str], count: int, sub_batches: int) -> None:
    name, change = variant
    schedule = PASSES[change](build(name, blocks=6, sub_batches=sub_batches))
    per_layer = Counter((c.block // 2, c.sub_batch) for c in sent(schedule))
    assert per_layer == {(layer, k): count for layer in range(3) for k in range(sub_batches)}


PER_ONE_BLOCK_LAYER = {
    ("megatron", "as_built"): 3,
    ("megatron", "stop_early"): 2,
    ("merak", "as_built"): 3,
    ("cross_pass", "as_built"): 2,
    ("oases", "as_built"): 2,
}


@pytest.mark.parametrize(("variant", "count"), PER_ONE_BLOCK_LAYER.items())
def test_all_reduces_where_a_layer_is_one_block(variant: tuple[str, str], count: int) -> None:
    name, change = variant
    schedule = PASSES[change](build(name, blocks_per_layer=1))
    assert Counter((c.block, c.sub_batch) for c in sent(schedule)) == {(b, k): count for b in range(4) for k in (0, 1)}
    assert schedule.kept_inputs == 4 * 2


@pytest.mark.parametrize("blocks_per_layer", [1, 2])
@pytest.mark.parametrize("sub_batches", [1, 2, 3])
def test_wang_sends_what_megatron_does_but_outputs_in_pieces(sub_batches: int, blocks_per_layer: int) -> None:
    def pieces(tensor: Tensor) -> int:
        return 1 if tensor == "input_grad" else WANG_PIECES

    expected = [
        Collective(c.block, c.sub_batch, c.tensor, piece, pieces(c.tensor))
        for c in sent(build("megatron", 4, sub_batches, blocks_per_layer))
        for piece in range(pieces(c.tensor))
    ]
    assert sent(build("wang", 4, sub_batches, blocks_per_layer)) == expected


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_kept_inputs(name: str, sub_batches: int) -> None:
    layers = 3
    each = 2 if name == "oases" else 1  # of every block, or of every layer's first block
    assert build(name, layers * 2, sub_batches).kept_inputs == layers * each * sub_batches


@pytest.mark.parametrize("name", SCHEDULES)
def test_last_layer_may_be_short(name: str) -> None:
    schedule = build(name, blocks=5, blocks_per_layer=3)
    assert (schedule.blocks, schedule.sub_batches) == (5, 2)
    run(schedule, 5, 2)


# --- what hides what --------------------------------------------------------------------------------


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
def test_megatron_awaits_each_all_reduce_at_once(sub_batches: int) -> None:
    schedule = build("megatron", sub_batches=sub_batches)
    for ops in (schedule.forward, schedule.backward):
        assert not any(pending(ops).values())


def test_wang_projects_the_next_piece_while_one_is_sent() -> None:
    schedule = build("wang", sub_batches=1)
    for collective, under in (pending(schedule.forward) | pending(schedule.backward)).items():
        following = collective.siblings()[collective.piece + 1 :]
        assert [op.collective for op in under if isinstance(op, Project)] == list(following)
        assert not computes(under)


@pytest.mark.parametrize("sub_batches", [2, 3])
@pytest.mark.parametrize("name", ["merak", "cross_pass", "oases"])
def test_forward_hides_each_all_reduce_under_another_sub_batch(name: str, sub_batches: int) -> None:
    assert_hidden_by_the_other(build(name, sub_batches=sub_batches).forward)


def passes(backward: Ops) -> list[tuple[Pass, list[Instruction]]]:
    """A backward half cut where the kind of pass or the layer changes."""
    cut: list[tuple[Pass, list[Instruction]]] = []
    for op in backward:
        sent = isinstance(op, Communicate) and op.collective.tensor == "recomputed"
        this = ("recompute" if sent or isinstance(op, Recompute) else "backward", block_of(op) // 2)
        if not cut or cut[-1][0] != this:
            cut.append((this, []))
        cut[-1][1].append(op)
    return cut


@pytest.mark.parametrize("sub_batches", [2, 3])
def test_merak_has_a_barrier_between_passes(sub_batches: int) -> None:
    cut = passes(build("merak", blocks=6, sub_batches=sub_batches).backward)
    assert [this for this, _ in cut] == [(name, layer) for layer in (2, 1, 0) for name in ("recompute", "backward")]
    for _, ops in cut:
        starts = [op.collective for op in ops if isinstance(op, StartAsync)]
        assert sorted(map(str, starts)) == sorted(str(op.collective) for op in ops if isinstance(op, Sync))
        assert_hidden_by_the_other(ops)


@pytest.mark.parametrize("sub_batches", [2, 3])
@pytest.mark.parametrize("name", ["cross_pass", "oases"])
def test_backward_hides_each_all_reduce_under_another_sub_batch(name: str, sub_batches: int) -> None:
    assert_hidden_by_the_other(build(name, sub_batches=sub_batches).backward)


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
def test_cross_pass_hides_gradients_under_the_recompute_of_the_layer_below(sub_batches: int) -> None:
    under = pending(build("cross_pass", blocks=6, sub_batches=sub_batches).backward)
    for first in (4, 2):
        for k in range(sub_batches):
            recomputed = [op for op in under[Collective(first, k, "input_grad")] if isinstance(op, Recompute)]
            assert Recompute(first - 2, k) in recomputed
            assert all(op.block in (first - 2, first - 1) for op in recomputed)


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
def test_cross_pass_lets_no_recomputed_output_leave_its_layer(sub_batches: int) -> None:
    """The joint schedule overlaps across layers, and sends no recomputed output that nobody reads."""
    schedule = build("cross_pass", blocks=6, sub_batches=sub_batches)
    assert {c.block % 2 for c in sent(schedule) if c.tensor == "recomputed"} == {0}


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
def test_oases_recomputes_under_the_gradient_of_the_same_sub_batch(sub_batches: int) -> None:
    """Even alone, a sub-batch hides its gradient's all-reduce: recompute needs no gradient."""
    under = pending(build("oases", sub_batches=sub_batches).backward)
    for block in (3, 2, 1):
        for k in range(sub_batches):
            assert Recompute(block - 1, k) in under[Collective(block, k, "input_grad")]


def test_oases_recompute_sends_nothing() -> None:
    assert {c.tensor for c in sent(build("oases"))} == {"output", "input_grad"}


def test_cross_pass_of_one_block_layers_is_oases() -> None:
    assert build("cross_pass", blocks_per_layer=1) == build("oases")


# --- finding one by name ----------------------------------------------------------------------------


def test_kind_is_found_by_name() -> None:
    assert kind("oases") is SCHEDULES["oases"]
    assert {name: kind(name).sub_batches for name in SCHEDULES} == {
        "megatron": 1,
        "wang": 1,
        "merak": 2,
        "cross_pass": 2,
        "oases": 2,
    }


def test_unknown_kind_is_refused_with_the_choice_there_is() -> None:
    with pytest.raises(ConfigError, match="schedule 'gpipe' is unknown; choose one of megatron, wang, merak"):
        kind("gpipe")
