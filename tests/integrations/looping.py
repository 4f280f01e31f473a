"""A training loop of one's own on Accelerate, the same with OasesPlugin and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from oases_hf import OasesPlugin

from .. import reference as plain
from ..parallel import full_gradients, full_parameters
from ..parity import float64_math
from ..tiny import Batch, tiny_llama
from .collectives import Call, recorded
from .fitting import alone, rows

Settings = Mapping[str, Any] | None
Backward = Callable[[Accelerator, PreTrainedModel, Batch], None]


@dataclass(frozen=True, slots=True)
class Loop:
    """What a loop leaves on one rank. Tensors are whole, by parameter name."""

    gradients: dict[str, Tensor]
    """Of the first step, after clipping."""
    norms: tuple[float, ...]
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    calls: tuple[tuple[Call, ...], ...]
    """Per batch."""


def set_up(
    settings: Settings,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    model: Mapping[str, Any] | None = None,
) -> tuple[Accelerator, PreTrainedModel]:
    """On a rank: an Accelerator and a model, converted unless there are no settings."""
    if settings is None:
        alone()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    accelerator.scaler = scaler
    made = tiny_llama(**(model or {}))
    return accelerator, made if settings is None else OasesPlugin(**settings).install(accelerator, made)


def one_loss(accelerator: Accelerator, model: PreTrainedModel, batch: Batch) -> None:
    accelerator.backward(model(**batch).loss)


def loop(settings: Settings, accumulate: int = 1, backward: Backward = one_loss, max_norm: float = 0.1) -> Loop:
    """On a rank: train on 12 rows, in batches of 2."""
    accelerator, model = set_up(settings, accumulate)
    start = parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    data: Iterator[Batch]
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(cast(Any, rows(12)), batch_size=2))
    gradients: dict[str, Tensor] = {}
    norms: list[float] = []
    calls: list[tuple[Call, ...]] = []
    model.train()
    for batch in data:
        with float64_math(), accelerator.accumulate(model), recorded() as seen:
            backward(accelerator, model, batch)
        calls.append(tuple(seen))
        with float64_math():
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
                gradients = gradients or gradients_of(model)
                optimizer.step()
                optimizer.zero_grad()
    return Loop(gradients, tuple(norms), start, parameters(model), tuple(calls))


def parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copies of the full parameters."""
    return full_parameters(model) if hasattr(model, "oases") else plain.parameters(model)


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copies of the full gradients."""
    return full_gradients(model) if hasattr(model, "oases") else plain.gradients(model)
