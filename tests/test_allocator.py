"""What tensors take of the segments of torch's allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from oases_hf.allocator import MIB, allocated_bytes
from oases_hf.plan import Plan
from oases_hf.planner import Problem, predict
from oases_hf.planner.terms import Terms
from oases_hf.profiler.stopwatch import KeptBytes
from oases_hf.schedule import Recompute
from oases_hf.simulator import simulate

from .planner.examples import by_hand


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (1, 1),
        (MIB, MIB),
        (2 * MIB, 2 * MIB),
        (int(5.375 * MIB), 20 * MIB // 3),
        (8 * MIB, 10 * MIB),
        (10 * MIB - 1, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (int(10.75 * MIB), 12 * MIB),
        (86 * MIB, 86 * MIB),
    ],
)
def test_the_share_of_a_segment(size: int, taken: int) -> None:
    assert allocated_bytes(size) == taken


@pytest.mark.parametrize("on_gpu", [False, True])
def test_graphs_are_counted_as_devices_give_memory(on_gpu: bool) -> None:
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3 * MIB // 4, 3)
    kept = KeptBytes(iter([weight]), on_gpu=on_gpu)
    with kept(Recompute(0, 0)):
        (x * weight).sum()
    assert kept.bytes == {0: 10 * MIB if on_gpu else 9 * MIB}


@pytest.mark.parametrize("recorded", [False, True])
def test_hidden_tensors_of_recordings_take_their_share(recorded: bool) -> None:
    costs = replace(by_hand(2), rows=8, sequence=2**10, hidden=2**8, recorded=recorded)  # 8 MiB a tensor
    problem, exact = Problem(costs, 2, 1), Problem(replace(costs, recorded=False), 2, 1)
    memory = predict(problem, (2, 2), ("full", "full"), 1).memory
    assert memory.saved == 2 * (10 if recorded else 8) * MIB
    plan = Plan("by hand", 2, (2, 2), "oases", 1, ("full", "full"))
    saved, beside = 2 * 2 * MIB, Terms.of_plan(problem, (2,), 1, "off", None).beside_bytes
    more = simulate(problem, plan).peak_bytes - simulate(exact, plan).peak_bytes
    assert more == (saved + 2 * MIB + beside if recorded else 0), "what is saved, and the gradient of the last"
