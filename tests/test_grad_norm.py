"""The norm of gradients over all ranks: that of one process, whatever ranks hold alike, and of whatever types."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oases_hf.parallel.gradients import GradientSync
from oases_hf.parallel.mesh import Mesh
from oases_hf.parallel.sharding import Layout

from .parallel import full_gradients, one_step, parallel
from .ranks import Worlds
from .tiny import batch, tiny_llama

ORDERS = (1.0, 2.0, 3.0, math.inf)
DEGREES = [4, 2, 1, 1]


def norm_of(gradients: list[Tensor], order: float) -> float:
    return float(torch.cat([gradient.double().flatten() for gradient in gradients]).norm(order))


def norms() -> list[tuple[float, float]]:
    """On a rank: of a step's gradients, by us and of the whole tensors."""
    model: Any = tiny_llama(layers=2).train()
    state = parallel(model, 4, degrees=DEGREES)
    one_step(model, [batch(4, 12)])
    whole = list(full_gradients(model).values())
    parameters = list(model.parameters())
    return [(float(state.gradients.norm(parameters, order)), norm_of(whole, order)) for order in ORDERS]


def test_norms_of_parts_that_some_ranks_hold_alike(ranks: Worlds) -> None:
    for found in ranks(4).run(norms):
        for ours, wanted in found:
            assert ours == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wider", [False, True])
def test_norms_of_several_types(order: float, wider: bool) -> None:
    """None is rounded to the narrowest; gradients may be wider than their parameters."""
    drawn = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(7, 5, dtype=t)) for t in (torch.bfloat16, torch.float32)]
    if wider:
        parameters[1].grad_dtype = torch.float64
    for parameter in parameters:
        assert parameter.grad_dtype is not None
        parameter.grad = torch.randn(7, 5, generator=drawn).to(parameter.grad_dtype)
    gradients = GradientSync(Mesh.build(), {parameter: Layout((7, 5)) for parameter in parameters})
    wanted = norm_of([parameter.grad for parameter in parameters if parameter.grad is not None], order)
    assert float(gradients.norm(parameters, order)) == pytest.approx(wanted, rel=1e-12 if wider else 1e-6)
