"""The parity criterion lets rounding noise pass and planted faults fail."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from . import reference as plain
from .parity import (
    GRADIENT_FLOAT32,
    assert_gradients,
    assert_loss,
    assert_updates,
    float64_math,
    gradient_deviation,
    update_deviation,
)
from .tiny import Attention, batch, tiny_llama

NORM = "model.layers.0.input_layernorm.weight"
WHOLE = batch(4, 8, padded=True)
MICRO = [{name: rows[i : i + 2] for name, rows in WHOLE.items()} for i in (0, 2)]
ROW = torch.linspace(-1, 1, 7, dtype=torch.float64)

UPCASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to device": lambda x: x.to("cpu", torch.float32),
    "to dtype": lambda x: x.to(dtype=torch.float32),
    "type": lambda x: x.type(torch.float32),
    "F.softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "F.softmax input": lambda x: F.softmax(input=x, dim=-1, dtype=torch.float32),
    "F.log_softmax": lambda x: F.log_softmax(x, -1, 3, torch.float32),
    "torch.softmax": lambda x: torch.softmax(x, -1, torch.float32),
    "softmax": lambda x: x.softmax(-1, dtype=torch.float32),
    "mean": lambda x: x.mean(dtype=torch.float32),
}


@pytest.mark.parametrize("upcast", UPCASTS.values(), ids=UPCASTS.keys())
def test_float64_stays(upcast: Callable[[Tensor], Tensor]) -> None:
    with float64_math():
        kept = upcast(ROW)
    assert kept.dtype is torch.float64
    assert upcast(ROW).dtype is torch.float32
    torch.testing.assert_close(kept, upcast(ROW).double(), rtol=1e-6, atol=1e-6)


def test_other_conversions_are_left_alone() -> None:
    with float64_math():
        assert torch.arange(3).float().dtype is torch.float32
        assert ROW.to(torch.bfloat16).dtype is torch.bfloat16
        assert ROW.to(torch.bfloat16).float().dtype is torch.float32
        assert ROW.bfloat16().softmax(-1, dtype=torch.float32).dtype is torch.float32


class Recomputing(torch.autograd.Function):
    """Cubes; the backward upcasts its gradient, and recomputes and runs a backward of its own, as executors do."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float() ** 3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        (x,) = cast(tuple[Tensor], ctx.saved_tensors)  # type: ignore[attr-defined]
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            torch.autograd.backward(leaf.float() ** 3, grads[0].to(torch.float32))
        assert leaf.grad is not None
        return leaf.grad


@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward])
def test_float64_stays_in_backward_of_a_custom_function(backward: Callable[[Tensor], None]) -> None:
    x = ROW.clone().requires_grad_()
    with float64_math():
        backward(Recomputing.apply(x).sum())  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3 * ROW**2, rtol=1e-14, atol=0)


def test_without_float64_math_right_gradients_differ_too_much() -> None:
    model = tiny_llama()
    model(**WHOLE).loss.backward()
    assert not gradient_deviation(plain.gradients(model), plain.reference(model, [WHOLE], steps=1).gradients).ok


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # not yet in 5.17
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_float64_stays_in_recomputed_forwards(use_reentrant: bool) -> None:
    model = tiny_llama()
    right = plain.reference(model, [WHOLE], steps=1)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_gradients(plain.train(model, [WHOLE], steps=1).gradients, right.gradients)


def test_attention_kernels_agree_in_float64() -> None:
    eager, sdpa = (plain.reference(tiny_llama(attn=attn), [WHOLE]) for attn in ("eager", "sdpa"))
    assert_gradients(eager.gradients, sdpa.gradients)
    assert_updates(eager.end, sdpa.end, sdpa.start)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [False, True])
