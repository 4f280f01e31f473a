"""The paper's seven models, as problems for the planner and the simulator.

On RTX 3090s computation is the published profile of one (scripts/bench/data), for hidden sizes 1024-4096; above, it is
extrapolated from 4096 by operations. On other GPUs it is computed from a data sheet. Collectives are those of a
cluster in ``oases_hf/simulator/clusters.json``, a constant per kind of link, none per model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from oases_hf.costs import CostTable, ElementBytes, Timing
from oases_hf.plan import ScheduleName
from oases_hf.planner import Problem, uniform_plan
from oases_hf.planner.problem import GIB
from oases_hf.simulator import Simulation, simulate
from oases_hf.simulator.cluster import ClusterSpec, Work
from scripts.bench.paper_plans import DATA, GPUS, MATRICES, SEQUENCE, cost_table

Paper = dict[str, Any]

PROFILED = 4096
MEMORY_GIB = 24e9 / GIB
SUB_BATCHES = (1, 2)
HEAD = 128
"""Elements of an attention head, where the paper does not say it."""


def read() -> Paper:
    """The paper's tables."""
    paper: Paper = json.loads((DATA / "paper.json").read_text())
    return paper


@dataclass(frozen=True)
class Model:
    """A row of the paper's table of models: layers, and what 32 GPUs train at once."""

    name: str
    hidden: int
    layers: int
    degree: int
    batch: int

    @property
    def profiled(self) -> bool:
        """Whether its blocks were measured."""
        return self.hidden <= PROFILED

    @property
    def mark(self) -> str:
        """How much of it was measured."""
        return "profiled" if self.profiled else "extrapolated"

    @property
    def rows(self) -> int:
        """Sequences that a TMP world trains at once."""
        return self.batch * self.degree // GPUS

    def problem(self, cluster: ClusterSpec, accumulation: int = 1, gpus: int = GPUS) -> Problem:
        """What is trained on so many RTX 3090s of a cluster, so many micro-batches per step."""
        profiled = cost_table(self.hidden, self.rows, SUB_BATCHES, self.degree) if self.profiled else _larger(self)
        return self._problem(self._linked(profiled, cluster, gpus), accumulation)

    def from_data_sheet(self, cluster: ClusterSpec, dtype: str) -> Problem:
        """The same on all GPUs of a cluster, of any kind, in mixed precision."""
        source = cost_table(self.hidden if self.profiled else PROFILED, self.rows, SUB_BATCHES, self.degree)
        half = replace(source, hidden=self.hidden, element_bytes=ElementBytes(2, 2, 2, 4, 4, 8))
        table = _with_graphs(half)
        return self._problem(cluster.timed(replace(table, data_size=cluster.gpus // self.degree), _work(table, dtype)))

    def uniform(self, problem: Problem, schedule: ScheduleName) -> Simulation:
        """A step at the paper's degree."""
        return simulate(problem, uniform_plan(problem, schedule, self.degree, self.name))

    def k_tokens_per_s(self, problem: Problem, step: Simulation) -> float:
        """Of all GPUs, in thousands."""
        sequences = problem.costs.rows * problem.costs.data_size * problem.accumulation
        return sequences * SEQUENCE / step.step_ms

    def _problem(self, costs: CostTable, accumulation: int = 1) -> Problem:
        return Problem(costs, self.layers, MEMORY_GIB, accumulation, recompute="full")

    def _linked(self, table: CostTable, cluster: ClusterSpec, gpus: int) -> CostTable:
        data_size = gpus // self.degree
        groups = {n * m for n in _divisors(self.degree) for m in (1, data_size)} - {1}
        return cluster.linked(replace(table, data_size=data_size), groups)


def models(paper: Paper) -> Iterator[Model]:
    """Those of the paper."""
    for row in paper["models"]:
        yield Model(*row)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _larger(model: Model) -> CostTable:
    """A table of a hidden size beyond those that were profiled, of degrees up to the model's.

    Matmuls of a rank take as long per operation as at the largest hidden size that was profiled, where they have about
    as many operations: of twice the hidden size, those of a fourth of the degree.
    """
    scale = (model.hidden / PROFILED) ** 2
    timings: list[dict[int, dict[int, Timing]]] = [{} for _ in MATRICES]
    for of in _divisors(model.degree):
        near = min(_divisors(GPUS), key=lambda other: abs(math.log(other * scale / of)))
        source = cost_table(PROFILED, max(1, model.rows * of // model.degree), SUB_BATCHES, near)
        for found, each in zip(timings, source.kinds, strict=True):
            found[of] = {number: time.scaled(scale * near / of) for number, time in each.timings[near].items()}
    whole = cost_table(PROFILED, model.rows, SUB_BATCHES, model.degree)
    kinds = tuple(
        replace(each, parameters={of: round(n * scale) for of, n in each.parameters.items()}, timings=found)
        for each, found in zip(whole.kinds, timings, strict=True)
    )
    return replace(whole, hidden=model.hidden, kinds=kinds)


def _with_graphs(table: CostTable) -> CostTable:
    """With what half precision keeps for backward: Korthikanti et al., 11 + 24 / t + 5 a s / (h t) in bytes × s b h.

    Of these, norms, their inputs and dropout masks, not split, are 5 in each block; the rest of the MLP is 16 / t.
    """
    split = {"attention": 8 + 5 * SEQUENCE / HEAD, "mlp": 16.0}
    kinds = []
    for each in table.kinds:
        parameters = {of: MATRICES[each.name] * table.hidden**2 // of for of in each.timings}
        timings = {
            of: {
                number: replace(
                    time,
                    graph_bytes=round(
                        table.hidden_elements(of, table.sub_batch_rows(of, number)) * (5 + split[each.name] / of)
                    ),
                )
                for number, time in row.items()
            }
            for of, row in each.timings.items()
        }
        kinds.append(replace(each, parameters=parameters, timings=timings))
    return replace(table, kinds=tuple(kinds))


def _work(table: CostTable, dtype: str) -> Work:
    """Operations of a row, by multiplications of matrices of hidden × hidden, and of those of attention itself."""
    matrix = 2.0 * SEQUENCE * table.hidden**2
    itself = {"attention": 4.0 * SEQUENCE**2 * table.hidden, "mlp": 0.0}
    last = {"attention": matrix, "mlp": 4 * matrix}
    linear = {each.name: {of: MATRICES[each.name] * matrix / of for of in each.timings} for each in table.kinds}
    return Work(
        dtype,
        operations={name: {of: n + itself[name] / of for of, n in row.items()} for name, row in linear.items()},
        linear=linear,
        last_matmul={name: {of: last[name] / of for of in row} for name, row in linear.items()},
    )
