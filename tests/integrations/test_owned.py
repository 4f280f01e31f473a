"""Optimizer state owned once, with Trainer and in loops of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oases_hf.errors import ConfigError
from oases_hf.models.converted import converted

from ..families import FAMILIES
from ..pairwise import pairs_first
from ..parallel import full_parameters
from ..ranks import Worlds
from ..tiny import batch
from .fitting import Task
from .looping import Backward, loop, one_loss, set_up
from .test_accelerate import assert_same, held_back, two_forwards_then_two_backwards, two_losses
from .test_trainer import check

WAYS = ("keep", "reduce")
WORLDS: dict[str, dict[str, Any]] = {
    "replicas": {"tmp_size": 4, "degree": 2},
    "replicas and worlds": {"tmp_size": 2, "degree": 1},
    "worlds": {"tmp_size": 2, "degree": 2},
}


@pytest.mark.parametrize(("limit", "worlds", "how"), pairs_first([0.0, 0.5], [*WORLDS], WAYS))
def test_trainer(ranks: Worlds, limit: float, worlds: str, how: str) -> None:
    """With accumulation; Trainer logs the norm with and without clipping."""
    task = Task({"gradient_accumulation_steps": 2, "max_grad_norm": limit})
    check(ranks, 4, task, **WORLDS[worlds], shard_optimizer=how)


@pytest.mark.parametrize("family", ["bert row", "gpt2 tied"])
def test_trainer_with_other_families(ranks: Worlds, family: str) -> None:
    assert family in FAMILIES
    task = Task({"per_device_train_batch_size": 4, "max_grad_norm": 0.5}, family=family)
    check(ranks, 4, task, tmp_size=4, degree=2, shard_optimizer="keep")


@pytest.mark.parametrize(
    ("backward", "worlds", "how"),
    pairs_first([one_loss, two_losses, two_forwards_then_two_backwards, held_back], [*WORLDS], WAYS),
)
def test_loops(ranks: Worlds, backward: Backward, worlds: str, how: str) -> None:
    """Gradients that were handed over already are added to."""
    settings = WORLDS[worlds]
    (expected,) = ranks(1).run(loop, None, 4 // settings["tmp_size"], backward)
    assert_same(ranks(4).run(loop, {**settings, "shard_optimizer": how}, 1, backward), expected)


def scaled_step(fused: bool, clipped: bool, overflow: bool) -> tuple[float, bool, int, dict[str, Tensor]]:
    """On a rank: a step with a gradient scaler; with an overflow, rank 1 alone finds inf in what it owns.

    Returns the scale, whether parameters moved, the bytes that replicas send in the step, and the parameters.
    """
    settings = {"tmp_size": 4, "degree": 2, "shard_optimizer": "keep"}
    accelerator, model = set_up(settings, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
    start = full_parameters(model)
    accelerator.backward(model.train()(**batch(4, 8)).loss)
    state = converted(model)
    if overflow and accelerator.process_index == 1:
        mine = next(p for p, owner in state.gradients.ownership.owners.items() if owner == 1)
        assert mine.grad is not None
        mine.grad[0, 0] = torch.inf
    if clipped:
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    traffic = state.mesh.axis(4, 2).traffic
    before = traffic.bytes
    optimizer.step()
    end = full_parameters(model)
    moved = any(not end[name].equal(start[name]) for name in end)
    return accelerator.scaler.get_scale(), moved, traffic.bytes - before, end


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_step_that_is_skipped_sends_nothing(ranks: Worlds, fused: bool, clipped: bool) -> None:
    for scale, moved, sent, _ in ranks(4).run(scaled_step, fused, clipped, True):
        assert (scale, moved, sent) == (2.0**9, False, 0)
    for scale, moved, sent, _ in ranks(4).run(scaled_step, fused, clipped, False):
        assert (scale, moved) == (2.0**10, True)
        assert sent > 0


class ScheduleFreeSGD(torch.optim.SGD):
    """Named like one that swaps parameters by its state."""


def schedule_free() -> str:
    _, model = set_up({"tmp_size": 4, "degree": 2, "shard_optimizer": True})
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as raised:
        optimizer.step()
    return str(raised.value)


def test_optimizers_that_use_their_state_outside_the_step_are_refused(ranks: Worlds) -> None:
    for said in ranks(4).run(schedule_free):
        assert "which with shard_optimizer only their owners have; leave shard_optimizer off" in said
