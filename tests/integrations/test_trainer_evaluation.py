"""Evaluation: losses, metrics and their numbers of rows are those of one process."""

from __future__ import annotations

from typing import Any, cast

import numpy
import pytest
from transformers import EvalPrediction

from ..pairwise import values_first
from ..parity import assert_loss, float64_math
from ..ranks import Worlds
from .fitting import Task, build, fit, one_process, rows

Figures = dict[str, float]


def compute_metrics(prediction: EvalPrediction) -> Figures:
    """Figures that any missing, doubled or moved row would change."""
    logits, labels = numpy.asarray(prediction.predictions), numpy.asarray(prediction.label_ids)
    weight = numpy.arange(1, len(logits) + 1)
    return {
        "rows": len(logits),
        "label_rows": len(labels),
        "logits": float((weight * logits.reshape(len(logits), -1).sum(1)).sum()),
        "labels": float((weight * labels.reshape(len(labels), -1).sum(1)).sum()),
    }


def evaluate(count: int, arguments: dict[str, Any], oases: dict[str, Any] | None, family: str | None = None) -> Figures:
    """On a rank: evaluate twice, since Trainer puts its own gathering back after the first time."""
    data = cast(Any, rows(count, family=family))
    trainer = build(Task(arguments, options={"compute_metrics": compute_metrics}, family=family), oases)
    with float64_math():
        first, second = trainer.evaluate(data), trainer.evaluate(data)
        predicted = trainer.predict(data)
    assert {k: v for k, v in first.items() if k in figures(second)} == figures(second)
    return figures(first) | {"predicted_rows": len(predicted.predictions)}


def figures(metrics: Figures) -> Figures:
    return {name: value for name, value in metrics.items() if "runtime" not in name and "second" not in name}


def assert_equal(ours: Figures, expected: Figures) -> None:
    names = expected.keys() - {"eval_model_preparation_time"}
    for name in names:
        assert_loss(ours[name], expected[name])


# In batches of 2, 5 and 7 rows leave a short one. Of two worlds, one then has a batch that is filled up with other
# rows: half with 7 rows, all of it with 5 and 6.
@pytest.mark.parametrize(
    ("world", "tmp_size", "count"),
    [
        pytest.param(*sizes, count, marks=[] if sizes == (4, 2) or count == 5 else pytest.mark.slow)
        for sizes in [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1)]
        for count in [5, 6, 7, 8]
    ],
)
def test_metrics_and_rows(ranks: Worlds, world: int, tmp_size: int, count: int) -> None:
    """Case 12."""
    (expected,) = ranks(1).run(evaluate, count, {}, None)
    assert expected["eval_rows"] == expected["predicted_rows"] == count
    for ours in ranks(world).run(evaluate, count, {}, {"tmp_size": tmp_size}):
        assert_equal(ours, expected)


@pytest.mark.parametrize(
    ("family", "sizes"), values_first(["gpt2 tied", "bert", "bert row", "bert token"], [(4, 2), (4, 4), (2, 2)])
)
def test_other_families(ranks: Worlds, family: str, sizes: tuple[int, int]) -> None:
    """Case 12."""
    world, tmp_size = sizes
    (expected,) = ranks(1).run(evaluate, 5, {}, None, family)
    for ours in ranks(world).run(evaluate, 5, {}, {"tmp_size": tmp_size}, family):
        assert_equal(ours, expected)


def loss_of(family: str, model: dict[str, Any], oases: dict[str, Any] | None) -> float:
    """On a rank: the loss over seven rows, whose labels are floats for a model of a single one."""
    data = rows(7, family=family)
    if model:
        data = [{**row, "labels": row["labels"].double()} for row in data]
    trainer = build(Task(model=model, family=family), oases)
    with float64_math():
        return trainer.evaluate(cast(Any, data))["eval_loss"]


@pytest.mark.parametrize(("family", "model"), [("bert span", {}), ("bert row", {"num_labels": 1})])
def test_losses_in_which_no_label_stands_for_none(ranks: Worlds, family: str, model: dict[str, Any]) -> None:
    (expected,) = ranks(1).run(loss_of, family, model, None)
    for loss in ranks(4).run(loss_of, family, model, {"tmp_size": 2}):
        assert_loss(loss, expected)


@pytest.mark.parametrize("arguments", [{"eval_use_gather_object": True}, {"eval_accumulation_steps": 1}], ids=str)
def test_other_ways_to_gather(ranks: Worlds, arguments: dict[str, Any]) -> None:
    (expected,) = ranks(1).run(evaluate, 6, arguments, None)
    for ours in ranks(4).run(evaluate, 6, arguments, {"tmp_size": 2}):
        assert_equal(ours, expected)


@pytest.mark.parametrize("world", [2, 4])
def test_evaluation_between_steps(ranks: Worlds, world: int) -> None:
    """Training goes on as if there had been none, and evaluations see what was learned."""
    task = Task({"eval_strategy": "steps", "eval_steps": 1}, options={"eval_dataset": rows(7, seed=1)})
    expected = one_process(ranks, task)
    for ours in ranks(world).run(fit, task, {}):
        losses = list(zip(ours.logged("eval_loss"), expected.logged("eval_loss"), strict=True))
        assert len(losses) == 3
        for loss, wanted in losses:
            assert_loss(loss, wanted)
        assert_loss(ours.losses[-1], expected.losses[-1])
    assert_loss(expected.losses[-1], one_process(ranks, Task()).losses[-1])
