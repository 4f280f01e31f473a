"""The autograd node that stands for a whole stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import BackwardError
from ..parallel.autograd import apply
from ..schedule import Instruction
from .executor import Run
from .graphs import Replayed

BackwardOps = Callable[[Run | Replayed], Sequence[Instruction]]


class _StackNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, run: Run | Replayed, backward_ops: BackwardOps) -> Tensor:
        ctx.run, ctx.backward_ops = run, backward_ops
        return run.forward(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise BackwardError(
                "create_graph=True: a converted model computes first derivatives only; leave create_graph out, or take "
                "higher ones of the model before it is converted"
            )
        run, ctx.run = ctx.run, None
        if run is None:
            raise BackwardError(
                "a second backward through one forward: its tensors are gone, also with retain_graph=True; "
                "run the forward again, or sum the losses and run backward once"
            )
        return run.backward(grads[0], ctx.backward_ops(run)), None, None, None


def run_recorded(hidden: Tensor, run: Run | Replayed, backward_ops: BackwardOps, trainable: bool) -> Tensor:
    """Run a stack's forward; the result requires a gradient when ``trainable``, even if ``hidden`` does not.

    Args:
        hidden: ``[B, S, H]``.
        run: the run, fresh.
        backward_ops: called with the run when its backward begins; returns the instructions of it.
        trainable: whether a parameter of the stack requires a gradient.
    """
    anchor = torch.empty(0, requires_grad=trainable)
    return apply(_StackNode, hidden, anchor, run, backward_ops)
