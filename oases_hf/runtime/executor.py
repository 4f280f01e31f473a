"""The executor: runs the instructions of a schedule on the blocks of a stack.

One :class:`Run` holds the tensors of one forward and its backward, under the keys that
``schedule.check`` keeps facts under. Shapes: B batch, S sequence, H hidden; b is the part of B that
a sub-batch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import assert_never

import torch
from torch import Tensor

from ..parallel.gradients import GradientSync
from ..parallel.linear import Captured, PutOff
from ..parallel.link import Link
from ..parallel.mesh import Pending
from ..parallel.rng import DropoutSeeds, seeded
from ..schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    Instruction,
    Project,
    Recompute,
    ReduceGrads,
    Schedule,
    StartAsync,
    Sync,
    around,
    to_text,
)
from ..schedule.instructions import Tensor as TensorName
from .block import Autocast, Block, Graph, Inner

Key = tuple[int, int]


class Run:
    """The tensors of one forward through a stack and of its backward.

    Args:
        blocks: the blocks, in order.
        schedule: the instructions; ``schedule.check`` says what a right one is.
        link: the ranks that share the blocks' weights.
        gradients: who averages gradients over data-parallel ranks.
        seeds: of dropout; None when there is none.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        schedule: Schedule,
        link: Link,
        gradients: GradientSync,
        seeds: DropoutSeeds | None = None,
    ) -> None:
        self._blocks = blocks
        self._schedule = schedule
        self._link = link
        self._gradients = gradients
        self._seeds = seeds
        self._number = seeds.next_forward() if seeds else 0
        self._sub_batches = schedule.sub_batches
        every = (*schedule.forward, *schedule.backward)
        self._sent = {op.collective for op in every if isinstance(op, StartAsync)}
        self._kept = {(op.block, op.sub_batch) for op in every if isinstance(op, Forward) and op.keep_input}
        self._deferring = any(isinstance(op, BackwardInput) for op in every)
        # Norms behind blocks have a backward, and what they were of is kept, or made again by recompute.
        backward = {(op.block, op.sub_batch) for op in every if isinstance(op, Backward | BackwardInput)}
        remade = {c for c in self._sent if c.tensor == "recomputed"}
        self._keep_joins = backward - {(c.block, c.sub_batch) for c in remade}
        self._autocast = Autocast("cpu", False, torch.bfloat16, True)
        self._hidden: dict[Key, Tensor] = {}
        self._inputs: dict[Key, Tensor] = {}
        self._joins: dict[Key, Tensor] = {}
        self._partials: dict[Collective, Tensor] = {}
        self._inners: dict[Collective, Inner] = {}
        self._graphs: dict[Key, Graph] = {}
        self._put_off: dict[Key, PutOff] = {}
        self._grads: dict[int, Tensor] = {}
        self._flying: dict[Collective, tuple[Tensor, Pending]] = {}
        self._arrived: dict[Collective, Tensor] = {}

    @property
    def kept_bytes(self) -> int:
        """The bytes of the block inputs that are kept for recompute now."""
        kept = (*self._inputs.values(), *self._joins.values())
        return sum(x.numel() * x.element_size() for x in kept)

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the forward half on ``[B, S, H]``."""
        self._autocast = Autocast.of(hidden.device.type)
        for k, part in enumerate(hidden.tensor_split(self._sub_batches)):
            self._hidden[0, k] = part
        self._execute("forward", self._schedule.forward)
        last = len(self._blocks)
        # Popped, not read: a run that held its output would be in a cycle with the autograd node.
        return torch.cat([self._hidden.pop((last, k)) for k in range(self._sub_batches)])

    def backward(self, grad: Tensor, ops: Sequence[Instruction]) -> Tensor:
        """Run ``ops``, a backward half, on the gradient of the output, ``[B, S, H]``; returns that of the input."""
        for k, part in enumerate(grad.tensor_split(self._sub_batches)):
            self._grads[k] = part
        self._execute("backward", ops)
        return torch.cat([self._grads.pop(k) for k in range(self._sub_batches)])

    def _execute(self, half: str, ops: Sequence[Instruction]) -> None:
        for position, op in enumerate(ops):
            try:
                self._step(op)
            except Exception as error:
                block = op.collective.block if isinstance(op, Project | StartAsync | Sync) else op.block
                where = f"{half} schedule, {to_text(op)} of {self._blocks[block].name}"
                error.add_note(f"{where}: {around(ops, position)}")
                raise

    def _step(self, op: Instruction) -> None:
        match op:
            case Forward():
                self._forward(op)
            case Recompute():
                self._recompute(op)
            case Project(collective):
                self._project(collective)
            case StartAsync(collective):
                self._start(collective)
            case Sync(collective):
                self._sync(collective)
            case Backward(block, k):
                self._backward((block, k))
            case BackwardInput(block, k):
                self._backward((block, k))
            case BackwardWeight(block, k):
                put_off = self._put_off.pop((block, k))
                while put_off:  # emptied: what is put off refers to the graph, and the graph to the list
                    put_off.pop(0)()
            case ReduceGrads(block):
                self._gradients.start(self._blocks[block].parameters)
            case _:
                assert_never(op)

    def _forward(self, op: Forward) -> None:
        key = (op.block, op.sub_batch)
        if key in self._kept and not self._from_join(key):
            self._inputs[key] = self._hidden[key]
        with torch.no_grad():
            self._compute(op, "output", self._hidden[key])

    def _recompute(self, op: Recompute) -> None:
        key = (op.block, op.sub_batch)
        if self._from_join(key):
            before = self._blocks[op.block - 1].norm
            assert before is not None
            with torch.no_grad(), self._autocast.again():
                self._inputs[key] = before(self._joins[op.block - 1, op.sub_batch])
        leaf = self._inputs[key].detach().requires_grad_()
        self._graphs[key] = Graph(leaf)
        if self._deferring:
            self._put_off[key] = []
        with torch.enable_grad():
            self._compute(op, "recomputed", leaf)

    def _from_join(self, key: Key) -> bool:
        """Whether a block's input is a norm of what is kept for the block before, so need not be kept itself."""
        before = (key[0] - 1, key[1])
        return before in self._joins and self._blocks[before[0]].norm_of_sum

    def _compute(self, op: Forward | Recompute, tensor: TensorName, x: Tensor) -> None:
        """Run a block on ``x``, ``[b, S, H]``; in pieces, stop before its projections."""
        key = (op.block, op.sub_batch)
        first = Collective(*key, tensor, 0, op.pieces)
        captured: list[Captured] | None = [] if op.pieces > 1 else None
        # Of a recompute that is not sent, only the graph is of use: its last matmul is spared.
        unread = captured is None and tensor == "recomputed" and first not in self._sent
        with self._inside(key, tensor, x.device, captured, unread=unread):
            share = self._blocks[op.block].partial(x, op.sub_batch)
        if captured is None:
            self._made(first, share)
        else:
            pieces = [each.x.flatten(0, -2).tensor_split(op.pieces) for each in captured]
            self._inners[first] = Inner(x.shape, captured, pieces)

    def _project(self, collective: Collective) -> None:
        inner = self._inners[collective.siblings()[0]]
        key = (collective.block, collective.sub_batch)
        device, piece = inner.captured[0].x.device, collective.piece
        recording = torch.set_grad_enabled(collective.tensor == "recomputed")
        with recording, self._inside(key, collective.tensor, device, piece=piece):
            share = inner.project(piece)
        self._made(collective, share)

    def _made(self, collective: Collective, share: Tensor) -> None:
        """Keep a piece of a block's output: for its all-reduce, and for backward."""
        if collective.tensor == "recomputed":
            self._graphs[collective.block, collective.sub_batch].outputs[collective.piece] = share
        if collective in self._sent:
            self._partials[collective] = share.detach()

    @contextmanager
    def _inside(
        self,
        key: Key,
        tensor: TensorName,
        device: torch.device,
        captured: list[Captured] | None = None,
        *,
        unread: bool = False,
        piece: int = 0,
    ) -> Iterator[None]:
        """The state in which a block computes: the same in recompute as in forward."""
        with ExitStack() as stack:
            own, shared = None, ""
            if self._seeds is not None:
                own = self._seeds.own(self._number, *key, piece)
                shared = self._seeds.shared(self._number, *key, piece)
            stack.enter_context(self._link.executing(captured, self._put_off.get(key), unread, shared))
            stack.enter_context(seeded(own, device))
            if tensor == "recomputed":
                stack.enter_context(self._autocast.again())
            yield

    def _start(self, collective: Collective) -> None:
        share = self._partials.pop(collective).contiguous()
        if collective.tensor == "recomputed":
            share = share.clone()  # backward may still need what the graph computed
        self._flying[collective] = share, self._link.axis.start_all_reduce(share)

    def _sync(self, collective: Collective) -> None:
        share, work = self._flying.pop(collective)
        work.wait()
        self._arrived[collective] = share
        pieces = collective.siblings()
        if all(piece in self._arrived for piece in pieces):
            parts = [self._arrived.pop(piece) for piece in pieces]
            inner = self._inners.pop(pieces[0], None)
            self._join(collective, parts[0] if inner is None else torch.cat(parts).view(inner.shape))

    def _join(self, collective: Collective, reduced: Tensor) -> None:
        """Add a reduced tensor to the stream it belongs to."""
        block, k = collective.block, collective.sub_batch
        after = (block + 1, k)
        match collective.tensor:
            case "output":
                self._hidden[after], normed = self._blocks[block].join(self._hidden.pop((block, k)), reduced)
                if normed is not None and (block, k) in self._keep_joins:
                    self._joins[block, k] = normed
            case "recomputed":
                with torch.no_grad(), self._autocast.again():
                    hidden, normed = self._blocks[block].join(self._inputs[block, k], reduced)
                if normed is not None:
                    self._joins[block, k] = normed
                if after not in self._kept and block + 1 < len(self._blocks):
                    self._inputs[after] = hidden
            case "input_grad":
                self._grads[k] = self._grads[k] + reduced
            case _:
                assert_never(collective.tensor)

    def _backward(self, key: Key) -> None:
        graph = self._graphs.pop(key)
        del self._inputs[key]
        outputs = [graph.outputs[piece] for piece in range(len(graph.outputs))]
        grad = self._through_norm(key)
        grads = [grad] if len(outputs) == 1 else grad.flatten(0, -2).tensor_split(len(outputs))
        torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)])
        assert graph.leaf.grad is not None
        self._partials[Collective(*key, "input_grad")] = graph.leaf.grad

    def _through_norm(self, key: Key) -> Tensor:
        """The gradient of a block's reduced output, from that of the stream behind it."""
        block, k = self._blocks[key[0]], key[1]
        if block.norm is None:
            return self._grads[k]
        leaf = self._joins.pop(key).detach().requires_grad_()
        with torch.enable_grad(), self._autocast.again():
            normed = block.norm(leaf)
        torch.autograd.backward(normed, self._grads[k].to(normed.dtype))
        assert leaf.grad is not None
        if block.norm_of_sum:
            self._grads[k] = leaf.grad
        return leaf.grad
