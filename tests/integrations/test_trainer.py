"""Trainer with OasesCallback computes what one plain Trainer process computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch.distributed as dist
from transformers import PreTrainedModel

from ..pairwise import values_first
from ..ranks import Worlds
from ..tiny import IGNORE, randomise
from .fitting import Fit, Row, Task, assert_same, build, fit, one_process, rows

# LLaMA, and others: with words as labels, shifted and not, and with one label per row.
FAMILIES = (None, "gpt2 tied", "bert", "bert row")


def per_worlds(task: Task, worlds: int) -> Task:
    """What one process must do to see what so many TMP worlds see in a step: their batches, one after the other.

    Or all in one: with accumulation, Trainer adds up the mean losses of BERT's batches.
    """
    parts = task.arguments.get("gradient_accumulation_steps", 1) * worlds
    if task.family is None or parts == 1:
        return dataclasses.replace(task, arguments={**task.arguments, "gradient_accumulation_steps": parts})
    size = task.arguments.get("per_device_train_batch_size", 2) * parts
    as_one = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": size}
    return dataclasses.replace(task, arguments={**task.arguments, **as_one})


def check(ranks: Worlds, world: int, task: Task, **oases: Any) -> list[Fit]:
    worlds = world // oases.get("tmp_size", world)
    fits = ranks(world).run(fit, task, oases)
    assert_same(fits, one_process(ranks, per_worlds(task, worlds)), task.family)
    return fits


def valid(row: Row) -> int:
    return int((row["labels"][1:] != IGNORE).sum())


def assert_unequal_labels(data: list[Row], size: int) -> None:
    """Fail unless two batches that follow each other differ in their number of labels."""
    counts = [valid(row) for row in data]
    per_batch = [sum(counts[i : i + size]) for i in range(0, len(data), size)]
    assert all(here != there for here, there in zip(per_batch[::2], per_batch[1::2], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_worlds_of_two_ranks_with_accumulation(ranks: Worlds, family: str | None) -> None:
    """Case 1."""
    if family != "bert row":
        assert_unequal_labels(rows(16, family=family), 2)
    fits = check(ranks, 4, Task({"gradient_accumulation_steps": 2, "max_steps": 2}, family=family), tmp_size=2)
    assert [fit.total_batch for fit in fits] == [8] * 4


@pytest.mark.parametrize(("world", "tmp_size"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)])
def test_every_shape_of_the_mesh(ranks: Worlds, world: int, tmp_size: int) -> None:
    """Also launched alone or data parallel only, where Accelerate would wrap the model."""
    check(ranks, world, Task({"max_grad_norm": 0.5}), tmp_size=tmp_size)


def test_a_callback_that_is_attached_later(ranks: Worlds) -> None:
    check(ranks, 2, Task(attach=True))


def test_shuffled_data(ranks: Worlds) -> None:
    """And a schedule, a warm-up and weight decay: all that is on by default."""
    usual = {"lr_scheduler_type": "linear", "warmup_steps": 1, "weight_decay": 0.1}
    task = Task({"train_sampling_strategy": "random", "seed": 7, **usual})
    check(ranks, 4, task, tmp_size=2)
    assert one_process(ranks, per_worlds(task, 2)).losses != one_process(ranks, per_worlds(Task(), 2)).losses


@pytest.mark.parametrize(
    ("clipped", "world"), values_first([(0.0, None), *((0.1, family) for family in FAMILIES)], [4, 2])
)
def test_clipping(ranks: Worlds, clipped: tuple[float, str | None], world: int) -> None:
    """Case 2. Without a limit the norm is logged all the same."""
    limit, family = clipped
    fits = check(ranks, world, Task({"max_grad_norm": limit}, family=family), tmp_size=2)
    assert len({tuple(fit.logged("grad_norm")) for fit in fits}) == 1
    assert min(fits[0].logged("grad_norm")) > 0.2, "nothing to clip"


@pytest.mark.parametrize("world", [2, 4])
def test_nine_heads_on_three_key_value_heads(ranks: Worlds, world: int) -> None:
    """Case 22, and 6: neither heads nor words divide evenly."""
    sizes = {"heads": 9, "kv_heads": 3, "hidden": 36, "vocab": 99, "tied": True}
    check(ranks, world, Task(model=sizes))


def with_one_and_seven_labels(family: str | None) -> list[Row]:
    first, second = rows(2, padded=False, family=family)
    for row, kept in ((first, [3]), (second, range(2, 9))):
        labels = row["input_ids"].clone()
        row["labels"] = labels.new_full(labels.shape, IGNORE)
        row["labels"][list(kept)] = labels[list(kept)]
    return [first, second]


@pytest.mark.parametrize("family", [None, "gpt2 tied", "bert"])
def test_sub_batches_with_one_and_seven_labels(ranks: Worlds, family: str | None) -> None:
    """Case 13."""
    data = with_one_and_seven_labels(family)
    assert [valid(row) for row in data] == [1, 7]
    check(ranks, 2, Task({"max_steps": 2}, rows=data, family=family))


ONE_PASS = {"max_steps": -1, "num_train_epochs": 1}


ODD_BATCHES = {"one row": (1, 3, 1), "three rows": (3, 6, 0), "a short last batch": (3, 7, 1)}


@pytest.mark.parametrize(("family", "batches"), values_first(FAMILIES, [*ODD_BATCHES]))
def test_odd_batches(ranks: Worlds, family: str | None, batches: str) -> None:
    """Case 14: less overlap is said once, and nothing else."""
    size, count, said = ODD_BATCHES[batches]
    task = Task({"per_device_train_batch_size": size, **ONE_PASS}, rows=rows(count, family=family), family=family)
    for ours in check(ranks, 2, task):
        assert ours.steps == -(-count // size)
        assert len(ours.warnings) == said, ours.warnings
        assert all("a batch of 1 cannot be split into 2" in message for message in ours.warnings)


@pytest.mark.parametrize(("family", "use_reentrant"), values_first(FAMILIES, [False, True]))
def test_requests_for_gradient_checkpointing(ranks: Worlds, family: str | None, use_reentrant: bool) -> None:
    """Case 16: nothing is recomputed twice, so there is no communication beyond the schedule's."""
    asked = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    fits = check(ranks, 2, Task(asked, family=family))
    without = check(ranks, 2, Task(family=family))
    assert [fit.calls for fit in fits] == [fit.calls for fit in without]
    assert ranks(2).run(checkpoints_layers, Task(asked, family=family)) == [False, False]


