"""Putting a family's declaration to work on the layers of a model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.pytorch_utils import Conv1D

from ..errors import UnsupportedModelError
from ..parallel.layers import BlockEntry, adopt
from ..parallel.linear import ColumnParallel, RowParallel
from ..parallel.link import Link
from ..parallel.sharding import Layout, Slice, Span
from .family import Column, Family, Row, Units


class Sharder:
    """Replaces parameters by this rank's part, each once however many modules share it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Weak: a whole parameter goes when its last module has the part, so no second model stays in memory.
        self.replaced = WeakIdKeyDictionary()
        self.layouts: dict[nn.Parameter, Layout] = {}

    def __call__(self, module: nn.Module, name: str, layout: Layout) -> None:
        """Replace parameter ``name`` of ``module``."""
        whole = getattr(module, name)
        part: nn.Parameter | None = self.replaced.get(whole)
        if part is None:
            part = nn.Parameter(layout.local(whole.detach(), self._rank), requires_grad=whole.requires_grad)
            self.replaced[whole] = part
            self.layouts[part] = layout
        setattr(module, name, part)

    def retie(self, model: nn.Module) -> None:
        """Let every module that shares a replaced parameter have the part."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in self.replaced:
                    module._parameters[name] = self.replaced[parameter]


def check_layer(layer: nn.Module, family: Family) -> None:
    """Raise UnsupportedModelError unless every linear that ``family`` declares is a plain one in ``layer``."""
    for block in family.blocks:
        for path in block.linears:
            module = layer.get_submodule(path)
            if type(module) not in (nn.Linear, Conv1D):
                raise UnsupportedModelError(
                    f"{path} is a {type(module).__name__}, neither nn.Linear nor Conv1D; load it unquantised"
                )


def shard_layer(layer: nn.Module, family: Family, shares: list[Units], link: Link, sharder: Sharder) -> None:
    """Make one layer parallel, in place: its linears hold a rank's part, its blocks' entries sum gradients.

    Args:
        layer: a whole layer of a model of ``family``, checked by :func:`check_layer`.
        family: the declaration.
        shares: for each rank of the group, its part of everything that is split.
        link: the group.
        sharder: of this rank.

    Raises:
        UnsupportedModelError: a linear is not of the declared size.
    """
    for block in family.blocks:
        for path, split in block.linears.items():
            _shard_linear(layer.get_submodule(path), split, shares, link, sharder)
        for entry in block.entries:
            adopt(layer.get_submodule(entry), BlockEntry, link=link)
    family.localize(layer, shares[link.axis.rank])


def _shard_linear(module: Any, split: Column | Row, shares: list[Units], link: Link, sharder: Sharder) -> None:
    transposed = isinstance(module, Conv1D)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    weight_shape = tuple(module.weight.shape)
    match split:
        case Column():
            spans = _column_spans(weight_shape[out_dim], split, shares)
            sharder(module, "weight", _layout(weight_shape, out_dim, spans))
            if module.bias is not None:
                sharder(module, "bias", _layout(tuple(module.bias.shape), 0, spans))
            setattr(module, "nf" if transposed else "out_features", module.weight.shape[out_dim])
            adopt(module, ColumnParallel, link=link, transposed=transposed)
        case Row(unit):
            sharder(module, "weight", _layout(weight_shape, in_dim, [(units[unit].span,) for units in shares]))
            setattr(module, "nx" if transposed else "in_features", module.weight.shape[in_dim])
            adopt(module, RowParallel, link=link, transposed=transposed)


def _column_spans(features: int, split: Column, shares: list[Units]) -> list[tuple[Span, ...]]:
    """Each rank's spans of the output features: of each section, one behind the other, split by its unit."""
    offsets, total = [], 0
    for section in split.sections:
        offsets.append(total)
        total += shares[0][section].of
    if total != features:
        raise UnsupportedModelError(f"a linear of {features} output features where its config says {total}")
    sections = list(zip(split.sections, offsets, strict=True))
    return [tuple(units[name].span.scaled(1, offset) for name, offset in sections) for units in shares]


def _layout(shape: tuple[int, ...], dim: int, spans: list[tuple[Span, ...]]) -> Layout:
    """Ranks whose spans are the same share the sum of a gradient."""
    return Layout(shape, tuple(Slice(dim, each) for each in spans), partial_grad=len(set(spans)) < len(spans))
