"""Sums that are rounded: all-reduces of blocks are shorter, in plans and in simulations, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from oases_hf.costs import CostTable, Curve, ElementBytes, Outside
from oases_hf.plan import Plan
from oases_hf.planner import Problem, predict
from oases_hf.simulator import simulate

from .examples import by_hand

PER_BYTE = Curve(((1, 1.0), (2, 2.0)))
FLOAT64, FLOAT32 = ElementBytes(8, 8, 8, 8, 8, 16), ElementBytes(4, 4, 4, 4, 4, 8)
AUTOCAST, BFLOAT16 = ElementBytes(4, 2, 4, 4, 4, 8), ElementBytes(2, 2, 2, 2, 2, 4)


def problem(size: ElementBytes) -> Problem:
    """Two blocks, whose sums take a millisecond for each byte, as do those of embedding and head over two worlds."""
    curves = {2: PER_BYTE, 4: PER_BYTE}
    table = by_hand(2, element_bytes=size, data_size=2, all_reduce=curves, all_gather=curves, outside=Outside(1, 50, 9))
    return Problem(table, 2, 1.0)


@pytest.mark.parametrize(
    ("size", "sent"), [(FLOAT64, (2, 2)), (FLOAT32, (2, 2)), (AUTOCAST, (2, 2)), (BFLOAT16, (2, 2))], ids=str
)
def test_what_is_sent_of_an_element(size: ElementBytes, sent: tuple[int, int]) -> None:
    assert (size.sent_partial, size.sent_gradient) == (size.partial, size.gradient)
    narrow = replace(size, comm=2)
    assert (narrow.sent_partial, narrow.sent_gradient) == sent


@pytest.mark.parametrize(("size", "saved"), [(FLOAT32, 2 + 2), (AUTOCAST, 2), (BFLOAT16, 0)], ids=str)
@pytest.mark.parametrize("sub_batches", [1, 2])
def test_all_reduces_of_blocks_are_shorter(size: ElementBytes, saved: int, sub_batches: int) -> None:
    exact, rounded = (
        predict(problem(each), (2, 2), ("full", "full"), sub_batches) for each in (size, replace(size, comm=2))
    )
    rows = 8
    assert [block.comm_ms for block in rounded.blocks] == [block.comm_ms - rows * saved for block in exact.blocks]
    assert rounded.memory == exact.memory
    assert rounded.outside_ms == exact.outside_ms


def test_rows_that_move_are_sent_as_they_are() -> None:
    plans = [predict(problem(size), (1, 2), ("full", "full"), 2) for size in (FLOAT32, replace(FLOAT32, comm=2))]
    assert plans[0].reshard_ms == plans[1].reshard_ms > 0


@pytest.mark.parametrize("schedule", ["oases", "megatron"])
def test_the_simulator_sends_as_much(schedule: str) -> None:
    """In a blocking schedule all of it is waited for; in the other one, the planner says the same."""
    found = []
    for size in (AUTOCAST, replace(AUTOCAST, comm=2)):
        asked = problem(size)
        plan = Plan("a model", 2, (2, 2), schedule, 1)  # type: ignore[arg-type]
        found.append(simulate(asked, plan).step_ms)
        if schedule == "oases":
            assert found[-1] == pytest.approx(predict(asked, (2, 2), ("full", "full"), 1).step_ms)
    assert found[1] < found[0]
    if schedule == "megatron":
        assert found[0] - found[1] == pytest.approx(2 * 8 * 2), "of two blocks: eight rows, two bytes less"


def test_tables_of_before_are_read() -> None:
    table = by_hand(2, element_bytes=AUTOCAST)
    fields = json.loads(table.to_json())
    del fields["element_bytes"]["comm"]
    assert CostTable.from_json(json.dumps(fields)) == table
