"""The same few AdamW steps, in one plain process and on the ranks of a TMP world."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from ..integrations.accelerate import OasesPlugin
from .settings import Settings
from .subject import Subject
from .tasks import Batch, split

MICRO_BATCHES = 2

Backward = Callable[[Batch], float]


class Watch(Protocol):
    """Who looks at a run while it goes."""

    def backward_done(self, step: int, loss: float) -> None:
        """See the gradients of a step, counted from 0, and its loss."""

    def step_done(self, step: int) -> None:
        """See what the optimizer made of the parameters; change them, if need be, for the next step."""


def train(optimizer: Any, batches: Iterable[Batch], backward: Backward, watch: Watch) -> None:
    """Step on every batch.

    Args:
        optimizer: of the model that ``backward`` is of.
        batches: one per step.
        backward: computes gradients of a batch, and returns its loss.
        watch: told of every step.
    """
    for step, batch in enumerate(batches):
        watch.backward_done(step, backward(batch))
        optimizer.step()
        watch.step_done(step)
        optimizer.zero_grad()


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """The optimizer of all three runs."""
    return torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)


def plain_backward(model: PreTrainedModel, subject: Subject, parts: int = 1) -> Backward:
    """What one process does with a batch, whole or in ``parts`` micro-batches."""

    def backward(batch: Batch) -> float:
        total = 0.0
        pieces: Sequence[Batch] = split(batch, parts)
        counts = [subject.task.count(piece) for piece in pieces]
        for piece, count in zip(pieces, counts, strict=True):
            if count:  # HF's mean over no items is not a number
                with subject.autocast(model.device):
                    loss = model(**piece).loss * (count / sum(counts))
                loss.backward()
                total += float(loss)
        return total

    return backward


def use_other_attention(model: PreTrainedModel) -> bool:
    """Let ``model`` compute attention by another implementation of the same formula, if it has one."""
    ours = model.config._attn_implementation
    other = "sdpa" if ours == "eager" else "eager"
    if other == "sdpa" and not (model._supports_sdpa and not getattr(model.config, "attn_logit_softcapping", None)):
        return False
    model.set_attn_implementation(other)
    return True


def parallel(subject: Subject, device: torch.device) -> tuple[PreTrainedModel, Any, Backward]:
    """This rank's part of the model, its optimizer, and what it does with a batch; every rank calls it.

    Raises:
        ConfigError: ranks, settings and model do not go together.
        UnsupportedModelError: the model cannot be sharded.
    """
    settings = subject.settings
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if settings.dtype == "mixed" else "no")
    plugin = OasesPlugin(
        tmp_size=settings.tmp_size,
        schedule=settings.schedule,
        sub_batches=settings.sub_batches,
        defer_weight_grads=settings.defer_weight_grads or None,
        shard_optimizer="off",  # gradients are compared on every rank
    )
    with redirect_stdout(io.StringIO()):  # the report says what its banner does
        model = plugin.install(accelerator, subject.make(device))
    prepared, optimizer = accelerator.prepare(model, adamw(model, settings))

    def backward(batch: Batch) -> float:
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        return float(loss)

    return model, optimizer, backward
