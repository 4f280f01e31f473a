"""The reference: a few AdamW steps of one plain Hugging Face process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .parity import float64_math
from .tiny import IGNORE, Batch


@dataclass(frozen=True, slots=True)
class Run:
    """What a run leaves to compare. Parameters by name, tied ones once, frozen ones without a gradient."""

    losses: tuple[float, ...]
    """Per step: the mean over all its labels."""
    grad_norms: tuple[float, ...]
    """Per step, before clipping."""
    gradients: dict[str, Tensor]
    """Of the first step, before clipping."""
    start: dict[str, Tensor]
    end: dict[str, Tensor]


def reference(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    steps: int = 5,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
) -> Run:
    """Train a copy of the model; see `train`."""
    return train(
        copy.deepcopy(model),
        batches,
        steps=steps,
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        lr=lr,
        weight_decay=weight_decay,
    )


def train(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    steps: int = 5,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
) -> Run:
    """Train the model itself with AdamW, a step on every ``accumulate`` batches, starting over when they run out.

    The loss of a step is the mean over the labels of all its batches, however unequally these are filled.
    """
    model.train()
    start = parameters(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay)
    losses, norms, first = [], [], dict[str, Tensor]()
    for step in range(steps):
        chosen = [batches[(step * accumulate + i) % len(batches)] for i in range(accumulate)]
        losses.append(backward(model, chosen))
        first = first or gradients(model)
        limit = math.inf if max_grad_norm is None else max_grad_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, limit)))
        optimizer.step()
        optimizer.zero_grad()
    return Run(tuple(losses), tuple(norms), first, start, parameters(model))


def backward(model: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """Add the gradient of the mean loss over all labels of the batches to ``.grad``; return that loss."""
    counts = [label_count(model, batch) for batch in batches]
    total = 0.0
    with float64_math():
        for batch, count in zip(batches, counts, strict=True):
            if count:  # HF's mean over no labels is not a number
                loss = loss_of(model, batch) * (count / sum(counts))
                loss.backward()
                total += float(loss.detach())
    return total


def loss_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """HF's loss; of a model without one, the mean over rows of the sum over outputs, each with a weight of its own."""
    outputs = model(**batch)
    if outputs.get("loss") is not None:
        return cast(Tensor, outputs["loss"])
    weighted = [out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out) for out in outputs.to_tuple()]
    return torch.stack([out.sum() for out in weighted]).sum() / label_count(model, batch)


def label_count(model: PreTrainedModel, batch: Batch) -> int:
    """How many labels the loss averages over: causal models drop the first of each row; without labels, the rows."""
    labels = batch.get("labels")
    if labels is None:
        return len(next(iter(batch.values())))
    shifts = getattr(model, "loss_type", None) in ("ForCausalLM", None)  # None, as in GPT-2, is HF's default: causal
    return int(((labels[..., 1:] if shifts and labels.dim() > 1 else labels) != IGNORE).sum())


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


_cache: dict[Hashable, Run] = {}


def cached(key: Hashable, make: Callable[[], Run]) -> Run:
    """Return the run made for the key before in this process, or make it. Ranks are reused, so this pays there too."""
    if key not in _cache:
        _cache[key] = make()
    return _cache[key]
