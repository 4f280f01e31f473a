"""The multiplier on memory: a lower bound on the time of every plan that fits, and plans around it.

Without the memory row the best plan is a shortest path. With a price on every byte instead of the row it is one too,
and its priced time, less what the capacity is worth, is below the time of every plan that fits (Lagrangian bound).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .graph import Array, Graph, Path


@dataclass(frozen=True)
class Dual:
    """The best bound, and the best plan met on the way.

    Attributes:
        price: ms per byte.
        lower_ms: no plan that fits is faster.
        path: the fastest plan met that fits.
        upper_ms: its time.
    """

    price: float
    lower_ms: float
    path: Path
    upper_ms: float


def shortest(graph: Graph, weights: Sequence[Array]) -> Path:
    """The path of least weight: ``weights`` of the nodes, and the time of the edges."""
    distance = weights[0]
    came_from = []
    for pair, weight in zip(graph.pair_ms, weights[1:], strict=True):
        through = distance[:, None] + pair
        best = through.argmin(axis=0)
        came_from.append(best)
        distance = through[best, np.arange(len(best))] + weight
    path = [int(distance.argmin())]
    for best in reversed(came_from):
        path.append(int(best[path[-1]]))
    return tuple(reversed(path))


def leanest(graph: Graph) -> Path:
    """The path that keeps the fewest bytes."""
    return tuple(int(kept.argmin()) for kept in graph.kept_bytes)


def priced(graph: Graph, price: float) -> list[Array]:
    """The weights of nodes when every byte kept costs ``price`` ms."""
    prices = {(id(ms), id(kept)): ms + price * kept for ms, kept in zip(graph.ms, graph.kept_bytes, strict=True)}
    return [prices[id(ms), id(kept)] for ms, kept in zip(graph.ms, graph.kept_bytes, strict=True)]


def bound(graph: Graph, capacity: float) -> Dual | None:
    """Maximise the bound over the price; None if nothing fits into ``capacity`` bytes.

    The bound is concave and piecewise linear in the price: the next price is where the lines of the best path that
    fits and the best that does not cross; when no path lies below the crossing, it is the maximum.
    """
    fast = shortest(graph, graph.ms)
    fast_ms, fast_bytes = graph.path_ms(fast), graph.path_bytes(fast)
    if fast_bytes <= capacity:
        return Dual(0.0, fast_ms, fast, fast_ms)
    lean = leanest(graph)
    lean_ms, lean_bytes = graph.path_ms(lean), graph.path_bytes(lean)
    if lean_bytes > capacity:
        return None
    found, found_ms = lean, lean_ms
    while True:
        price = (lean_ms - fast_ms) / (fast_bytes - lean_bytes)
        path = shortest(graph, priced(graph, price))
        ms, kept = graph.path_ms(path), graph.path_bytes(path)
        crossing_ms = lean_ms + price * lean_bytes
        if kept <= capacity and ms < found_ms:
            found, found_ms = path, ms
        if ms + price * kept >= crossing_ms - 1e-12 * abs(crossing_ms):
            return Dual(price, min(crossing_ms, ms + price * kept) - price * capacity, found, found_ms)
        if kept <= capacity:
            lean_ms, lean_bytes = ms, kept
        else:
            fast_ms, fast_bytes = ms, kept
