"""Putting a family's declaration to work on the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.pytorch_utils import Conv1D

from ..errors import UnsupportedModelError
from ..parallel.layers import BlockEntry, FusedRMSNorm, JoinNorm, adopt
from ..parallel.linear import ColumnParallel, RowParallel
from ..parallel.link import Link
from ..parallel.sharding import Layout, Slice, Span
from .family import Column, Family, Part, Row, Units


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
    """Raise UnsupportedModelError unless ``layer`` is Hugging Face's, and what ``family`` splits are plain linears."""
    for block in family.blocks:
        for path in block.linears:
            module = layer.get_submodule(path)
            if type(module) not in (nn.Linear, Conv1D):
                raise UnsupportedModelError(
                    f"{path} is a {type(module).__name__}, neither nn.Linear nor Conv1D; load it unquantised"
                )
    for path, module in layer.named_modules():
        kind, own = type(module), "forward" in vars(module)
        if kind.__module__.split(".")[0] not in ("torch", "transformers") or own:
            raise UnsupportedModelError(
                f"{path or 'a layer'} is a {kind.__name__} of {kind.__module__}{' with a forward of its own' * own}: "
                f"blocks call the parts of Hugging Face's layers, not changed ones; change what is around the layers, "
                f"or declare a family"
            )


@dataclass(frozen=True)
class Placement:
    """Where a block is: who shares its weights, and what each of them has.

    Attributes:
        link: the ranks that share the weights.
        shares: for each of them, its part of everything that is split.
    """

    link: Link
    shares: list[Units]

    @property
    def own(self) -> Units:
        """This rank's part."""
        return self.shares[self.link.axis.rank]


def fuse_norms(model: nn.Module, layer: nn.Module, family: Family) -> None:
    """Let all RMSNorms of ``model``, in its layers and behind them, compute in one kernel, if ``family`` says they can.

    Args:
        model: of ``family``.
        layer: one of its layers, which says what class its norms have.
        family: the declaration.
    """
    kind = type(layer.get_submodule(family.blocks[0].entries[0]))
    if family.rms_norms and kind is not nn.RMSNorm:
        for module in model.modules():
            if type(module) is kind:
                adopt(module, FusedRMSNorm)


def shard_layer(layer: nn.Module, family: Family, placements: Sequence[Placement], sharder: Sharder) -> None:
    """Make one layer parallel, in place: its linears hold a rank's part, its blocks' entries sum gradients.

    Args:
        layer: a whole layer of a model of ``family``, checked by :func:`check_layer`.
        family: the declaration.
        placements: of the layer's blocks, in order.
        sharder: of this rank.

    Raises:
        UnsupportedModelError: a linear is not of the declared size.
    """
    own: dict[str, Part] = {}
    for block, placement in zip(family.blocks, placements, strict=True):
        for path, split in block.linears.items():
            _shard_linear(layer.get_submodule(path), split, placement, sharder)
        for entry in map(layer.get_submodule, block.entries):
            adopt(entry, BlockEntry, link=placement.link)
        if block.join:
            adopt(layer.get_submodule(block.join.norm), JoinNorm, link=placement.link)
        own |= {unit: placement.own[unit] for split in block.linears.values() for unit in split.units}
    family.localize(layer, own)


def _shard_linear(module: Any, split: Column | Row, placement: Placement, sharder: Sharder) -> None:
    link, shares = placement.link, placement.shares
    transposed = isinstance(module, Conv1D)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    weight_shape = tuple(module.weight.shape)
    match split:
        case Column():
            spans = _column_spans(weight_shape[out_dim], split, shares)
            sharder(module, "weight", _layout(weight_shape, out_dim, spans, link))
            if module.bias is not None:
                sharder(module, "bias", _layout(tuple(module.bias.shape), 0, spans, link))
            setattr(module, "nf" if transposed else "out_features", module.weight.shape[out_dim])
            adopt(module, ColumnParallel, link=link, transposed=transposed)
        case Row(unit):
            rows: list[tuple[Span, ...]] = [(units[unit].span,) for units in shares]
            sharder(module, "weight", _layout(weight_shape, in_dim, rows, link))
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


def _layout(shape: tuple[int, ...], dim: int, spans: list[tuple[Span, ...]], link: Link) -> Layout:
    """Ranks whose spans are the same share the sum of a gradient; replicas have the same slices once more."""
    slices = tuple(Slice(dim, each) for each in spans) * link.replicas
    shared = len(set(spans)) < len(spans)
    return Layout(shape, slices, partial_grad=shared, replicas=1 if shared else link.replicas)
