"""Passes: each turns a schedule into another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from .instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Communicate,
    Forward,
    Instruction,
    Kept,
    Moved,
    Project,
    Recompute,
    ReduceGrads,
    Schedule,
    Slice,
    StartAsync,
    Sync,
    block_of,
    pieces_of,
)

Ops = Iterable[Instruction]
Move = Literal["gather", "slice"]


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
                case Recompute(block, k) if Collective(block, k, "recomputed") not in sent:
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
    return _without_recomputed(schedule, {*_keeping(schedule, "input"), schedule.blocks})


def _keeping(schedule: Schedule, what: Kept) -> set[int]:
    """The blocks whose forward keeps ``what``."""
    return {op.block for op in schedule.forward if isinstance(op, Forward) and op.keep == what}


def _without_recomputed(schedule: Schedule, blocks: Collection[int]) -> Schedule:
    """The same without recomputing, by communication, what the given blocks read."""

    def change(ops: Ops) -> Iterator[Instruction]:
        for op in ops:
            unread = block_of(op) + 1 in blocks
            if unread and isinstance(op, Recompute):
                yield replace(op, pieces=1)  # nothing would project its pieces
            elif not (unread and isinstance(op, Communicate) and op.collective.tensor == "recomputed"):
                yield op

    return _mapped(schedule, change)


def keep_graphs(schedule: Schedule, blocks: Collection[int]) -> Schedule:
    """The same, some blocks not recomputed: their forward keeps what backward needs."""

    def change(ops: Ops) -> Iterator[Instruction]:
        for op in ops:
            match op:
                case Forward(block) if block in blocks:
                    yield replace(op, keep="graph")
                case Forward(block) if block - 1 in blocks:  # nobody recomputes what it reads
                    yield replace(op, keep="input")
                case Recompute(block) if block in blocks:
                    pass
                case _:
                    yield op

    return _mapped(_without_recomputed(schedule, {*blocks, *(block + 1 for block in blocks)}), change)


def moves(degrees: Sequence[int], tmp_size: int) -> dict[int, Move]:
    """Before which blocks rows move in forward, and how; the index behind the last block stands for the output.

    Before the first block and behind the last, every rank of the TMP world has all rows. Between blocks of degrees
    ``d`` and ``e``, replicas of a block gather their rows when ``d < e`` and part them when ``d > e``.
    """
    around = [tmp_size, *degrees, tmp_size]
    pairs = enumerate(itertools.pairwise(around))
    return {i: "gather" if before < after else "slice" for i, (before, after) in pairs if before != after}


def gathers(move: Move, tensor: Moved) -> bool:
    """Whether ``tensor`` is gathered where forward makes ``move``: backward undoes what forward does."""
    return (move == "gather") != (tensor == "grad")


def reshard(schedule: Schedule, changes: Mapping[int, Move]) -> Schedule:
    """The same, rows moved between blocks of different degrees: ``changes`` as :func:`moves` returns them.

    Gathering is awaited at once (equation 4 of the paper).
    """
    kept = {*_keeping(schedule, "input"), *_keeping(schedule, "graph"), schedule.blocks}

    def moved(tensor: Moved, block: int, k: int) -> Iterator[Instruction]:
        if block not in changes:
            return
        collective = Collective(block, k, tensor)
        both = StartAsync(collective), Sync(collective)
        yield from both if gathers(changes[block], tensor) else (Slice(collective),)

    def change(ops: Ops) -> Iterator[Instruction]:
        for op in ops:
            yield op
            match op:
                case Sync(Collective(block, k, tensor, piece, pieces)) if piece == pieces - 1:
                    if tensor == "input_grad":
                        yield from moved("grad", block, k)
                    elif tensor == "output":
                        yield from moved("hidden", block + 1, k)
                    elif block + 1 not in kept:
                        yield from moved("input", block + 1, k)

    subs = range(schedule.sub_batches)
    first = [op for k in subs for op in moved("hidden", 0, k)]
    last = [op for k in subs for op in moved("grad", schedule.blocks, k)] if schedule.backward else []
    return Schedule((*first, *change(schedule.forward)), (*last, *change(schedule.backward)))


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
    kept = (block for block in (*_keeping(schedule, "input"), *_keeping(schedule, "graph")) if block <= first)
    start = max(kept, default=0) if first < schedule.blocks else first
    forward = (
        replace(op, keep="nothing") if isinstance(op, Forward) and op.block < start else op for op in schedule.forward
    )
    return Schedule(tuple(forward), tuple(op for op in schedule.backward if block_of(op) >= start)), start
