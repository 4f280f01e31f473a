"""All-reduces of blocks in bf16: what is rounded, that it is nothing else, and how near to one process that comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

from oases_hf.parallel.link import Link
from oases_hf.parallel.mesh import Axis, Pending
from oases_hf.plan import SCHEDULE_NAMES, Recompute, ScheduleName

from .families import FAMILIES
from .pairwise import covering
from .parallel import full_gradients, one_step, parallel
from .parity import assert_gradients
from .ranks import Worlds
from .reference import gradients, reference
from .test_graphs import step, warmed
from .test_runtime import ALL_REDUCES, HIDDEN, LAYERS, ROWS, SEQ
from .test_sent_messages import DEGREES, MESSAGE_BYTES, RECOMPUTES
from .tiny import batch, tiny_llama

SUMS = 2 * 4
"""That a gradient of these models is behind: of four blocks, in both directions."""


def tolerance(ranks: int) -> float:
    """How far gradients may be off: of every sum, each share and what it is added to are rounded by half an epsilon.

    That is 6 % for 2 ranks; at most half of it was seen, where gradients nearly cancel.
    """
    return SUMS * ranks / 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("dtype", "sent"),
    [
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_only_wider_types_are_narrowed(dtype: torch.dtype, sent: torch.dtype) -> None:
    axis = Axis((0, 1), 0)
    assert Link(axis, comm_dtype="bf16").sent_as(dtype) == sent
    assert Link(axis).sent_as(dtype) == dtype


@contextmanager
def seen() -> Iterator[list[tuple[torch.dtype, int]]]:
    """The types and bytes of the all-reduces begun inside."""
    sent, own = list[tuple[torch.dtype, int]](), Axis.start_all_reduce

    def start_all_reduce(axis: Axis, tensor: Tensor, *args: Any) -> Pending:
        assert tensor.is_contiguous()
        sent.append((tensor.dtype, tensor.nbytes))
        return own(axis, tensor, *args)

    with mock.patch.object(Axis, "start_all_reduce", start_all_reduce):
        yield sent


def sent_bytes(schedule: ScheduleName, sub_batches: int, ways: dict[str, Any]) -> tuple[list[Any], int]:
    """On a rank: all-reduces of the base model's forward and backward, and the bytes that were counted as traffic."""
    model: Any = tiny_llama(layers=LAYERS, hidden=HIDDEN, dtype=torch.float32).train()
    state = parallel(model, 2, schedule, sub_batches, **ways)
    before = state.mesh.tmp.traffic.bytes
    with seen() as sent:
        model.model(batch(ROWS, SEQ)["input_ids"]).last_hidden_state.pow(2).sum().backward()
    return sent, state.mesh.tmp.traffic.bytes - before


@pytest.mark.parametrize(
    ("schedule", "sub_batches", "message_bytes"), covering(SCHEDULE_NAMES, (1, 2), (None, MESSAGE_BYTES))
)
def test_blocks_send_half_the_bytes(
    ranks: Worlds, schedule: ScheduleName, sub_batches: int, message_bytes: int | None
) -> None:
    hidden_bytes, sums = ROWS * SEQ * HIDDEN * torch.float32.itemsize, ALL_REDUCES[schedule] * LAYERS
    for comm_dtype, dtype in ((None, torch.float32), ("bf16", torch.bfloat16)):
        ways = {"message_bytes": message_bytes, "comm_dtype": comm_dtype}
        for sent, traffic in ranks(2).run(sent_bytes, schedule, sub_batches, ways):
            embedding, *blocks = sent
            assert embedding == (torch.float32, hidden_bytes)
            assert {each for each, _ in blocks} == {dtype}
            assert sum(size for _, size in blocks) == sums * hidden_bytes * dtype.itemsize // torch.float32.itemsize
            assert max(size for _, size in blocks) <= (message_bytes or hidden_bytes)
            assert traffic == sum(size for _, size in sent)


@dataclass
class _Landing:
    sent: Tensor
    pending: Pending
    share: Tensor

    def wait(self) -> None:
        self.pending.wait()
        self.share.copy_(self.sent)


