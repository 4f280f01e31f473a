"""An oracle for schedules: runs them on symbolic values, as a runtime would with buffers.

It shares no code with the check of the package. Where the check keeps facts ("the partial is there"),
this keeps *values*, and compares what comes out with the definition of the step:

    forward    h[b+1] = join(h[b], sum(partial(b, h[b])))
    backward   g[b-1] = join(g[b], sum(vjp(b, h[b], g[b]))),  w[b] = wgrad(b, h[b], g[b])

A real all-reduce may finish early by luck, so a buffer counts as poisoned from StartAsync to Sync.
Rows that move between blocks of different degrees keep their value; until they have, nobody reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TypeVar, assert_never

from oases_hf.schedule import Move
from oases_hf.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    Instruction,
    Moved,
    Project,
    Recompute,
    ReduceGrads,
    Schedule,
    Slice,
    StartAsync,
    Sync,
    Tensor,
)

K = TypeVar("K")
V = TypeVar("V")
At = tuple[int, int]  # (block, sub-batch)


class Wrong(Exception):
    """The schedule computes something wrong, or reads what is not there."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A symbolic value, compared by identity: :func:`term` makes each one once."""

    name: str
    of: tuple[Term | int, ...]


@cache
def term(name: str, *of: Term | int) -> Term:
    """The value of applying ``name`` to ``of``."""
    return Term(name, of)


POISON = term("poison")


@dataclass(frozen=True)
class Results:
    """What a step computes: per sub-batch, and the weight gradients per block and sub-batch."""

    outputs: list[Term]
    input_grads: list[Term]
    weight_grads: dict[At, Term]


@cache
def reference(blocks: int, sub_batches: int, first_block: int = 0) -> Results:
    """The step by its definition, one sub-batch after the other and without any schedule."""
    results = Results([], [], {})
    for k in range(sub_batches):
        hidden = [term("input", k)]
        for b in range(blocks):
            hidden.append(term("join", hidden[b], term("sum", term("partial", b, hidden[b]))))
        results.outputs.append(hidden[blocks])
        grad = term("loss_grad", k)
        for b in reversed(range(first_block, blocks)):
            results.weight_grads[b, k] = term("wgrad", b, hidden[b], grad)
            grad = term("join", grad, term("sum", term("vjp", b, hidden[b], grad)))
        results.input_grads.append(grad)
    return results


def _read(store: dict[K, V], key: K, what: str) -> V:
    """What a buffer holds; Wrong if it is absent, or if an all-reduce owns it."""
    value = store.get(key)
    if value is None:
        raise Wrong(f"{what} {key} is read and absent")
    if value is POISON:
        raise Wrong(f"{what} {key} is read while its all-reduce runs")
    return value


def _take(store: dict[K, V], key: K, what: str) -> V:
    value = _read(store, key, what)
    del store[key]
    return value


@dataclass(slots=True)
class Graph:
    """A block computed from ``input`` and kept for backward; without the projections ``to_project`` as yet."""

    made_by: Forward | Recompute
    input: Term
    to_project: set[int]


