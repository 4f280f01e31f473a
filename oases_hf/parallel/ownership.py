"""Optimizer state kept once: of the ranks that hold the same, one owns a parameter and steps it.

Gradients are summed on the owner alone. The others have none when the optimizer steps, so that it passes over their
parameters and makes no state for them; what the owner made of a parameter is then sent to them. Both are exchanges of
what many parameters have, in which every holder sends and receives about as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from ..owners import Held, deal
from .mesh import Axis, Pending

BUCKET_BYTES = 2**28
"""An exchange is of parameters of so many bytes at most, or of a single one."""


@dataclass(frozen=True)
class Exchange:
    """Tensors on their way between the holders of some parameters.

    Attributes:
        parameters: all that the exchange is about.
        wait: takes in what arrives.
    """

    parameters: tuple[nn.Parameter, ...]
    wait: Callable[[], None]


class Ownership:
    """Which rank owns which parameter.

    Args:
        axes: for each parameter that gets an owner, the ranks that hold the same.
        rank: this rank's number in the world.
    """

    def __init__(self, axes: Mapping[nn.Parameter, Axis], rank: int) -> None:
        held = [Held(p.numel() * p.element_size(), axis.ranks) for p, axis in axes.items()]
        self.owners = dict(zip(axes, deal(held), strict=True))
        self._axes = axes
        self._rank = rank

    def elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether another rank keeps the optimizer state of ``parameter``."""
        return self.owners.get(parameter, self._rank) != self._rank

    def start_sums(self, parameters: Iterable[nn.Parameter]) -> Iterator[Exchange]:
        """Start to sum gradients on their owners; elsewhere they are gone at once. All holders call it alike."""
        yield from map(self._start_sum, self._buckets(parameters))

    def broadcast(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every rank what the owners have made of ``parameters``; all ranks call it right after a step."""
        stepped = set(parameters)
        running: Exchange | None = None
        for bucket in self._buckets(p for p in self.owners if p in stepped and p.requires_grad):
            started = self._start_copy(bucket)
            if running is not None:
                running.wait()
            running = started
        if running is not None:
            running.wait()

    def _start_sum(self, bucket: Sequence[nn.Parameter]) -> Exchange:
        axis, of_owner = self._axes[bucket[0]], self._of_owner(bucket)
        grads = [[_taken(p) for p in of_owner[rank]] for rank in axis.ranks if rank != self._rank]
        own = [p.grad for p in of_owner[self._rank] if p.grad is not None]
        received, work = _start_exchange(axis, bucket[0], grads, [own] * len(grads))

        def wait() -> None:
            work.wait()
            for share in received:
                for grad, other in zip(own, share, strict=True):
                    grad.add_(other)

        return Exchange(tuple(bucket), wait)

    def _start_copy(self, bucket: Sequence[nn.Parameter]) -> Exchange:
        axis, of_owner = self._axes[bucket[0]], self._of_owner(bucket)
        others = [[p.detach() for p in of_owner[rank]] for rank in axis.ranks if rank != self._rank]
        own = [p.detach() for p in of_owner[self._rank]]
        received, work = _start_exchange(axis, bucket[0], [own] * len(others), others)

        def wait() -> None:
            work.wait()
            for theirs, updated in zip(others, received, strict=True):
                for parameter, value in zip(theirs, updated, strict=True):
                    parameter.copy_(value)

        return Exchange(tuple(bucket), wait)

    def _of_owner(self, bucket: Sequence[nn.Parameter]) -> dict[int, list[nn.Parameter]]:
        ranks = self._axes[bucket[0]].ranks
        return {rank: [p for p in bucket if self.owners[p] == rank] for rank in ranks}

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Runs of parameters with the same holders, and of one type."""
        for _, run in groupby(parameters, lambda p: (self._axes[p].ranks, p.dtype, p.device)):
            bucket: list[nn.Parameter] = []
            for parameter in run:
                if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET_BYTES:
                    yield bucket
                    bucket = []
                bucket.append(parameter)
            yield bucket


def _taken(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, which then has none."""
    grad, parameter.grad = parameter.grad, None
    assert grad is not None
    return grad


def _start_exchange(
    axis: Axis, like: Tensor, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
) -> tuple[list[list[Tensor]], Pending]:
    """Start to send some tensors to each other rank of ``axis``; what comes has the shapes of ``receives``."""

    def sizes(lists: Sequence[Sequence[Tensor]]) -> list[int]:
        counts = [sum(t.numel() for t in tensors) for tensors in lists]
        return [*counts[: axis.rank], 0, *counts[axis.rank :]]

    flat = [tensor.flatten() for tensors in sends for tensor in tensors]
    sent = torch.cat(flat) if flat else like.new_empty(0)
    whole, work = axis.start_exchange(sent, sizes(sends), sizes(receives))
    shapes = [tensor for tensors in receives for tensor in tensors]
    parts = iter(
        part.view_as(shape) for part, shape in zip(whole.split([t.numel() for t in shapes]), shapes, strict=True)
    )
    return [[next(parts) for _ in tensors] for tensors in receives], work
