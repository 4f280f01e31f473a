"""Attempts that should be refused, and what comes of them on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, Trainer

from oases_hf import OasesCallback, OasesConfig, OasesPlugin
from oases_hf.errors import OasesError

from ..families import FAMILIES
from ..tiny import tiny_llama
from .fitting import arguments, rows

Attempt = Callable[[PreTrainedModel], object]


class Refusal(NamedTuple):
    """An attempt made on so many ranks, the pattern of the error and its message, and whose model it is made on."""

    attempt: Attempt
    world: int
    expected: str
    family: str | None = None


def install(model: nn.Module, accelerator: Accelerator | None = None, **settings: Any) -> PreTrainedModel:
    """Convert a model for a loop of one's own."""
    return OasesPlugin(**settings).install(accelerator or Accelerator(cpu=True), cast(PreTrainedModel, model))


def trainer(
    model: nn.Module | None,
    arguments_: dict[str, Any] | None = None,
    oases: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """Build a Trainer with the callback."""
    return Trainer(
        cast(Any, model),
        arguments(**(arguments_ or {})),
        train_dataset=cast(Any, rows(4)),
        callbacks=[OasesCallback(OasesConfig(**(oases or {})))],
        **options,
    )


def refusal(attempt: Attempt, family: str | None = None) -> tuple[str, bool]:
    """On a rank: what is said, and whether the model is still whole."""
    model = FAMILIES[family].model() if family else tiny_llama()
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    try:
        attempt(model)
    except OasesError as error:
        whole = shapes == {name: value.shape for name, value in model.state_dict().items()}
        return f"{type(error).__name__}: {error}", whole and not hasattr(model, "oases")
    return "nothing", False
