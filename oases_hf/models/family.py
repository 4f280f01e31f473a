"""What a model family declares: how its layers are cut into blocks, and its weights over ranks.

A family is a table; :mod:`oases_hf.convert` and :mod:`oases_hf.runtime` do the work. The math stays
HF's: a block calls the layer's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig

from ..errors import UnsupportedModelError
from ..parallel.sharding import Span


class Part(NamedTuple):
    """The span of one rank along something that is split, in elements, and how many there are in all."""

    span: Span
    of: int


# By the name of what a family splits: "query", "key_value", "ffn".
Units = Mapping[str, Part]


@dataclass(frozen=True)
class Column:
    """A linear layer split by output features, made of sections that are each split by a unit."""

    sections: tuple[str, ...]

    def __init__(self, *sections: str) -> None:
        object.__setattr__(self, "sections", sections)


@dataclass(frozen=True)
class Row:
    """A linear layer split by input features; the last thing its block computes."""

    unit: str


@dataclass(frozen=True)
class Block:
    """One block of a layer: everything between two all-reduces.

    Attributes:
        name: how messages and plans call it.
        entry: path in the layer of the module that the residual stream goes through first.
        run: computes the block's output from ``(layer, hidden [b, S, H], **context)``; with the
            linears sharded, that is this rank's share.
        linears: path in the layer of each sharded linear, and how it is split.
    """

    name: str
    entry: str
    run: Callable[..., Tensor]
    linears: Mapping[str, Column | Row]


@dataclass(frozen=True)
class Family:
    """A kind of model that can be converted.

    Attributes:
        model_types: the ``config.model_type`` it serves.
        stack: path in the base model of the ModuleList of layers.
        blocks: the blocks of a layer, in order.
        units: the spans of one rank, from ``(config, degree, rank)``; raises ConfigError when the
            degree is too high.
        localize: sets the attributes that HF's code reads sizes from, from ``(layer, units)``.
        per_sample: names of the layer's arguments whose first dimension is the batch.
        cache: names of the layer's argument that holds the key/value cache.
        dropout: whether a block draws random numbers in training.
    """

    model_types: tuple[str, ...]
    stack: str
    blocks: tuple[Block, ...]
    units: Callable[[PretrainedConfig, int, int], Units]
    localize: Callable[[nn.Module, Units], None]
    per_sample: tuple[str, ...]
    cache: tuple[str, ...]
    dropout: Callable[[PretrainedConfig], bool]
    positional: tuple[str, ...] = field(default=())


def family_of(config: PretrainedConfig | Any) -> Family:
    """The family that serves ``config.model_type``.

    Raises:
        UnsupportedModelError: there is none.
    """
    from .registry import FAMILIES

    model_type = getattr(config, "model_type", None)
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    served = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UnsupportedModelError(
        f"model_type {model_type!r} has no family declaration; served are: {served}. "
        f"The README says how to declare one."
    )
