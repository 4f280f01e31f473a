"""Equations 3, 4 and 6 on examples that were computed by hand.

At degree 2: forward 4, recompute 3, backward 8 ms; at degree 4 half, at degree 1 twice. All-reduces 3, gathers 5 ms.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from oases_hf.costs import Outside, Slowdown
from oases_hf.errors import ConfigError
from oases_hf.plan import Plan, Recompute, ShardOptimizer
from oases_hf.planner import Problem, predict
from oases_hf.planner.problem import Choice, Mode, chains
from oases_hf.planner.terms import Terms
from oases_hf.simulator import simulate

from .examples import by_hand, flat


def step_ms(problem: Problem, *degrees: int, sub_batches: int = 2, recompute: Recompute = "full") -> float:
    return predict(problem, degrees, (recompute,) * len(degrees), sub_batches).step_ms


@pytest.mark.parametrize(
    ("sub_batches", "forward", "backward"),
    [
        (1, (4 + 3) * 3, 11 + 2 * (max(3, 3) + 8) + 3),  # no second sub-batch: only recompute hides something
        (2, 4 + 2 * 4 + 3 * 4 + 3, 11 + 2 * 11 + 3 * 11 + 3),
        (4, 4 + 2 * 4 + 3 * 3 * 4 + 3, 11 + 2 * 11 + 3 * 3 * 11 + 3),
    ],
)
def test_equation_3(sub_batches: int, forward: float, backward: float) -> None:
    problem = Problem(by_hand(2), layers=3, memory_limit_gib=1)
    assert step_ms(problem, 2, 2, 2, sub_batches=sub_batches) == pytest.approx(forward + backward)


def test_equation_3_where_communication_lasts_longer() -> None:
    problem = Problem(by_hand(2, all_reduce={2: flat(9.0)}), layers=3, memory_limit_gib=1)
    assert step_ms(problem, 2, 2, 2) == pytest.approx((4 + 2 * 9 + 3 * 9 + 9) + (11 + 2 * 11 + 3 * 11 + 9))
    without = (4 + 2 * 9 + 3 * 9 + 9) + (8 + 2 * 9 + 3 * 9 + 9)
    assert step_ms(problem, 2, 2, 2, recompute="none") == pytest.approx(without)


def test_equation_4_gather_in_forward() -> None:
    problem = Problem(by_hand(4), layers=2, memory_limit_gib=1)
    forward = 4 + 4 + (2 * 5) + (max(2, 3) + min(2, 3)) + max(2, 3) + 3
    backward = 5.5 + 5.5 + 11 + 11 + 3 + (2 * 5)  # sliced between the blocks, gathered for the embedding
    gradients = 3  # of the first block's two replicas: nothing is left to hide it
    assert step_ms(problem, 2, 4) == pytest.approx(forward + backward + gradients)
    assert predict(problem, (2, 4), ("full", "full"), 2).reshard_ms == 20


def test_equation_4_gather_in_backward_hides_behind_recompute_only() -> None:
    problem = Problem(by_hand(4), layers=2, memory_limit_gib=1)
    forward = 2 + max(2, 3) + max(4, 3) + 4 + 3 + (2 * 5)
    backward = 11 + 11 + (2 * 5) + max(1.5, 3) + 4 + 5.5 + 3  # the second block's gradients are hidden
    assert step_ms(problem, 4, 2) == pytest.approx(forward + backward)


def test_gradients_are_hidden_as_far_as_the_lane_is_idle() -> None:
    # One all-reduce over the two replicas of the second block, 40 ms; the first block's backward takes 11 + 11 of which
    # 3 of its own sub-batches' all-reduces are not idle. It waits for none of the second block, of degree 1.
    table = by_hand(2, all_reduce={2: flat(3.0)})
    slow = replace(table, all_reduce={2: replace(flat(3.0), points=((1, 3.0), (100, 3.0), (4000, 40.0)))})
    one, other = (Problem(costs, layers=2, memory_limit_gib=1) for costs in (table, slow))
    assert step_ms(other, 2, 1) - step_ms(one, 2, 1) == pytest.approx(40 - (11 + 11 - 3))


def test_gradients_are_reduced_once_a_step_or_once_a_micro_batch() -> None:
    problem = Problem(by_hand(2), layers=1, memory_limit_gib=1, accumulation=5)
    syncs = {mode: predict(problem, (1,), ("full",), 2, mode).gradient_sync_ms for mode in ("off", "keep", "reduce")}
    assert syncs == {"off": 3, "keep": 1.5, "reduce": 7.5}  # to owners it takes half of an all-reduce
    assert predict(problem, (1,), ("full",), 2, "keep").update_ms == 1.5  # what owners updated


def test_no_overlap_adds_everything() -> None:
    problem = Problem(by_hand(2), layers=3, memory_limit_gib=1, objective="no_overlap")
    assert step_ms(problem, 2, 2, 2) == pytest.approx(3 * 2 * (4 + 3 + 3 + 8 + 3))


def test_a_slot_with_slow_down() -> None:
    problem = Problem(by_hand(2, slowdown=Slowdown(compute=1.5, collective=1.25)), layers=1, memory_limit_gib=1)
    slot = Terms(problem, Mode(2, "off", 4)).slot
    assert slot(10, 4) == pytest.approx(5 + (10 - 5 / 1.5))  # 5 ms both run, then computation alone
    assert slot(4, 10) == pytest.approx(6 + (10 - 6 / 1.25))
    assert slot(4, 0) == 4
    assert slot(0, 4) == 4


@pytest.mark.parametrize(
    ("recompute", "mode", "expected"),
    [  # parameters, gradients, optimizer, saved, runtime: of the block of degree 1, with what is gathered each way
        (("full", "full"), "off", (6000, 6000, 12000, 16 + 32, 40 + 100 + 16 + 2 * 16)),
        (("full", "none"), "off", (6000, 6000, 12000, 16 + 200, 40 + 100 + 16 + 2 * 16)),
        (("none", "none"), "off", (6000, 6000, 12000, 200 + 200, 40 + 16 + 2 * 16)),
        (("full", "full"), "keep", (6000, 6000, 4000 + 4000, 16 + 32, 40 + 100 + 16 + 2 * 16 + 3 * 2000)),
        (("full", "full"), "reduce", (6000, 2000 + 2000, 4000 + 4000, 16 + 32, 40 + 100 + 16 + 2 * 16 + 5 * 2000)),
    ],
)
def test_equation_6(recompute: tuple[Recompute, ...], mode: ShardOptimizer, expected: tuple[int, ...]) -> None:
    memory = predict(Problem(by_hand(2), 2, 1), (1, 2), recompute, 2, mode).memory
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.saved, memory.runtime) == expected
    assert memory.total == sum(expected)


def test_what_graphs_share_counts_once() -> None:
    costs = by_hand(2)
    (kind,) = costs.kinds
    timings = {
        degree: {k: replace(timing, shared_bytes=30) for k, timing in row.items()}
        for degree, row in kind.timings.items()
    }
    shared = replace(costs, kinds=(replace(kind, timings=timings),))
    saved = {k: [predict(Problem(c, 1, 1), (2,), ("none",), k).memory.saved for c in (costs, shared)] for k in (1, 4)}
    assert saved == {1: [100, 100], 4: [400, 4 * 70 + 30]}
    full = [predict(Problem(c, 1, 1), (2,), ("full",), 4).memory for c in (costs, shared)]
    assert full[0] == full[1], "the graph of one sub-batch has all of it"


def test_the_parts_of_a_prediction_add_up() -> None:
    step = predict(Problem(by_hand(4), 4, 1, accumulation=3), (4, 2, 2, 1), ("full", "none", "full", "none"), 2)
    blocks_ms = sum(block.compute_ms + block.exposed_ms for block in step.blocks)
    rest_ms = step.tail_ms + step.reshard_ms + step.gradient_sync_ms + step.update_ms + step.outside_ms
    assert step.step_ms == pytest.approx(blocks_ms + rest_ms)
    assert [block.comm_ms for block in step.blocks] == [36, 36, 36, 0]


def test_degrees_form_a_chain() -> None:
    assert chains((1, 2, 3, 6)) == ((1, 2, 6), (1, 3, 6))
    assert chains((2, 4, 8)) == ((2, 4, 8),)
    assert chains((4, 6)) == ((4,), (6,))
    problem = Problem(by_hand(6), layers=3, memory_limit_gib=1)
    with pytest.raises(ConfigError, match=r"degrees \[2, 3, 6\] of tmp_size=6 are no chain"):
        predict(problem, (2, 6, 3), ("full",) * 3, 2)
    with pytest.raises(ConfigError, match="2 degrees and 3 recompute choices for 3 blocks"):
        predict(problem, (2, 6), ("full",) * 3, 2)
    with pytest.raises(ConfigError, match="degree 4 does not divide tmp_size=6"):
        replace(problem, degrees=(2, 4))
    with pytest.raises(ConfigError, match="at least one of each"):
        replace(problem, shard_optimizer=())
    with pytest.raises(ConfigError, match="must be 1 or more"):
        replace(problem, accumulation=0)


@pytest.mark.parametrize("shard_optimizer", ["off", "keep", "reduce"])
@pytest.mark.parametrize("outside_bytes", [10, 100_000])
def test_recordings_have_memory_to_themselves(outside_bytes: int, shard_optimizer: ShardOptimizer) -> None:
    """What blocks need is there beside what the loss needs, unless gradients are freed, which is not recorded."""
    costs = by_hand(4, outside=Outside(ms=0.0, parameters=0, bytes=outside_bytes))
    found = {}
    for recorded in (False, True):
        problem = Problem(replace(costs, recorded=recorded), layers=3, memory_limit_gib=1.0)
        memory = predict(problem, (2,) * 3, ("full",) * 3, 2, shard_optimizer).memory
        plan = Plan("by hand", 4, (2,) * 3, "oases", 2, ("full",) * 3, shard_optimizer)
        found[recorded] = memory, simulate(problem, plan).peak_bytes
    (alone, simulated), (recorded_, simulated_recorded) = found[False], found[True]
    if shard_optimizer == "reduce":
        assert recorded_ == alone
        assert simulated_recorded == simulated
        return
    blocks = Terms.of_plan(Problem(costs, 3, 1.0), (2,), 2, shard_optimizer, None).block(
        costs.kinds[0], Choice(2, "full")
    )
    hidden = 8 * 1 * 1 * 4  # of the micro-batch
    assert alone.runtime == max(outside_bytes, blocks.runtime_bytes)
    assert recorded_.runtime == outside_bytes + 2 * hidden + blocks.runtime_bytes
    assert replace(recorded_, runtime=alone.runtime) == alone
    assert simulated < simulated_recorded <= recorded_.total
