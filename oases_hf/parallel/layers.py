"""Parallel layers: mixins that a converted HF module adopts, keeping its own class behind them.

Outside the executor they communicate by themselves, blocking, so HF's own loop over the layers is
right (and is the Megatron-LM baseline). While the executor runs a block, the :class:`Link` says that
it owns the communication, and they compute this rank's share only.

Shapes: B batch, S sequence, H hidden, ``x_…`` this rank's share of a dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .autograd import apply
from .mesh import Axis
from .sharding import Span


@dataclass
class Link:
    """Who communicates: the layers themselves, or the executor that runs them. One per group of ranks.

    Attributes:
        axis: the ranks that share the layers' weights.
        managed: the executor owns the collectives.
        captured: where row-parallel layers put their input instead of projecting it.
        put_off: where linear layers put the work of their weight gradients.
    """

    axis: Axis
    managed: bool = False
    captured: list[tuple[RowParallel, Tensor]] | None = None
    put_off: list[Callable[[], None]] | None = None

    @contextmanager
    def executing(
        self,
        captured: list[tuple[RowParallel, Tensor]] | None = None,
        put_off: list[Callable[[], None]] | None = None,
    ) -> Iterator[None]:
        """Let the executor own the collectives of the layers called inside."""
        before = self.managed, self.captured, self.put_off
        self.managed, self.captured, self.put_off = True, captured, put_off
        try:
            yield
        finally:
            self.managed, self.captured, self.put_off = before


class CopyToGroup(torch.autograd.Function):
    """Identity whose backward sums the gradient over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Return ``x``."""
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum over the group."""
        return ctx.axis.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class ReduceFromGroup(torch.autograd.Function):
    """Sum over the group whose backward is the identity (equation 1 of the paper)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Sum over the group."""
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient."""
        return grads[0], None


class GatherFromGroup(torch.autograd.Function):
    """The last dimension of all ranks side by side; the backward is this rank's slice, never a sum.

    Right when what follows is computed alike on every rank, as a loss on gathered logits is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, spans: tuple[Span, ...]) -> Tensor:
        """Gather ``[..., x_V]`` to ``[..., V]``."""
        ctx.span = spans[axis.rank]
        widest = max(span.size for span in spans)
        parts = axis.all_gather(F.pad(x, (0, widest - x.shape[-1])))
        return torch.cat([part[..., : span.size] for part, span in zip(parts, spans, strict=True)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Slice."""
        return grads[0][..., ctx.span.lo : ctx.span.hi].contiguous(), None, None


def _add_weight_grad(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, grad: Tensor) -> None:
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = (grad.t() @ x).to(weight.dtype)
        elif weight.grad.dtype == grad.dtype:
            weight.grad.addmm_(grad.t(), x)
        else:
            weight.grad.add_(grad.t() @ x)
        if bias is not None and bias.requires_grad:
            total = grad.sum(0).to(bias.dtype)
            bias.grad = total if bias.grad is None else bias.grad.add_(total)


class _DeferredLinear(torch.autograd.Function):
    """A linear layer whose backward returns the input's gradient and puts the weight's off."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, put_off: list[Callable[[], None]]
    ) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        x, cast_weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, cast_weight)
        ctx.weight, ctx.bias, ctx.put_off = weight, bias, put_off
        return F.linear(x, cast_weight, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.put_off.append(partial(_add_weight_grad, ctx.weight, ctx.bias, x, grads[0]))
        return grads[0] @ weight, None, None, None


def _hooked(parameter: nn.Parameter) -> bool:
    """Whether somebody wants to see this parameter's gradient come out of autograd."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def linear(module: nn.Linear, x: Tensor, bias: nn.Parameter | None, link: Link) -> Tensor:
    """``module`` applied to ``x``, its weight gradient put off when the link asks for that."""
    weight = cast(nn.Parameter, module.weight)
    deferrable = weight.requires_grad and not any(_hooked(p) for p in (weight, bias) if p is not None)
    if link.put_off is not None and torch.is_grad_enabled() and deferrable:
        return apply(_DeferredLinear, x, weight, bias, link.put_off)
    return F.linear(x, weight, bias)


class ColumnParallel(nn.Linear):
    """A linear layer that holds some of its output features; its input is whole."""

    link: Link

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, x_F]``."""
        return linear(self, x, self.bias, self.link)


class RowParallel(nn.Linear):
    """A linear layer that holds some of its input features; its output is a sum over the group.

    The bias is added by the group's first rank only.
    """

    link: Link

    def project(self, x: Tensor) -> Tensor:
        """This rank's share of the sum: ``[..., x_F]`` to ``[..., H]``."""
        return linear(self, x, self.bias if self.link.axis.rank == 0 else None, self.link)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, x_F]`` to ``[B, S, H]``; ``x`` itself when the executor will project it in pieces."""
        if self.link.captured is not None:
            self.link.captured.append((self, x))
            return x
        y = self.project(x)
        return y if self.link.managed else apply(ReduceFromGroup, y, self.link.axis)


class BlockEntry(nn.Module):
    """The first layer of a block, a norm: where the gradient is summed when nobody else does."""

    link: Link

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, H]``."""
        if not self.link.managed:
            x = apply(CopyToGroup, x, self.link.axis)
        return cast(Tensor, super().forward(x))


class VocabParallelEmbedding(nn.Embedding):
    """An embedding that holds some of its rows."""

    link: Link
    span: Span

    def forward(self, input: Tensor) -> Tensor:
        """Token ids ``[B, S]`` to ``[B, S, H]``."""
        outside = (input < self.span.lo) | (input >= self.span.hi)
        x = super().forward((input - self.span.lo).masked_fill(outside, 0))
        return apply(ReduceFromGroup, x.masked_fill(outside.unsqueeze(-1), 0.0), self.link.axis)


class VocabParallelHead(nn.Linear):
    """An output head that holds some of the vocabulary; ``finish`` makes of its local logits what is asked for."""

    link: Link
    finish: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, x_V]``, or to what ``finish`` makes of that."""
        return self.finish(super().forward(apply(CopyToGroup, x, self.link.axis)))


def adopt(module: nn.Module, mixin: type[nn.Module], **attributes: object) -> None:
    """Put ``mixin`` before the class of ``module``, in place, and set its attributes."""
    original = type(module)
    if issubclass(mixin, original):
        module.__class__ = mixin
    else:
        name = f"{mixin.__name__}{original.__name__}"
        module.__class__ = type(name, (mixin, original), {"__module__": mixin.__module__})
    for name, value in attributes.items():
        setattr(module, name, value)
