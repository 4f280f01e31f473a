"""LLaMA on every schedule, degree and split computes what one plain HF process computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from oases_hf.models.converted import converted
from oases_hf.plan import SCHEDULE_NAMES

from .pairwise import covering, values_first
from .parallel import full_gradients, full_parameters, one_step, parallel
from .parity import GRADIENT_FLOAT32, assert_gradients, assert_loss, assert_updates, float64_math, gradient_deviation
from .ranks import Worlds
from .reference import Run, backward, cached, reference
from .tiny import Attention, Batch, batch, tiny_llama

SUB_BATCHES = (1, 2, 3)
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "eager")
ROWS, SEQ = 5, 12
# 4 query heads on 3 ranks are 2, 1 and 1: with 2 KV heads, degree 3 and 4 share KV heads between ranks.
SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2}


def batches(padded: bool, worlds: int, count: int = 1) -> list[list[Batch]]:
    """Per step, the batch of each TMP world."""
    return [
        [batch(ROWS, SEQ, padded=padded, seed=10 * step + world) for world in range(worlds)] for step in range(count)
    ]


def expected(attn: Attention, padded: bool, worlds: int) -> Run:
    """One process, one step on the batches of all worlds."""
    data = batches(padded, worlds)[0]
    return cached(
        (attn, padded, worlds),
        lambda: reference(tiny_llama(attn=attn, **SIZES), data, steps=1, accumulate=worlds),
    )


CHOICES: tuple[Sequence[Any], ...] = (ATTENTIONS, SCHEDULE_NAMES, SUB_BATCHES, (False, True), (False, True))
"""Attention, schedule, number of sub-batches, whether rows are padded and weight gradients deferred."""


def check_schedules(tmp_size: int, settings: list[tuple[Any, ...]]) -> None:
    """On a rank: one step in each setting; models are converted once per implementation of attention."""
    for attn in ATTENTIONS:
        model = tiny_llama(attn=attn, **SIZES).train()
        state = parallel(model, tmp_size)
        worlds = state.mesh.data.size
        for _, schedule, sub_batches, padded, defer in (each for each in settings if each[0] == attn):
            state.stack.schedule, state.stack.sub_batches, state.stack.defer = schedule, sub_batches, defer
            loss = one_step(model, batches(padded, worlds)[0])
            wanted = expected(attn, padded, worlds)
            assert_loss(loss, wanted.losses[0])
            assert_gradients(full_gradients(model), wanted.gradients)


@pytest.mark.parametrize(
    ("world", "tmp_size"),
    [(1, 1), pytest.param(3, 3, marks=pytest.mark.slow), (4, 4), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_gradients_of_every_two_settings(ranks: Worlds, world: int, tmp_size: int) -> None:
    ranks(world).run(check_schedules, tmp_size, covering(*CHOICES))


@pytest.mark.parametrize(
    ("world", "tmp_size"),
    [
        pytest.param(world, tmp_size, marks=[] if (world, tmp_size) == (2, 2) else pytest.mark.slow)
        for world, tmp_size in [(1, 1), (2, 2), (3, 3), (4, 4), (2, 1), (4, 2)]
    ],
)
def test_gradients_of_every_schedule_and_split(ranks: Worlds, world: int, tmp_size: int) -> None:
    settings = [each for each in itertools.product(*CHOICES) if each[2] == 2 or not each[4]]
    assert len(settings) == 2 * 5 * 2 * 4
    ranks(world).run(check_schedules, tmp_size, settings, timeout_s=240)


def train_five_steps(tmp_size: int, dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    """On a rank: five AdamW steps, clipped, against one process."""
    data = batches(padded=True, worlds=1, count=5)
    flat = [step[0] for step in data]
    key = (tmp_size, dtype, tuple(kwargs.items()))
    wanted = cached(key, lambda: reference(tiny_llama(dtype=dtype, **kwargs), flat, steps=5, max_grad_norm=0.5))
    model = tiny_llama(dtype=dtype, **kwargs).train()
    state = parallel(model, tmp_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step, (chosen,) in enumerate(data):
        with float64_math():
            loss = backward(model, [chosen])
            state.gradients.finish()
        if step == 0:
            relative = {} if dtype is torch.float64 else {"relative": GRADIENT_FLOAT32}
            assert_gradients(full_gradients(model), wanted.gradients, **relative)
        norm = float(state.gradients.clip(list(model.parameters()), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        if dtype is torch.float64:
            assert_loss(loss, wanted.losses[step])
            assert norm == pytest.approx(wanted.grad_norms[step], rel=1e-10)
    if dtype is torch.float64:
        assert_updates(full_parameters(model), wanted.end, wanted.start)
    else:
        full_parameters(model)  # ranks that hold the same hold the same bits


MODELS: dict[str, dict[str, Any]] = {
    "grouped": SIZES,
    "tied": {**SIZES, "tied": True},
    "nine_heads": {"heads": 9, "kv_heads": 3, "hidden": 36, "tied": True},
    "no_bias": {**SIZES, "bias": False},
    "one_kv_head": {"heads": 4, "kv_heads": 1},
}


@pytest.mark.parametrize(("name", "world"), values_first([*MODELS], [4, 2]))
def test_five_steps(ranks: Worlds, world: int, name: str) -> None:
    ranks(world).run(train_five_steps, world, torch.float64, MODELS[name])


def test_gradients_in_float32(ranks: Worlds) -> None:
    ranks(2).run(train_five_steps, 2, torch.float32, SIZES)


Fault = str
FAULTS: tuple[Fault, ...] = ("halved norm", "unsummed KV", "times T", "bias twice", "swapped masks")


def gradients_with(fault: Fault) -> float:
    """On a rank: how far gradients are off, relative to what is allowed, when something is wrong on purpose."""
    model = tiny_llama(**SIZES).train()
    state = parallel(model, 4)
    data = batches(padded=True, worlds=1)[0]
    layer = cast(Any, model).model.layers[0]
    if fault == "swapped masks":
        own = state.stack.blocks[0].run

        def swapped(layer: Any, hidden: torch.Tensor, **context: Any) -> torch.Tensor:
            return own(layer, hidden, **{**context, "attention_mask": context["attention_mask"].flip(0)})

        state.stack.blocks = (type(state.stack.blocks[0])("attention", swapped), *state.stack.blocks[1:])
    if fault == "bias twice":
        with torch.no_grad():
            layer.mlp.down_proj.bias.mul_(2)
    if fault == "unsummed KV":
        name = "model.layers.0.self_attn.k_proj.weight"
        parameter = dict(model.named_parameters())[name]
        whole = state.layouts[name]
        state.gradients.layouts = {
            **state.gradients.layouts,
            parameter: type(whole)(whole.shape, whole.slices, partial_grad=False),
        }
    one_step(model, data)
    if fault == "halved norm":
        layer.input_layernorm.weight.grad.div_(2)
    if fault == "times T":
        for parameter in model.parameters():
            parameter.grad.mul_(4)
    if fault == "unsummed KV":
        local = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        wanted = expected("sdpa", True, 1).gradients
        layouts = converted(model).layouts
        mine = {n: layouts[n].local(g, state.mesh.tmp.rank) for n, g in wanted.items()}
        return gradient_deviation(local, mine).ratio
    return gradient_deviation(full_gradients(model), expected("sdpa", True, 1).gradients).ratio


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_planted_faults_are_found(ranks: Worlds, fault: Fault | None) -> None:
    worst = max(ranks(4).run(gradients_with, fault or "none"))
    assert (worst <= 1) == (fault is None), worst
