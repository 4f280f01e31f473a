"""The executor: runs the instructions of a schedule on the blocks of a stack.

One :class:`Run` holds the tensors of one forward and its backward, under the keys that ``schedule.check``
keeps facts under. Shapes: B batch, S sequence, H hidden; b is the part of B that a sub-batch is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, assert_never

import torch
from torch import Tensor

from ..parallel.actions import Outside, at_once
from ..parallel.casts import Casts
from ..parallel.gradients import GradientSync
from ..parallel.linear import Captured
from ..parallel.rng import Masks, seeded
from ..schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    Instruction,
    Project,
    Ready,
    Recompute,
    ReduceGrads,
    Slice,
    StartAsync,
    Sync,
    around,
    block_of,
    to_text,
)
from ..schedule.instructions import Reduced
from .block import Autocast, Block, Graph, Inner, Rows
from .flights import Flights
from .watch import Wait, Watch

Key = tuple[int, int]


class Run:
    """The tensors of one forward and its backward.

    Args:
        blocks: in order.
        ready: the schedule.
        rows: how rows are spread over blocks of different degrees.
        gradients: who completes gradients across replicas.
        masks: the seeds of dropout.
        watch: makes a context for each instruction.
        wait: waits for a collective of a block.
        outside: does what is not computation, at this point of the order.

    Attributes:
        masks: likewise; a recording draws anew at each replay.
        reducing: instructions that reduce gradients do so.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        ready: Ready,
        rows: Rows,
        gradients: GradientSync,
        masks: Masks,
        watch: Watch,
        wait: Wait,
        outside: Outside,
    ) -> None:
        self._blocks = blocks
        self._ready = ready
        self._rows = rows
        self._gradients = gradients
        self._watch = watch
        self._outside = outside
        self._flights = Flights(wait, outside)
        self.reducing = True
        self.masks = masks
        self._sub_batches = ready.schedule.sub_batches
        self._autocast = Autocast("cpu", False, torch.bfloat16)
        self._hidden: dict[Key, Tensor] = {}
        self._inputs: dict[Key, Tensor] = {}
        self._joins: dict[Key, Tensor] = {}
        self._partials: dict[Collective, Tensor] = {}
        self._made_in: dict[int, torch.dtype] = {}
        self._inners: dict[Collective, Inner] = {}
        self._graphs: dict[Key, Graph] = {}
        self._put_off: dict[Key, list[Callable[[], None]]] = {}
        self._grads: dict[int, Tensor] = {}
        self._arrived: dict[Collective, Tensor] = {}
        self._casts: defaultdict[tuple[str, int], Casts] = defaultdict(Casts)  # by pass and block

    @property
    def kept_bytes(self) -> int:
        """The bytes of the block inputs that are kept for recompute now."""
        kept = {x.untyped_storage() for x in (*self._inputs.values(), *self._joins.values())}
        return sum(storage.nbytes() for storage in kept)

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the forward half on ``[B, S, H]``."""
        self._autocast = Autocast.of(hidden.device.type)
        # Detached, as the input of every other block is: what is compiled for those serves the first one.
        for k, part in enumerate(self._rows.split(hidden.detach(), self._sub_batches)):
            self._hidden[0, k] = part
        self._execute("forward", self._ready.schedule.forward)
        # Popped, else the run would hold its output: a cycle with the autograd node.
        return self._rows.join([self._hidden.pop((len(self._blocks), k)) for k in range(self._sub_batches)], hidden)

    def backward(self, grad: Tensor, ops: Sequence[Instruction]) -> Tensor:
        """Run ``ops``, a backward half, on the gradient of the output, ``[B, S, H]``; returns that of the input."""
        for k, part in enumerate(self._rows.split(grad, self._sub_batches)):
            self._grads[k] = part
        self._execute("backward", ops)
        return self._rows.join([self._grads.pop(k) for k in range(self._sub_batches)], grad)

    def _execute(self, half: str, ops: Sequence[Instruction]) -> None:
        for position, op in enumerate(ops):
            try:
                with self._watch(op):
                    self._step(op)
                if op in self._ready.last:
                    self._casts.pop(self._ready.last[op], None)
            except Exception as error:
                name = self._blocks[min(block_of(op), len(self._blocks) - 1)].name  # behind the last, its output moves
                error.add_note(f"{half} schedule, {to_text(op)} of {name}: {around(ops, position)}")
                raise

    def _step(self, op: Instruction) -> None:
        match op:
            case Forward():
                self._forward(op)
            case Recompute():
                self._recompute(op)
            case Project(collective):
                self._project(collective, self._inners[collective.siblings()[0]])
            case StartAsync(collective):
                self._start(collective)
            case Slice(collective):
                stream, key = self._stream(collective)
                stream[key] = self._rows.part(stream[key], collective.block)
            case Sync(collective):
                self._sync(collective)
            case Backward(block, k) | BackwardInput(block, k):
                self._backward((block, k))
            case BackwardWeight(block, k):
                put_off = self._put_off.pop((block, k))
                while put_off:  # emptied: what is put off refers to the graph, and the graph to the list
                    put_off.pop(0)()
            case ReduceGrads(block):
                if self._gradients.several_hold(self._blocks[block].parameters):
                    self._outside(partial(self._reduce, block))
            case _:
                assert_never(op)

    def _forward(self, op: Forward) -> None:
        key = (op.block, op.sub_batch)
        if key in self._ready.kept and not self._from_join(key):
            self._inputs[key] = self._hidden[key]
        if op.keep == "graph":
            return self._record(op, "output", self._hidden[key])
        with torch.no_grad():
            self._compute(op, "output", self._hidden[key])

    def _recompute(self, op: Recompute) -> None:
        key = (op.block, op.sub_batch)
        if self._from_join(key):
            with torch.no_grad(), self._autocast.again():
                self._inputs[key] = self._blocks[op.block - 1].normed(self._joins[op.block - 1, op.sub_batch])
        self._record(op, "recomputed", self._inputs[key])

    def _record(self, op: Forward | Recompute, tensor: Reduced, x: Tensor) -> None:
        """Run a block on ``x``, ``[b, S, H]``, and keep its graph."""
        key = (op.block, op.sub_batch)
        leaf = x.detach().requires_grad_()
        self._graphs[key] = Graph(leaf)
        if self._ready.deferring:
            self._put_off[key] = []
        with torch.enable_grad():
            self._compute(op, tensor, leaf)

    def _from_join(self, key: Key) -> bool:
        """Whether a block's input is a norm of what is kept for the block before, so need not be kept itself."""
        before = (key[0] - 1, key[1])
        return before in self._joins and self._blocks[before[0]].norm_of_sum and key[0] not in self._rows.between

    def _compute(self, op: Forward | Recompute, tensor: Reduced, x: Tensor) -> None:
        """Run a block on ``x``, ``[b, S, H]``; in pieces, stop before its projections."""
        key, block = (op.block, op.sub_batch), self._blocks[op.block]
        first = Collective(*key, tensor, 0, op.pieces)
        captured: list[Captured] | None = [] if op.pieces > 1 or block.compiled else None
        with self._inside(first, x.device, captured):
            share = block.partial(x, op.sub_batch)
        if captured is None:
            self._made(first, share)
        elif op.pieces == 1:
            self._project(first, Inner(x.shape, captured, [(each.x,) for each in captured], torch.is_grad_enabled()))
        else:
            pieces = [each.x.flatten(0, -2).tensor_split(op.pieces) for each in captured]
            self._inners[first] = Inner(x.shape, captured, pieces, torch.is_grad_enabled())

    def _project(self, collective: Collective, inner: Inner) -> None:
        with torch.set_grad_enabled(inner.recording), self._inside(collective, inner.captured[0].x.device):
            share = inner.project(collective.piece)
        self._made(collective, share)

    def _made(self, collective: Collective, share: Tensor) -> None:
        """Keep a piece of a block's output: for its all-reduce, and for backward."""
        self._made_in[collective.block] = share.dtype
        if share.requires_grad:
            self._graphs[collective.block, collective.sub_batch].add(collective.piece, share)
        if collective in self._ready.sent:
            self._partials[collective] = share.detach()

    @contextmanager
    def _inside(
        self, collective: Collective, device: torch.device, captured: list[Captured] | None = None
    ) -> Iterator[None]:
        """The state in which a block computes what a collective sums: the same in recompute as in forward."""
        key, block = (collective.block, collective.sub_batch), self._blocks[collective.block]
        recompute = collective.tensor == "recomputed"
        # Of a recompute that is not sent, only the graph is of use: its last matmul is spared.
        unread = recompute and collective not in self._ready.sent
        compiled = block.compiled and captured is not None
        put_off = self._put_off.get(key)
        weight_grads = None if compiled else at_once if put_off is None else put_off.append
        casts = None if compiled else self._casts[collective.tensor, collective.block]
        with ExitStack() as stack:
            link = block.link
            shared = self.masks.shared(*key, collective.piece, link.replica)
            stack.enter_context(link.executing(captured, weight_grads, unread, casts, shared, self._outside))
            stack.enter_context(seeded(self.masks.own(*key, collective.piece), device, self._outside))
            if recompute:
                stack.enter_context(self._autocast.again())
            yield

    def _start(self, collective: Collective) -> None:
        if collective.moves_rows:
            stream, key = self._stream(collective)
            axis, part = self._rows.between[collective.block], stream[key].contiguous()
            self._flights.start(collective, axis.start_gather_rows, part, axis.whole_rows(part))
            return
        share, block = self._partials.pop(collective), self._blocks[collective.block]
        link = block.link
        if link.axis.size == 1:
            self._flights.ground(collective, share)
            return
        sent_as = link.sent_as(share.dtype) if self._ready.schedule.backward else share.dtype
        graph = self._graphs.get((collective.block, collective.sub_batch))
        held = block.hooked or (graph is not None and graph.saved)
        self._flights.start(collective, link.start_all_reduce, share.contiguous().to(sent_as, copy=held))

    def _reduce(self, block: int) -> None:
        if self.reducing:
            self._gradients.start(self._blocks[block].parameters)

    def _sync(self, collective: Collective) -> None:
        tensor = self._flights.land(collective)
        if collective.moves_rows:
            stream, key = self._stream(collective)
            stream[key] = tensor
            return
        self._arrived[collective] = tensor
        if all(piece in self._arrived for piece in collective.siblings()):
            parts = [self._arrived.pop(piece) for piece in collective.siblings()]
            inner = self._inners.pop(collective.siblings()[0], None)
            self._join(collective, parts[0] if inner is None else torch.cat(parts).view(inner.shape))

    def _stream(self, collective: Collective) -> tuple[dict[Any, Tensor], Any]:
        """Where the tensor is whose rows move."""
        if collective.tensor == "grad":
            return self._grads, collective.sub_batch
        store = self._hidden if collective.tensor == "hidden" else self._inputs
        return store, (collective.block, collective.sub_batch)

    def _join(self, collective: Collective, reduced: Tensor) -> None:
        """Add a reduced tensor to the stream it belongs to; sums are in the type of the stream if that is wider."""
        block, k = collective.block, collective.sub_batch
        after = (block + 1, k)
        if collective.tensor != "input_grad":
            reduced = reduced.to(self._made_in[block])  # a norm of it computes in no narrower type
        match collective.tensor:
            case "output":
                self._hidden[after], normed = self._blocks[block].join(self._hidden.pop((block, k)), reduced)
                if normed is not None and (block, k) in self._ready.kept_joins:
                    self._joins[block, k] = normed
            case "recomputed":
                with torch.no_grad(), self._autocast.again():
                    hidden, normed = self._blocks[block].join(self._inputs[block, k], reduced)
                if normed is not None:
                    self._joins[block, k] = normed
                if after not in self._ready.kept and block + 1 < len(self._blocks):
                    self._inputs[after] = hidden
            case _:
                self._grads[k] = self._grads[k] + reduced

    def _backward(self, key: Key) -> None:
        graph = self._graphs.pop(key)
        self._inputs.pop(key, None)
        edges, dtypes = zip(*(graph.outputs[piece] for piece in range(len(graph.outputs))), strict=True)
        grad = self._through_norm(key)
        grads = [grad] if len(edges) == 1 else grad.flatten(0, -2).tensor_split(len(edges))
        torch.autograd.backward(edges, [g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)])
        assert graph.leaf.grad is not None
        self._partials[Collective(*key, "input_grad")] = graph.leaf.grad

    def _through_norm(self, key: Key) -> Tensor:
        """The gradient of a block's reduced output, from that of the stream behind it."""
        block, k = self._blocks[key[0]], key[1]
        if block.norm is None:
            return self._grads[k]
        with self._autocast.again():
            grad = block.norm_grad(self._joins.pop(key), self._grads[k])
        if block.norm_of_sum:
            self._grads[k] = grad
        return grad