@dataclass(slots=True)
class Machine:
    """The memory of one rank during a step, and what each instruction does to it."""

    blocks: int
    sub_batches: int
    changes: Mapping[int, Move]
    waiting: dict[Collective, Term] = field(default_factory=dict)  # to be moved to other rows
    hidden: dict[At, Term] = field(default_factory=dict)  # a block's input, in forward
    kept: set[At] = field(default_factory=set)  # whose input the forward kept
    inputs: dict[At, Term] = field(default_factory=dict)  # kept or remade, to recompute from
    inner: dict[tuple[Tensor, int, int], Term] = field(default_factory=dict)  # the partial yet to be projected
    # The buffers of collectives. Piece i of a tensor is written as the whole tensor: the key has the i.
    partials: dict[Collective, Term] = field(default_factory=dict)
    flying: dict[Collective, Term] = field(default_factory=dict)
    arrived: dict[Collective, Term] = field(default_factory=dict)
    graphs: dict[At, Graph] = field(default_factory=dict)
    grads: dict[At, Term] = field(default_factory=dict)  # of a block's output
    queued: dict[At, Term] = field(default_factory=dict)
    weight_grads: dict[At, Term] = field(default_factory=dict)
    reduced: set[int] = field(default_factory=set)

    def step(self, op: Instruction) -> None:
        """Execute one instruction; raises Wrong when it reads or overwrites what it must not."""
        match op:
            case Forward(block, k):
                self.forward(op, _read(self.hidden, (block, k), "hidden"))
            case Recompute(block, k):
                self.recompute(op, _read(self.inputs, (block, k), "input"))
            case Project(collective):
                self.project(collective)
            case StartAsync(Collective(tensor="hidden" | "input" | "grad") as collective):
                self.flying[collective] = self.move(collective, "gather")
            case Sync(Collective(block, k, "hidden" | "input" | "grad" as tensor) as collective):
                if collective not in self.flying:
                    raise Wrong(f"{collective} is awaited and was not started")
                self.deliver(tensor, block, k, self.flying.pop(collective))
            case Slice(Collective(block, k, "hidden" | "input" | "grad" as tensor) as collective):
                self.deliver(tensor, block, k, self.move(collective, "slice"))
            case Slice(collective):
                raise Wrong(f"{collective} is no stream to slice")
            case StartAsync(collective):
                self.flying[collective] = _read(self.partials, collective, "partial")
                self.partials[collective] = POISON
            case Sync(collective):
                self.sync(collective, _take(self.flying, collective, "all-reduce"))
            case Backward(block, k):
                self.add_weight_grad((block, k), self.backward(block, k))
            case BackwardInput(block, k):
                self.queued[block, k] = self.backward(block, k)
            case BackwardWeight(block, k):
                self.add_weight_grad((block, k), _take(self.queued, (block, k), "queue"))
            case ReduceGrads(block):
                self.reduce_grads(block)
            case _:
                assert_never(op)

    def reach(self, tensor: Moved, block: int, k: int, value: Term) -> None:
        """The stream gets from the block before to ``block``, or its gradient the other way."""
        if block in self.changes:
            self.waiting[Collective(block, k, tensor)] = value
        else:
            self.deliver(tensor, block, k, value)

    def move(self, collective: Collective, how: Move) -> Term:
        """Take what waits for ``collective``, if it is to be moved in this way: backward undoes what forward does."""
        forward = how if collective.tensor != "grad" else {"gather": "slice", "slice": "gather"}[how]
        if self.changes.get(collective.block) != forward:
            raise Wrong(f"{collective} does not {how}")
        if collective not in self.waiting:
            raise Wrong(f"{collective} moves before it is there")
        return self.waiting.pop(collective)

    def deliver(self, tensor: Moved, block: int, k: int, value: Term) -> None:
        match tensor:
            case "hidden":
                self.hidden[block, k] = value
            case "input":
                if (block, k) not in self.kept:
                    self.inputs[block, k] = value
            case "grad":
                self.grads[block - 1, k] = value
            case _:
                assert_never(tensor)

    def forward(self, op: Forward, hidden: Term) -> None:
        if op.keep == "input":
            self.kept.add((op.block, op.sub_batch))
            self.inputs[op.block, op.sub_batch] = hidden
        if op.keep == "graph":
            self.graphs[op.block, op.sub_batch] = self.graph(op, hidden)
        self.make_partial("output", op, hidden)

    def recompute(self, op: Recompute, hidden: Term) -> None:
        self.graphs[op.block, op.sub_batch] = self.graph(op, hidden)
        self.make_partial("recomputed", op, hidden)

    def graph(self, op: Forward | Recompute, hidden: Term) -> Graph:
        return Graph(op, hidden, set(range(op.pieces)) if op.pieces > 1 else set())

    def make_partial(self, tensor: Tensor, op: Forward | Recompute, hidden: Term) -> None:
        value = term("partial", op.block, hidden)
        if op.pieces == 1:
            self.write_partial(Collective(op.block, op.sub_batch, tensor), value)
        else:
            self.inner[tensor, op.block, op.sub_batch] = value

    def write_partial(self, collective: Collective, value: Term) -> None:
        if self.partials.get(collective) is POISON:
            raise Wrong(f"{collective} is overwritten while its all-reduce runs")
        self.partials[collective] = value

    def project(self, collective: Collective) -> None:
        at = (collective.block, collective.sub_batch)
        self.write_partial(collective, _read(self.inner, (collective.tensor, *at), "inner"))
        graph = self.graphs.get(at)
        made_by = Recompute if collective.tensor == "recomputed" else Forward
        if graph is not None and isinstance(graph.made_by, made_by):
            graph.to_project.discard(collective.piece)

    def sync(self, collective: Collective, value: Term) -> None:
        del self.partials[collective]
        self.arrived[collective] = value
        pieces = [collective] if collective.pieces == 1 else list(collective.siblings())
        if all(piece in self.arrived for piece in pieces):
            values = [self.arrived.pop(piece) for piece in pieces]
            same = all(other is value for other in values)
            self.join(collective, term("sum", value if same else term("mixed", *values)))

    def join(self, collective: Collective, result: Term) -> None:
        """Do with a whole result what its tensor is for."""
        block, k = collective.block, collective.sub_batch
        match collective.tensor:
            case "output":
                total = term("join", _read(self.hidden, (block, k), "hidden"), result)
                self.reach("hidden", block + 1, k, total)
            case "recomputed":
                # Nobody recomputes from the result of the last block; and what the forward kept is there.
                if (block + 1, k) in self.kept:
                    self.reach("input", block + 1, k, POISON)
                elif block + 1 < self.blocks:
                    total = term("join", _read(self.inputs, (block, k), "input"), result)
                    self.reach("input", block + 1, k, total)
            case "input_grad":
                total = term("join", _read(self.grads, (block, k), "grad"), result)
                self.reach("grad", block, k, total)
            case _:
                raise Wrong(f"{collective} is no sum")

    def backward(self, block: int, k: int) -> Term:
        """Consume the graph: the input's gradient goes to its buffer, the weights' is returned."""
        graph = _take(self.graphs, (block, k), "graph")
        if graph.to_project:
            raise Wrong(f"block {block} runs backward and is not all projected")
        grad = _read(self.grads, (block, k), "grad")
        self.inputs.pop((block, k), None)
        self.write_partial(Collective(block, k, "input_grad"), term("vjp", block, graph.input, grad))
        return term("wgrad", block, graph.input, grad)

    def add_weight_grad(self, at: At, value: Term) -> None:
        if at in self.weight_grads:
            raise Wrong(f"weight gradient {at} is added twice")
        if at[0] in self.reduced:
            raise Wrong(f"weight gradient {at} is added after the reduction of its block")
        self.weight_grads[at] = value

    def reduce_grads(self, block: int) -> None:
        if block in self.reduced:
            raise Wrong(f"block {block} is reduced twice")
        for k in range(self.sub_batches):
            _read(self.weight_grads, (block, k), "weight gradient")
        self.reduced.add(block)

    def end_half(self) -> None:
        """Memory is reused after a half, so an all-reduce still in flight would write over something."""
        if self.flying:
            raise Wrong(f"{', '.join(map(str, self.flying))} runs when the half ends")


