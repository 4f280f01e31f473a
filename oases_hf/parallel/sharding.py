"""Which part of a tensor each rank holds. Pure arithmetic; parts may be of different sizes.

Nothing is padded: 9 heads on 2 ranks are 5 and 4 heads, a vocabulary of 49,153 is 24,577 and 24,576
rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError


class Span(NamedTuple):
    """The half-open range ``[lo, hi)`` of a dimension."""

    lo: int
    hi: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.hi - self.lo

    def scaled(self, width: int, offset: int = 0) -> Span:
        """The span of ``width`` times as many elements, ``offset`` further on."""
        return Span(self.lo * width + offset, self.hi * width + offset)


def bounds(n: int, parts: int, index: int) -> Span:
    """Part ``index`` of ``n`` elements in ``parts`` contiguous parts whose sizes differ by at most one."""
    base, extra = divmod(n, parts)
    lo = index * base + min(index, extra)
    return Span(lo, lo + base + (index < extra))


class HeadShare(NamedTuple):
    """The query heads and the key/value heads of one rank; the former never straddle a group of the latter."""

    query: Span
    key_value: Span


def head_share(query_heads: int, kv_heads: int, degree: int, rank: int) -> HeadShare:
    """The heads of ``rank``, such that each rank's query heads share its key/value heads evenly.

    Up to ``kv_heads`` ranks hold whole groups (a key/value head with its query heads). Beyond, a
    key/value head is held by ⌊degree/kv_heads⌋ or ⌈degree/kv_heads⌉ ranks, which split its query heads.

    Raises:
        ConfigError: there are more ranks than query heads.
    """
    if degree > query_heads:
        raise ConfigError(
            f"{query_heads} heads cannot be split over {degree} ranks; choose a degree up to {query_heads}"
        )
    group = query_heads // kv_heads
    if degree <= kv_heads:
        held = bounds(kv_heads, degree, rank)
        return HeadShare(held.scaled(group), held)
    for head in range(kv_heads):
        holders = bounds(degree, kv_heads, head)
        if holders.lo <= rank < holders.hi:
            query = bounds(group, holders.size, rank - holders.lo).scaled(1, head * group)
            return HeadShare(query, Span(head, head + 1))
    raise ValueError(f"rank {rank} is not one of {degree}")


@dataclass(frozen=True)
class Slice:
    """Spans of one dimension of a full tensor, joined in order."""

    dim: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """The number of elements along ``dim``."""
        return sum(span.size for span in self.spans)

    def of(self, full: Tensor) -> Tensor:
        """The part of ``full`` that this slice names, contiguous; a copy unless it is all of it."""
        if self.spans == (Span(0, full.shape[self.dim]),):
            return full.contiguous()
        return torch.cat([full.narrow(self.dim, span.lo, span.size) for span in self.spans], self.dim).contiguous()

    def put(self, full: Tensor, part: Tensor) -> None:
        """Write ``part`` to its place in ``full``."""
        sizes = [span.size for span in self.spans]
        for span, piece in zip(self.spans, part.split(sizes, self.dim), strict=True):
            full.narrow(self.dim, span.lo, span.size).copy_(piece)

    def rows(self, lo: int, hi: int) -> Slice:
        """What it is of the rows ``[lo, hi)`` of the full tensor alone."""
        if self.dim:
            return self
        clipped = (Span(max(span.lo, lo) - lo, min(span.hi, hi) - lo) for span in self.spans)
        return Slice(0, tuple(span for span in clipped if span.size > 0))

    def own_rows(self, lo: int, hi: int) -> Span:
        """Which of the rows of the part these are; the spans must be in ascending order."""
        if self.dim:
            return Span(lo, hi)
        return Span(self.rows(0, lo).size, self.rows(0, hi).size)


@dataclass(frozen=True)
class Layout:
    """How one parameter is spread over the ranks of its TMP world.

    Attributes:
        shape: the full shape, as in the HF checkpoint.
        slices: each rank's slice; empty when every rank holds the whole.
        partial_grad: each rank's gradient is only its share of a sum over the TMP world, although
            several ranks hold the parameter (norms and biases inside a block, shared KV heads).
        replicas: the parts of the TMP world that hold the same and work on different rows, so that
            their gradients add up.
    """

    shape: tuple[int, ...]
    slices: tuple[Slice, ...] = ()
    partial_grad: bool = False
    replicas: int = 1

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts."""
        return bool(self.slices)

    @property
    def ownable(self) -> bool:
        """Whether one of the ranks that hold the same may keep its optimizer state for all.

        Not of what a rank holds whole (norms, biases, positions): it is small, and stays the same on all ranks of a
        TMP world to the last bit only if all do the same sums.
        """
        return self.sharded and not self.partial_grad

    def holders(self, rank: int, ranks: int) -> int:
        """How many ranks, ``rank`` included, hold what ``rank`` holds."""
        return self.slices.count(self.slices[rank]) if self.slices else ranks

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part that ``rank`` holds."""
        if not self.slices:
            return self.shape
        part = self.slices[rank]
        return (*self.shape[: part.dim], part.size, *self.shape[part.dim + 1 :])

    def local(self, full: Tensor, rank: int) -> Tensor:
        """The part of ``full`` that ``rank`` holds; a copy when sharded."""
        return self.slices[rank].of(full) if self.slices else full

    def rows(self, lo: int, hi: int) -> Layout:
        """How the rows ``[lo, hi)`` of the tensor are spread."""
        return replace(self, shape=(hi - lo, *self.shape[1:]), slices=tuple(each.rows(lo, hi) for each in self.slices))

    @property
    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return math.prod(self.shape)
