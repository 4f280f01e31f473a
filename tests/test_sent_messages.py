"""All-reduces that are sent in several messages: what is sent, and that it is computed as one process does."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

from oases_hf.parallel.link import Link
from oases_hf.parallel.mesh import Axis, Pending
from oases_hf.plan import SCHEDULE_NAMES, Recompute, ScheduleName
from oases_hf.schedule.builders import WANG_PIECES

from .parallel import full_gradients, one_step, parallel
from .parity import assert_gradients, assert_loss
from .ranks import Worlds
from .test_llama_parity import SIZES, batches, expected
from .test_runtime import ALL_REDUCES, HIDDEN, HIDDEN_BYTES, LAYERS, ROWS, SEQ
from .tiny import batch, tiny_llama

MESSAGE_BYTES = 704
"""Divides no tensor of these tests."""


@dataclass
class _Landing:
    waits: list[int]
    number: int

    def wait(self) -> None:
        self.waits.append(self.number)


@dataclass
class _Axis:
    """Adds one to what it is to sum."""

    size: int = 2
    sent: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        tensor += 1
        self.sent.append(tensor.nbytes)
        return _Landing(self.waits, len(self.sent) - 1)


@pytest.mark.parametrize(
    ("message_bytes", "sent"), [(None, [800]), (800, [800]), (784, [400, 400]), (304, [272, 272, 256])]
)
def test_every_part_is_started_and_waited_for(message_bytes: int | None, sent: list[int]) -> None:
    axis = _Axis()
    share = torch.zeros(10, 10, dtype=torch.float64)
    pending = Link(cast(Axis, axis), message_bytes=message_bytes).start_all_reduce(share)
    assert (axis.sent, axis.waits) == (sent, [])
    pending.wait()
    assert axis.waits == list(range(len(sent)))
    assert torch.equal(share, torch.ones(10, 10, dtype=torch.float64))


def sent_bytes(schedule: ScheduleName, sub_batches: int) -> list[int]:
    """On a rank: what every all-reduce of the base model's forward and backward is of."""
    model = tiny_llama(layers=LAYERS, hidden=HIDDEN).train()
    parallel(model, 2, schedule, sub_batches, message_bytes=MESSAGE_BYTES)
    sent, own = list[int](), Axis.start_all_reduce

    def start_all_reduce(axis: Axis, tensor: Tensor, *args: Any) -> Pending:
        sent.append(tensor.nbytes)
        return own(axis, tensor, *args)

    tokens = batch(ROWS, SEQ)["input_ids"]
    with mock.patch.object(Axis, "start_all_reduce", start_all_reduce):
        model.model(tokens).last_hidden_state.pow(2).sum().backward()
    return sent


@pytest.mark.parametrize("sub_batches", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_blocks_send_messages_and_the_embedding_does_not(
    ranks: Worlds, schedule: ScheduleName, sub_batches: int
) -> None:
    whole = HIDDEN_BYTES // sub_batches
    pieces = WANG_PIECES if schedule == "wang" else 1
    of_layer = (ALL_REDUCES[schedule] - 2) * pieces * math.ceil(whole // pieces / MESSAGE_BYTES)
    of_layer += 2 * math.ceil(whole / MESSAGE_BYTES)
    for sent in ranks(2).run(sent_bytes, schedule, sub_batches):
        embedding, messages = sent[0], sent[1:]
        assert embedding == HIDDEN_BYTES
        assert len(messages) == of_layer * LAYERS * sub_batches
        assert sum(messages) == ALL_REDUCES[schedule] * LAYERS * HIDDEN_BYTES, "the same bytes"
        assert max(messages) <= MESSAGE_BYTES


DEGREES = {"uniform": (4,) * 4, "replicas": (2,) * 4, "mixed": (4, 2, 1, 2), "rising": (1, 2, 4, 4)}
RECOMPUTES: tuple[tuple[Recompute, ...], ...] = (("full",) * 4, ("full", "none", "none", "full"))


def check_every_schedule(degrees: tuple[int, ...]) -> int:
    """On a rank: a step by every schedule in such messages; returns how many were compared."""
    compared = 0
    for schedule, sub_batches, recompute in itertools.product(SCHEDULE_NAMES, (1, 2), RECOMPUTES):
        model = tiny_llama(**SIZES).train()
        ways: dict[str, Any] = {"degrees": degrees, "recompute": recompute, "message_bytes": MESSAGE_BYTES}
        parallel(model, 4, schedule, sub_batches, **ways)
        wanted = expected("sdpa", True, 1)
        assert_loss(one_step(model, batches(True, 1)[0]), wanted.losses[0])
        assert_gradients(full_gradients(model), wanted.gradients)
        compared += 1
    return compared


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(degrees, id=name, marks=[] if name == "replicas" else pytest.mark.slow)
        for name, degrees in DEGREES.items()
    ],
)
def test_a_step_is_that_of_one_process(ranks: Worlds, degrees: tuple[int, ...]) -> None:
    assert ranks(4).run(check_every_schedule, degrees) == [len(SCHEDULE_NAMES) * 2 * 2] * 4
