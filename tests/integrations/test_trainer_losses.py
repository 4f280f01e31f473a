"""Losses other than the model's own: smoothed, handed over, or of an overridden compute_loss."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer

from ..pairwise import values_first
from ..parity import assert_loss, float64_math
from ..ranks import Worlds
from ..tiny import IGNORE
from .fitting import Task, build, one_process, rows, state_of
from .test_trainer import check

Outputs = Any


def squared_logits(outputs: Outputs, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss of whole rows of logits that no vocabulary-parallel cross entropy could stand for."""
    logits, shifted = outputs["logits"][:, :-1], labels[:, 1:]
    counted = shifted != IGNORE
    entropy = F.cross_entropy(logits[counted], shifted[counted], reduction="sum")
    spread = (logits[counted].logsumexp(-1) * logits[counted].std(-1)).sum()
    total: Tensor = entropy + 0.1 * spread
    return total / (counted.sum() if num_items_in_batch is None else num_items_in_batch)


class OwnLoss(Trainer):
    """Computes a loss of its own from whole logits, without labels."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = squared_logits(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class LogitsAndLoss(Trainer):
    """Adds to the model's loss a term of the whole logits that come with it."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] + 1e-2 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


LOSSES: dict[str, tuple[Task, dict[str, Any]]] = {
    "label smoothing": (Task({"label_smoothing_factor": 0.1}), {}),
    "compute_loss_func": (Task(options={"compute_loss_func": squared_logits}), {}),
    "compute_loss_func and smoothing": (
        Task({"label_smoothing_factor": 0.1}, options={"compute_loss_func": squared_logits}),
        {},
    ),
    "own compute_loss": (Task(trainer=OwnLoss), {}),
    "loss and whole logits": (Task(trainer=LogitsAndLoss), {"gather_logits": True}),
}


@pytest.mark.parametrize(("name", "world"), values_first([*LOSSES], [4, 2]))
def test_losses(ranks: Worlds, name: str, world: int) -> None:
    task, oases = LOSSES[name]
    check(ranks, world, task, tmp_size=2, **oases)


def evaluated(task: Task, oases: dict[str, Any] | None) -> float:
    """On a rank: the loss of an evaluation before training."""
    trainer = build(task, oases)
    with float64_math():
        return trainer.evaluate(cast(Any, rows(5)))["eval_loss"]


@pytest.mark.parametrize(("name", "world"), values_first([*LOSSES], [2, 4]))
def test_losses_in_evaluation(ranks: Worlds, name: str, world: int) -> None:
    task, oases = LOSSES[name]
    (expected,) = ranks(1).run(evaluated, task, None)
    for loss in ranks(world).run(evaluated, task, {**oases, "tmp_size": 2}):
        assert_loss(loss, expected)


def logits_of_a_training_step(oases: dict[str, Any]) -> tuple[int, ...] | None:
    """On a rank: the shape of the logits that a forward with labels returns in training."""
    trainer = build(Task(), oases)
    model = cast(Any, trainer.model).train()
    logits = model(**{name: tensor[None] for name, tensor in rows(1)[0].items()}).logits
    assert state_of(trainer)
    return None if logits is None else tuple(logits.shape)


def test_whole_logits_with_labels_only_when_asked_for(ranks: Worlds) -> None:
    assert ranks(2).run(logits_of_a_training_step, {}) == [None, None]
    assert ranks(2).run(logits_of_a_training_step, {"gather_logits": True}) == [(1, 12, 99)] * 2


def test_smoothing_changes_the_loss(ranks: Worlds) -> None:
    smoothed, plain = one_process(ranks, LOSSES["label smoothing"][0]), one_process(ranks, Task())
    assert abs(smoothed.losses[0] - plain.losses[0]) > 1e-3
