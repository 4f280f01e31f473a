"""The list of a model's layers, which HF's own loop runs as one overlapped stack.

While the base model's forward runs, iterating over a :class:`StackList` yields a single callable that
runs all layers through the executor; at any other time, and whenever the executor cannot serve a
call (a key/value cache, captured hidden states), it is the plain list of layers, which communicate by
themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..parallel.gradients import GradientSync
from ..parallel.link import Link
from ..parallel.rng import DropoutSeeds
from ..schedule import (
    Instruction,
    Schedule,
    check,
    defer_weight_grads,
    kind,
    reduce_grads,
    without_backward_below,
)
from .executor import Block, Run
from .node import run_recorded

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerBlock:
    """One block of every layer.

    Attributes:
        name: for messages.
        run: computes it from ``(layer, hidden, **context)``.
        norm: path in the layer of the norm that the reduced output goes through, if any.
        norm_of_sum: the norm is of the stream and the output together.
    """

    name: str
    run: Callable[..., Tensor]
    norm: str | None = None
    norm_of_sum: bool = False


@dataclass
class Stack:
    """What a :class:`StackList` needs to run; the owner of everything that outlives one forward.

    Attributes:
        path: where the stack is in the model, for messages.
        blocks: the blocks of a layer, in order.
        block_parameters: the parameters of each block of the whole stack, in order.
        per_sample: names of the layers' arguments whose first dimension is the batch.
        cache: names of the layers' argument that holds a key/value cache.
        positional: names of the arguments that the loop passes by position.
        schedule: the schedule's name.
        sub_batches: into how many parts to split a batch.
        defer: put weight gradients off until the input gradient's all-reduce runs.
        seeds: of dropout; None when the model has none.
        training: the base model is in training mode, as of its last forward.
    """

    path: str
    blocks: tuple[LayerBlock, ...]
    block_parameters: tuple[tuple[nn.Parameter, ...], ...]
    per_sample: tuple[str, ...]
    cache: tuple[str, ...]
    positional: tuple[str, ...]
    link: Link
    gradients: GradientSync
    schedule: str
    sub_batches: int
    defer: bool
    seeds: DropoutSeeds | None
    training: bool = True
    plain: bool = False
    reduce_now: bool = False
    _inside: bool = False
    _live: WeakSet[Run] = field(default_factory=WeakSet)
    _said: set[str] = field(default_factory=set)

    def enter(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Forward pre-hook of the base model: from here on, iterating means running."""
        capturing = any(_wants(module, kwargs, what) for what in ("output_hidden_states", "output_attentions"))
        if capturing:
            self._say("hidden states or attentions are asked for: layers run one by one, without overlap")
        self._inside = not capturing and not self.plain
        self.training = module.training

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the base model: iterating yields layers again."""
        self._inside = False

    def run(self, layers: Sequence[nn.Module], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run all layers on ``hidden``, ``[B, S, H]``, with the arguments that HF's loop gives each of them."""
        context = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        if any(context.get(name) is not None for name in self.cache):
            if torch.is_grad_enabled():
                self._say("a key/value cache is in use: no overlap; pass use_cache=False when training")
            for layer in layers:
                hidden = layer(hidden, *args, **kwargs)
            return hidden
        sub_batches = self._split_count(hidden, context)
        batch = hidden.shape[0]
        contexts = [_slice_context(context, self.per_sample, batch, sub_batches, k) for k in range(sub_batches)]
        blocks = [
            Block(
                f"{self.path}.{i}.{block.name}",
                partial(_partial, block.run, layer, contexts),
                parameters,
                None if block.norm is None else layer.get_submodule(block.norm),
                block.norm_of_sum,
            )
            for (i, layer, block), parameters in zip(self._walk(layers), self.block_parameters, strict=True)
        ]
        return self._apply(blocks, hidden, sub_batches)

    def _walk(self, layers: Sequence[nn.Module]) -> Iterator[tuple[int, nn.Module, LayerBlock]]:
        for i, layer in enumerate(layers):
            for block in self.blocks:
                yield i, layer, block

    def _apply(self, blocks: Sequence[Block], hidden: Tensor, sub_batches: int) -> Tensor:
        trained = [i for i, ps in enumerate(self.block_parameters) if any(p.requires_grad for p in ps)]
        recording = torch.is_grad_enabled() and (bool(trained) or hidden.requires_grad)
        first = 0 if hidden.requires_grad or not trained else trained[0]
        schedules = plan_step(
            self.schedule, len(blocks), sub_batches, len(self.blocks), self.defer, first if recording else None
        )
        run = Run(blocks, schedules[0], self.link, self.gradients, self.seeds if self.training else None)
        if not recording:
            return run.forward(hidden)
        self._live.add(run)
        return run_recorded(hidden, run, partial(self._backward_ops, schedules), trainable=True)

    def _backward_ops(self, schedules: tuple[Schedule, Schedule], run: Run) -> Sequence[Instruction]:
        """The backward half: with early reduction when no other run's backward adds to the same gradients."""
        self._live.discard(run)
        early = self.reduce_now and not self._live
        return schedules[early].backward

    def _split_count(self, hidden: Tensor, context: Mapping[str, Any]) -> int:
        batch = hidden.shape[0]
        odd = [name for name in self.per_sample if not _sliceable(context.get(name))]
        if odd and self.sub_batches > 1:
            self._say(f"{odd[0]} of type {type(context[odd[0]]).__name__} cannot be split: one sub-batch, no overlap")
            return 1
        if batch < self.sub_batches:
            self._say(f"a batch of {batch} cannot be split into {self.sub_batches}: {batch} sub-batches, less overlap")
        return max(1, min(self.sub_batches, batch))

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning("%s: %s (said once)", self.path, message)


