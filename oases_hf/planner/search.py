"""Exact search: a dynamic program over (time, memory) that drops what cannot win.

Partial plans that end in the same choice compete: one that is neither faster nor leaner than another is dropped. So
is one whose bound (its own time, plus the least priced way on) is not below the target. Equal layers make most
partial plans equal in time and memory, and those are one here; a branch and bound has to visit them all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .dual import Dual, priced
from .graph import Array, Graph, Path

MAX_LABELS = 10_000  # a block's partial plans (some 1,000 were seen); those with the worst bounds are given up beyond


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        path: the fastest plan that fits, None when the incumbent is not beaten.
        upper_ms: its time, or the incumbent's.
        lower_ms: no plan that fits is faster.
    """

    path: Path | None
    upper_ms: float
    lower_ms: float


@dataclass(frozen=True)
class _Onward:
    """From each choice of one block to the end, itself excluded: the cheapest priced way, and the leanest."""

    priced_ms: Array
    ms: Array
    kept: Array
    least_kept: Array
    next_choice: NDArray[np.intp] | None


@dataclass(frozen=True)
class _Labels:
    """Partial plans up to one block: time, bytes, choice of the block, and which label of the block before."""

    ms: Array
    kept: Array
    choice: NDArray[np.intp]
    parent: NDArray[np.intp]

    def take(self, indices: NDArray[np.intp]) -> _Labels:
        return _Labels(self.ms[indices], self.kept[indices], self.choice[indices], self.parent[indices])


def search(
    graph: Graph, capacity: float, dual: Dual, incumbent_ms: float, gap: float, max_labels: int = MAX_LABELS
) -> Found:
    """Find the fastest path that keeps at most ``capacity`` bytes, to within a relative ``gap``.

    ``incumbent_ms`` is the time of a plan that is known: only faster ones are looked for.
    """
    onward = _onward(graph, dual.price)
    best: Path | None = dual.path if dual.upper_ms < incumbent_ms else None
    best_ms = min(dual.upper_ms, incumbent_ms)
    dropped_ms = best_ms
    history: list[_Labels] = []
    for block in range(len(graph.ms)):
        labels = _extended(graph, history[-1] if history else None, block)
        way = onward[block]
        labels = labels.take(np.flatnonzero(labels.kept + way.least_kept[labels.choice] <= capacity))
        ends = np.where(labels.kept + way.kept[labels.choice] <= capacity, labels.ms + way.ms[labels.choice], np.inf)
        if len(ends) and ends.min() < best_ms:
            end = int(ends.argmin())
            best_ms = float(ends[end])
            best = _walk(history, labels, end) + _follow(onward[block:], int(labels.choice[end]))
        bounds = labels.ms + dual.price * (labels.kept - capacity) + way.priced_ms[labels.choice]
        alive = bounds < best_ms * (1 - gap)
        dropped_ms = min(dropped_ms, float(bounds[~alive].min(initial=np.inf)))
        labels, bounds = labels.take(np.flatnonzero(alive)), bounds[alive]
        kept = _undominated(labels, best_ms)
        if len(kept) > max_labels:
            kept = kept[np.argsort(bounds[kept], kind="stable")]
            dropped_ms = min(dropped_ms, float(bounds[kept[max_labels]]))
            kept = kept[:max_labels]
        history.append(labels.take(kept))
    return Found(best, best_ms, max(dual.lower_ms, min(dropped_ms, best_ms)))


def _extended(graph: Graph, before: _Labels | None, block: int) -> _Labels:
    """Every label of the block before, with every choice of this one."""
    ms, kept = graph.ms[block], graph.kept_bytes[block]
    choices = np.arange(len(ms))
    if before is None:
        return _Labels(ms, kept, choices, np.zeros_like(choices))
    grown_ms = before.ms[:, None] + graph.pair_ms[block - 1][before.choice] + ms
    grown_kept = before.kept[:, None] + kept
    count = len(before.ms)
    parent = np.repeat(np.arange(count), len(ms))
    return _Labels(grown_ms.ravel(), grown_kept.ravel(), np.tile(choices, count), parent)


def _undominated(labels: _Labels, scale_ms: float) -> NDArray[np.intp]:
    """The labels that are faster, by more than rounding, than every leaner one with the same choice."""
    order = np.lexsort((labels.ms, labels.kept, labels.choice))
    starts = np.searchsorted(labels.choice[order], np.arange(labels.choice.max(initial=-1) + 2))
    survivors = []
    for start, stop in itertools.pairwise(starts):
        ms = labels.ms[order[start:stop]]
        leaner_ms = np.concatenate(([np.inf], np.minimum.accumulate(ms)))[: len(ms)]
        survivors.append(order[start:stop][ms < leaner_ms - 1e-12 * scale_ms])
    return np.concatenate(survivors) if survivors else order


def _onward(graph: Graph, price: float) -> list[_Onward]:
    """For every block, the ways from its choices to the end."""
    weights = priced(graph, price)
    zero = np.zeros_like(graph.ms[-1])
    ways = [_Onward(zero, zero, zero, zero, None)]
    for block in range(len(graph.ms) - 2, -1, -1):
        after, pair = ways[-1], graph.pair_ms[block]
        through = pair + weights[block + 1] + after.priced_ms
        best = through.argmin(axis=1)
        rows = np.arange(len(best))
        ways.append(
            _Onward(
                priced_ms=through[rows, best],
                ms=pair[rows, best] + (graph.ms[block + 1] + after.ms)[best],
                kept=(graph.kept_bytes[block + 1] + after.kept)[best],
                least_kept=np.full(len(best), (graph.kept_bytes[block + 1] + after.least_kept).min()),
                next_choice=best,
            )
        )
    return ways[::-1]


def _walk(history: list[_Labels], labels: _Labels, index: int) -> Path:
    """The choices that led to a label, its own last."""
    path = [int(labels.choice[index])]
    for before in reversed(history):
        index = int(labels.parent[index])
        labels = before
        path.append(int(labels.choice[index]))
    return tuple(reversed(path))


def _follow(ways: list[_Onward], choice: int) -> Path:
    """The choices of the cheapest priced way on from a choice, itself excluded."""
    path = []
    for way in ways:
        if way.next_choice is not None:
            choice = int(way.next_choice[choice])
            path.append(choice)
    return tuple(path)
