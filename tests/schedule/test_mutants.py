"""The check against the oracle: on thousands of damaged schedules both must say the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from oases_hf.errors import ScheduleError
from oases_hf.schedule import Move, Schedule, check, in_pieces

from . import mutants
from .examples import DEGREES, PASSES, build, mixed
from .interpreter import is_right

BLOCKS = 4  # two layers of two
SUB_BATCHES = 2
PLAIN = {
    "megatron": build("megatron"),
    # Two pieces instead of wang's own number: as many kinds of mutants, a third as many of each.
    "wang": in_pieces(build("megatron"), 2),
    "merak": build("merak"),
    "cross_pass": build("cross_pass"),
    "oases": build("oases"),
    "oases, deferred": PASSES["defer_weight_grads"](build("oases")),
    "oases, reduced": PASSES["reduce_grads"](build("oases")),
    "oases, deferred and reduced": PASSES["reduce_deferred_grads"](build("oases")),
    "oases, some graphs kept": PASSES["some_graphs_kept"](build("oases")),
}
EXAMPLES: dict[str, tuple[Schedule, Mapping[int, Move]]] = {
    **{title: (schedule, {}) for title, schedule in PLAIN.items()},
    "cross_pass, rising": mixed(build("cross_pass"), DEGREES["rising"]),
    "oases, mixed": mixed(build("oases"), DEGREES["mixed"]),
    "oases, some graphs kept, falling": mixed(PLAIN["oases, some graphs kept"], DEGREES["falling"]),
}


def is_accepted(schedule: Schedule, changes: Mapping[int, Move]) -> bool:
    try:
        check(schedule, BLOCKS, SUB_BATCHES, changes=changes)
    except ScheduleError:
        return False
    return True


def compare(schedules: Iterable[Schedule], changes: Mapping[int, Move]) -> tuple[int, int]:
    """How many the check accepts and refuses; fails at the first where the oracle says otherwise."""
    counts = [0, 0]
    for schedule in schedules:
        accepted = is_accepted(schedule, changes)
        if accepted != is_right(schedule, BLOCKS, SUB_BATCHES, changes):
            pytest.fail(f"{'accepted, and wrong' if accepted else 'refused, and right'}: {schedule}")
        counts[0 if accepted else 1] += 1
    return counts[0], counts[1]


@pytest.mark.parametrize("title", EXAMPLES)
def test_deleted_instruction_is_refused_when_it_matters(title: str) -> None:
    schedule, changes = EXAMPLES[title]
    accepted, refused = compare(mutants.deleted(schedule), changes)
    # Whether a block's gradients are reduced depends on its replicas: the check leaves it open.
    assert accepted == (BLOCKS if "reduced" in title else 0)
    assert refused > 0


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=pytest.mark.slow if title in ("wang", "oases, deferred", "oases, reduced") else [])
        for title in EXAMPLES
    ],
)
def test_moved_instruction_is_refused_exactly_when_the_step_is_wrong(title: str) -> None:
    schedule, changes = EXAMPLES[title]
    accepted, refused = compare(mutants.moved(schedule), changes)
    assert accepted > 0
    assert refused > 0


@pytest.mark.parametrize("title", EXAMPLES)
def test_several_edits_are_refused_exactly_when_the_step_is_wrong(title: str) -> None:
    schedule, changes = EXAMPLES[title]
    accepted, refused = compare(mutants.edited(schedule, count=400), changes)
    assert accepted > 0
    assert refused > 0


def test_repeated_instruction_is_refused_although_some_do_no_harm() -> None:
    """To run twice is at best a waste and at worst a doubled gradient; the check does not weigh which."""
    repeats = list(mutants.repeated(PLAIN["oases, deferred and reduced"]))
    assert not any(is_accepted(schedule, {}) for schedule in repeats)
    assert 0 < sum(is_right(schedule, BLOCKS, SUB_BATCHES) for schedule in repeats) < len(repeats)