def test_rounding_noise_passes(attn: Attention, tied: bool) -> None:
    model = tiny_llama(attn=attn, tied=tied)
    whole = plain.reference(model, [WHOLE], max_grad_norm=1.0)
    micro = plain.reference(model, MICRO, accumulate=2, max_grad_norm=1.0)
    assert_gradients(micro.gradients, whole.gradients)
    assert_updates(micro.end, whole.end, whole.start)
    for ours, theirs in zip(micro.losses, whole.losses, strict=True):
        assert_loss(ours, theirs)


def test_rounding_noise_passes_in_float32() -> None:
    model = tiny_llama(dtype=torch.float32)
    whole = plain.reference(model, [WHOLE], steps=1)
    micro = plain.reference(model, MICRO, accumulate=2, steps=1)
    assert_gradients(micro.gradients, whole.gradients, relative=GRADIENT_FLOAT32)


Fault = Callable[[PreTrainedModel, pytest.MonkeyPatch], None]


def halve_a_norm_gradient(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.get_parameter(NORM).register_hook(lambda grad: grad / 2)


def leave_kv_gradients_unsummed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two query heads of a KV head is on a rank of its own; only the first one's gradient arrives."""

    def repeat_kv(kv_BHSD: Tensor, repeats: int) -> Tensor:
        return torch.stack([kv_BHSD, *[kv_BHSD.detach()] * (repeats - 1)], dim=2).flatten(1, 2)

    monkeypatch.setattr(modeling_llama, "repeat_kv", repeat_kv)


def double_everything(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 2)


FAULTS = [halve_a_norm_gradient, leave_kv_gradients_unsummed, double_everything]


def faulty(model: PreTrainedModel, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> plain.Run:
    model = copy.deepcopy(model)
    fault(model, monkeypatch)
    return plain.train(model, [WHOLE])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-9), (torch.float32, GRADIENT_FLOAT32)])
def test_faults_fail(fault: Fault, dtype: torch.dtype, relative: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(attn="eager", dtype=dtype)
    right = plain.reference(model, [WHOLE])
    wrong = faulty(model, fault, monkeypatch)
    assert wrong.losses[0] == right.losses[0]
    assert gradient_deviation(wrong.gradients, right.gradients, relative=relative).ratio > 100
    if dtype is torch.float64:
        assert update_deviation(wrong.end, right.end, right.start).ratio > 10  # Adam hides factors


def test_a_failure_names_the_parameter_and_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    right, wrong = plain.reference(model, [WHOLE]), faulty(model, halve_a_norm_gradient, monkeypatch)
    with pytest.raises(AssertionError, match=rf"gradient of {NORM} deviates by 0.\d+, allowed is \S+e-"):
        assert_gradients(wrong.gradients, right.gradients)
    with pytest.raises(AssertionError, match=r"update of \S+ deviates by"):
        assert_updates(wrong.end, right.end, right.start)
    with pytest.raises(AssertionError, match=r"loss deviates by 1e-05, allowed is 2e-10"):
        assert_loss(2.00001, 2.0)


def test_names_and_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"missing \['b'\], not in the reference \['c'\]"):
        assert_gradients({"a": ROW, "c": ROW}, {"a": ROW, "b": ROW})
    with pytest.raises(AssertionError, match=r"a has shape \(1, 7\), the reference \(7,\)"):
        assert_gradients({"a": ROW[None]}, {"a": ROW})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_a_number_fails_on_either_side(bad: float) -> None:
    for ours, theirs in [(ROW * bad, ROW), (ROW, ROW * bad), (ROW * bad, ROW * bad)]:
        assert not gradient_deviation({"a": ours, "b": ROW}, {"a": theirs, "b": ROW}).ok
        assert not update_deviation({"a": ours, "b": ROW}, {"a": theirs, "b": ROW}, {"a": ROW, "b": ROW}).ok


def test_what_never_moves_must_stay() -> None:
    zero = {"a": 0 * ROW}
    assert gradient_deviation(zero, zero).ok
    assert not gradient_deviation({"a": ROW}, zero).ok
    assert not update_deviation({"a": ROW}, zero, zero).ok
