"""The picture of every schedule, compared with a file: the diff of that file is the review of a change.

After a change that is meant, write the files anew and read what git says about them:

    UPDATE_GOLDEN=1 python -m pytest tests/schedule/test_golden.py && git diff tests/schedule/golden
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from oases_hf.schedule import (
    SCHEDULES,
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Recompute,
    Schedule,
    Sync,
    kind,
    to_text,
)

from .examples import PASSES, build

FOLDER = Path(__file__).parent / "golden"
VARIANTS = {
    "oases_defer_weight_grads": ("oases", "defer_weight_grads"),
    "oases_reduce_grads": ("oases", "reduce_grads"),
    "megatron_stop_early": ("megatron", "stop_early"),
}
PICTURES: dict[str, tuple[str, str]] = {name: (name, "as_built") for name in SCHEDULES} | VARIANTS
Line = list[Instruction]


def _awaited_for_next(line: Line, last: tuple[int, int]) -> Line:
    """The waits at the end of a line that belong to the block after it, cut off from the line."""
    cut = len(line)
    while cut > 0 and isinstance(op := line[cut - 1], Sync) and (op.collective.block, op.collective.sub_batch) != last:
        cut -= 1
    waits, line[cut:] = line[cut:], []
    return waits


def _lines(ops: Sequence[Instruction]) -> Iterator[Line]:
    """One line per block: what it awaits, what it computes, what it sends."""
    line: Line = []
    last: tuple[int, int] | None = None
    for op in ops:
        if isinstance(op, Forward | Recompute | Backward | BackwardInput):
            if last is not None and op.block != last[0]:
                waits = _awaited_for_next(line, last)
                yield line
                line = waits
            last = (op.block, op.sub_batch)
        line.append(op)
    yield line


def picture(schedule: Schedule) -> str:
    """The text form of a schedule, in lines."""
    halves = [
        "".join(" ".join(map(to_text, line)) + "\n" for line in _lines(half))
        for half in (schedule.forward, schedule.backward)
    ]
    return "|\n".join(halves)


@pytest.mark.parametrize("title", PICTURES)
def test_schedule_is_as_in_its_golden_file(title: str) -> None:
    name, change = PICTURES[title]
    schedule = PASSES[change](build(name, sub_batches=kind(name).sub_batches))
    file = FOLDER / f"{title}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(picture(schedule))
    golden = file.read_text()
    assert picture(schedule) == golden
    assert Schedule.parse(golden) == schedule


def test_every_golden_file_is_compared() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(PICTURES)
