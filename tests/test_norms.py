"""Norms that torch computes in one kernel are those of Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from oases_hf.models.registry import FAMILIES as DECLARED
from oases_hf.parallel.layers import FusedRMSNorm, adopt

from .families import FAMILIES
from .parallel import parallel

SERVED = {tiny.model_type: name for name, tiny in FAMILIES.items()}
FUSED = [SERVED[model_type] for family in DECLARED if family.rms_norms for model_type in family.model_types]
ROUNDED = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative; Hugging Face computes in float32, and rounds the quotient before it is multiplied."""


def norms(model: Any) -> Iterator[nn.Module]:
    """In layers and behind them."""
    return (module for module in model.modules() if "Norm" in type(module).__name__)


def passed(norm: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """What a norm makes of ``x``, and the gradients of ``x`` and of its weight."""
    x = x.clone().requires_grad_()
    y = norm(x)
    weight = cast(nn.Parameter, norm.weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad.to(y.dtype))]


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("name", FUSED)
def test_they_compute_the_same(name: str, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    for own in norms(FAMILIES[name].model(dtype=dtype)):
        fused = copy.deepcopy(own)
        adopt(fused, FusedRMSNorm)
        width = cast(Tensor, own.weight).shape[0]
        x, grad = (torch.randn(3, 5, width, generator=drawn).to(dtype) for _ in range(2))
        for found, expected in zip(passed(fused, x, grad), passed(own, x, grad), strict=True):
            assert found.dtype == expected.dtype
            assert (found - expected).abs().max() <= ROUNDED[dtype] * expected.abs().max()


def test_weight_and_input_of_two_types_are_left_to_hugging_face() -> None:
    own = next(norms(FAMILIES["llama"].model(dtype=torch.float32)))
    fused = copy.deepcopy(own)
    adopt(fused, FusedRMSNorm)
    x = torch.randn(2, 3, cast(Tensor, own.weight).shape[0], dtype=torch.bfloat16)
    for found, expected in zip(passed(fused, x, x), passed(own, x, x), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype


def test_autocast_does_not_reach_the_kernel() -> None:
    """On GPUs it would have it compute, and return, float32."""
    fused = next(norms(FAMILIES["llama"].model(dtype=torch.bfloat16)))
    adopt(fused, FusedRMSNorm)
    reached = []

    def watched(x: Tensor, *args: Any) -> Tensor:
        reached.append(torch.is_autocast_enabled("cpu"))
        return own(x, *args)

    own = functional.rms_norm
    with torch.autocast("cpu", torch.bfloat16), mock.patch.object(functional, "rms_norm", watched):
        y = fused(torch.randn(2, 3, cast(Tensor, fused.weight).shape[0], dtype=torch.bfloat16))
    assert reached == [False]
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("name", SERVED.values())
def test_those_that_are_declared_are_fused(name: str) -> None:
    model = FAMILIES[name].model()
    parallel(model, 1)
    found = [isinstance(norm, FusedRMSNorm) for norm in norms(model)]
    assert found.count(name in FUSED) == len(found)
    assert name not in FUSED or isinstance(model.base_model.norm, FusedRMSNorm)


def test_they_take_what_hugging_face_calls_its_argument() -> None:
    own = next(norms(FAMILIES["llama"].model(dtype=torch.float32)))
    fused = copy.deepcopy(own)
    adopt(fused, FusedRMSNorm)
    x = torch.randn(2, 3, cast(Tensor, own.weight).shape[0])
    assert torch.allclose(fused(hidden_states=x), own(hidden_states=x))


def test_norms_of_torch_stay() -> None:
    model = FAMILIES["llama"].model(dtype=torch.float32)
    for layer in cast(Any, model).base_model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, nn.RMSNorm(model.config.hidden_size, model.config.rms_norm_eps))
    parallel(model, 1)
    assert not any(isinstance(norm, FusedRMSNorm) for norm in norms(model))
    model(**FAMILIES["llama"].batch(2, 8)).loss.backward()
