"""``degree="auto"``: costs are measured, or as measured before; the model trains by the plan that comes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator

from oases_hf import OasesPlugin, Plan
from oases_hf.convert import describe
from oases_hf.costs import CostTable, Curve
from oases_hf.errors import ConfigError
from oases_hf.integrations import planning
from oases_hf.models.converted import converted
from oases_hf.parallel.mesh import Axis, Mesh
from oases_hf.planner import Problem, Solution, solve
from oases_hf.profiler import Architecture, Running, Workload, layer, link, profile

from ..families import FAMILIES, most_different
from ..planner.examples import by_hand, flat
from ..ranks import Worlds
from ..tiny import tiny_llama
from .fitting import Task
from .test_trainer import check

pytestmark = pytest.mark.dist

SMALL = (2**10, 2**12)


def in_a_hurry(cache: Path) -> None:
    """On a rank: measure little, and keep it in a folder of the test."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    link.SIZES, link.BUDGET_S, layer.BUDGET_S = SMALL, 0.0, 0.0


def measured(family: str, world: int, cache: Path) -> tuple[CostTable, CostTable, list[str]]:
    """On a rank: a table, the same again, and what was said of it."""
    in_a_hurry(cache)
    model, said = FAMILIES[family].model(dtype=torch.float32), list[str]()
    mesh, workload = Mesh.build(world), Workload(4, 8, (1, 2))
    before = torch.get_rng_state()
    tables = [
        profile(Architecture.of(model), mesh, workload, Running(torch.device("cpu")), say=said.append) for _ in range(2)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    return tables[0], tables[1], said


@pytest.mark.parametrize("family", most_different(FAMILIES))
def test_every_family_is_measured(ranks: Worlds, family: str, tmp_path: Path) -> None:
    found = ranks(2).run(measured, family, 2, tmp_path)
    first, again, said = found[0]
    assert first == again == found[1][0]
    assert said[-1].startswith("costs: as measured before")
    assert first.degrees() == (1, 2)
    for kind in first.kinds:
        for degree in (1, 2):
            assert kind.parameters[degree] > 0
            for timing in kind.timings[degree].values():
                assert min(timing.forward_ms, timing.recompute_ms, timing.backward_ms) > 0
                assert timing.graph_bytes > 0
        assert kind.parameters[1] > kind.parameters[2]
        assert kind.timings[1][1].graph_bytes > kind.timings[1][2].graph_bytes, "of one sub-batch, and of two"
    assert set(first.all_reduce) == set(first.all_gather) == {2}
    assert first.outside.ms > 0


def test_a_planned_model_trains(ranks: Worlds, tmp_path: Path) -> None:
    task = Task({"gradient_accumulation_steps": 2}, prepare=_hurry(tmp_path))
    check(ranks, 4, task, tmp_size=4, degree="auto")


class _hurry:
    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def __call__(self, *_: Any) -> None:
        in_a_hurry(self._cache)


def plans(cache: Path, memory_gib: float, message_mib: float | None = None) -> Plan | str:
    in_a_hurry(cache)
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"}):
        plugin = OasesPlugin(
            degree="auto", memory_gib=memory_gib, batch_size=4, sequence_length=8, message_mib=message_mib
        )
        try:
            return converted(plugin.install(Accelerator(), tiny_llama())).plan
        except ConfigError as error:
            return str(error)


def test_memory_decides(ranks: Worlds, tmp_path: Path) -> None:
    plan, same = ranks(2).run(plans, tmp_path, 1.0)
    assert isinstance(plan, Plan)
    assert plan == same
    said, also = ranks(2).run(plans, tmp_path, 1e-6)
    assert said == also
    assert "GiB" in str(said)


@pytest.mark.parametrize(("all_reduce_ms", "sub_batches", "defer"), [(6.0, 1, True), (0.0, 1, False), (0.0, 2, False)])
def test_what_pays_is_chosen_and_said(all_reduce_ms: float, sub_batches: int, defer: bool) -> None:
    """One block of 8 ms of weight gradients, at degree 2 since nothing else is measured to fit."""
    costs = by_hand(2, all_reduce={ranks: flat(all_reduce_ms) for ranks in (1, 2)}, all_gather={2: flat(1e3)})
    problem = Problem(costs, layers=4, memory_limit_gib=1.0, sub_batches=(sub_batches,))
    chosen, reason = planning.decide(problem, describe(tiny_llama()))
    assert set(chosen.plan.degrees) == {2}
    assert chosen.defer is defer
    assert ("weight gradients are deferred" in reason) is defer
    assert ("does not pay here" in reason) is (sub_batches == 1)


def test_a_size_of_messages_that_was_given_is_planned_with(ranks: Worlds, tmp_path: Path) -> None:
    plan, same = ranks(2).run(plans, tmp_path, 1.0, 0.5)
    assert isinstance(plan, Plan)
    assert plan == same
    assert plan.message_bytes == 2**19


def dipping(_: link.LinkProfile, axis: Axis) -> Curve:
    """Times of all-reduces that are best in messages of 1 KiB."""
    return Curve(((2**10, 1.0), (2**12, 100.0)))


def choices_on_such_a_link(cache: Path) -> list[tuple[int | None, ...]]:
    """On a rank: the sizes of messages that the planner is asked to choose from."""
    asked: list[tuple[int | None, ...]] = []

    def solving(problem: Problem) -> Solution:
        asked.append(problem.message_bytes)
        return solve(problem)

    with mock.patch.object(link.LinkProfile, "all_reduce", dipping), mock.patch.object(planning, "solve", solving):
        plans(cache, 1.0)
    return asked


def test_the_sizes_of_messages_follow_from_the_profile(ranks: Worlds, tmp_path: Path) -> None:
    assert ranks(2).run(choices_on_such_a_link, tmp_path) == [[(None, 2**10)], []], "the first rank plans"


def test_the_shape_must_be_known() -> None:
    with pytest.raises(ConfigError, match=r"set batch_size .* and sequence_length"):
        OasesPlugin(degree="auto").install(Accelerator(cpu=True), tiny_llama())
