"""Traces of training: what ran in the chosen steps, under the names that the simulator has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from oases_hf.errors import ConfigError
from oases_hf.models.converted import converted
from oases_hf.planner import Problem
from oases_hf.simulator import simulate
from oases_hf.simulator.trace import name_of

from ..planner.examples import random_table
from ..ranks import Worlds
from ..tiny import batch
from .fitting import Task, fit
from .looping import set_up

LANES = {"compute": 0, "comm": 1}


def events(path: Path, lane: str) -> list[dict[str, Any]]:
    """The spans of a lane, by their begin."""
    found = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and e["tid"] == LANES[lane]]
    return sorted(found, key=lambda event: float(event["ts"]))


def traced(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, Counter[str]], Counter[str]]:
    """On a rank: the files of a loop that traces steps 2 and 4, what is on their lanes, and what the simulator says."""
    accelerator, model = set_up({"trace": "out", "trace_steps": (2, 4), **settings}, accumulate=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    for number in range(10):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch(4, 8, seed=number)).loss)
            optimizer.step()
            optimizer.zero_grad()
    rank = accelerator.process_index
    files = sorted(path.name for path in Path("out").glob(f"*rank{rank}.json"))
    lanes = {lane: Counter(e["name"] for e in events(Path("out") / files[0], lane)) for lane in LANES}
    for one, other in pairwise(events(Path("out") / files[0], "compute")):
        assert float(one["ts"]) + float(one["dur"]) <= float(other["ts"]) + 1e-3, "one after the other"
    problem = Problem(random_table(0, 4, 2), 2, 1e9, accumulation=2)
    plan = converted(model).plan
    simulated = simulate(problem, plan)
    return files, lanes, Counter(name_of(span) for span in simulated.spans)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": "megatron"},
        pytest.param({"schedule": "wang"}, marks=pytest.mark.slow),
        {"tmp_size": 4, "degree": 2},
    ],
    ids=str,
)
def test_what_ran_is_what_is_simulated(ranks: Worlds, settings: Mapping[str, Any]) -> None:
    for rank, (files, lanes, simulated) in enumerate(ranks(4).run(traced, settings)):
        assert files == [f"step2-rank{rank}.json", f"step4-rank{rank}.json"]
        ours = lanes["compute"] + lanes["comm"]
        assert {name: simulated[name] for name in ours} == ours
        assert {name for name in simulated if name not in ours} <= {
            "embedding, head and loss",
            "optimizer",
            "gradients of embedding and head",
        }


def unwritable() -> str:
    """On a rank: what is said of a folder that cannot be made, before anything is trained."""
    with pytest.raises(ConfigError) as raised:
        set_up({"trace": "/proc/traces"})
    return str(raised.value)


def test_a_folder_that_cannot_be_made(ranks: Worlds) -> None:
    for said in ranks(2).run(unwritable):
        assert said.startswith("trace='/proc/traces': ")


def resumed() -> list[str]:
    """On a rank: the files of a Trainer that goes on from its second step."""
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    fit(Task(saving), {})
    fit(Task({"max_steps": 4}), {"trace": "traces"}, "out/checkpoint-2")
    return sorted(path.name for path in Path("traces").iterdir())


def test_steps_are_those_that_trainer_counts(ranks: Worlds) -> None:
    ranks(2).run(resumed)
    for files in ranks(2).run(resumed):
        assert set(files) <= {"step3-rank0.json", "step3-rank1.json"}
        assert files
