"""The model that is verified: read once as a config, then made as often as it is needed, equal each time."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..convert import check_plain
from ..errors import ConfigError
from ..models import family_of
from ..models.reading import WEIGHTS, first_line, keep_layers, read_config
from .settings import Settings
from .tasks import Batch, Task, make_batch, task_of

SEQ = 64


@dataclass(frozen=True)
class Subject:
    """A model to make, and what to train it on.

    Attributes:
        config: with all dropout at 0.
        seq: tokens per row.
    """

    settings: Settings
    config: PretrainedConfig
    task: Task
    seq: int

    @classmethod
    def load(cls, settings: Settings) -> Subject:
        """Read the config, and check what can be checked without weights.

        Raises:
            ConfigError: there is no such model or config, or it cannot be split over so many ranks.
            UnsupportedModelError: no family serves it.
        """
        config = read_config(settings.model, settings.config)
        family = family_of(config)
        if settings.layers is not None:
            _keep_layers(config, settings.layers)
        for rank in range(settings.tmp_size):
            family.units(config, settings.tmp_size, rank)
        task = task_of(config, settings.head)
        if task.auto_class == "AutoModelForSequenceClassification" and config.pad_token_id is None:
            config.pad_token_id = 0  # else decoders refuse batches of more than one row
        for name in _dropouts(config):
            setattr(config, name, 0.0)
        return cls(settings, config, task, _seq(config, settings.seq))

    def make(self, device: torch.device) -> PreTrainedModel:
        """A new model on ``device``, in training mode; every call, on every rank, makes the same.

        Raises:
            ConfigError: its weights cannot be read.
            UnsupportedModelError: it is not a plain model.
        """
        auto = getattr(transformers, self.task.auto_class)
        settings, config = self.settings, copy.deepcopy(self.config)
        how: dict[str, Any] = {"dtype": WEIGHTS[settings.dtype], "attn_implementation": settings.attention}
        torch.manual_seed(settings.seed)
        try:
            if settings.model is None:
                model: PreTrainedModel = auto.from_config(config, **how)
                _randomise_vectors(model)
            else:
                model = auto.from_pretrained(settings.model, config=config, **how)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"{settings.name} cannot be loaded: {first_line(error)}") from error
        check_plain(model)
        model.config.use_cache = False
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        cast(nn.Module, model).to(device)
        model.train()
        return model

    def batches(self, device: torch.device) -> list[Batch]:
        """The batch of each step; the same on every rank."""
        settings = self.settings
        made = [
            make_batch(self.config, self.task, settings.batch, self.seq, 1_000_003 * settings.seed + step)
            for step in range(settings.steps)
        ]
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in made]

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context that one plain process computes in."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.settings.dtype == "mixed")


def _keep_layers(config: PretrainedConfig, layers: int) -> None:
    if layers > config.num_hidden_layers:
        raise ConfigError(f"--layers {layers}: the model has {config.num_hidden_layers} layers")
    keep_layers(config, layers)


def _dropouts(config: PretrainedConfig) -> list[str]:
    """The names of all probabilities of dropout, as they are called in one family or another."""
    return [name for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)]


def _seq(config: PretrainedConfig, asked: int | None) -> int:
    most: int = getattr(config, "max_position_embeddings", None) or SEQ
    if config.model_type == "roberta":
        most -= (config.pad_token_id or 0) + 1  # its positions begin behind the padding's
    if asked is not None and asked > most:
        raise ConfigError(f"--seq {asked}: the model takes up to {most} tokens")
    return min(SEQ, most) if asked is None else asked


@torch.no_grad()
def _randomise_vectors(model: PreTrainedModel) -> None:
    """Draw biases and norm weights anew: new ones are zeros and ones, which hide faults in their handling."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
