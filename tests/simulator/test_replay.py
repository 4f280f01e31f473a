"""Steps on two lanes: by hand, against the planner, and against a timeline of another making."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from oases_hf.costs import Curve, KindCosts, Outside, Slowdown, Timing
from oases_hf.errors import ConfigError
from oases_hf.plan import SCHEDULE_NAMES, Plan, Recompute, ScheduleName
from oases_hf.planner import Problem, predict
from oases_hf.schedule import Forward, ReduceGrads, StartAsync, kind
from oases_hf.simulator import Simulation, Span, simulate
from oases_hf.simulator.lanes import Lanes
from oases_hf.simulator.replay import OPTIMIZER, OUTSIDE

from ..planner.examples import by_hand, flat, random_table
from ..planner.test_timeline import timeline_ms


def busy_ms(spans: Sequence[Span], lane: str) -> float:
    """For how long a lane is busy."""
    return sum(span.end_ms - span.begin_ms for span in spans if span.lane == lane)


def plan(problem: Problem, degree: int, name: ScheduleName = "oases", **changes: object) -> Plan:
    blocks, size = len(problem.blocks), problem.costs.tmp_size
    made = Plan("a model", size, (degree,) * blocks, name, kind(name).sub_batches)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_lanes_by_hand() -> None:
    lanes = Lanes(Slowdown())
    lanes.compute("a", 4.0)
    lanes.start("x", "x", 6.0)
    lanes.start("y", "y", 1.0)
    lanes.compute("b", 2.0)
    lanes.wait("x")
    assert (lanes.now_ms, lanes.idle_ms) == (10.0, 4.0)
    lanes.compute("c", 0.5)
    lanes.wait("y")
    assert (lanes.now_ms, lanes.idle_ms) == (11.0, 4.5)
    assert [(s.what, s.begin_ms, s.end_ms) for s in lanes.spans if s.lane == "comm"] == [("x", 4, 10), ("y", 10, 11)]


def test_lanes_slow_each_other_down() -> None:
    """3 ms of computation beside a collective of 2 ms: that takes 3, in which 2 of the computation are done."""
    lanes = Lanes(Slowdown(compute=1.5, collective=1.5))
    lanes.start("x", "x", 2.0)
    lanes.compute("a", 3.0)
    assert lanes.now_ms == pytest.approx(4.0)
    lanes.start("y", "y", 2.0)
    lanes.compute("b", 1.0)
    assert lanes.now_ms == pytest.approx(5.5)
    lanes.wait("y")
    assert lanes.now_ms == pytest.approx(6.5)


def test_what_is_behind_runs_when_nothing_else_does() -> None:
    lanes = Lanes(Slowdown())
    lanes.start("grads", "grads", 5.0, behind=True)
    lanes.compute("a", 2.0)
    lanes.start("x", "x", 4.0)
    lanes.wait("x")
    assert lanes.now_ms == 6.0
    lanes.wait_all()
    assert lanes.now_ms == 9.0


@pytest.mark.parametrize("sub_batches", [1, 2, 4])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_equal_to_another_timeline(kinds: int, sub_batches: int) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        blocks = [Timing(ms, 0.8 * ms, 2 * ms, ms, 0, 0) for ms in (draw.uniform(1, 4) for _ in range(kinds))]
        all_reduce_ms = draw.uniform(0.2, 8)
        table = by_hand(
            2,
            kinds=tuple(KindCosts(f"block {i}", {2: 1}, {2: {sub_batches: b}}) for i, b in enumerate(blocks)),
            all_reduce={2: flat(all_reduce_ms)},
        )
        problem = Problem(table, 6, 1.0)
        found = simulate(problem, plan(problem, 2, sub_batches=sub_batches))
        assert found.step_ms == pytest.approx(timeline_ms(blocks * 6, all_reduce_ms, sub_batches))


def test_megatron_by_hand() -> None:
    """Forward 8 / 2 and its sum 3, the same again in recompute, backward 16 / 2 and its sum: nothing overlaps."""
    problem = Problem(by_hand(2), 5, 1.0)
    found = simulate(problem, plan(problem, 2, "megatron"))
    assert found.step_ms == pytest.approx(5 * ((4 + 3) + (4 + 3) + (8 + 3)))
    assert found.exposed_ms == pytest.approx(5 * 9)
    assert found.utilization == pytest.approx(1 - 45 / 125)


def test_pieces_by_hand() -> None:
    """Wang: recompute's 3 ms before 4 pieces of a quarter of the last matmul's 1 ms, each sum under the next piece."""
    problem = Problem(by_hand(2, all_reduce={1: flat(1.0), 2: flat(0.25)}), 1, 1.0)
    found = simulate(problem, plan(problem, 2, "wang"))
    once = 3 + 4 * 0.25 + 0.25
    assert found.step_ms == pytest.approx(2 * once + 8 + 0.25)


def random_plans(problem: Problem, count: int) -> list[Plan]:
    draw, blocks, size = random.Random(0), len(problem.blocks), problem.costs.tmp_size
    choices: tuple[Recompute, ...] = ("full", "none")
    return [
        Plan(
            "a model",
            size,
            tuple(draw.choices(problem.choosable_degrees, k=blocks)),
            "oases",
            draw.choice((1, 2, 4)),
            tuple(draw.choices(choices, k=blocks)),
            draw.choice(("off", "keep", "reduce")),
        )
        for _ in range(count)
    ]


def test_the_planner_says_the_same_of_random_plans() -> None:
    """Its sum of slots is about as long, and mostly the same; it takes the peaks of memory to coincide, which they do
    at the end of forward."""
    ratios = []
    for seed in range(6):
        table = random_table(seed, 4, 2)
        problem = Problem(table, 4, 1e9, accumulation=2, sub_batches=(1, 2, 4))
        for each in random_plans(problem, 20):
            found = simulate(problem, each)
            said = predict(problem, each.degrees, each.recompute, each.sub_batches, each.shard_optimizer)
            ratios.append(found.step_ms / said.step_ms)
            assert 0.8 * said.memory.total <= found.peak_bytes <= said.memory.total
    assert all(0.8 <= ratio <= 1.1 for ratio in ratios)
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.01)


def everything(spans: Simulation) -> set[str]:
    return {type(span.what).__name__ for span in spans.spans}


def test_the_step_of_a_run_is_replayed() -> None:
    """Every instruction of the schedule once per micro-batch; gradients are reduced in the last one only."""
    table = by_hand(4, data_size=2, all_reduce={n: flat(1.0) for n in (1, 2, 4, 8)})
    table = replace(table, outside=Outside(ms=2.0, parameters=100, bytes=10), optimizer_ms=1e4)
    problem = Problem(table, 3, 1.0, accumulation=3)
    found = simulate(problem, plan(problem, 2))
    ops = [span.what for span in found.spans]
    assert ops.count(Forward(0, 0)) == 3
    assert sum(isinstance(op, ReduceGrads) for op in ops) == 3
    assert ops.count(OUTSIDE) == 3
    assert ops[-1] == OPTIMIZER
    assert sum(isinstance(op, StartAsync) for op in ops) == 3 * (3 * 2 * 2 + 2 * 2)  # sums, and gathers at both ends
    assert found.spans[-1].end_ms == found.step_ms
    assert busy_ms(found.spans, "compute") + found.exposed_ms == pytest.approx(found.step_ms)


def test_deferred_weights_hide_more() -> None:
    problem = Problem(by_hand(2), 4, 1.0, sub_batches=(1,))
    whole, deferred = (
        simulate(problem, plan(problem, 2, sub_batches=1), defer_weight_grads=defer) for defer in (False, True)
    )
    assert deferred.step_ms < whole.step_ms
    assert busy_ms(deferred.spans, "compute") == pytest.approx(busy_ms(whole.spans, "compute"))


def test_the_order_of_the_schedules_on_a_slow_link() -> None:
    table = by_hand(2, all_reduce={1: flat(1.0), 2: flat(3.0)}, kinds=(by_hand(2).kinds[0],) * 2)
    halved = {d: {k: t.scaled(1 / k) for k, t in row.items()} for d, row in table.kinds[0].timings.items()}
    kinds = tuple(replace(kind_, timings=halved, name=str(i)) for i, kind_ in enumerate(table.kinds))
    sized = replace(table, kinds=kinds, all_reduce={2: replace(flat(1.0), points=((4, 0.1), (16, 3.0)))})
    problem = Problem(sized, 6, 1.0)
    times = [simulate(problem, plan(problem, 2, name)).step_ms for name in SCHEDULE_NAMES]
    named = dict(zip(SCHEDULE_NAMES, times, strict=True))
    assert named["oases"] < named["cross_pass"] <= named["merak"] < named["megatron"]


def test_refusals() -> None:
    problem = Problem(by_hand(2), 4, 1.0)
    with pytest.raises(ConfigError, match="with 3 blocks, the model is a model with 4"):
        simulate(problem, Plan("a model", 2, (2,) * 3))
    with pytest.raises(ConfigError, match="sub_batches 8 was not measured"):
        simulate(problem, plan(problem, 2, sub_batches=8))


@pytest.mark.parametrize("sub_batches", [1, 2, 4])
def test_messages_take_what_the_planner_says(sub_batches: int) -> None:
    """Of equal blocks the two agree, in whole tensors and in messages."""
    table = by_hand(2, all_reduce={2: Curve(((4, 1.0), (8, 3.0), (32, 20.0)))})
    problem = Problem(table, 4, 1.0)
    found = []
    for message_bytes in (None, 16):
        each = plan(problem, 2, sub_batches=sub_batches, message_bytes=message_bytes)
        ways = each.sub_batches, each.shard_optimizer, message_bytes
        found.append(simulate(problem, each).step_ms)
        assert found[-1] == pytest.approx(predict(problem, each.degrees, each.recompute, *ways).step_ms)
    assert (found[1] < found[0]) == (sub_batches == 1), "a batch of 32 bytes is sent in two messages"
