"""Plans whose blocks differ in degree and in what they recompute: what one plain HF process computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from oases_hf.convert import block_count, plain
from oases_hf.models.converted import converted
from oases_hf.plan import SCHEDULE_NAMES, Recompute, ScheduleName

from .families import FAMILIES, PADDINGS, Padding
from .pairwise import values_first
from .parallel import full_gradients, one_step, parallel
from .parity import assert_gradients, assert_loss, float64_math
from .ranks import Worlds
from .reference import Run, label_count, loss_of, reference
from .test_dropout import FOUR_HEADS, slopes
from .test_families import Expected, batches, expected
from .tiny import Attention, Batch, batch, tiny_llama
from .training import assert_trains_as

PLANS = 30


@dataclass(frozen=True)
class Case:
    """A plan, and the step to run by it on four ranks."""

    family: str
    tmp_size: int
    degrees: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    schedule: ScheduleName | Literal["plain"]
    sub_batches: int
    defer: bool
    attention: Attention
    padding: Padding
    rows: int = field(default=5)

    @classmethod
    def drawn(cls, number: int) -> Case:
        """A random one; every family has its turn."""
        draw = random.Random(number)
        family = list(FAMILIES)[number % len(FAMILIES)]
        blocks = block_count(FAMILIES[family].model())
        tmp_size = draw.choice([4, 4, 4, 2])
        chain = [degree for degree in (1, 2, 4) if degree <= tmp_size]
        choices: tuple[Recompute, ...] = ("full", "none")
        return cls(
            family,
            tmp_size,
            tuple(draw.choice(chain) for _ in range(blocks)),
            tuple(draw.choice(choices) for _ in range(blocks)),
            draw.choice([*SCHEDULE_NAMES, "oases", "oases", "plain"]),
            draw.choice([1, 2, 3]),
            draw.choice([False, True]),
            draw.choice(FAMILIES[family].attentions),
            draw.choice(PADDINGS),
        )


def compare(case: Case, wanted: Expected) -> None:
    """On a rank: a step by the plan."""
    model = FAMILIES[case.family].model(attn=case.attention).train()
    schedule: ScheduleName = "oases" if case.schedule == "plain" else case.schedule
    state = parallel(
        model,
        case.tmp_size,
        schedule,
        case.sub_batches,
        degrees=case.degrees,
        recompute=case.recompute,
        defer_weight_grads=case.defer,
    )
    state.stack.plain = case.schedule == "plain"
    loss, gradients = wanted
    for _ in range(2):  # the second finds what the first left
        assert_loss(one_step(model, batches(case.family, case.padding, state.mesh.data.size)), loss)
        assert_gradients(full_gradients(model), gradients)


CASES = [Case.drawn(number) for number in range(PLANS)]


def test_the_plans_are_mixed() -> None:
    of_layers = [(case, case.degrees[i : i + 2]) for case in CASES for i in range(0, len(case.degrees), 2)]
    assert sum(len(set(pair)) == 2 for _, pair in of_layers) > PLANS / 2, "attention and MLP of one layer"
    assert {case.family for case in CASES} == set(FAMILIES)
    assert {case.schedule for case in CASES} == {*SCHEDULE_NAMES, "plain"}


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=[] if i < len(FAMILIES) else pytest.mark.slow) for i in range(PLANS)]
)
def test_a_step_by_a_random_plan(ranks: Worlds, number: int) -> None:
    case = CASES[number]
    worlds = 4 // case.tmp_size
    ranks(4).run(compare, case, expected(case.family, case.attention, case.padding, worlds))


STEPS, LIMIT = 5, 0.5
DEGREES: dict[str, tuple[int, ...]] = {"falling": (4, 2, 2, 1), "rising": (1, 2, 4, 4), "low": (2, 1, 1, 2)}
RECOMPUTE: tuple[Recompute, ...] = ("full", "none", "full", "none")


def backward(model: PreTrainedModel, data: Batch, share: float) -> float:
    """Add the gradient of a micro-batch with so large a share of the step's labels; returns its part of the loss."""
    state = converted(model)
    state.gradients.reopen()
    with float64_math():
        loss = loss_of(model, data) * share
        loss.backward()
    return float(loss)


def train(family: str, degrees: tuple[int, ...], wanted: Run) -> None:
    """On a rank: five AdamW steps of two micro-batches each, clipped, against one process.

    The first of a step's micro-batches goes through HF's own loop, and the gradients of either are finished.
    """
    model = FAMILIES[family].model().train()
    state = parallel(model, 4, degrees=degrees, recompute=RECOMPUTE)

    def step(number: int) -> float:
        first, second = batches(family, "right", 2, number)
        counts = [label_count(model, rows) for rows in (first, second)]
        model.zero_grad()
        with plain(model):
            loss = backward(model, first, counts[0] / sum(counts))
        state.gradients.finish()
        state.stack.reduce_now = True
        loss += backward(model, second, counts[1] / sum(counts))
        state.gradients.finish()
        return loss

    assert_trains_as(wanted, model, family, LIMIT, step)


