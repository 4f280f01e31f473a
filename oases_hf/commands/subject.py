"""What a command is asked about: a model as its config says, and how it computes."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import ConfigError
from ..models import family_of
from ..models.reading import WEIGHTS, class_of, read_config
from ..profiler import Architecture, Autocast


def architecture_of(options: argparse.Namespace) -> Architecture:
    """The model of the options that ``add_model`` adds.

    Its config says what a model made from it would: so are tables that a training measured found again.

    Raises:
        ConfigError: it cannot be read, or does not take so many tokens.
        UnsupportedModelError: no family serves it.
    """
    config = read_config(options.model, options.config)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and options.seq > most:
        raise ConfigError(f"--seq {options.seq}: the model takes up to {most} tokens")
    family_of(config)
    model = Architecture(class_of(config), config, WEIGHTS[options.dtype])
    with FakeTensorMode():
        made = model.of_one_layer().config
    config._attn_implementation, config.dtype = made._attn_implementation, model.dtype
    return model


def autocast_of(options: argparse.Namespace, device: torch.device) -> Autocast:
    """Makes the context that training computes in."""
    return partial(torch.autocast, device.type, torch.bfloat16, enabled=options.dtype == "mixed")
