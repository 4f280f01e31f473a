"""The text form: every instruction and every schedule survives the way there and back."""

from __future__ import annotations

import pytest

from oases_hf.errors import ScheduleError
from oases_hf.schedule import (
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
    Slice,
    StartAsync,
    Sync,
    from_text,
    to_text,
)

from .examples import COMBINATIONS, PASSES, build

FORMS: dict[str, Instruction] = {
    "F3.1": Forward(3, 1),
    "f3.1": Forward(3, 1, keep="nothing"),
    "G3.1": Forward(3, 1, keep="graph"),
    "F12.10/4": Forward(12, 10, pieces=4),
    "G0.1/2": Forward(0, 1, pieces=2, keep="graph"),
    "f0.0/2": Forward(0, 0, pieces=2, keep="nothing"),
    "R3.1": Recompute(3, 1),
    "R3.1/2": Recompute(3, 1, pieces=2),
    "B3.1": Backward(3, 1),
    "I3.1": BackwardInput(3, 1),
    "W3.1": BackwardWeight(3, 1),
    "D3": ReduceGrads(3),
    "=o3.1:0/2": Project(Collective(3, 1, "output", 0, 2)),
    "=r3.1:1/2": Project(Collective(3, 1, "recomputed", 1, 2)),
    ">o3.1": StartAsync(Collective(3, 1, "output")),
    ">r10.0": StartAsync(Collective(10, 0, "recomputed")),
    ">g3.1": StartAsync(Collective(3, 1, "input_grad")),
    ">o3.1:3/4": StartAsync(Collective(3, 1, "output", 3, 4)),
    ">h3.1": StartAsync(Collective(3, 1, "hidden")),
    ".i3.1": Sync(Collective(3, 1, "input")),
    "/h3.1": Slice(Collective(3, 1, "hidden")),
    "/d0.1": Slice(Collective(0, 1, "grad")),
    ".g0.0": Sync(Collective(0, 0, "input_grad")),
    ".r3.1:0/10": Sync(Collective(3, 1, "recomputed", 0, 10)),
}


@pytest.mark.parametrize(("text", "op"), FORMS.items(), ids=FORMS)
def test_instruction_has_its_text_form(text: str, op: Instruction) -> None:
    assert to_text(op) == text
    assert from_text(text) == op


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
@pytest.mark.parametrize(("name", "change"), COMBINATIONS)
def test_schedule_survives_the_round_trip(name: str, change: str, sub_batches: int) -> None:
    schedule = PASSES[change](build(name, sub_batches=sub_batches))
    assert Schedule.parse(str(schedule)) == schedule


def test_whitespace_does_not_count() -> None:
    assert Schedule.parse(" F0.0\n>o0.0  .o0.0|\nR0.0\n") == Schedule.parse("F0.0 >o0.0 .o0.0 | R0.0")


def test_empty_schedule_is_the_loss_alone() -> None:
    empty = Schedule((), ())
    assert str(empty) == "|"
    assert Schedule.parse("|") == empty
    assert (empty.blocks, empty.sub_batches, empty.kept_inputs) == (0, 0, 0)


@pytest.mark.parametrize(
    "word",
    ["", "X0.0", "F0", "F0.", "F.0", "F-1.0", "F0.0 ", "F0.0/0", "D0.1", ">0.0", ">x0.0", ">o0.0:1", "=o0.0:0/0", "|"],
)
def test_what_is_no_instruction_is_refused(word: str) -> None:
    with pytest.raises(ScheduleError, match="is no instruction; write for example") as refusal:
        from_text(word)
    assert repr(word) in str(refusal.value)


@pytest.mark.parametrize("word", ["B0.0/2", "I0.0/2", "W0.0/2"])
def test_only_outputs_come_in_pieces(word: str) -> None:
    with pytest.raises(ScheduleError, match=f"'{word}': only F, G, f and R come in pieces"):
        from_text(word)


@pytest.mark.parametrize("word", ["=o0.0:2/2", ">r0.0:5/2", ".o0.0:1/1"])
def test_piece_must_be_one_of_the_pieces(word: str) -> None:
    with pytest.raises(ScheduleError, match=f"'{word}': pieces count from 0; the last of"):
        from_text(word)


@pytest.mark.parametrize("text", ["", "F0.0 R0.0", "F0.0 | R0.0 | B0.0"])
def test_schedule_has_one_loss(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"has one '\|', which stands for the loss"):
        Schedule.parse(text)


def test_refusal_names_the_word() -> None:
    with pytest.raises(ScheduleError, match=r"'>p0\.0'"):
        Schedule.parse("F0.0 >p0.0 | R0.0")
