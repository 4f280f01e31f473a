"""Casts of weights to the type that autocast computes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .autograd import apply


class Casts:
    """Casts that several calls of layers share, as long as weights stay as they are; made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[nn.Parameter, torch.dtype], Tensor] = {}

    def of(self, weight: nn.Parameter) -> Tensor | None:
        """The cast of ``weight``, which is in no graph; None where autocast would not make any."""
        device = weight.device.type
        if weight.dtype != torch.float32 or not torch.is_autocast_enabled(device):
            return None
        key = weight, torch.get_autocast_dtype(device)
        if key not in self._made:
            self._made[key] = weight.detach().to(key[1])
        return self._made[key]


class _StandIn(torch.autograd.Function):
    """A cast in place of its weight; each call converts its own gradient, so that sums are in the weight's type."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, cast: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def stand_in(weight: nn.Parameter, cast: Tensor) -> Tensor:
    """``cast``, whose gradient is that of ``weight``."""
    return apply(_StandIn, weight, cast)
