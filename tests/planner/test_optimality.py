"""The planner against enumeration of all plans."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from oases_hf.errors import ConfigError
from oases_hf.planner import Choice, Problem, ilp, predict, solve
from oases_hf.planner.problem import GIB, is_chain
from oases_hf.planner.terms import Terms

from .examples import random_table

SHAPES = [  # tmp_size, kinds, layers, degrees, recompute: at most some 10^5 plans
    (4, 2, 3, (1, 2, 4), "auto"),
    (6, 2, 2, (1, 2, 3, 6), "auto"),
    (6, 1, 6, (2, 3, 6), "auto"),
    (4, 2, 4, (1, 2, 4), "full"),
    (2, 2, 4, (1, 2), "auto"),
]


def all_plans(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Time and bytes of every plan of the problem, in all its modes."""
    times, sizes = [], []
    for mode in problem.modes():
        terms = Terms(problem, mode)
        time, size = plans_in(terms, problem.choices(problem.degrees_in(mode)))
        times.append(time)
        sizes.append(size)
    return np.concatenate(times), np.concatenate(sizes)


def plans_in(terms: Terms, choices: tuple[Choice, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Time and bytes of every plan with some choices in one mode."""
    problem = terms.problem
    plans = np.indices((len(choices),) * len(problem.blocks)).reshape(len(problem.blocks), -1)
    degrees = [choice.degree for choice in choices]
    used = np.bitwise_or.reduce(1 << plans, axis=0)  # few sets of choices make up the many plans
    sets, of_plan = np.unique(used, return_inverse=True)
    chain = [is_chain(tuple(sorted({d for i, d in enumerate(degrees) if bits >> i & 1}))) for bits in sets.tolist()]
    plans = plans[:, np.array(chain)[of_plan]]
    blocks = [[terms.block(kind, choice) for choice in choices] for kind in problem.blocks]
    time = np.full(plans.shape[1], terms.constant_ms())
    size = np.full(plans.shape[1], float(terms.constant_bytes()))
    peak = np.full(plans.shape[1], float(terms.least_runtime_bytes))
    for row, kind in zip(plans, blocks, strict=True):
        time += np.array([terms.node_ms(block) for block in kind])[row]
        size += np.array([block.kept_bytes for block in kind])[row]
        peak = np.maximum(peak, np.array([block.runtime_bytes for block in kind])[row])
    for rows, kinds in zip(pairwise(plans), pairwise(blocks), strict=True):
        time += np.array([[terms.pair_ms(one, other) for other in kinds[1]] for one in kinds[0]])[rows]
    time += np.array([terms.pair_ms(terms.ends, block) for block in blocks[0]])[plans[0]]
    time += np.array([terms.pair_ms(block, terms.ends) for block in blocks[-1]])[plans[-1]]
    return time, size + peak


def instance(seed: int) -> tuple[Problem, np.ndarray, np.ndarray]:
    draw = random.Random(seed)
    tmp_size, kinds, layers, degrees, recompute = SHAPES[seed % len(SHAPES)]
    problem = Problem(
        replace(random_table(seed, tmp_size, kinds), recorded=seed % 3 == 0),
        layers,
        memory_limit_gib=1.0,
        accumulation=draw.choice((1, 3)),
        sub_batches=draw.choice(((1,), (2,), (1, 2), (4,))),
        recompute=recompute,  # type: ignore[arg-type]
        shard_optimizer=draw.choice((("off",), ("off", "keep"), ("reduce",))),
        objective=draw.choice(("overlap", "overlap", "no_overlap")),
        degrees=degrees,
    )
    times, sizes = all_plans(problem)
    if seed % 2:  # memory binds
        least, fastest = sizes.min(), sizes[times.argmin()]
        limit = int(least + draw.uniform(0.0, 0.9) * (fastest - least))
        problem = replace(problem, memory_limit_gib=limit / GIB)
    return problem, times, sizes


@pytest.mark.parametrize("seeds", [range(first, first + 30) for first in range(0, 300, 30)])
def test_as_good_as_the_best_of_all_plans(seeds: range) -> None:
    for seed in seeds:
        problem, times, sizes = instance(seed)
        limit = problem.memory_limit_gib * GIB
        solution = solve(problem, gap=0.0)
        best = times[sizes <= limit].min()
        assert solution.prediction.step_ms == pytest.approx(best, rel=1e-9), seed
        assert solution.prediction.memory.total <= limit
        assert solution.lower_bound_ms <= best * (1 + 1e-9)
        assert (solution.status, solution.solver) == ("optimal", "search")


@pytest.mark.parametrize("solver", ["CBC", "HiGHS"])
@pytest.mark.parametrize("seed", range(1, 300, 20))
def test_the_ilp_takes_over_where_the_search_gives_up(seed: int, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: title for name, title in ilp._SOLVERS.items() if title == solver}
    monkeypatch.setattr(ilp, "_SOLVERS", known)
    problem, times, sizes = instance(seed)
    best = times[sizes <= problem.memory_limit_gib * GIB].min()
    solution = solve(problem, gap=0.0, max_labels=1)
    assert solution.prediction.step_ms == pytest.approx(best, rel=1e-6)
    assert solution.lower_bound_ms <= best * (1 + 1e-9)
    assert solution.gap < 1e-6
    assert solution.solver in ("search", solver)


@pytest.mark.parametrize("seed", range(1, 300, 30))
def test_a_gap_is_kept_and_told(seed: int) -> None:
    problem, times, sizes = instance(seed)
    best = times[sizes <= problem.memory_limit_gib * GIB].min()
    solution = solve(problem, gap=0.02)
    assert solution.lower_bound_ms <= best * (1 + 1e-9)
    assert best <= solution.prediction.step_ms * (1 + 1e-9)
    assert solution.gap <= 0.02
    assert solution.gap == pytest.approx(1 - solution.lower_bound_ms / solution.prediction.step_ms)


@pytest.mark.parametrize("seed", range(0, 300, 15))
def test_the_objective_is_the_prediction(seed: int) -> None:
    problem, times, sizes = instance(seed)
    solution = solve(problem, gap=0.0)
    ways = solution.sub_batches, solution.shard_optimizer, solution.message_bytes
    again = predict(problem, solution.degrees, solution.recompute, *ways)
    assert again == solution.prediction
    assert np.isclose(times, again.step_ms, rtol=1e-12).any()
    assert again.memory.total in sizes[np.isclose(times, again.step_ms, rtol=1e-12)]


@pytest.mark.parametrize("seed", range(1, 40, 4))
def test_more_memory_is_never_slower(seed: int) -> None:
    problem, _, sizes = instance(seed)
    limits = np.linspace(sizes.min(), sizes.max(), 8)
    times = [
        solve(replace(problem, memory_limit_gib=limit / GIB), gap=0.0).prediction.step_ms for limit in np.ceil(limits)
    ]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(times))


def test_what_nothing_fits_into_says_by_how_much_and_what_helps() -> None:
    problem, _, sizes = instance(0)
    least = int(sizes.min())
    short = replace(problem, memory_limit_gib=(least - 0.5 * GIB) / GIB, shard_optimizer=("off",))
    with pytest.raises(ConfigError, match=r"needs 0\.50 GiB more .*; profile a smaller micro-batch"):
        solve(short)