@cache
def plan_step(
    name: str, blocks: int, sub_batches: int, blocks_per_layer: int, defer: bool, first: int | None
) -> tuple[Schedule, Schedule]:
    """The checked schedule of a step, plain and with early data-parallel reduction.

    Args:
        name: which schedule.
        blocks: blocks of the stack.
        sub_batches: parts of the batch.
        blocks_per_layer: the granularity of recompute of the schedules that have one.
        defer: put weight gradients off.
        first: the first block that needs a backward; None when none does.
    """
    schedule = kind(name).build(blocks, sub_batches, blocks_per_layer)
    if first is None:
        first = blocks
    schedule, first = without_backward_below(schedule, first)
    if defer:
        schedule = defer_weight_grads(schedule)
    check(schedule, blocks, sub_batches, first)
    return schedule, check(reduce_grads(schedule), blocks, sub_batches, first)


def _partial(run: Callable[..., Tensor], layer: nn.Module, contexts: list[dict[str, Any]], x: Tensor, k: int) -> Tensor:
    return run(layer, x, **contexts[k])


def _wants(module: nn.Module, kwargs: Mapping[str, Any], what: str) -> bool:
    asked = kwargs.get(what)
    return bool(getattr(module.config, what, False) if asked is None else asked)


def _sliceable(value: Any) -> bool:
    return value is None or torch.is_tensor(value) or isinstance(value, tuple | list)


def _slice_context(
    context: Mapping[str, Any], per_sample: Sequence[str], batch: int, sub_batches: int, k: int
) -> dict[str, Any]:
    return {
        name: _part(value, batch, sub_batches, k) if name in per_sample and sub_batches > 1 else value
        for name, value in context.items()
    }


def _part(value: Any, batch: int, sub_batches: int, k: int) -> Any:
    """Part ``k`` of what is given per sample; what is broadcast over samples stays whole."""
    if isinstance(value, tuple | list):
        return type(value)(_part(item, batch, sub_batches, k) for item in value)
    if torch.is_tensor(value) and value.dim() > 1 and value.shape[0] == batch:
        return value.tensor_split(sub_batches)[k]
    return value


class StackList(nn.ModuleList):
    """A ModuleList of layers; see the module's docstring."""

    stack: Stack

    def _layers(self) -> list[nn.Module]:
        return list(super().__iter__())

    def _running(self) -> list[Callable[..., Tensor]]:
        return [partial(self.stack.run, self._layers())]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers; one callable for all of them inside the base model's forward."""
        return cast(Iterator[nn.Module], iter(self._running())) if self.stack._inside else super().__iter__()

    def __getitem__(self, index: int | slice) -> Any:
        """One layer, or a list of layers."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        layers = self._layers()[index]
        return self._running() if self.stack._inside and len(layers) == len(self) else layers


@contextmanager
def one_by_one(stack: Stack) -> Iterator[None]:
    """Run layers by HF's own loop inside, each communicating by itself."""
    before, stack.plain = stack.plain, True
    try:
        yield
    finally:
        stack.plain = before
