"""Putting a family's declaration to work on the layers of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UnsupportedModelError
from ..parallel.layers import BlockEntry, ColumnParallel, Link, RowParallel, adopt
from ..parallel.sharding import Layout, Slice
from .family import Column, Family, Row, Units


class Sharder:
    """Replaces parameters by this rank's part, each once however many modules share it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parts: dict[nn.Parameter, nn.Parameter] = {}
        self.layouts: dict[nn.Parameter, Layout] = {}

    def __call__(self, module: nn.Module, name: str, layout: Layout) -> None:
        """Replace parameter ``name`` of ``module``."""
        whole = getattr(module, name)
        part = self._parts.get(whole)
        if part is None:
            part = nn.Parameter(layout.local(whole.detach(), self._rank), requires_grad=whole.requires_grad)
            self._parts[whole] = part
            self.layouts[part] = layout
        setattr(module, name, part)


def check_layer(layer: nn.Module, family: Family) -> None:
    """Raise UnsupportedModelError unless every linear that ``family`` declares is a plain one in ``layer``."""
    for block in family.blocks:
        for path in block.linears:
            module = layer.get_submodule(path)
            if type(module) is not nn.Linear:
                raise UnsupportedModelError(
                    f"{path} is a {type(module).__name__}, not an nn.Linear; load it unquantised"
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
        adopt(layer.get_submodule(block.entry), BlockEntry, link=link)
    family.localize(layer, shares[link.axis.rank])


def _shard_linear(module: Any, split: Column | Row, shares: list[Units], link: Link, sharder: Sharder) -> None:
    match split:
        case Column():
            sharder(module, "weight", _column_layout(tuple(module.weight.shape), split, shares))
            if module.bias is not None:
                sharder(module, "bias", _column_layout(tuple(module.bias.shape), split, shares))
            module.out_features = module.weight.shape[0]
            adopt(module, ColumnParallel, link=link)
        case Row(unit):
            slices = tuple(Slice(1, (units[unit].span,)) for units in shares)
            sharder(module, "weight", Layout(tuple(module.weight.shape), slices))
            module.in_features = module.weight.shape[1]
            adopt(module, RowParallel, link=link)


def _column_layout(shape: tuple[int, ...], split: Column, shares: list[Units]) -> Layout:
    """Each section of the output features, one behind the other, split by its unit."""
    offsets, total = [], 0
    for section in split.sections:
        offsets.append(total)
        total += shares[0][section].of
    if total != shape[0]:
        raise UnsupportedModelError(f"a linear of {shape[0]} output features where its config says {total}")
    slices = tuple(
        Slice(0, tuple(units[s].span.scaled(1, offset) for s, offset in zip(split.sections, offsets, strict=True)))
        for units in shares
    )
    return Layout(shape, slices, partial_grad=len(set(slices)) < len(slices))