def checkpoints_layers(task: Task) -> bool:
    """On a rank: whether layers checkpoint themselves after training, as HF's own loop over them would then do."""
    trainer = build(task, {})
    trainer.train()
    return bool(cast(Any, trainer.model).is_gradient_checkpointing)


# Of each family: its first layer, and weights inside a layer: of keys or what is packed with them, and of the MLP.
PLACES = {
    None: ("model.layers.0", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    "gpt2 tied": ("transformer.h.0", "transformer.h.1.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"),
    "bert": (
        "bert.encoder.layer.0",
        "bert.encoder.layer.1.attention.self.key.weight",
        "bert.encoder.layer.0.intermediate.dense.weight",
    ),
}


def freeze_the_bottom(family: str | None, model: PreTrainedModel) -> None:
    model.get_input_embeddings().requires_grad_(False)
    model.get_submodule(PLACES[family][0]).requires_grad_(False)


def freeze_all_but_keys(family: str | None, model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    model.get_parameter(PLACES[family][1]).requires_grad_()


def freeze_all_but_up(family: str | None, model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    model.get_parameter(PLACES[family][2]).requires_grad_()


@pytest.mark.parametrize(
    ("sizes", "freeze"),
    values_first(
        [*((None, *sizes) for sizes in [(2, 2), (4, 4), (4, 2)]), ("gpt2 tied", 2, 2), ("bert", 2, 2)],
        [freeze_the_bottom, freeze_all_but_keys, freeze_all_but_up],
    ),
)
def test_frozen_parameters(
    ranks: Worlds, sizes: tuple[str | None, int, int], freeze: Callable[[str | None, PreTrainedModel], None]
) -> None:
    """Case 17."""
    family, world, tmp_size = sizes
    task = Task(prepare=partial(freeze, family), family=family)
    fits = check(ranks, world, task, tmp_size=tmp_size)
    expected = one_process(ranks, per_worlds(task, world // tmp_size))
    for ours in fits:
        assert ours.trained == expected.trained == expected.gradients.keys()
        frozen = ours.start.keys() - ours.trained
        assert frozen
        assert all(ours.end[name].equal(ours.start[name]) for name in frozen)


def initialise_by_rank(model: PreTrainedModel) -> None:
    """New weights, as a process without a seed of the job makes them; those of rank 0 count."""
    randomise(model, dist.get_rank())


@pytest.mark.parametrize("family", [None, "bert row"])
def test_ranks_that_initialised_other_weights(ranks: Worlds, family: str | None) -> None:
    check(ranks, 4, Task(prepare=initialise_by_rank, family=family), tmp_size=2)
