"""Builders of the five schedules, and passes that turn one schedule into another.

A builder takes the number of blocks and sub-batches and returns instructions; ``blocks_per_layer``
is the granularity of recompute of the schedules that recompute whole layers. Writing ``AR`` for
all-reduces per two-block layer and sub-batch: ``megatron`` 6, ``wang`` 6 (in pieces), ``merak`` 6,
``cross_pass`` 5, ``oases`` 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..plan import ScheduleName, check_schedule_name
from .instructions import (
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
    pieces_of,
)

Ops = Iterable[Instruction]
WANG_PIECES = 4


def _output(block: int, sub_batch: int) -> Collective:
    return Collective(block, sub_batch, "output")


def _recomputed(block: int, sub_batch: int) -> Collective:
    return Collective(block, sub_batch, "recomputed")


def _input_grad(block: int, sub_batch: int) -> Collective:
    return Collective(block, sub_batch, "input_grad")


def _forward(blocks: int, sub_batches: int, kept_every: int) -> Iterator[Instruction]:
    """One sub-batch computes a block while the other communicates the one before (Algorithm 1, 5-13)."""
    for block in range(blocks):
        for k in range(sub_batches):
            if block > 0:
                yield Sync(_output(block - 1, k))
            yield Forward(block, k, keep_input=block % kept_every == 0)
            yield StartAsync(_output(block, k))
    for k in range(sub_batches):
        yield Sync(_output(blocks - 1, k))


def _layers(blocks: int, blocks_per_layer: int) -> list[range]:
    """The blocks of each layer, last layer first."""
    starts = range(0, blocks, blocks_per_layer)
    return [range(lo, min(lo + blocks_per_layer, blocks)) for lo in reversed(starts)]


def _recompute_pass(layer: range, sub_batches: int) -> Iterator[Instruction]:
    for block in layer:
        for k in range(sub_batches):
            if block > layer.start:
                yield Sync(_recomputed(block - 1, k))
            yield Recompute(block, k)
            yield StartAsync(_recomputed(block, k))
    for k in range(sub_batches):
        yield Sync(_recomputed(layer[-1], k))


def _backward_pass(layer: range, sub_batches: int) -> Iterator[Instruction]:
    for block in reversed(layer):
        for k in range(sub_batches):
            if block < layer[-1]:
                yield Sync(_input_grad(block + 1, k))
            yield Backward(block, k)
            yield StartAsync(_input_grad(block, k))
    for k in range(sub_batches):
        yield Sync(_input_grad(layer.start, k))


def merak(blocks: int, sub_batches: int, blocks_per_layer: int = 2) -> Schedule:
    """Interleave sub-batches within the forward, the recompute and the backward pass of each layer.

    The barriers between passes stay (Lai et al., Merak; the paper's Fig. 4b).
    """
    backward: list[Instruction] = []
    for layer in _layers(blocks, blocks_per_layer):
        backward += _recompute_pass(layer, sub_batches)
        backward += _backward_pass(layer, sub_batches)
    return Schedule(tuple(_forward(blocks, sub_batches, blocks_per_layer)), tuple(backward))


def megatron(blocks: int, sub_batches: int, blocks_per_layer: int = 2) -> Schedule:
    """Await every all-reduce at once; recompute whole layers, their communication included (Fig. 4a)."""
    return blocking(merak(blocks, sub_batches, blocks_per_layer))


def wang(blocks: int, sub_batches: int, blocks_per_layer: int = 2) -> Schedule:
    """``megatron`` whose row-parallel matmuls overlap the all-reduce of their own pieces (Wang et al.)."""
    return in_pieces(megatron(blocks, sub_batches, blocks_per_layer), WANG_PIECES)


def cross_pass(blocks: int, sub_batches: int, blocks_per_layer: int = 2) -> Schedule:
    """Schedule recompute and backward jointly, across layers (section IV-A of the paper, Fig. 4c)."""
    backward: list[Instruction] = []
    subs = range(sub_batches)
    for layer in _layers(blocks, blocks_per_layer):
        last = layer[-1]
        for block in layer[:-1]:
            for k in subs:
                backward += [Sync(_recomputed(block - 1, k))] if block > layer.start else []
                backward += [Recompute(block, k), StartAsync(_recomputed(block, k))]
        for k in subs:
            backward += [Sync(_recomputed(last - 1, k))] if last > layer.start else []
            backward.append(Recompute(last, k))
            backward += [Sync(_input_grad(last + 1, k))] if last + 1 < blocks else []
            backward += [Backward(last, k), StartAsync(_input_grad(last, k))]
        for block in reversed(layer[:-1]):
            for k in subs:
                backward += [Sync(_input_grad(block + 1, k)), Backward(block, k), StartAsync(_input_grad(block, k))]
    backward += [Sync(_input_grad(0, k)) for k in subs]
    return Schedule(tuple(_forward(blocks, sub_batches, blocks_per_layer)), tuple(backward))


def oases(blocks: int, sub_batches: int, blocks_per_layer: int = 2) -> Schedule:
    """Recompute each block from behind its all-reduce, so that recompute never communicates (Fig. 4d)."""
    del blocks_per_layer  # the granularity is the block
    backward: list[Instruction] = []
    for block in reversed(range(blocks)):
        for k in range(sub_batches):
            # Recompute first: it needs no gradient, so it hides the pending all-reduce.
            backward.append(Recompute(block, k))
            backward += [Sync(_input_grad(block + 1, k))] if block + 1 < blocks else []
            backward += [Backward(block, k), StartAsync(_input_grad(block, k))]
    backward += [Sync(_input_grad(0, k)) for k in range(sub_batches)]
    return Schedule(tuple(_forward(blocks, sub_batches, 1)), tuple(backward))


def _mapped(schedule: Schedule, change: Callable[[Ops], Iterator[Instruction]]) -> Schedule:
    return Schedule(tuple(change(schedule.forward)), tuple(change(schedule.backward)))


def blocking(schedule: Schedule) -> Schedule:
    """The same work, every collective awaited at once."""

    def change(ops: Ops) -> Iterator[Instruction]:
        for op in ops:
            if not isinstance(op, Sync):
                yield op
            if isinstance(op, StartAsync):
                yield Sync(op.collective)

    return _mapped(schedule, change)


def in_pieces(schedule: Schedule, pieces: int) -> Schedule:
    """The same work, each block's output projected, sent and awaited in ``pieces``."""
    if pieces == 1:
        return schedule
    sent = {op.collective for op in schedule.backward if isinstance(op, StartAsync)}

    def parts(collective: Collective) -> tuple[Collective, ...]:
        return pieces_of(collective.block, collective.sub_batch, collective.tensor, pieces)

    def change(ops: Ops) -> Iterator[Instruction]:
        for op in ops:
            match op:
                # A recomputed output that is not sent stays whole: nothing would project its pieces.
                case Recompute(block, k) if _recomputed(block, k) not in sent:
                    yield op
                case Forward() | Recompute():
                    yield replace(op, pieces=pieces)
                case StartAsync(Collective(tensor="output" | "recomputed") as collective):
                    for part in parts(collective):
                        yield Project(part)
                        yield StartAsync(part)
                case Sync(Collective(tensor="output" | "recomputed") as collective):
                    yield from map(Sync, parts(collective))
                case _:
                    yield op

    return _mapped(schedule, change)


def stop_early(schedule: Schedule) -> Schedule:
    """The same without the recompute all-reduces that nobody reads: those of a layer's last block.

    PyTorch's checkpoint stops so; ``megatron`` then has 5 all-reduces per layer instead of 6.
    """
    kept = {op.block for op in schedule.forward if isinstance(op, Forward) and op.keep_input}
    last = schedule.blocks - 1

    def unread(op: Instruction) -> bool:
        if not isinstance(op, StartAsync | Sync) or op.collective.tensor != "recomputed":
            return False
        return op.collective.block == last or op.collective.block + 1 in kept

    return _mapped(schedule, lambda ops: (op for op in ops if not unread(op)))


def defer_weight_grads(schedule: Schedule) -> Schedule:
    """The same, weight gradients computed while the all-reduce of the input's gradient runs."""

    def change(ops: Ops) -> Iterator[Instruction]:
        for op in ops:
            match op:
                case Backward(block, k):
                    yield BackwardInput(block, k)
                case StartAsync(Collective(block, k, "input_grad")):
                    yield op
                    yield BackwardWeight(block, k)
                case _:
                    yield op

    return _mapped(schedule, change)


def reduce_grads(schedule: Schedule) -> Schedule:
    """The same, each block's data-parallel reduction started when its weight gradients are complete.

    It starts behind the block's last input gradient, which the next block waits for.
    """
    last: dict[int, int] = {}
    for i, op in enumerate(schedule.backward):
        match op:
            case Backward(block) | BackwardWeight(block) | StartAsync(Collective(block, _, "input_grad")):
                last[block] = i
    after = {i: ReduceGrads(block) for block, i in last.items()}
    backward: list[Instruction] = []
    for i, op in enumerate(schedule.backward):
        backward += [op, after[i]] if i in after else [op]
    return Schedule(schedule.forward, tuple(backward))


def without_backward_below(schedule: Schedule, first: int) -> tuple[Schedule, int]:
    """The same without the backward of the blocks below ``first``, and the first block that is left.

    That is ``first`` or the block before it from which a recompute starts: a layer that is
    recomputed from its first block stays whole. With ``first`` behind the last block no backward is left.
    """
    kept = [op.block for op in schedule.forward if isinstance(op, Forward) and op.keep_input and op.block <= first]
    start = max(kept, default=0) if first < schedule.blocks else first

    def block_of(op: Instruction) -> int:
        return op.collective.block if isinstance(op, Project | StartAsync | Sync) else op.block

    forward = (
        replace(op, keep_input=False) if isinstance(op, Forward) and op.block < start else op for op in schedule.forward
    )
    return Schedule(tuple(forward), tuple(op for op in schedule.backward if block_of(op) >= start)), start


@dataclass(frozen=True)
class Kind:
    """A named schedule: its builder, and the number of sub-batches it is made for."""

    build: Callable[[int, int, int], Schedule]
    sub_batches: int


SCHEDULES: dict[ScheduleName, Kind] = {
    "megatron": Kind(megatron, 1),
    "wang": Kind(wang, 1),
    "merak": Kind(merak, 2),
    "cross_pass": Kind(cross_pass, 2),
    "oases": Kind(oases, 2),
}


# For benchmarks only: no setting or plan takes these names.
VARIANTS: dict[str, Kind] = {
    "megatron_5": Kind(lambda *sizes: stop_early(megatron(*sizes)), 1),
}


def kind(name: str) -> Kind:
    """The schedule called ``name``; raises ConfigError, naming those there are."""
    return VARIANTS[name] if name in VARIANTS else SCHEDULES[check_schedule_name(name)]
