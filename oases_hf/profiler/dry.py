"""One layer as a rank would hold and run it, made of tensors without data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedModel

from ..convert import block_parameters, stack_of
from ..models import Block, family_of
from ..models.family import Row
from ..models.shard import Placement, Sharder, check_layer, fuse_norms, shard_layer
from ..parallel.actions import at_once
from ..parallel.casts import Casts
from ..parallel.link import Link
from ..parallel.mesh import Axis
from ..parallel.sharding import Layout
from ..runtime import block as runtime
from ..schedule import Backward, Recompute
from .layer import Autocast
from .stopwatch import KeptBytes, PeakBytes


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of attention, from shapes."""
    return int(sdpa_flop_count(query, key, value))


COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""The kernel that fake tensors take, which torch's counter does not know."""


class _RMSNorm(torch.autograd.Function):
    """What torch's RMSNorm keeps on GPUs: its input, and a number for each row. What it computes is of no use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, x.new_zeros(x.shape[:-1], dtype=torch.float32), weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[2]
        return grads[0] * weight, None, torch.zeros_like(weight), None


@contextmanager
def kept_as_on_gpus() -> Iterator[None]:
    """Let operators that are one kernel on GPUs, and several on CPUs, keep inside what they keep there.

    For all threads, and only where values do not matter: they are wrong.
    """
    own = F.rms_norm
    F.rms_norm = cast(Any, _RMSNorm.apply)
    try:
        yield
    finally:
        F.rms_norm = own


@dataclass(frozen=True)
class Held:
    """Bytes of one block.

    Attributes:
        graph: what its graph keeps.
        temporary: the most beside that, in recompute or backward.
        shared: of ``graph``, what that of another sub-batch keeps the very same of.
    """

    graph: int
    temporary: int
    shared: int


@dataclass(frozen=True)
class Operations:
    """Floating point operations of one block in the forward of one row: all, of linear layers, of the last of these."""

    all: int
    linear: int
    last: int


class DryLayer:
    """The layer of a model of one, sharded for a rank of a group that is not there.

    Args:
        model: of fake tensors; changed.
        degree: ranks that split the layer.
        rank: of them.
        replicas: groups of such ranks.

    Raises:
        UnsupportedModelError: the layer cannot be sharded.
        ConfigError: the degree is too high.
    """

    def __init__(self, model: PreTrainedModel, degree: int, rank: int, replicas: int) -> None:
        family, self._model = family_of(model.config), model.train()
        (layer,) = stack_of(model, family)
        check_layer(layer, family)
        shares = [family.units(model.config, degree, each) for each in range(degree)]
        placement = Placement(Link(Axis(tuple(range(degree)), rank), replicas), shares)
        sharder = Sharder(rank)
        fuse_norms(model, layer, family)
        shard_layer(layer, family, [placement] * len(family.blocks), sharder)
        self._layer, self._family, self._link = layer, family, placement.link
        self._layouts = sharder.layouts

    def parameters(self, block: int, rank: int) -> int:
        """Elements of a block that any rank of the group holds."""
        return sum(math.prod(self._layout(p).local_shape(rank)) for p in self._block_parameters(block))

    def unowned(self, block: int, rank: int) -> int:
        """Of these, those that have no owner."""
        layouts = map(self._layout, self._block_parameters(block))
        return sum(math.prod(layout.local_shape(rank)) for layout in layouts if not layout.ownable)

    def _block_parameters(self, block: int) -> tuple[nn.Parameter, ...]:
        return block_parameters(self._layer, self._family.blocks[block])

    def _layout(self, parameter: nn.Parameter) -> Layout:
        return self._layouts.get(parameter) or Layout(tuple(parameter.shape))

    def run(self, rows: int, sequence: int, autocast: Autocast) -> tuple[Held, ...]:
        """What each block holds of ``rows`` of so many tokens."""
        device = self._model.device
        context = self._context(torch.zeros(rows, sequence, dtype=torch.long), autocast)
        for parameter in self._layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        found = []
        for i, block in enumerate(self._family.blocks):
            kept, peak = KeptBytes(self._model.parameters(), on_gpu=True), PeakBytes(device)
            leaf = torch.zeros(rows, sequence, self._model.config.hidden_size, dtype=self._model.dtype)
            grad, other = torch.zeros_like(leaf), torch.zeros_like(leaf).requires_grad_()
            leaf.requires_grad_()
            ready, casts = self._ready(block, context), Casts()
            with kept_as_on_gpus(), autocast(), self._link.executing(weight_grads=at_once, unread=True, casts=casts):
                with kept(Recompute(i, 0)), peak(Recompute(i, 0)):
                    share = ready.partial(leaf, 0)
                with kept(Recompute(i, 1)):
                    ready.partial(other, 1)
            with autocast(), peak(Backward(i, 0)):
                of = leaf if ready.norm_of_sum else share.detach()
                through = ready.norm_grad(of, grad) if ready.norm else grad
                torch.autograd.backward(share, through.to(share.dtype))
            graph = kept.bytes[i]
            made = max(peak.bytes[Backward, i], peak.bytes[Recompute, i] - graph)
            found.append(Held(graph, max(0, made), kept.shared[i]))
        return tuple(found)

    def operations(self, sequence: int, autocast: Autocast) -> tuple[Operations, ...]:
        """What each block computes in the forward of one row of so many tokens."""
        context = self._context(torch.zeros(1, sequence, dtype=torch.long), autocast)
        found = []
        for block in self._family.blocks:
            x = torch.zeros(1, sequence, self._model.config.hidden_size, dtype=self._model.dtype)
            ready = self._ready(block, context)
            counter = FlopCounterMode(display=False, custom_mapping=COUNTED)
            with counter, torch.no_grad(), autocast(), self._link.executing():
                ready.partial(x, 0)
            linears = {path: self._layer.get_submodule(path) for path in block.linears}
            sizes = {path: 2 * sequence * cast(Tensor, module.weight).numel() for path, module in linears.items()}
            last = sum(size for path, size in sizes.items() if isinstance(block.linears[path], Row))
            found.append(Operations(counter.get_total_flops(), sum(sizes.values()), last))
        return tuple(found)

    def _ready(self, block: Block, context: dict[str, Any]) -> runtime.Block:
        """The block as the executor has it."""
        norm, of_sum = None, False
        if block.join:
            norm, of_sum = self._layer.get_submodule(block.join.norm), block.join.of == "sum"
        return runtime.Block(
            block.name, self._link, lambda x, k: block.run(self._layer, x, **context), (), norm, of_sum
        )

    def _context(self, tokens: Tensor, autocast: Autocast) -> dict[str, Any]:
        """The arguments that Hugging Face's loop gives the layer beside the hidden tensor.

        With a cache, which is then left out: else the loop would have to read the positions to do without a mask.
        """
        found: dict[str, Any] = {}

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.update({**dict(zip(self._family.positional, args[1:], strict=False)), **kwargs})

        self._model.config.use_cache = True
        handle = self._layer.register_forward_pre_hook(look, with_kwargs=True)
        with torch.no_grad(), autocast():
            cast(nn.Module, self._model.base_model)(input_ids=tokens)
        handle.remove()
        return {name: None if name in self._family.cache else value for name, value in found.items()}
