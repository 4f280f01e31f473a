"""Cross entropy on logits whose vocabulary is spread over ranks; no rank ever holds a whole row."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autograd import apply
from .mesh import Axis
from .sharding import Span

IGNORE_INDEX = -100


class _CrossEntropySum(torch.autograd.Function):
    """The cross entropy summed over the tokens that count.

    With smoothing ε and V words a token's loss is ``(1-ε)(-log p_t) + ε/V Σ_v(-log p_v)``.
    Shapes: N tokens, x_V words of this rank.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, span: Span, vocab: int, ignore: int, smoothing: float
    ) -> Tensor:
        highest = axis.all_reduce(logits.max(-1).values.float(), dist.ReduceOp.MAX)
        shifted = logits - highest[:, None]  # float32, also of logits that are narrower
        mine = (labels >= span.lo) & (labels < span.hi)
        target = (labels - span.lo).clamp(0, span.size - 1)
        at_target = torch.where(mine, shifted.gather(-1, target[:, None])[:, 0], 0.0)
        sums = [at_target, shifted.sum(-1)] if smoothing else [at_target]
        probabilities = shifted.exp_()
        sums = list(axis.all_reduce(torch.stack([probabilities.sum(-1), *sums])))
        probabilities.div_(sums[0][:, None])
        counted = labels != ignore
        ctx.save_for_backward(probabilities, target, mine & counted, counted)
        ctx.dtype, ctx.vocab, ctx.smoothing = logits.dtype, vocab, smoothing
        loss = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            loss = loss - smoothing / vocab * sums[2]
        return torch.where(counted, loss, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        probabilities, target, mine, counted = ctx.saved_tensors
        others = probabilities - ctx.smoothing / ctx.vocab if ctx.smoothing else probabilities
        scale, at = torch.where(counted, grads[0], 0.0)[:, None], target[:, None]
        grad = torch.empty_like(others, dtype=ctx.dtype)
        torch.mul(others, scale, out=grad)  # rounded once, and no wider copy of it is made
        at_target = others.gather(-1, at) - mine[:, None].to(others.dtype) * (1 - ctx.smoothing)
        return grad.scatter_(-1, at, (at_target * scale).to(ctx.dtype)), None, None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    spans: tuple[Span, ...],
    num_items: Tensor | float | None = None,
    ignore_index: int = IGNORE_INDEX,
    smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of local logits in float32, with HF's reduction.

    Args:
        logits: ``[..., x_V]``, this rank's words; those narrower than float32 are not copied into it first.
        labels: ``[...]``, the same on every rank of ``axis``.
        axis: the ranks that share the vocabulary.
        spans: the words of each of them.
        num_items: what the sum is divided by; the number of tokens that count when None.
        ignore_index: the label of tokens that do not count.
        smoothing: the label smoothing factor.

    Raises:
        RuntimeError: a label is neither ``ignore_index`` nor a word (asynchronously on a GPU).
    """
    vocab = spans[-1].hi
    labels = labels.reshape(-1).to(logits.device)
    counted = labels != ignore_index
    torch._assert_async(
        (~counted | ((labels >= 0) & (labels < vocab))).all(), f"a label is outside the vocabulary of {vocab} words"
    )
    span = spans[axis.rank]
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.dtype.itemsize > torch.float32.itemsize:
        flat = flat.float()
    total = apply(_CrossEntropySum, flat, labels, axis, span, vocab, ignore_index, smoothing)
    if num_items is None:
        return total / counted.sum()
    return total / (num_items.to(total.device) if torch.is_tensor(num_items) else num_items)


def shifted_labels(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Labels ``[B, S]`` such that position ``i`` holds the token that follows it."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
