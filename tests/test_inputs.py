"""Inputs of every kind a model takes, in all shapes of masks: as in one plain HF process, whatever is split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, flash_attention_mask

from .families import FAMILIES
from .parallel import full_gradients, one_step, parallel
from .parity import assert_gradients, assert_loss
from .ranks import Worlds
from .reference import backward, gradients
from .tiny import Batch

ROWS, SEQ = 5, 12
LOWEST = torch.finfo(torch.float64).min


def rows(name: str, **change: Any) -> Batch:
    """A batch without a mask; ``change`` adds to it."""
    whole = FAMILIES[name].batch(ROWS, SEQ)
    del whole["attention_mask"]
    return {**whole, **change}


def restarting() -> Tensor:
    """Positions of rows that pack sequences of different lengths."""
    lengths = [(5, 7), (12,), (3, 4, 5), (11, 1), (6, 6)]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def seen(name: str) -> Tensor:
    """Which tokens each token of each row sees, ``[B, 1, Q, K]``: itself always, others at random."""
    drawn = torch.rand((ROWS, 1, SEQ, SEQ), generator=torch.Generator().manual_seed(1)) < 0.6
    chosen = drawn | torch.eye(SEQ, dtype=torch.bool)
    return chosen if FAMILIES[name].model_type in ("bert", "roberta") else chosen.tril()


def additive(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, LOWEST)


def packed(name: str) -> Batch:
    return rows(name, position_ids=restarting())


def shared_positions(name: str) -> Batch:
    return rows(name, position_ids=torch.arange(SEQ)[None] + 3)


def mask_per_row(name: str) -> Batch:
    return rows(name, attention_mask=additive(seen(name)))


def mask_for_all_rows(name: str) -> Batch:
    return rows(name, attention_mask=additive(seen(name)[:1]))


def boolean_mask(name: str) -> Batch:
    return rows(name, attention_mask=seen(name))


def token_types(name: str) -> Batch:
    kinds = torch.randint(2, (ROWS, SEQ), generator=torch.Generator().manual_seed(2))
    return {**FAMILIES[name].batch(ROWS, SEQ, padding="left"), "token_type_ids": kinds}


def embedded(name: str) -> Batch:
    """Embeddings in place of token ids; their gradient is compared too."""
    batch = FAMILIES[name].batch(ROWS, SEQ, padding="right")
    width = FAMILIES[name].model().config.hidden_size
    drawn = torch.randn((*batch.pop("input_ids").shape, width), generator=torch.Generator().manual_seed(3))
    return {**batch, "inputs_embeds": drawn.double().requires_grad_()}


def one_row(name: str) -> Batch:
    return {key: tensor[1:2] for key, tensor in FAMILIES[name].batch(ROWS, SEQ, padding="right").items()}


def as_many_rows_as_tokens(name: str) -> Batch:
    """Nothing can tell rows from tokens by their number."""
    return FAMILIES[name].batch(SEQ, SEQ, padding="right")


Make = Callable[[str], Batch]
EVERY: tuple[Make, ...] = (packed, shared_positions, mask_per_row, mask_for_all_rows, embedded, one_row)
CASES: list[tuple[str, str, Make]] = [
    *((name, attn, make) for name in ("gpt2", "bert") for attn in ("sdpa", "eager") for make in EVERY),
    *((name, "sdpa", make) for name in ("llama", "neox", "gemma3", "roberta") for make in EVERY),
    *((name, "sdpa", boolean_mask) for name in ("gpt2", "neox", "bert", "llama")),
    *((name, attn, token_types) for name in ("gpt2", "bert") for attn in ("sdpa", "eager")),
    *((name, "sdpa", as_many_rows_as_tokens) for name in ("gpt2", "neox", "bert", "gemma3")),
]


def compare(name: str, attn: str, make: Make) -> list[str]:
    """On a rank: one step in one process and on both ranks, split in two and three; returns what was logged."""
    alone, model = (FAMILIES[name].model(attn=attn).train() for _ in range(2))
    data, again = make(name), make(name)
    loss = backward(alone, [data])
    wanted = gradients(alone) | leaves(data)
    state = parallel(model, 2)
    with logged() as said:
        for sub_batches in (2, 3):
            state.stack.sub_batches = sub_batches
            for leaf in again.values():
                leaf.grad = None
            assert_loss(one_step(model, [again]), loss)
            assert_gradients(full_gradients(model) | leaves(again), wanted)
    return said


def leaves(data: Batch) -> dict[str, Tensor]:
    """The gradients of inputs that have one."""
    return {name: tensor.grad for name, tensor in data.items() if tensor.grad is not None}


@contextmanager
def logged() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oases_hf").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("oases_hf").removeHandler(handler)


ALIKE = [("gpt2", "eager"), ("bert", "sdpa"), ("neox", "sdpa"), ("roberta", "sdpa")]


@pytest.mark.parametrize(
    ("name", "attn", "make"),
    [pytest.param(*case, marks=pytest.mark.slow if case[:2] in ALIKE and case[2] in EVERY else []) for case in CASES],
)
def test_inputs(ranks: Worlds, name: str, attn: str, make: Make) -> None:
    for said in ranks(2).run(compare, name, attn, make):
        assert len(said) == (2 if make is one_row else 0)


class BlockMaskLike:
    """A mask of all rows in one, as flex attention's."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole


def whole_mask(*args: Any, **kwargs: Any) -> BlockMaskLike:
    return BlockMaskLike(eager_mask(*args, **kwargs))


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention from a mask as flex attention's, or as flash attention's: which tokens of each row are not padding."""
    batch, heads, length, width = query.shape
    if isinstance(mask, BlockMaskLike):
        assert len(mask.whole) == batch
        bias = mask.whole
    else:
        allowed = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if mask is not None:
            assert mask.shape == (batch, length)
            allowed = allowed & mask[:, None, None, :].bool()
        bias = additive(allowed)
    groups = heads // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (width**-0.5 if scaling is None else scaling) + bias
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


for kind, mask in (("whole_rows", whole_mask), ("two_dims", flash_attention_mask)):
    AttentionInterface.register(kind, attend)
    AttentionMaskInterface.register(kind, mask)


def padded(name: str) -> Batch:
    return FAMILIES[name].batch(ROWS, SEQ, padding="right")


def flattened(name: str) -> Batch:
    """What collators for flash attention add, which counts tokens over all rows."""
    ends = torch.arange(0, ROWS * SEQ + 1, SEQ, dtype=torch.int32)
    return rows(name, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize(
    ("attn", "make", "message"),
    [
        ("whole_rows", padded, "attention_mask of type BlockMaskLike cannot be split: one sub-batch, no overlap"),
        ("two_dims", padded, None),
        ("two_dims", flattened, "cu_seq_lens_q of type Tensor cannot be split: one sub-batch, no overlap"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "gemma3"])
def test_masks_of_other_attentions(ranks: Worlds, name: str, attn: str, make: Make, message: str | None) -> None:
    """What cannot be split by rows is run whole, and that is said once."""
    for said in ranks(2).run(compare, name, attn, make):
        assert [line.split(": ", 1)[1] for line in said] == ([] if message is None else [f"{message} (said once)"])
