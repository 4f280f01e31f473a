"""What runs the layers of a model as one: by the executor, or by recordings of what that launches.

Whenever neither can serve a call (a key/value cache, captured hidden states), layers run one by one, and communicate by
themselves.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..parallel.actions import Outside, at_once
from ..parallel.gradients import GradientSync
from ..parallel.link import Link
from ..parallel.mesh import Mesh
from ..parallel.rng import DropoutSeeds, Masks, seed_of, seeded
from ..schedule import Instruction, Ready, Step, plan_step
from .block import Block, Rows
from .call import Arguments, Call, Context, contexts_of, distinct
from .compiled import Compiled
from .executor import Run
from .graphs import Graphs, Replayed
from .node import run_recorded
from .signature import UnrecordableError, hooks_inside, is_hooked
from .splitting import Share, parts_of, unsplittable
from .watch import Wait, Watch, just_wait, unwatched

log = logging.getLogger(__name__)

OF_LOSS = "num_items_in_batch"
"""What HF hands down to layers, though it is of the loss; it changes at every batch."""


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
    """What a list of layers needs to run as one; the owner of everything that outlives one forward.

    Attributes:
        path: where the stack is in the model, for messages.
        layers: returns the layers.
        blocks: the blocks of a layer, in order.
        block_parameters: the parameters of each block of the whole stack, in order.
        links: the ranks that share the weights of each block of the whole stack, in order.
        mesh: the ranks.
        per_sample: names of the layers' arguments whose first dimension is the batch.
        cache: names of the layers' argument that holds a key/value cache.
        positional: names of the arguments that the loop passes by position.
        schedule: the schedule's name.
        sub_batches: into how many parts to split a batch.
        graphs_kept: the blocks that are not recomputed.
        defer: put weight gradients off until the input gradient's all-reduce runs.
        seeds: of dropout; None when the model has none.
        training: the base model is in training mode, as of its last forward.
        watch: called with every instruction that runs.
        graphs: recordings, where they are wanted.
        compiled: compiles blocks, where that is wanted.
        wait: called with every collective of a block that is waited for.
    """

    path: str
    layers: Callable[[], Sequence[nn.Module]]
    blocks: tuple[LayerBlock, ...]
    block_parameters: tuple[tuple[nn.Parameter, ...], ...]
    per_sample: tuple[str, ...]
    cache: tuple[str, ...]
    positional: tuple[str, ...]
    links: tuple[Link, ...]
    mesh: Mesh
    gradients: GradientSync
    schedule: str
    sub_batches: int
    graphs_kept: frozenset[int]
    defer: bool
    seeds: DropoutSeeds | None
    training: bool = True
    watch: Watch = unwatched
    graphs: Graphs | None = None
    compiled: Compiled | None = None
    wait: Wait = just_wait
    plain: bool = False
    reduce_now: bool = False
    _inside: bool = False
    _drawing: ExitStack = field(default_factory=ExitStack)
    _live: WeakSet[Any] = field(default_factory=WeakSet)
    _said: set[str] = field(default_factory=set)

    def enter(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Forward pre-hook of the base model: from here on, iterating means running."""
        capturing = any(_wants(module, kwargs, what) for what in ("output_hidden_states", "output_attentions"))
        if capturing:
            self._say("hidden states or attentions are asked for: layers run one by one, without overlap")
        hooked = any(is_hooked(layer) for layer in self.layers())
        if hooked:
            self._say("a layer has hooks of its own: layers run one by one, without overlap")
        self._inside = not (capturing or hooked or self.plain)
        if not self._inside and torch.is_grad_enabled():
            self.gradients.not_early()
        self.training = module.training
        if self.training and self.seeds is not None:
            # The executor seeds its blocks; layers one by one, and hooks, draw from this, alike in the TMP world.
            seed = partial(seed_of, self.seeds.shared(self.seeds.next_forward()))
            self._drawing.enter_context(seeded(seed, next(module.parameters()).device))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the base model: iterating yields layers again."""
        self._drawing.close()
        self._inside = False

    def run(self, layers: Sequence[nn.Module], hidden: Tensor, calls: Sequence[Arguments]) -> Tensor:
        """Run all layers on ``hidden``, ``[B, S, H]``, with the arguments that HF's loop gave each of them."""
        contexts = contexts_of(calls, self.positional, OF_LOSS)
        if any(contexts[0].get(name) is not None for name in self.cache):
            if torch.is_grad_enabled():
                self.gradients.not_early()
                self._say("a key/value cache is in use: no overlap; pass use_cache=False when training")
            for layer, (args, kwargs) in zip(layers, calls, strict=True):
                hidden = layer(hidden, *args, **kwargs)
            return hidden
        ready = self._ready(hidden, self._split_count(hidden, contexts))
        number = self.seeds.next_forward() if self.seeds is not None and self.training else 0
        call = Call(layers, hidden, contexts, ready, self.training, number)
        if not ready.schedule.backward:
            return self._make(call, at_once).forward(hidden)
        run = self._passes(call)
        self._live.add(run)
        return run_recorded(hidden, run, partial(self._backward_ops, ready), trainable=True)

    def _make(self, call: Call, outside: Outside) -> Run:
        """A run of its layers."""
        ready = call.ready
        parts = {
            id(context): self._parts(context, len(call.hidden), ready.schedule.sub_batches)
            for context in distinct(call.contexts)
        }
        compiled = self._compiled(call.layers, call.training)
        run, hooked = compiled or _as_it_is, hooks_inside(call.layers)
        blocks = [
            Block(
                f"{self.path}.{i}.{block.name}",
                link,
                partial(_partial, run(block.run, link.axis.size), layer, parts[id(call.contexts[i])][link.replicas]),
                parameters,
                None if block.norm is None else layer.get_submodule(block.norm),
                block.norm_of_sum,
                compiled is not None,
                hooked,
            )
            for (i, layer, block), link, parameters in zip(
                self._walk(call.layers), self.links, self.block_parameters, strict=True
            )
        ]
        masks = Masks(self.seeds if call.training else None, call.number)
        return Run(blocks, ready, self._rows, self.gradients, masks, self.watch, lambda work: self.wait(work), outside)

    def _compiled(self, layers: Sequence[nn.Module], training: bool) -> Compiled | None:
        """What compiles the blocks of ``layers``, where they can run compiled."""
        why_not = None if self.compiled is None else self.compiled.why_not(layers, training)
        if why_not is not None:
            self._say(f"{why_not}: blocks are not compiled")
        return None if why_not is not None else self.compiled

    def _passes(self, call: Call) -> Run | Replayed:
        """A recording of such a forward and its backward where there can be one, or else a run."""
        if self.graphs is None or not self.graphs.on(call.hidden.device) or self.watch is not unwatched:
            return self._make(call, at_once)
        try:
            if self.gradients.eager:
                raise UnrecordableError("shard_optimizer='reduce' frees gradients")
            return self.graphs.run(call, self._make, self._say, alone=not self._live)
        except UnrecordableError as odd:
            self._say(f"{odd}: kernels are launched one by one, not as a CUDA graph")
        return self._make(call, at_once)

    def _walk(self, layers: Sequence[nn.Module]) -> Iterator[tuple[int, nn.Module, LayerBlock]]:
        for i, layer in enumerate(layers):
            for block in self.blocks:
                yield i, layer, block

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        return tuple(link.axis.size for link in self.links)

    @cached_property
    def _rows(self) -> Rows:
        around = (self.mesh.tmp.size, *self._degrees, self.mesh.tmp.size)
        pairs = [(max(pair), min(pair)) for pair in itertools.pairwise(around)]
        between = {i: self.mesh.axis(*pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]}
        return Rows(max(link.replicas for link in self.links), between)

    def _parts(self, context: Context, batch: int, sub_batches: int) -> dict[int, list[dict[str, Any]]]:
        """A layer's arguments for each sub-batch, by the number of replicas that share its rows."""
        shares = {link.replicas: Share(link.replica, link.replicas, self._rows.multiple) for link in self.links}
        return {n: parts_of(context, self.per_sample, batch, sub_batches, share) for n, share in shares.items()}

    def _ready(self, hidden: Tensor, sub_batches: int) -> Ready:
        """The schedule of a forward of ``hidden``."""
        trained = [i for i, ps in enumerate(self.block_parameters) if any(p.requires_grad for p in ps)]
        recording = torch.is_grad_enabled() and (bool(trained) or hidden.requires_grad)
        first = 0 if hidden.requires_grad or not trained else trained[0]
        step = Step(
            self.schedule,
            sub_batches,
            len(self.blocks),
            self._degrees,
            self.mesh.tmp.size,
            self.graphs_kept,
            self.defer,
        )
        return plan_step(step, first if recording else len(self.links))

    def _backward_ops(self, ready: Ready, run: Run | Replayed) -> Sequence[Instruction]:
        """The backward half: with early reduction when no other run's backward adds to the same gradients."""
        self._live.discard(run)
        self.gradients.begin()
        if self.graphs is not None:
            self.graphs.attach()
        return (ready.early if self.reduce_now and not self._live else ready.schedule).backward

    def _split_count(self, hidden: Tensor, contexts: Sequence[Context]) -> int:
        batch = hidden.shape[0]
        odd = unsplittable(distinct(contexts), self.per_sample)
        if odd is not None and self._rows.multiple > 1:
            raise UnsupportedModelError(
                f"{odd} cannot be split by rows, which replicas of blocks of a degree below tmp_size="
                f"{self.mesh.tmp.size} do; choose degree {self.mesh.tmp.size}, or attention that takes a mask per row"
            )
        if odd is not None and self.sub_batches > 1:
            self._say(f"{odd} cannot be split: one sub-batch, no overlap")
            return 1
        if batch < self.sub_batches:
            self._say(f"a batch of {batch} cannot be split into {self.sub_batches}: {batch} sub-batches, less overlap")
        return max(1, min(self.sub_batches, batch))

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning("%s: %s (said once)", self.path, message)


def _partial(run: Callable[..., Tensor], layer: nn.Module, contexts: list[dict[str, Any]], x: Tensor, k: int) -> Tensor:
    return run(layer, x, **contexts[k])


def _as_it_is(run: Callable[..., Tensor], degree: int) -> Callable[..., Tensor]:
    return run


def _wants(module: nn.Module, kwargs: Mapping[str, Any], what: str) -> bool:
    asked = kwargs.get(what)
    return bool(getattr(module.config, what, False) if asked is None else asked)
