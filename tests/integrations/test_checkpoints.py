"""Trainer's checkpoints are exports; training does not resume from them, and a new run may start from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..ranks import Worlds
from .fitting import Task, build, fit, whole_parameters
from .test_saving import assert_equal, reload


def default_saving(arguments: dict[str, Any]) -> tuple[list[str], tuple[str, ...], list[str]]:
    """On a rank: train with Trainer's own way of saving; returns checkpoints, warnings and refusals to resume."""
    task = Task({"save_strategy": "steps", "logging_steps": 500, **arguments})
    ours = fit(task, {})
    folders = sorted(os.listdir("out"))
    _, there = reload(Path("out") / folders[-1])
    assert_equal(there, ours.end)
    assert (Path("out") / folders[-1] / "trainer_state.json").exists()
    trainer = build(task, {})
    refusals = []
    for checkpoint in (True, f"out/{folders[-1]}"):
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except Exception as error:
            refusals.append(f"{type(error).__name__}: {error}")
    return folders, ours.warnings, refusals


@pytest.mark.parametrize(
    ("arguments", "folders"),
    [
        ({}, ["checkpoint-3"]),
        ({"save_steps": 1}, ["checkpoint-1", "checkpoint-2", "checkpoint-3"]),
        ({"save_steps": 1, "save_total_limit": 1}, ["checkpoint-3"]),
        ({"save_only_model": True}, ["checkpoint-3"]),
    ],
    ids=str,
)
def test_checkpoints_are_exports_and_resuming_is_refused(
    ranks: Worlds, arguments: dict[str, Any], folders: list[str]
) -> None:
    for rank, (found, warnings, refusals) in enumerate(ranks(2).run(default_saving, arguments)):
        assert found == folders
        assert len(refusals) == 2
        for said in refusals:
            assert said.startswith("CheckpointError: resumable training state is not supported yet")
            assert "start a new run from that folder" in said
        told = rank == 0 and "save_only_model" not in arguments
        assert any("holds an export of the model, no optimizer" in message for message in warnings) == told


def second_run() -> float:
    """On a rank: go on from an export, as the refusal to resume says."""
    trainer = build(Task(), {})
    trainer.train()
    trainer.save_model("export")
    dist.barrier()
    again = build(Task(prepare=from_export), {})
    assert_equal(whole_parameters(again), whole_parameters(trainer))
    return float(again.train().training_loss)


def from_export(model: PreTrainedModel) -> None:
    there = reload("export")[1]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(there[name])


def test_a_new_run_from_an_export(ranks: Worlds) -> None:
    first, second = ranks(2).run(second_run)
    assert first == second
