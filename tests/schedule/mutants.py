"""Small damage to a schedule: instructions deleted, moved, repeated, inputs kept or let go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import get_args

from oases_hf.schedule import Forward, Instruction, Schedule
from oases_hf.schedule.instructions import Kept

Words = list[Instruction | None]  # both halves in one list; None is the loss between them


def words_of(schedule: Schedule) -> Words:
    return [*schedule.forward, None, *schedule.backward]


def schedule_of(words: Words) -> Schedule:
    loss = words.index(None)
    forward, backward = words[:loss], words[loss + 1 :]
    return Schedule(tuple(op for op in forward if op), tuple(op for op in backward if op))


def deleted(schedule: Schedule) -> Iterator[Schedule]:
    """Every schedule that lacks one instruction."""
    words = words_of(schedule)
    for i, op in enumerate(words):
        if op is not None:
            yield schedule_of(words[:i] + words[i + 1 :])


def moved(schedule: Schedule) -> Iterator[Schedule]:
    """Every schedule with one instruction somewhere else, also on the other side of the loss."""
    words = words_of(schedule)
    for i, op in enumerate(words):
        rest = words[:i] + words[i + 1 :]
        for j in range(len(words) if op is not None else 0):
            # One step back is the step forward of the neighbour; only the loss does not step itself.
            if j != i and (j != i - 1 or words[j] is None):
                yield schedule_of([*rest[:j], op, *rest[j:]])


def repeated(schedule: Schedule) -> Iterator[Schedule]:
    """Every schedule that runs one instruction a second time, later."""
    words = words_of(schedule)
    for i, op in enumerate(words):
        for j in range(i + 1, len(words) + 1 if op is not None else 0):
            yield schedule_of([*words[:j], op, *words[j:]])


def _edit(words: Words, random: Random) -> None:
    """Delete an instruction, move it a little or far, or change what a forward keeps."""
    i = random.choice([i for i, op in enumerate(words) if op is not None])
    op = words[i]
    match random.choice(["delete", "step", "jump", "flip"]):
        case "delete":
            del words[i]
        case "step":
            del words[i]
            words.insert(max(0, i + random.randint(-4, 4)), op)
        case "jump":
            del words[i]
            words.insert(random.randint(0, len(words)), op)
        case _:
            forwards = [(i, op) for i, op in enumerate(words) if isinstance(op, Forward)]
            i, forward = random.choice(forwards)
            words[i] = replace(forward, keep=random.choice([k for k in get_args(Kept) if k != forward.keep]))


def edited(schedule: Schedule, count: int, seed: int = 0) -> Iterator[Schedule]:
    """``count`` schedules with two or three edits each, the same ones for the same seed."""
    random = Random(seed)
    for _ in range(count):
        words = words_of(schedule)
        for _ in range(random.choice([2, 3])):
            _edit(words, random)
        yield schedule_of(words)
