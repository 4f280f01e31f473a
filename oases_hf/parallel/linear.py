"""Linear layers that hold some of their features, and let others say when their weights' gradients are computed.

They serve ``nn.Linear``, whose weight is ``[out, in]``, and GPT-2's ``Conv1D``, whose weight is ``[in, out]``.
Shapes: B batch, S sequence, H hidden, ``x_…`` this rank's share of a dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .autograd import apply
from .casts import stand_in
from .link import Link, WeightGrads, leave_block
from .rng import seeded


@dataclass
class Captured:
    """A row-parallel layer that is yet to project ``x``, and the dropout that follows."""

    layer: RowParallel
    x: Tensor
    dropout: SharedDropout | None = None


def _add_grads(weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool, x: Tensor, grad: Tensor) -> None:
    """Add to the gradients of a layer's parameters, in the matmul itself where it is of their type.

    What comes first is added to zeros, by the same kernel and so rounded alike.
    """
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    left, right = (x.t(), grad) if transposed else (grad.t(), x)
    with torch.no_grad():
        total = _grad_of(weight)
        if total.dtype == grad.dtype:
            torch.addmm(total, left, right, out=total)
        else:
            total.add_(left @ right)
        if bias is not None:
            _grad_of(bias).add_(grad.sum(0))


def _grad_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _Linear(torch.autograd.Function):
    """A linear layer that does not compute an output nobody reads, and hands over what its weight's gradient takes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        cast: Tensor | None,
        bias: nn.Parameter | None,
        transposed: bool,
        weight_grads: WeightGrads | None,
        unread: bool,
    ) -> Tensor:
        ctx.parameters, ctx.transposed, ctx.weight_grads = (weight, bias), transposed, weight_grads
        x, used = _autocast(x), _autocast(weight if cast is None else cast)
        used = used.t() if transposed else used
        ctx.save_for_backward(x, used)
        if unread:
            return x.new_zeros(1).expand(*x.shape[:-1], used.shape[0])
        return F.linear(x, used, None if bias is None else _autocast(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_weight = of_bias = None
        parameter, bias = ctx.parameters
        if ctx.weight_grads is not None and _plain(parameter) and (bias is None or _plain(bias)):
            ctx.weight_grads(partial(_add_grads, parameter, bias, ctx.transposed, x, grad))
        else:
            rows = grad.flatten(0, -2)
            if ctx.needs_input_grad[1]:
                of_weight = rows.t() @ x.flatten(0, -2)
                of_weight = of_weight.t() if ctx.transposed else of_weight
            if ctx.needs_input_grad[3]:
                of_bias = rows.sum(0)
        return grad @ weight, of_weight, None, of_bias, None, None, None


def _autocast(tensor: Tensor) -> Tensor:
    """As autocast, if it is on, would make it for a linear layer."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _plain(parameter: nn.Parameter) -> bool:
    """Whether autograd would do no more with a parameter's gradient than add it to what is there."""
    alone = parameter.requires_grad and parameter.is_leaf and not hooked(parameter)
    return alone and parameter.grad_dtype == parameter.dtype


def hooked(parameter: Tensor) -> bool:
    """Whether somebody wants to see this parameter's gradient come out of autograd."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


class _Parallel(nn.Module):
    """What column- and row-parallel layers share; put before ``nn.Linear`` or ``Conv1D``."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    link: Link
    transposed: bool

    def apply_to(self, x: Tensor, bias: nn.Parameter | None, unread: bool = False) -> Tensor:
        """The layer on ``x``, whose weight gradient the link takes charge of; a stand-in if ``unread``."""
        weight, weight_grads = self.weight, self.link.weight_grads
        cast, casts = None, self.link.casts
        if casts is not None:
            x, cast = casts.of_input(x), casts.of(weight)
        if torch.is_grad_enabled() and (weight_grads is not None or unread):
            return apply(_Linear, x, weight, cast, bias, self.transposed, weight_grads, unread)
        used = weight if cast is None else stand_in(weight, cast)
        return F.linear(x, used.t() if self.transposed else used, bias)


class ColumnParallel(_Parallel):
    """A linear layer that holds some of its output features; its input is whole."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, x_F]``."""
        return self.apply_to(x, self.bias)


class RowParallel(_Parallel):
    """A linear layer that holds some of its input features; its output is a sum over the group.

    The bias is added by the group's first rank only.
    """

    def project(self, x: Tensor) -> Tensor:
        """This rank's share of the sum: ``[..., x_F]`` to ``[..., H]``."""
        return self.apply_to(x, self.bias if self.link.axis.rank == 0 else None, self.link.unread)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, x_F]`` to ``[B, S, H]``; to a stand-in when the executor will project it in pieces."""
        if self.link.captured is not None:
            self.link.captured.append(Captured(self, x))
            return x.new_zeros(1).expand(*x.shape[:-1], self.weight.shape[1 if self.transposed else 0])
        y = self.project(x)
        return y if self.link.managed else leave_block(y, self.link)


class SharedDropout(nn.Dropout):
    """A dropout on what all ranks of a group have in common, or sum: its mask is the same on all of them.

    Dropout is linear, so that of each rank's share is a share of the dropout of the sum.
    """

    link: Link

    def drop(self, x: Tensor) -> Tensor:
        """``x`` with the next mask of the group."""
        if not self.training or self.p == 0.0:
            return x
        with seeded(self.link.next_seed(), x.device, self.link.outside):
            return F.dropout(x.contiguous(), self.p)  # on GPUs the mask depends on strides, which stand-ins lack

    def forward(self, input: Tensor) -> Tensor:
        """``input`` with the next mask; as it is when it is yet to be projected, in pieces."""
        if self.link.captured:
            self.link.captured[-1].dropout = self
            return input
        return self.drop(input)
