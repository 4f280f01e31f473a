"""Dropout: which masks ranks have in common, the same ones in recompute, and nobody else's random numbers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oases_hf.convert import plain
from oases_hf.models.converted import Converted
from oases_hf.plan import SCHEDULE_NAMES, ScheduleName

from .families import FAMILIES
from .pairwise import values_first
from .parallel import full_gradients, full_parameters, one_step, parallel
from .parity import assert_gradients, float64_math
from .ranks import Worlds
from .reference import loss_of
from .tiny import Batch

ROWS, SEQ = 4, 8
# By name, how many dropouts there are outside the layers: behind the embedding, before a classifier.
OUTSIDE = {"gpt2": 1, "neox": 1, "neox sequential": 1, "bert": 1, "bert row": 2, "roberta": 1, "phi3": 0, "llama": 0}
FOUR_HEADS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_head": 4},
    "llama": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    "phi3": {"num_attention_heads": 4, "num_key_value_heads": 4},
}


def made(
    name: str,
    tmp_size: int,
    schedule: ScheduleName = "oases",
    *,
    attn: str = "eager",
    dropout: float = 0.3,
    dtype: torch.dtype = torch.float64,
) -> tuple[Any, Converted]:
    """On a rank seeded like no other: a model whose ranks hold as many heads each."""
    torch.manual_seed(1000 + dist.get_rank())
    settings = FOUR_HEADS.get(name, {"num_attention_heads": 4})
    model = FAMILIES[name].model(attn=attn, dropout=dropout, dtype=dtype, **settings).train()
    return model, parallel(model, tmp_size, schedule)


def data(name: str) -> Batch:
    return FAMILIES[name].batch(ROWS, SEQ, padding="right")


@contextmanager
def masks() -> Iterator[list[Tensor]]:
    """The masks drawn inside, in order."""
    own, seen = torch.nn.functional.dropout, list[Tensor]()

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        assert input.is_contiguous(), "on GPUs, masks of other layouts differ"
        seen.append(own(torch.ones_like(input), p))
        return input * seen[-1]

    with mock.patch.object(torch.nn.functional, "dropout", dropout):
        yield seen


Digests = list[str]


def digests(drawn: Sequence[Tensor], of_heads: bool) -> Digests:
    """Of masks on attention weights, which are per head, or of all others."""
    chosen = [mask for mask in drawn if (mask.dim() == 4) == of_heads]
    return [f"{tuple(mask.shape)} {hashlib.sha256(mask.numpy().tobytes()).hexdigest()}" for mask in chosen]


def drawn(name: str, tmp_size: int, schedule: ScheduleName) -> tuple[Digests, Digests]:
    """On a rank: the masks of two forwards, shared and own; those of each recompute are those of its forward."""
    model, _ = made(name, tmp_size, schedule)
    shared, own = Digests(), Digests()
    for _ in range(2):
        with masks() as forward:
            loss = loss_of(model, data(name))
        with masks() as backward:
            loss.backward()
        for into, of_heads, outside in ((shared, False, OUTSIDE[name]), (own, True, 0)):
            once, again = Counter(digests(forward, of_heads)), Counter(digests(backward, of_heads))
            assert (once - again).total() == outside
            assert not again - once
            into += once.elements()
    return shared, own


@pytest.mark.parametrize(("name", "schedule"), values_first([*OUTSIDE], ["oases", "wang"]))
def test_masks(ranks: Worlds, name: str, schedule: ScheduleName) -> None:
    """Case 15: alike within a TMP world but for those on attention weights; no two others are."""
    first, mate, second, second_mate = ranks(4).run(drawn, name, 2, schedule)
    assert first[0] == mate[0]
    assert second[0] == second_mate[0]
    assert bool(first[0]) == (name != "llama")
    every = [*first[0], *second[0], *(mask for rank in (first, mate, second, second_mate) for mask in rank[1])]
    assert len(set(every)) == len(every)


def slopes(model: Any, state: Converted, rows: Batch) -> tuple[float, float]:
    """How the loss of two forwards changes along its gradient, their masks as before; and as the gradient says."""
    step = 1e-7

    def loss() -> Tensor:
        assert state.stack.seeds is not None
        state.stack.seeds.forwards = state.vocabulary.link.draws = 0
        return loss_of(model, rows) + 2 * loss_of(model, rows)

    with float64_math():
        loss().backward()
        state.gradients.finish()
        squared = float(state.gradients.norm(list(model.parameters()))) ** 2
        moved = []
        for sign in (1, -2):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=sign * step)
                moved.append(float(loss()))
    return (moved[0] - moved[1]) / (2 * step), squared


def slopes_of(name: str, schedule: ScheduleName, attn: str) -> tuple[float, float]:
    return slopes(*made(name, 2, schedule, attn=attn), data(name))


@pytest.mark.parametrize(
    ("schedule", "model"),
    values_first(SCHEDULE_NAMES, [("gpt2", "sdpa"), ("neox", "eager"), ("bert row", "sdpa"), ("bert", "eager")]),
)
def test_recompute_is_forward(ranks: Worlds, schedule: ScheduleName, model: tuple[str, str]) -> None:
    name, attn = model
    for slope, squared in ranks(2).run(slopes_of, name, schedule, attn):
        assert slope == pytest.approx(squared, rel=1e-6)


def five_steps(name: str, tmp_size: int) -> dict[str, Tensor]:
    """On a rank: train with dropout; parameters that several ranks of a TMP world hold are checked to be equal."""
    model, state = made(name, tmp_size, dropout=0.1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        worlds = range(state.mesh.data.size)
        one_step(model, [FAMILIES[name].batch(ROWS, SEQ, padding="right", seed=10 * step + w) for w in worlds])
        state.gradients.clip(list(model.parameters()), 0.1)
        optimizer.step()
    return full_parameters(model)


@pytest.mark.parametrize(("name", "tmp_size"), values_first(["gpt2", "neox", "bert row"], [4, 2]))
def test_replicated_parameters_stay_equal(ranks: Worlds, name: str, tmp_size: int) -> None:
    """Case 15."""
    first, *others = ranks(4).run(five_steps, name, tmp_size)
    start = dict(FAMILIES[name].model(dtype=torch.float32).named_parameters())
    assert not any(tensor.equal(start[parameter]) for parameter, tensor in first.items())
    for other in others:
        assert all(tensor.equal(other[parameter]) for parameter, tensor in first.items())


def step_of(name: str, loop: Callable[[Any], Any]) -> tuple[float, float]:
    """On a rank: the losses of two training steps; what samplers and collators draw from stays as it was."""
    model, _ = made(name, 2)
    before, losses = torch.get_rng_state(), []
    for _ in range(2):
        with loop(model):
            loss = loss_of(model, data(name))
        loss.backward()
        losses.append(float(loss))
    assert torch.equal(torch.get_rng_state(), before)
    return losses[0], losses[1]


@pytest.mark.parametrize("loop", [nullcontext, plain], ids=["overlapped", "plain"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_the_global_generator_is_left_alone(ranks: Worlds, name: str, loop: Callable[[Any], Any]) -> None:
    first, second = ranks(2).run(step_of, name, loop)
    assert first == second
    assert first[0] != first[1]


def evaluated(name: str) -> None:
    """On a rank: evaluation draws nothing, and training goes on as if there had been none."""
    model, state = made(name, 2)
    alone = FAMILIES[name].model(attn="eager", **FOUR_HEADS.get(name, {"num_attention_heads": 4})).eval()
    assert state.stack.seeds is not None
    counters = state.stack.seeds.forwards, state.vocabulary.link.draws
    rows = {n: t for n, t in data(name).items() if "labels" not in n}
    with masks() as seen, float64_math(), torch.no_grad():
        found, expected = (m(**rows)[0] for m in (model.eval(), alone))
    assert not seen
    assert (state.stack.seeds.forwards, state.vocabulary.link.draws) == counters
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with float64_math():
        model.zero_grad()
        loss_of(model, data(name)).backward()
        state.gradients.finish()
        loss_of(alone, data(name)).backward()
    assert_gradients(full_gradients(model), {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("name", OUTSIDE)
def test_evaluation_draws_nothing(ranks: Worlds, name: str) -> None:
    ranks(2).run(evaluated, name)
