"""What a model family declares: how its layers are cut into blocks, and its weights over ranks.

A family is a table; :mod:`oases_hf.convert` and :mod:`oases_hf.runtime` do the work. The math stays
HF's: a block calls the layer's own modules. Of RMSNorms alone, torch's kernel takes the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig

from ..errors import ConfigError, UnsupportedModelError
from ..parallel.sharding import Span, bounds, head_share


class Part(NamedTuple):
    """The span of one rank along something that is split, in elements, and how many there are in all."""

    span: Span
    of: int


# By the name of what a family splits: "query", "key_value", "ffn".
Units = Mapping[str, Part]


def even_units(degree: int, rank: int, *, heads: int, head_width: int, ffn: int) -> Units:
    """The units ``heads`` and ``ffn`` of a model in which every query head has a key/value head of its own.

    Raises:
        ConfigError: there are more ranks than heads, or than MLP features.
    """
    if degree > ffn:
        raise ConfigError(f"{ffn} MLP features cannot be split over {degree} ranks; choose a degree up to {ffn}")
    share = head_share(heads, heads, degree, rank)
    return {
        "heads": Part(share.query.scaled(head_width), heads * head_width),
        "ffn": Part(bounds(ffn, degree, rank), ffn),
    }


@dataclass(frozen=True)
class Column:
    """A linear layer split by output features, made of sections that are each split by a unit."""

    sections: tuple[str, ...]

    def __init__(self, *sections: str) -> None:
        object.__setattr__(self, "sections", sections)

    @property
    def units(self) -> tuple[str, ...]:
        """What splits it."""
        return self.sections


@dataclass(frozen=True)
class Row:
    """A linear layer split by input features; the last thing its block computes."""

    unit: str

    @property
    def units(self) -> tuple[str, ...]:
        """What splits it."""
        return (self.unit,)


@dataclass(frozen=True)
class Join:
    """A norm between a block's reduced output and the residual stream.

    Attributes:
        norm: path of the norm in the layer.
        of: ``sum``: the stream becomes ``norm(stream + output)`` (BERT); ``output``: it becomes
            ``stream + norm(output)`` (Gemma).
    """

    norm: str
    of: Literal["sum", "output"]


@dataclass(frozen=True)
class Block:
    """One block of a layer: everything between two all-reduces.

    Attributes:
        name: how messages and plans call it.
        entries: paths in the layer of the modules that the residual stream goes through first.
        run: computes the block's output from ``(layer, hidden [b, S, H], **context)``; with the
            linears sharded, that is this rank's share.
        linears: path in the layer of each sharded linear, and how it is split.
        join: the norm that the output goes through, after its all-reduce; None where it is just added.
        dropouts: paths of what has no parameters and belongs to the block, beside its linears' parents.
    """

    name: str
    entries: tuple[str, ...]
    run: Callable[..., Tensor]
    linears: Mapping[str, Column | Row]
    join: Join | None = None
    dropouts: tuple[str, ...] = ()

    @property
    def children(self) -> tuple[str, ...]:
        """The names of the layer's children that the block uses."""
        paths = (*self.entries, *self.linears, *([self.join.norm] if self.join else []), *self.dropouts)
        return tuple(dict.fromkeys(path.split(".")[0] for path in paths))


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
        attention_dropout: name of the config's probability of dropout on attention weights.
        own_dropouts: paths in the layer of the dropouts on what ranks split, whose masks must differ;
            all other dropouts of a model are on what ranks have in common.
        positional: names of the layer's arguments that the loop passes by position.
        rms_norms: blocks' entries, and all norms of their class, are RMSNorms that compute as
            :class:`~oases_hf.parallel.layers.FusedRMSNorm`.
        refuse: why a config cannot be served although its model_type is; None when it can.
    """

    model_types: tuple[str, ...]
    stack: str
    blocks: tuple[Block, ...]
    units: Callable[[PretrainedConfig, int, int], Units]
    localize: Callable[[nn.Module, Units], None]
    per_sample: tuple[str, ...]
    cache: tuple[str, ...]
    attention_dropout: str = "attention_dropout"
    own_dropouts: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    rms_norms: bool = False
    refuse: Callable[[PretrainedConfig], str | None] = lambda config: None


def family_of(config: PretrainedConfig | Any) -> Family:
    """The family that serves ``config.model_type``.

    Raises:
        UnsupportedModelError: there is none, or its config asks for something that none serves.
    """
    from .registry import FAMILIES

    model_type = getattr(config, "model_type", None)
    reasons: list[str] = []
    for family in FAMILIES:
        if model_type in family.model_types:
            reason = family.refuse(config)
            if reason is None:
                return family
            reasons.append(reason)
    if reasons:
        raise UnsupportedModelError(f"{model_type}: {'; '.join(reasons)}")
    served = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UnsupportedModelError(
        f"model_type {model_type!r} has no family declaration; served are: {served}. "
        f"The README says how to declare one."
    )
