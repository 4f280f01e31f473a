"""The choice as a graph: one layer of nodes per block, a plan is a path, memory is what the path adds up to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Choice
from .terms import Terms

Array = NDArray[np.float64]
Path = tuple[int, ...]  # for each block the index of its choice


@dataclass(frozen=True)
class Graph:
    """Costs of nodes and edges; a step's time is the sum along a path, constants included.

    Attributes:
        choices: block → what may be chosen, C of them.
        ms: block → [C], what the choice adds; that of the ends and the constants are in the first and last.
        pair_ms: block but the last → [C, C of the next block].
        kept_bytes: block → [C], what adds up over blocks.
        runtime_bytes: block → [C], of which the maximum counts.
        constant_bytes: kept whatever is chosen.
        outside_bytes: the least that the maximum can be.
    """

    choices: tuple[tuple[Choice, ...], ...]
    ms: tuple[Array, ...]
    pair_ms: tuple[Array, ...]
    kept_bytes: tuple[Array, ...]
    runtime_bytes: tuple[Array, ...]
    constant_bytes: int
    outside_bytes: int

    def peaks(self) -> list[float]:
        """All values that the maximum of the runtime bytes can have, growing."""
        return sorted({max(float(value), self.outside_bytes) for array in self.runtime_bytes for value in array})

    def below(self, peak_bytes: float) -> Graph | None:
        """The graph of the choices that need no more runtime bytes; None if a block has none."""
        kept = {id(array): np.flatnonzero(array <= peak_bytes) for array in self.runtime_bytes}
        of_block = [kept[id(array)] for array in self.runtime_bytes]
        if any(len(indices) == 0 for indices in of_block):
            return None
        cut: dict[int, Array] = {}  # blocks of one kind share their arrays, before and behind
        pairs = zip(self.pair_ms, of_block, of_block[1:], strict=False)
        return Graph(
            choices=tuple(
                tuple(choices[index] for index in indices)
                for choices, indices in zip(self.choices, of_block, strict=True)
            ),
            ms=_cut(self.ms, of_block),
            pair_ms=tuple(cut.setdefault(id(pair), pair[np.ix_(rows, columns)]) for pair, rows, columns in pairs),
            kept_bytes=_cut(self.kept_bytes, of_block),
            runtime_bytes=_cut(self.runtime_bytes, of_block),
            constant_bytes=self.constant_bytes,
            outside_bytes=self.outside_bytes,
        )

    def path_ms(self, path: Path) -> float:
        """The time of a step."""
        nodes = sum(float(ms[index]) for ms, index in zip(self.ms, path, strict=True))
        return nodes + sum(
            float(pair[index]) for pair, index in zip(self.pair_ms, itertools.pairwise(path), strict=True)
        )

    def path_bytes(self, path: Path) -> float:
        """What a path keeps, without constants."""
        return sum(float(kept[index]) for kept, index in zip(self.kept_bytes, path, strict=True))


def _cut(arrays: tuple[Array, ...], of_block: list[NDArray[np.intp]]) -> tuple[Array, ...]:
    return tuple(array[indices] for array, indices in zip(arrays, of_block, strict=True))


def build(terms: Terms, degrees: tuple[int, ...]) -> Graph:
    """The graph of all plans with degrees in one chain; raises ConfigError where costs were not measured."""
    problem = terms.problem
    choices = problem.choices(degrees)
    kinds = [[terms.block(kind, choice) for choice in choices] for kind in problem.costs.kinds]
    count = len(kinds)
    node_ms = [np.array([terms.node_ms(block) for block in kind]) for kind in kinds]
    kept = [np.array([block.kept_bytes for block in kind], dtype=np.float64) for kind in kinds]
    runtime = [np.array([block.runtime_bytes for block in kind], dtype=np.float64) for kind in kinds]
    pairs = [
        np.array([[terms.pair_ms(one, other) for other in kinds[(k + 1) % count]] for one in kinds[k]])
        for k in range(count)
    ]
    blocks = count * problem.layers
    ms = [node_ms[i % count] for i in range(blocks)]
    ms[0] = ms[0] + np.array([terms.pair_ms(terms.ends, block) for block in kinds[0]]) + terms.constant_ms()
    ms[-1] = ms[-1] + np.array([terms.pair_ms(block, terms.ends) for block in kinds[-1]])
    return Graph(
        choices=(choices,) * blocks,
        ms=tuple(ms),
        pair_ms=tuple(pairs[i % count] for i in range(blocks - 1)),
        kept_bytes=tuple(kept[i % count] for i in range(blocks)),
        runtime_bytes=tuple(runtime[i % count] for i in range(blocks)),
        constant_bytes=terms.constant_bytes(),
        outside_bytes=terms.least_runtime_bytes,
    )