@contextmanager
def rounding() -> Iterator[None]:
    """Sums of what executors of exact models send are rounded inside, as they are told by ``comm_dtype="bf16"``."""
    own = Link.start_all_reduce

    def start_all_reduce(link: Link, share: Tensor) -> Pending:
        if link.axis.size == 1:
            return own(link, share)
        sent = share.bfloat16()
        return _Landing(sent, own(link, sent), share)

    with mock.patch.object(Link, "start_all_reduce", start_all_reduce):
        yield


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """To the last bit, and in the same type."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name


def check(name: str, world: int, wanted: dict[str, Tensor], schedule: ScheduleName, ways: dict[str, Any]) -> None:
    """On a rank: a step whose sums are rounded, by the library and by this test."""
    found = []
    for comm_dtype, by in (("bf16", nullcontext()), (None, rounding())):
        model = FAMILIES[name].model(attn=FAMILIES[name].attentions[0]).train()
        parallel(model, world, schedule, comm_dtype=comm_dtype, **ways)
        with by:
            one_step(model, [FAMILIES[name].batch(ROWS, SEQ, padding="right")])
        found.append(full_gradients(model))
    assert_same(*found)
    assert_gradients(found[0], wanted, relative=tolerance(world))


@cache
def wanted_of(name: str) -> dict[str, Tensor]:
    """The gradients of one process."""
    model = FAMILIES[name].model(attn=FAMILIES[name].attentions[0])
    return reference(model, [FAMILIES[name].batch(ROWS, SEQ, padding="right")], steps=1).gradients


SETTINGS = covering(SCHEDULE_NAMES, (1, 2), (False, True), ("replicas", "mixed"), RECOMPUTES, (None, MESSAGE_BYTES))


@pytest.mark.parametrize(("schedule", "sub_batches", "defer", "degrees", "recompute", "message_bytes"), SETTINGS)
def test_nothing_else_is_rounded(
    ranks: Worlds,
    schedule: ScheduleName,
    sub_batches: int,
    defer: bool,
    degrees: str,
    recompute: tuple[Recompute, ...],
    message_bytes: int | None,
) -> None:
    """What is computed is, to the last bit, what sums of rounded shares make of it, in every way to run a step."""
    ways = {
        "sub_batches": sub_batches,
        "defer_weight_grads": defer,
        "degrees": DEGREES[degrees],
        "recompute": recompute,
        "message_bytes": message_bytes,
    }
    ranks(4).run(check, "llama", 4, wanted_of("llama"), schedule, ways)


@pytest.mark.parametrize(
    ("name", "schedule"), [("bert", "megatron"), ("gemma3", "oases"), ("gemma3", "wang"), ("neox", "oases")]
)
def test_families(ranks: Worlds, name: str, schedule: ScheduleName) -> None:
    """A norm behind the sum, of it and the stream together or of it alone; one block in each layer."""
    ranks(2).run(check, name, 2, wanted_of(name), schedule, {"sub_batches": 2})


def recorded(schedule: ScheduleName) -> None:
    """On a rank: steps that are replayed, against the same launched one by one."""
    ways: dict[str, Any] = {"degrees": [1, 2, 2, 1], "defer_weight_grads": True, "comm_dtype": "bf16"}
    model, state, recorder = warmed(2, schedule, **ways)
    other = tiny_llama(layers=2).train()
    alone = parallel(other, 2, schedule, cuda_graphs=False, **ways)
    for seed in (3, 4):
        step(model, state, seed)
        step(other, alone, seed)
        assert_same(full_gradients(model), full_gradients(other))
    assert recorder.replays == 2 * (1 + 2)


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name in ("wang", "oases") else pytest.mark.slow) for name in SCHEDULE_NAMES],
)
def test_recordings(ranks: Worlds, schedule: ScheduleName) -> None:
    ranks(2).run(recorded, schedule)


def without_backward() -> list[Counter[torch.dtype]]:
    """On a rank: the types of all-reduces of evaluation and generation, which are compared with exact ones."""
    models = [cast(Any, tiny_llama(layers=LAYERS, hidden=HIDDEN)) for _ in range(2)]
    for model, comm_dtype in zip(models, (None, "bf16"), strict=True):
        parallel(model, 2, comm_dtype=comm_dtype)
    data, found = batch(ROWS, SEQ, padded=True), []
    with torch.no_grad():
        for training in (True, False):
            with seen() as sent:
                exact, ours = (model.train(training)(**data).loss for model in models)
            assert torch.equal(exact, ours)
            found.append(Counter(dtype for dtype, _ in sent))
        with seen() as sent:
            prompts = {"input_ids": data["input_ids"], "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
            exact, ours = (model.generate(**prompts) for model in models)
        assert torch.equal(exact, ours)
        found.append(Counter(dtype for dtype, _ in sent))
    return found


def test_evaluation_and_generation_are_exact(ranks: Worlds) -> None:
    for found in ranks(2).run(without_backward):
        for types in found:
            assert types[torch.bfloat16] == 0 < types[torch.float64]


def test_what_is_wrong_would_be_found() -> None:
    """The tolerance tells rounding from a gradient that is off by a factor."""
    model: Any = tiny_llama().train()
    model(**batch(ROWS, SEQ)).loss.backward()
    wrong = gradients(model)
    with pytest.raises(AssertionError, match="deviates"):
        assert_gradients({name: 1.1 * gradient for name, gradient in wrong.items()}, wrong, relative=tolerance(2))
