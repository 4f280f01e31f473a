"""The loss of logits that are narrower than float32 is that of Hugging Face, without a copy of them that is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.loss.loss_utils import fixed_cross_entropy

from oases_hf.parallel.loss import IGNORE_INDEX, cross_entropy
from oases_hf.parallel.mesh import Axis
from oases_hf.parallel.sharding import Span
from oases_hf.profiler.stopwatch import peak_bytes

from .parity import assert_gradients

TOKENS, WORDS = 64, 1000
ALONE = Axis((0,), 0)


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(TOKENS, WORDS, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    labels[::5] = IGNORE_INDEX
    return logits, labels


def ours(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, ALONE, (Span(0, WORDS),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_loss_and_gradient(dtype: torch.dtype) -> None:
    logits, labels = drawn(dtype)
    expected = fixed_cross_entropy(logits.float(), labels)
    loss = ours(logits, labels)
    (wanted,), (found,) = (torch.autograd.grad(3 * each, logits) for each in (expected, loss))
    assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    assert found.dtype == wanted.dtype == dtype
    # Both are computed in float32 and rounded once, so nearly all that is narrower is equal.
    assert_gradients({"logits": found.double()}, {"logits": wanted.double()}, relative=1e-6)


def test_a_graph_that_is_kept_gives_the_same_gradient_twice() -> None:
    logits, labels = drawn(torch.bfloat16)
    loss = ours(logits, labels)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_they_are_widened_once() -> None:
    logits, labels = drawn(torch.bfloat16)
    with peak_bytes(logits.device) as peak:
        loss = ours(logits, labels)
    forward = peak()
    with peak_bytes(logits.device) as peak:
        loss.backward()
    wide, rows = 4 * TOKENS * WORDS, 100 * TOKENS
    assert forward <= wide + rows
    assert peak() <= wide // 2 + rows, "the gradient, in the type of the logits"


def test_labels_that_are_all_ignored_leave_no_gradient() -> None:
    logits, labels = drawn(torch.float32)
    labels[:] = IGNORE_INDEX
    (found,) = torch.autograd.grad(ours(logits, labels), logits)
    (wanted,) = torch.autograd.grad(fixed_cross_entropy(logits, labels), logits)
    assert torch.equal(found, wanted)