@pytest.mark.parametrize(("layout", "family"), values_first([*DEGREES], ["llama", "bert", "gemma3"]))
def test_five_steps(ranks: Worlds, layout: str, family: str) -> None:
    data = [rows for step in range(STEPS) for rows in batches(family, "right", 2, step)]
    wanted = reference(FAMILIES[family].model(), data, steps=STEPS, accumulate=2, max_grad_norm=LIMIT)
    ranks(4).run(train, family, DEGREES[layout], wanted)


def small_batches(sizes: Sequence[int], wanted: list[dict[str, Tensor]]) -> None:
    model = FAMILIES["bert"].model().train()
    parallel(model, 4, degrees=DEGREES["low"])
    for size, gradients in zip(sizes, wanted, strict=True):
        one_step(model, [FAMILIES["bert"].batch(size, 12, padding="right")])
        assert_gradients(full_gradients(model), gradients)


def test_fewer_rows_than_replicas(ranks: Worlds) -> None:
    sizes = (1, 2, 3, 7)
    rows = [FAMILIES["bert"].batch(size, 12, padding="right") for size in sizes]
    wanted = [reference(FAMILIES["bert"].model(), [each], steps=1).gradients for each in rows]
    ranks(4).run(small_batches, sizes, wanted)


def slopes_of(family: str, schedule: ScheduleName, degrees: tuple[int, ...]) -> tuple[float, float]:
    torch.manual_seed(1000 + dist.get_rank())
    settings = FOUR_HEADS.get(family, {"num_attention_heads": 4})
    model = FAMILIES[family].model(attn="eager", dropout=0.3, **settings).train()
    state = parallel(model, 4, schedule, degrees=degrees, recompute=RECOMPUTE)
    return slopes(model, state, FAMILIES[family].batch(4, 8, padding="right"))


@pytest.mark.parametrize("schedule", ["oases", "cross_pass"])
@pytest.mark.parametrize("family", ["gpt2", "bert", "phi3", "neox sequential"])
def test_dropout(ranks: Worlds, family: str, schedule: ScheduleName) -> None:
    """The gradient is that of the masks of the forward."""
    for slope, squared in ranks(4).run(slopes_of, family, schedule, DEGREES["falling"]):
        assert slope == pytest.approx(squared, rel=1e-6)


def frozen_below(first: int, wanted: dict[str, Tensor]) -> None:
    model = tiny_llama(layers=2).train()
    freeze_below(model, first)
    parallel(model, 4, degrees=DEGREES["rising"], recompute=RECOMPUTE)
    one_step(model, [batch(5, 12, padded=True)])
    assert_gradients(full_gradients(model), wanted)


def freeze_below(model: PreTrainedModel, first: int) -> None:
    model.get_input_embeddings().requires_grad_(False)
    layers: Any = model.base_model.layers
    for layer in layers[:first]:
        layer.requires_grad_(False)


@pytest.mark.parametrize("first", [1, 2])
def test_frozen_blocks(ranks: Worlds, first: int) -> None:
    model = tiny_llama(layers=2)
    freeze_below(model, first)
    wanted = reference(model, [batch(5, 12, padded=True)], steps=1).gradients
    ranks(4).run(frozen_below, first, wanted)


def kept_bytes() -> tuple[int, int, int]:
    """On a rank: what a forward keeps in hidden tensors, and what a step sends over each axis."""
    model = tiny_llama(layers=2).train()
    state = parallel(model, 4, degrees=(4, 2, 2, 1), recompute=("full", "full", "none", "full"))
    loss = model(**batch(8, 8)).loss
    (run,) = state.stack._live
    kept = run.kept_bytes
    loss.backward()
    return kept, state.mesh.axis(2).traffic.bytes, state.mesh.axis(4, 2).traffic.bytes


def test_what_is_kept_and_sent(ranks: Worlds) -> None:
    """Blocks of degree 4, 2, 2 and 1 keep and reduce all, a half, none (its graph is kept), and a quarter."""
    whole = 8 * 8 * tiny_llama().config.hidden_size * 8
    for kept, reduced, gathered in ranks(4).run(kept_bytes):
        assert kept == whole + whole // 2 + whole // 4
        # Neighbours share both the weights of degree 2 and the rows of degree 1.
        assert reduced == 2 * 2 * whole // 2 + whole // 4, "two blocks of degree 2, forward and backward; one gathering"
        assert gathered == whole // 2, "rows part between degrees 4 and 2, and are gathered in backward"
