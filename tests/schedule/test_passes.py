"""The passes: what each changes, and that the rest stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oases_hf.schedule import (
    SCHEDULES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    Instruction,
    Project,
    Recompute,
    ReduceGrads,
    Schedule,
    StartAsync,
    Sync,
    blocking,
    check,
    defer_weight_grads,
    in_pieces,
    keep_graphs,
    moves,
    reduce_grads,
    stop_early,
    without_backward_below,
)

from .examples import COMBINATIONS, DEGREES, PASSES, build, mixed
from .interpreter import run


def everything(schedule: Schedule) -> set[Instruction]:
    return {*schedule.forward, *schedule.backward}


def without(ops: Sequence[Instruction], kinds: type[Instruction] | tuple[type[Instruction], ...]) -> list[Instruction]:
    return [op for op in ops if not isinstance(op, kinds)]


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
@pytest.mark.parametrize(("name", "change"), COMBINATIONS)
def test_every_pass_keeps_every_schedule_right(name: str, change: str, sub_batches: int) -> None:
    for blocks in range(1, 6):
        for blocks_per_layer in (1, 2, 3):
            schedule = PASSES[change](build(name, blocks, sub_batches, blocks_per_layer))
            run(schedule, blocks, sub_batches)
            assert check(schedule, blocks, sub_batches) is schedule


@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
@pytest.mark.parametrize("sub_batches", [1, 2, 3])
@pytest.mark.parametrize(("name", "change"), COMBINATIONS)
def test_blocks_of_any_degrees_keep_every_schedule_right(
    name: str, change: str, sub_batches: int, degrees: tuple[int, ...]
) -> None:
    schedule, changes = mixed(PASSES[change](build(name, sub_batches=sub_batches)), degrees)
    run(schedule, 4, sub_batches, changes=changes)
    assert check(schedule, 4, sub_batches, changes=changes) is schedule


def test_rows_move_where_degrees_change() -> None:
    assert moves((4, 2, 2, 4), 4) == {1: "slice", 3: "gather"}
    assert moves((1,), 4) == {0: "slice", 1: "gather"}
    assert moves((2, 2), 2) == {}
    schedule, _ = mixed(build("oases", blocks=2, sub_batches=1), (2, 4))
    assert str(schedule) == (
        "/h0.0 F0.0 >o0.0 .o0.0 >h1.0 .h1.0 F1.0 >o1.0 .o1.0 "
        "| R1.0 B1.0 >g1.0 R0.0 .g1.0 /d1.0 B0.0 >g0.0 .g0.0 >d0.0 .d0.0"
    )


def test_blocks_whose_graphs_are_kept_are_not_recomputed() -> None:
    schedule = keep_graphs(build("megatron", blocks=2, sub_batches=1), {0})
    assert str(schedule) == ("G0.0 >o0.0 .o0.0 F1.0 >o1.0 .o1.0 | R1.0 >r1.0 .r1.0 B1.0 >g1.0 .g1.0 B0.0 >g0.0 .g0.0")


def test_blocking_moves_waits_and_nothing_else() -> None:
    before, after = build("oases"), blocking(build("oases"))
    assert everything(before) == everything(after)
    assert without(before.backward, Sync) == without(after.backward, Sync)
    assert blocking(build("merak")) == build("megatron")


def test_in_pieces_cuts_outputs_and_leaves_gradients_whole() -> None:
    cut = in_pieces(build("oases", blocks=1, sub_batches=1), 2)
    assert str(cut) == "F0.0/2 =o0.0:0/2 >o0.0:0/2 =o0.0:1/2 >o0.0:1/2 .o0.0:0/2 .o0.0:1/2 | R0.0 B0.0 >g0.0 .g0.0"


def test_in_pieces_leaves_whole_what_is_recomputed_and_not_sent() -> None:
    cut = in_pieces(build("cross_pass", sub_batches=1), 2)
    recomputes = [op for op in cut.backward if isinstance(op, Recompute)]
    assert [(op.block, op.pieces) for op in recomputes] == [(2, 2), (3, 1), (0, 2), (1, 1)]


def test_one_piece_is_the_whole() -> None:
    assert in_pieces(build("merak"), 1) == build("merak")


def test_stop_early_drops_only_what_nobody_reads() -> None:
    before, after = build("megatron"), stop_early(build("megatron"))
    unread = [Collective(block, k, "recomputed") for block in (1, 3) for k in (0, 1)]
    assert everything(before) - everything(after) == {*map(StartAsync, unread), *map(Sync, unread)}
    assert after.forward == before.forward
    assert stop_early(build("oases")) == build("oases")
    assert stop_early(build("cross_pass")) == build("cross_pass")


@pytest.mark.parametrize("name", SCHEDULES)
def test_deferred_weight_grads_run_under_the_gradient_of_their_input(name: str) -> None:
    before = build(name)
    after = defer_weight_grads(before)
    ops = after.backward
    for i, op in enumerate(ops):
        if isinstance(op, BackwardWeight):
            collective = Collective(op.block, op.sub_batch, "input_grad")
            assert ops[i - 2 : i] == (BackwardInput(op.block, op.sub_batch), StartAsync(collective))
            assert Sync(collective) in ops[i + 1 :]
    assert after.forward == before.forward
    assert without(ops, (BackwardInput, BackwardWeight)) == without(before.backward, Backward)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_reduction_follows_the_last_weight_gradient_of_its_block(name: str, deferred: bool) -> None:
    before = defer_weight_grads(build(name)) if deferred else build(name)
    after = reduce_grads(before)
    last = BackwardWeight if deferred else Backward
    for block in range(4):
        at = after.backward.index(ReduceGrads(block))
        sent = StartAsync(Collective(block, 1, "input_grad"))
        assert after.backward[at - 1] in (sent, last(block, 1))
        assert {sent, last(block, 0), last(block, 1)} <= set(after.backward[:at])
    assert without(after.backward, ReduceGrads) == list(before.backward)


@pytest.mark.parametrize("change", ["as_built", "reduce_deferred_grads", "stop_early"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_without_backward_below_is_right_from_where_it_says(name: str, change: str) -> None:
    for first in range(7):
        schedule, start = without_backward_below(PASSES[change](build(name, blocks=6)), first)
        assert start == (first if name == "oases" or first == 6 else first // 2 * 2)
        run(schedule, 6, 2, first_block=start)
        check(schedule, 6, 2, first_block=start)


@pytest.mark.parametrize(("name", "start"), [("oases", 3), ("megatron", 2)])
def test_without_backward_below_keeps_no_input_and_no_backward_there(name: str, start: int) -> None:
    """A layer that is recomputed from its first block stays whole."""
    schedule, first = without_backward_below(build(name), 3)
    assert first == start
    assert {op.block for op in schedule.backward if isinstance(op, Backward)} == set(range(start, 4))
    assert {op.block for op in schedule.forward if isinstance(op, Forward) and op.keep == "input"} == {start}
    blocks = {op.collective.block for op in schedule.backward if isinstance(op, Project | StartAsync | Sync)}
    assert min(blocks) == start


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_backward_below_the_end_keeps_nothing(name: str) -> None:
    schedule, first = without_backward_below(build(name), 4)
    assert (schedule.backward, schedule.kept_inputs, first) == ((), 0, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_backward_of_everything_is_the_schedule_itself(name: str) -> None:
    assert without_backward_below(build(name), 0) == (build(name), 0)
