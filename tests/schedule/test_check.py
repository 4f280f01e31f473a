"""The check: what it demands, and what it says when it refuses."""

from __future__ import annotations

import pytest

from oases_hf.errors import ScheduleError
from oases_hf.schedule import SCHEDULES, Schedule, around, check, from_text, requires

from .examples import build
from .interpreter import Wrong, run

ONE_BLOCK = "F0.0 >o0.0 .o0.0 | R0.0 B0.0 >g0.0 .g0.0"

NEEDS = {
    "F1.0": ["hidden 1.0"],
    "R1.0": ["input 1.0"],
    "=o1.0:1/2": ["inner o1.0:0/2"],
    ">o1.0:1/2": ["partial o1.0:1/2"],
    ".g1.0": ["flying g1.0"],
    "B1.0": ["graph 1.0", "grad 1.0"],
    "I1.0": ["graph 1.0", "grad 1.0"],
    "W1.0": ["queued 1.0"],
    "D1": ["weight_grad 1.0", "weight_grad 1.1"],
}

REFUSED = {
    "absent input": (
        ONE_BLOCK.replace("F0.0", "f0.0"),
        "backward step 0, R0.0: input 0.0 does not hold yet; move it behind what makes that: [R0.0] B0.0 >g0.0 .g0.0",
    ),
    "too early": (
        ONE_BLOCK.replace("F0.0 >o0.0", ">o0.0 F0.0"),
        "forward step 0, >o0.0: partial o0.0 does not hold yet; move it behind what makes that: [>o0.0] F0.0 .o0.0",
    ),
    "never awaited, forward": (
        ONE_BLOCK.replace(".o0.0", ""),
        "forward: o0.0 started and never awaited; add the Sync",
    ),
    "never awaited, backward": (
        ONE_BLOCK.replace(".g0.0", ""),
        "backward: g0.0 started and never awaited; add the Sync",
    ),
    "no output": ("| " + ONE_BLOCK.split("|")[1], "forward ends, and hidden 1.0 was never made"),
    "no backward": (ONE_BLOCK.split("|")[0] + "|", "backward ends, and weight_grad 0.0 was never made"),
    "no input gradient": (
        ONE_BLOCK.replace(">g0.0 .g0.0", ""),
        "backward ends, and grad -1.0 was never made",
    ),
    "doubled gradient": (
        ONE_BLOCK.replace("B0.0", "B0.0 R0.0 B0.0"),
        "backward step 2, R0.0: that is done already; delete one: R0.0 B0.0 [R0.0] B0.0 >g0.0 .g0.0",
    ),
    "doubled gradient, written in another way": (
        "F0.0 >o0.0 .o0.0 R0.0 | B0.0 I0.0 W0.0 >g0.0 .g0.0",
        "backward step 1, I0.0: that is done already; delete one: B0.0 [I0.0] W0.0 >g0.0 .g0.0",
    ),
    "reduced too early": (
        ONE_BLOCK.replace("B0.0", "D0 B0.0"),
        "backward step 1, D0: weight_grad 0.0 does not hold yet; move it behind what makes that: "
        "R0.0 [D0] B0.0 >g0.0 .g0.0",
    ),
}


@pytest.mark.parametrize(("text", "facts"), NEEDS.items(), ids=NEEDS)
def test_every_instruction_states_what_it_needs(text: str, facts: list[str]) -> None:
    assert [str(fact) for fact in requires(from_text(text), sub_batches=2)] == facts


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_says_where_what_and_what_to_do(text: str, message: str) -> None:
    schedule = Schedule.parse(text)
    with pytest.raises(ScheduleError) as refusal:
        check(schedule, blocks=1, sub_batches=1)
    assert str(refusal.value) == message
    with pytest.raises(Wrong):
        run(schedule, blocks=1, sub_batches=1)


def test_right_schedule_is_returned() -> None:
    schedule = Schedule.parse(ONE_BLOCK)
    assert check(schedule, blocks=1, sub_batches=1) is schedule


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("blocks", "sub_batches"), [(3, 2), (5, 2), (4, 1), (4, 3)])
def test_schedule_is_for_so_many_blocks_and_sub_batches(name: str, blocks: int, sub_batches: int) -> None:
    with pytest.raises(ScheduleError):
        check(build(name), blocks, sub_batches)


def test_partial_reduction_sees_every_sub_batch() -> None:
    """A block is reduced when the weight gradients of *all* sub-batches are in, not of the first."""
    early = Schedule.parse(str(build("oases")).replace("B3.0", "B3.0 D3"))
    with pytest.raises(ScheduleError, match=r"D3: weight_grad 3\.1 does not hold yet"):
        check(early, 4, 2)


def test_first_block_needs_its_backward() -> None:
    schedule = Schedule.parse("f0.0 >o0.0 .o0.0 F1.0 >o1.0 .o1.0 | R1.0 B1.0 >g1.0 .g1.0")
    check(schedule, blocks=2, sub_batches=1, first_block=1)
    with pytest.raises(ScheduleError, match=r"weight_grad 0\.0 was never made"):
        check(schedule, blocks=2, sub_batches=1)


def test_around_shows_the_place_in_brackets() -> None:
    ops = Schedule.parse(ONE_BLOCK).backward
    assert around(ops, 0) == "[R0.0] B0.0 >g0.0 .g0.0"
    assert around(ops, 2, reach=1) == "B0.0 [>g0.0] .g0.0"
    assert around(ops, 3, reach=0) == "[.g0.0]"
