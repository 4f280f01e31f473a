"""Builders of the five schedules.

A builder takes the number of blocks and sub-batches and returns instructions; ``blocks_per_layer``
is the granularity of recompute of the schedules that recompute whole layers. Writing ``AR`` for
all-reduces per two-block layer and sub-batch: ``megatron`` 6, ``wang`` 6 (in pieces), ``merak`` 6,
``cross_pass`` 5, ``oases`` 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..plan import ScheduleName, check_schedule_name
from .instructions import Backward, Collective, Forward, Instruction, Recompute, Schedule, StartAsync, Sync
from .passes import blocking, in_pieces, stop_early

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
            yield Forward(block, k, keep="input" if block % kept_every == 0 else "nothing")
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


# For benchmarks and the profiler only: no setting or plan takes these names.
VARIANTS: dict[str, Kind] = {
    "megatron_5": Kind(lambda *sizes: stop_early(megatron(*sizes)), 1),
    "oases_blocking": Kind(lambda *sizes: blocking(oases(*sizes)), 1),
}


def kind(name: str) -> Kind:
    """The schedule called ``name``; raises ConfigError, naming those there are."""
    return VARIANTS[name] if name in VARIANTS else SCHEDULES[check_schedule_name(name)]
