"""The integer program of the paper (equations 5 and 6) in PuLP, for what the search leaves open.

One-hots per block, and a variable per pair of neighbours' choices whose row and column sums equal the one-hots: the
maxima and the edge costs are coefficients of these, nothing is linearised. Pairs on no path faster than the incumbent,
by the bound, are left out; the incumbent is CBC's warm start, and the answer where the solver finds nothing better.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pulp

from .dual import priced
from .graph import Graph, Path
from .problem import GIB

_SOLVERS = {"HiGHS": "HiGHS", "COIN_CMD": "CBC", "PULP_CBC_CMD": "CBC"}  # the first that is installed is used


@dataclass(frozen=True)
class Answer:
    """What a solver answered; ``proven``: within the gap that was asked for, not stopped by the time limit."""

    path: Path
    proven: bool
    solver: str


def solve_ilp(graph: Graph, capacity: float, price: float, start: Path, gap: float, time_limit_s: float) -> Answer:
    """Improve on ``start``, which fits into ``capacity`` bytes; ``price`` is the dual's, for leaving out pairs."""
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    hot = [
        [model.add_variable(f"s{block}_{index}", cat="Binary") for index in range(len(ms))]
        for block, ms in enumerate(graph.ms)
    ]
    objective = [ms[i] * s for ms, row in zip(graph.ms, hot, strict=True) for i, s in enumerate(row)]
    for row in hot:
        model += pulp.lpSum(row) == 1
    for block, usable in enumerate(_usable_pairs(graph, capacity, price, graph.path_ms(start))):
        rows: dict[int, list[pulp.LpVariable]] = {i: [] for i in range(len(hot[block]))}
        columns: dict[int, list[pulp.LpVariable]] = {j: [] for j in range(len(hot[block + 1]))}
        for i, j in zip(*(indices.tolist() for indices in np.nonzero(usable)), strict=True):
            pair = model.add_variable(f"e{block}_{i}_{j}", 0, 1)
            pair.setInitialValue(float((start[block], start[block + 1]) == (i, j)))
            rows[i].append(pair)
            columns[j].append(pair)
            objective.append(graph.pair_ms[block][i, j] * pair)
        for sums, ends in ((rows, hot[block]), (columns, hot[block + 1])):
            for index, end in enumerate(ends):
                model += pulp.lpSum(sums[index]) == end
    kept = [
        b / GIB * s for array, row in zip(graph.kept_bytes, hot, strict=True) for b, s in zip(array, row, strict=True)
    ]
    model += pulp.lpSum(kept) <= capacity / GIB
    model += pulp.lpSum(objective)
    for row, chosen in zip(hot, start, strict=True):
        for index, s in enumerate(row):
            s.setInitialValue(int(index == chosen))
    return _solved(model, hot, graph, capacity, start, gap, time_limit_s)


def _usable_pairs(graph: Graph, capacity: float, price: float, upper_ms: float) -> list[np.ndarray]:
    """Which pairs lie on a path whose bound is not above ``upper_ms``."""
    weights = priced(graph, price)
    to_here, from_here = [weights[0]], [weights[-1]]
    for pair, weight in zip(graph.pair_ms, weights[1:], strict=True):
        to_here.append((to_here[-1][:, None] + pair).min(axis=0) + weight)
    for pair, weight in zip(graph.pair_ms[::-1], weights[-2::-1], strict=True):
        from_here.append((pair + from_here[-1]).min(axis=1) + weight)
    limit = upper_ms + price * capacity
    limit += 1e-9 * abs(limit)
    pairs = zip(to_here, graph.pair_ms, from_here[-2::-1], strict=False)
    return [before[:, None] + pair + behind <= limit for before, pair, behind in pairs]


def _solved(
    model: pulp.LpProblem,
    hot: list[list[pulp.LpVariable]],
    graph: Graph,
    capacity: float,
    start: Path,
    gap: float,
    time_limit_s: float,
) -> Answer:
    with warnings.catch_warnings():
        # The CBC that PuLP 3 brings along is deprecated in favour of pulp[cbc], which PuLP 3 finds as COIN_CMD.
        warnings.simplefilter("ignore", DeprecationWarning)
        available = pulp.listSolvers(onlyAvailable=True)
        name = next(name for name in _SOLVERS if name in available)
        options = {} if name == "HiGHS" else {"warmStart": True, "threads": 1}
        model.solve(pulp.getSolver(name, msg=False, gapRel=gap, timeLimit=time_limit_s, **options))
    proven = model.sol_status == pulp.LpSolutionOptimal
    path = start
    if model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        answered = tuple(int(np.argmax([s.value() for s in row])) for row in hot)
        # A solver's tolerance may let a plan through that is a few bytes too large.
        if graph.path_bytes(answered) <= capacity and graph.path_ms(answered) < graph.path_ms(start):
            path = answered
    return Answer(path, proven, _SOLVERS[name])
