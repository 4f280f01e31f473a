"""Training that was interrupted ends as training that was not, on the same ranks or on others."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback

from oases_hf import Plan
from oases_hf.convert import block_count, describe
from oases_hf.errors import CheckpointError

from ..families import FAMILIES
from ..parallel import full_moments
from ..parity import float64_math
from ..ranks import Worlds
from .fitting import Task, assert_same, build, one_process, rows, whole_parameters
from .test_saving import assert_equal

STEPS = {"max_steps": 9, "save_strategy": "steps", "save_steps": 6, "lr_scheduler_type": "linear"}
TWICE: dict[str, Any] = {"optim": "adamw_torch_fused"}
SGD: dict[str, Any] = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.05}

Settings = Mapping[str, Any]


def freeze_embeddings(model: PreTrainedModel) -> None:
    model.get_input_embeddings().requires_grad_(False)


def moments(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    optimizer = cast(Any, trainer.optimizer)
    return full_moments(cast(PreTrainedModel, trainer.model), getattr(optimizer, "optimizer", optimizer))


def interrupted(task: Task, settings: Settings) -> None:
    """On a rank: 9 steps, past an epoch's end, and 3 that go on from the sixth, with a model of other weights."""
    whole = build(task, settings)
    whole.train()
    again = build(replace(task, model={**task.model, "seed": 5}), settings)
    again.train(resume_from_checkpoint="out/checkpoint-6")
    assert_equal(whole_parameters(again), whole_parameters(whole))
    ours, expected = moments(again), moments(whole)
    assert ours.keys() == expected.keys()
    for key, each in expected.items():
        assert_equal(ours[key], each)
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (again, whole)]
    assert losses[0] == losses[1]


SAME: dict[str, tuple[Task, int, Settings]] = {
    "llama": (Task(STEPS, model={"dropout": 0.1}, family="llama"), 2, {}),
    "bert": (Task({**STEPS, **TWICE}, model={"dropout": 0.1}, family="bert"), 2, {}),
    "gpt2 tied": (Task({**STEPS, "max_grad_norm": 0.5}, model={"dropout": 0.1}, family="gpt2 tied"), 2, {}),
    "sgd": (Task({**STEPS, **SGD}), 2, {}),
    "frozen": (Task(STEPS, prepare=freeze_embeddings), 2, {}),
    "one process": (Task(STEPS, model={"dropout": 0.1}, family="gpt2"), 1, {}),
    "rounded": (Task(STEPS, model={"dropout": 0.1}, family="gpt2"), 2, {"comm_dtype": "bf16"}),
    "worlds": (Task(STEPS, model={"dropout": 0.1}, family="gpt2"), 4, {"tmp_size": 2}),
    "owned": (
        Task(STEPS, model={"dropout": 0.1}, family="llama"),
        4,
        {"tmp_size": 4, "degree": 2, "shard_optimizer": "reduce"},
    ),
}


@pytest.mark.parametrize(("task", "world", "settings"), SAME.values(), ids=SAME)
def test_on_the_same_ranks_to_the_last_bit(ranks: Worlds, task: Task, world: int, settings: Settings) -> None:
    ranks(world).run(interrupted, task, settings)


def mixed_plan(model: PreTrainedModel, folder: Path, seed: int) -> str:
    """The path of a plan for four ranks with any degrees."""
    draw = random.Random(seed)
    degrees = tuple(draw.choice((1, 2, 4)) for _ in range(block_count(model)))
    path = folder / f"plan-{seed}.json"
    path.write_text(Plan(describe(model), 4, degrees, "oases", 2, (), "keep").to_json())
    return str(path)


LEARNING = [name for name, family in FAMILIES.items() if family.head != "none"]
"""The families that have a loss."""


class Compare(TrainerCallback):
    """Notes what a run begins with."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.parameters: dict[str, Tensor] = {}
        self.moments: dict[str, dict[str, Tensor]] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.parameters, self.moments = whole_parameters(self.trainer), moments(self.trainer)


def stage(task: Task, settings: Settings, resume: str | None, kept: Path) -> dict[str, Tensor]:
    """On a rank: train on from a checkpoint, which must be what ``kept`` has of it; leave there what came of it."""
    trainer = build(task, settings)
    compare = Compare(trainer)
    trainer.add_callback(compare)
    with float64_math():
        trainer.train(resume_from_checkpoint=resume)
    if resume is not None:
        expected = torch.load(kept)
        assert_equal(compare.parameters, expected["parameters"])
        assert compare.moments.keys() == expected["moments"].keys()
        for key, each in expected["moments"].items():
            assert_equal(compare.moments[key], each)
    end, kept_now = whole_parameters(trainer), moments(trainer)
    if dist.is_initialized():
        dist.barrier()
    if trainer.args.process_index == 0:
        torch.save({"parameters": end, "moments": kept_now}, kept)
    return end


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "bert" else pytest.mark.slow) for name in LEARNING]
)
def test_on_other_ranks(ranks: Worlds, tmp_path: Path, family: str) -> None:
    """Stages of two steps on 4, 2, 1 and 4 ranks, by uniform and mixed plans, also with owned optimizer state."""
    model = FAMILIES[family].model()
    stages: list[tuple[int, Settings]] = [
        (4, {"tmp_size": 4, "plan": mixed_plan(model, tmp_path, 0)}),
        (2, {}),
        (1, {}),
        # The mean over the labels of tokens is taken in each world, which is not that of one process.
        (4, {"tmp_size": 4 if FAMILIES[family].head == "token" else 2}),
        (4, {"tmp_size": 4, "degree": 2, "schedule": "megatron"}),
        (4, {"tmp_size": 4, "plan": mixed_plan(model, tmp_path, 1)}),
    ]
    steps = 2 * len(stages)
    arguments = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    data = rows(8, family=family)
    resume, end = None, {}
    for number, (world, settings) in enumerate(stages):
        size = 4 * int(settings.get("tmp_size", world)) // world
        task = Task(
            {**arguments, "max_steps": 2 * number + 2, "per_device_train_batch_size": size}, rows=data, family=family
        )
        end = ranks(world).run(stage, task, settings, resume, tmp_path / "kept.pt")[0]
        resume = str(tmp_path / "out" / f"checkpoint-{2 * number + 2}")
    plain = Task({"max_steps": steps, "max_grad_norm": 0.5, "per_device_train_batch_size": 4}, rows=data, family=family)
    expected = one_process(ranks, plain)
    assert_same([replace(expected, end=end)], expected, family)


def larger() -> list[str]:
    """On a rank: what is said when a checkpoint is of a model with other shapes, or nothing is whole."""
    build(Task({"max_steps": 1, "save_strategy": "steps"}), {}).train()
    said = []
    for model in ({"vocab": 95}, {"ffn": 40}):
        with pytest.raises(CheckpointError) as raised:
            build(Task({"max_steps": 2}, model=model), {}).train(resume_from_checkpoint=True)
        said.append(str(raised.value))
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink("out/checkpoint-1/trainer_state.json")
    dist.barrier()
    with pytest.raises(CheckpointError) as raised:
        build(Task({"max_steps": 2}), {}).train(resume_from_checkpoint=True)
    return [*said, str(raised.value)]


def test_checkpoints_of_other_shapes_and_none_that_is_whole(ranks: Worlds) -> None:
    for words, features, none in ranks(2).run(larger):
        assert "embed_tokens.weight has shape (99, 32), and the model's has (95, 32)" in words
        assert "has shape (48, 32), and the model's has (40, 32)" in features
        assert none.startswith("no checkpoint in out is whole; start anew")
