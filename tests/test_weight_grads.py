"""Weight gradients that linear layers add themselves: whoever looks at a parameter sees what autograd would show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.flop_counter import FlopCounterMode

from oases_hf.plan import Recompute

from .parallel import parallel
from .parity import assert_gradients, float64_math
from .reference import gradients
from .tiny import batch, tiny_llama

ROWS, SEQ = 4, 6
BOTH: tuple[Recompute, ...] = ("full", "none")
WEIGHTS = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj")
Change = Callable[[Any], object]

pytestmark = pytest.mark.parametrize("recompute", BOTH)


def nothing(model: Any) -> None:
    """Change nothing."""


def pair(recompute: Recompute, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A model, and the same by the executor."""
    whole = cast(Any, tiny_llama(dtype=dtype)).train()
    model = copy.deepcopy(whole)
    parallel(model, 1, recompute=[recompute] * 4)
    return whole, model


def trained(model: Any, between: Change = nothing) -> dict[str, Tensor]:
    """The gradients of two micro-batches; ``between`` comes before every backward."""
    with float64_math():
        for seed in range(2):
            loss = model(**batch(ROWS, SEQ, seed=seed)).loss
            between(model)
            loss.backward()
    return gradients(model)


class Scaled(nn.Module):
    """A weight that is computed of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def test_weights_that_are_computed(recompute: Recompute) -> None:
    whole, model = pair(recompute)
    for each in (whole, model):
        for path in WEIGHTS:
            register_parametrization(each.get_submodule(path), "weight", Scaled())
    assert_gradients(trained(model), trained(whole))


@pytest.mark.parametrize("early", [False, True])
def test_hooks_see_gradients_and_change_them(recompute: Recompute, early: bool) -> None:
    """Also those that come after forward."""

    def doubled(model: Any) -> None:
        for path in WEIGHTS:
            parameter = model.get_submodule(path).weight
            if not parameter._backward_hooks:
                parameter.register_hook(lambda grad: 2 * grad)

    whole, model = pair(recompute)
    if early:
        for each in (whole, model):
            doubled(each)
    assert_gradients(trained(model, doubled), trained(whole, doubled))


def test_parameters_that_are_frozen_after_forward(recompute: Recompute) -> None:
    def freeze(model: Any) -> None:
        for path in WEIGHTS:
            model.get_submodule(path).weight.requires_grad_(False)

    whole, model = pair(recompute)
    found, expected = trained(model, freeze), trained(whole, freeze)
    assert not any(f"{path}.weight" in found for path in WEIGHTS)
    assert_gradients(found, expected)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_one_of_weight_and_bias_is_frozen(recompute: Recompute, kind: str) -> None:
    whole, model = pair(recompute)
    for each in (whole, model):
        for path in WEIGHTS:
            getattr(each.get_submodule(path), kind).requires_grad_(False)
    assert_gradients(trained(model), trained(whole))


def test_gradients_of_a_type_of_their_own(recompute: Recompute) -> None:
    whole, model = pair(recompute, torch.bfloat16)
    for each in (whole, model):
        for path in WEIGHTS:
            each.get_submodule(path).weight.grad_dtype = torch.float32
    found = trained(model)
    assert all(found[f"{path}.weight"].dtype == torch.float32 for path in WEIGHTS)
    assert_gradients(found, trained(whole), relative=0.1)  # both compute in bf16; 0.056 was seen


def test_float64_is_left_alone_by_autocast(recompute: Recompute) -> None:
    whole, model = pair(recompute)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = trained(model), trained(whole)
    assert_gradients(found, expected)


def test_types_that_do_not_match_are_refused(recompute: Recompute) -> None:
    _, model = pair(recompute, torch.float32)
    model.get_submodule(WEIGHTS[0]).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        trained(model)


def test_operations_are_counted_alike_in_every_step(recompute: Recompute) -> None:
    _, model = pair(recompute)
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            model(**batch(ROWS, SEQ)).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
