"""A course of training on a rank, compared step by step with that of one plain process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oases_hf.models.converted import converted

from .families import FAMILIES
from .parallel import full_gradients, full_parameters
from .parity import ZERO_GRADIENT_FLOOR, assert_gradients, assert_loss, assert_updates
from .reference import Run


def assert_trains_as(
    wanted: Run, model: PreTrainedModel, family: str, limit: float, step: Callable[[int], float]
) -> None:
    """AdamW steps, clipped to ``limit``: losses, norms and the first gradients, and what became of the weights.

    ``step`` runs forward and backward of the step of that number, from no gradients to finished ones; returns its loss.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for number, (loss, norm) in enumerate(zip(wanted.losses, wanted.grad_norms, strict=True)):
        found = step(number)
        if number == 0:
            assert_gradients(full_gradients(model), wanted.gradients)
        assert_loss(found, loss)
        clipped = float(converted(model).gradients.clip(list(model.parameters()), limit))
        assert clipped == pytest.approx(norm, rel=1e-10)
        optimizer.step()
    after = full_parameters(model)
    assert_updates(after, wanted.end, wanted.start, floor=ZERO_GRADIENT_FLOOR)
    assert_updates(*(with_gradient(family, tensors) for tensors in (after, wanted.end, wanted.start)))


def with_gradient(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without those whose exact gradient is zero: what one finds is rounding noise."""
    return {n: tensor for n, tensor in tensors.items() if FAMILIES[name].has_gradient(n)}