def run(
    schedule: Schedule,
    blocks: int,
    sub_batches: int,
    first_block: int = 0,
    changes: Mapping[int, Move] = MappingProxyType({}),
) -> None:
    """Execute ``schedule`` and compare with the reference; raises Wrong."""
    expected = reference(blocks, sub_batches, first_block)
    machine = Machine(blocks, sub_batches, changes)
    for k in range(sub_batches):
        machine.reach("hidden", 0, k, term("input", k))
    for op in schedule.forward:
        machine.step(op)
    machine.end_half()
    for k in range(sub_batches):
        if machine.hidden.get((blocks, k)) is not expected.outputs[k]:
            raise Wrong(f"the output of sub-batch {k} is wrong")
        machine.reach("grad", blocks, k, term("loss_grad", k))
    for op in schedule.backward:
        machine.step(op)
    machine.end_half()
    for at, value in expected.weight_grads.items():
        if machine.weight_grads.get(at) is not value:
            raise Wrong(f"the weight gradient of {at} is wrong")
    for k in range(sub_batches):
        if first_block < blocks and machine.grads.get((first_block - 1, k)) is not expected.input_grads[k]:
            raise Wrong(f"the input gradient of sub-batch {k} is wrong")


def is_right(
    schedule: Schedule, blocks: int, sub_batches: int, changes: Mapping[int, Move] = MappingProxyType({})
) -> bool:
    """Whether ``schedule`` computes the step that the definition does."""
    try:
        run(schedule, blocks, sub_batches, changes=changes)
    except Wrong:
        return False
    return True
