"""Parallel layers: mixins that a converted HF module adopts, keeping its own class behind them.

Outside the executor they communicate by themselves, blocking, so HF's own loop over the layers is
right (and is the Megatron-LM baseline). While the executor runs a block, the :class:`Link` says that
it owns the communication, and they compute this rank's share only.

Shapes: B batch, S sequence, H hidden, ``x_…`` this rank's share of a dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autograd import apply
from .link import CopyToGroup, Link, ReduceFromGroup, ScaleGradient, enter_block
from .sharding import Span


class BlockEntry(nn.Module):
    """What the residual stream goes through first in a block: where its gradient is summed when nobody else does."""

    link: Link

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``[B, S, H]`` to what the module makes of it."""
        return super().forward(x if self.link.managed else enter_block(x, self.link), *args, **kwargs)


class FusedRMSNorm(nn.Module):
    """Hugging Face's RMSNorm by torch's, one kernel instead of seven; it rounds once, behind the weight.

    It serves ``weight * (x / rms(x)).to(x.dtype)`` with weight and ``x`` of one type; of two, HF's own code runs.
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Any:
        """``[..., H]`` to the same."""
        if hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        # On GPUs autocast would make float32 of what is narrower.
        with torch.autocast(hidden_states.device.type, enabled=False):
            return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class JoinNorm(nn.Module):
    """A norm behind a block: its gradient is whole on every rank of a replica."""

    link: Link

    def forward(self, x: Tensor) -> Any:
        """``[B, S, H]`` to the same."""
        if self.link.managed or self.link.replicas == 1:
            return super().forward(x)
        y = super().forward(apply(ScaleGradient, x, self.link.replicas))
        return apply(ScaleGradient, y, 1 / self.link.replicas)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding that holds some of its rows."""

    link: Link
    span: Span

    def forward(self, input: Tensor) -> Tensor:
        """Token ids ``[B, S]`` to ``[B, S, H]``."""
        wanted = input - self.span.lo
        held = wanted.clamp(0, self.span.size - 1)
        x = super().forward(held).masked_fill((wanted != held).unsqueeze(-1), 0.0)
        return apply(ReduceFromGroup, x, self.link.axis)


class VocabParallelHead(nn.Linear):
    """An output head that holds some of the vocabulary; ``finish`` makes of its local logits what is asked for."""

    link: Link
    finish: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, x_V]``, or to what ``finish`` makes of that."""
        return self.finish(super().forward(apply(CopyToGroup, x, self.link.axis)))


@cache
def _both(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """The class of all modules that are both: what is compiled for one serves the others, as they are of one class."""
    return type(f"{mixin.__name__}{original.__name__}", (mixin, original), {"__module__": mixin.__module__})


def adopt(module: nn.Module, mixin: type[nn.Module], **attributes: object) -> None:
    """Put ``mixin`` before the class of ``module``, in place, and set its attributes."""
    original = type(module)
    if not issubclass(mixin, original):
        mixin = _both(mixin, original)  # type: ignore[arg-type]  # mypy takes the hash of a module for that of its class
    module.__class__ = mixin
    for name, value in attributes.items():
        setattr(module, name, value)
