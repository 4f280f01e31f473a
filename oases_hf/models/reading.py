"""Reading what a model is, without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..errors import ConfigError

WEIGHTS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "mixed": torch.float32,
}
"""The dtype of weights, by what users call a precision; ``mixed`` computes under bfloat16 autocast."""


def read_config(model: str | None, config: str | None) -> PretrainedConfig:
    """The config of ``model``, a hub id or folder, or else that in ``config``, a file or its folder.

    Raises:
        ConfigError: there is none.
    """
    name = str(model or config)
    folder = Path(name).is_dir()
    if model is not None and not folder and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ConfigError(f"there is no folder {name}; give that of a model, or a hub id")
    try:
        if model is not None:
            found: PretrainedConfig = AutoConfig.from_pretrained(name)
            return found
        path = Path(name) / "config.json" if folder else Path(name)
        fields = json.loads(path.read_text())
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = "--config" if model is None else "the folder" if folder else "the hub's"
        raise ConfigError(f"{where} {name} cannot be read as a model's config: {first_line(error)}") from error


def class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of the first of the config's ``architectures``; raises ConfigError when transformers has none."""
    name = next(iter(config.architectures or ()), None)
    if name is None:
        raise ConfigError(
            'the config names no architectures; add "architectures": ["…ForCausalLM"], or what it is, to it'
        )
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ConfigError(f"the config's architecture {name} is not a model of transformers {transformers.__version__}")
    return found


def described(config: PretrainedConfig) -> str:
    """What a plan for a model of ``config`` is for: its type, hidden size and layers."""
    return f"{config.model_type}, hidden {config.hidden_size}, {config.num_hidden_layers} layers"


def keep_layers(config: PretrainedConfig, layers: int) -> None:
    """Let ``config`` be of the first so many layers."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def head_width(config: PretrainedConfig) -> int:
    """The features of one attention head."""
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def first_line(error: BaseException) -> str:
    """The first line of what ``error`` says."""
    text = f"no {error} in it" if isinstance(error, KeyError) else str(error)
    return text.strip().partition("\n")[0]
