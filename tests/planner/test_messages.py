"""Messages that all-reduces are sent in: priced as they are sent, and chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oases_hf.costs import Curve
from oases_hf.errors import ConfigError
from oases_hf.planner import Problem, explain, message_choices, plan_of, predict, solve

from .examples import by_hand
from .test_optimality import all_plans, instance

MIB = 2**20
# 16 MiB take the least time per byte. A batch of 8 rows is 32 MiB, in degree 2.
DIPPING = Curve(((8 * MIB, 4.0), (16 * MIB, 6.0), (32 * MIB, 16.0)))
STEADY = Curve(((8 * MIB, 4.0), (16 * MIB, 7.0), (32 * MIB, 13.0)))


def problem(curve: Curve = DIPPING, **changes: object) -> Problem:
    """Two blocks of degree 2."""
    table = by_hand(2, sequence=MIB, all_reduce={2: curve})
    ways: dict[str, object] = {"degrees": (2,), "sub_batches": (1,), "message_bytes": message_choices(table)}
    return Problem(table, 2, 1.0, **{**ways, **changes})  # type: ignore[arg-type]


def test_sizes_that_were_measured_to_be_faster() -> None:
    assert message_choices(by_hand(4, all_reduce={2: DIPPING, 4: STEADY})) == (None, 16 * MIB)
    assert message_choices(by_hand(4, all_reduce={2: STEADY, 4: STEADY})) == (None,)
    assert message_choices(by_hand(1)) == (None,)
    # A group of two data parallel worlds shares no block.
    assert message_choices(by_hand(1, data_size=2, all_reduce={2: DIPPING})) == (None,)


@pytest.mark.parametrize(
    ("sub_batches", "message_bytes", "once_ms"),
    [(1, None, 16), (2, None, 6), (4, None, 4), (1, 16 * MIB, 2 * 6), (2, 16 * MIB, 6), (1, 12 * MIB, 3 * 4.0 + 2.0)],
)
def test_every_number_of_sub_batches_is_priced_at_its_messages(
    sub_batches: int, message_bytes: int | None, once_ms: float
) -> None:
    """12 MiB: three messages of 10 2/3 MiB, each a third of the way from 4 to 6 ms."""
    step = predict(problem(), (2, 2), ("full", "full"), sub_batches, "off", message_bytes)
    both_directions = 2 * sub_batches * once_ms
    assert [block.comm_ms for block in step.blocks] == pytest.approx([both_directions] * 2)


def test_the_planner_chooses_the_size() -> None:
    solution = solve(problem())
    assert solution.message_bytes == 16 * MIB
    assert plan_of(solution, "m").message_bytes == 16 * MIB
    assert "all-reduces in messages of 16 MiB." in explain(solution)
    assert solution.prediction.step_ms < solve(problem(message_bytes=(None,))).prediction.step_ms
    assert solve(problem(STEADY)).message_bytes is None


def test_whole_tensors_where_messages_are_no_faster() -> None:
    """In two sub-batches tensors are of 16 MiB already."""
    solution = solve(problem(sub_batches=(2,)))
    assert solution.message_bytes is None
    assert "messages" not in explain(solution)


def test_some_size_must_be_allowed() -> None:
    with pytest.raises(ConfigError, match="give at least one of each: sub_batches, shard_optimizer, degrees, message"):
        problem(message_bytes=())


def test_as_good_as_the_best_of_all_plans() -> None:
    chosen = set()
    for seed in range(0, 60, 3):
        plain = instance(seed)[0]
        curves = {
            ranks: Curve(((64, curve(64)), (1024, curve(1024)), (4096, 6 * curve(1024))))
            for ranks, curve in plain.costs.all_reduce.items()
        }
        table = replace(plain.costs, all_reduce=curves)
        assert message_choices(table) == (None, 1024)
        asked = replace(plain, costs=table, message_bytes=(None, 1024))
        times, sizes = all_plans(asked)
        solution = solve(asked, gap=0.0)
        best = times[sizes <= asked.memory_limit_gib * 2**30].min()
        assert solution.prediction.step_ms == pytest.approx(best, rel=1e-9), seed
        chosen.add(solution.message_bytes)
    assert chosen == {None, 1024}
