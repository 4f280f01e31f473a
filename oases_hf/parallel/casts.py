"""Casts to the type that autocast computes in, of weights and of what they are applied to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from .autograd import apply


class Casts:
    """Casts that several calls of layers share, in one block and pass; made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[nn.Parameter, Tensor] = {}
        self._input: _Input | None = None

    def of(self, weight: nn.Parameter) -> Tensor | None:
        """The cast of ``weight``, which is in no graph; None where autocast would not make any."""
        dtype = _narrower(weight)
        if dtype is not None and weight not in self._made:
            self._made[weight] = weight.detach().to(dtype)
        return None if dtype is None else self._made[weight]

    def of_input(self, x: Tensor) -> Tensor:
        """``x`` as autocast would make it for a linear layer: one cast for layers that are given it in turn."""
        dtype = _narrower(x)
        if dtype is None:
            return x
        if self._input is None or self._input.of() is not x or self._input.version != x._version:
            self._input = _Input(ref(x), x._version, x.detach().to(dtype))
        return stand_in(x, self._input.cast)

    def forget_input(self) -> None:
        """Hold no cast of what layers are applied to."""
        self._input = None


@dataclass(frozen=True)
class _Input:
    """What layers were applied to last, as it was then, and its cast."""

    of: ref[Tensor]
    version: int
    cast: Tensor


def _narrower(tensor: Tensor) -> torch.dtype | None:
    """The type that autocast would cast float32 to for a linear layer; None where it would not, or for other types."""
    device = tensor.device.type
    cast = tensor.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if cast else None


class _StandIn(torch.autograd.Function):
    """A cast in place of what it is of; each call converts its own gradient, so that sums are in that one's type."""

    @staticmethod
    def forward(ctx: Any, of: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = of.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def stand_in(of: Tensor, cast: Tensor) -> Tensor:
    """``cast``, whose gradient is that of what it is ``of``."""
    return apply(_StandIn, of, cast)
