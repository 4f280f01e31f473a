"""Heads whose loss Trainer scales wrongly in plain Hugging Face: with accumulation and data parallelism, a step's loss
and gradient are those of all its rows as one batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from oases_hf.models.vocabulary import ignores_num_items

from ..families import FAMILIES, Head, Tiny
from ..pairwise import pairs_first, values_first
from ..ranks import Worlds
from .fitting import Row, Task, rows
from .test_trainer import assert_unequal_labels, check

HEADS: list[tuple[Any, Head]] = [
    (AutoModelForCausalLM, "words"),
    (AutoModelForSequenceClassification, "row"),
    (AutoModelForTokenClassification, "token"),
    (AutoModelForQuestionAnswering, "span"),
]
TYPES = {tiny.model_type: tiny for tiny in FAMILIES.values()}
EVERY_HEAD = {
    f"{name} {head}": dataclasses.replace(tiny, auto=auto, head=head, options={})
    for name, tiny in TYPES.items()
    for auto, head in HEADS
    if type(AutoConfig.for_model(name)) in auto._model_mapping
}


@pytest.mark.parametrize("tiny", EVERY_HEAD.values(), ids=EVERY_HEAD)
def test_heads_that_ignore_the_number_of_items(tiny: Tiny) -> None:
    model, data = tiny.model().eval(), tiny.batch(2, 6)
    with torch.no_grad():
        mean, divided = (float(model(**data, **given).loss) for given in ({}, {"num_items_in_batch": 1000}))
    # Nobody counts spans, so Trainer has no number to give to that head.
    assert ignores_num_items(model) == (mean == divided) or tiny.head == "span"


@pytest.mark.parametrize(("family", "world", "accumulate"), pairs_first(["bert", "roberta"], [2, 4], [1, 2]))
def test_masked_words_count_alike(ranks: Worlds, family: str, world: int, accumulate: int) -> None:
    """However unequally they are spread over sub-batches, ranks and the batches of a step."""
    size = 2 if accumulate == 2 else 4
    data = rows(16, family=family)
    assert_unequal_labels(data, size)
    arguments = {"gradient_accumulation_steps": accumulate, "per_device_train_batch_size": size, "max_steps": 2}
    check(ranks, world, Task(arguments, rows=data, family=family), tmp_size=2)


def full_rows(family: str) -> list[Row]:
    """As many labels in each row: those heads average over a batch, and the average of averages is then that of all."""
    data = rows(16, padded=False, family=family)
    for row in data:
        if FAMILIES[family].head == "token":
            row["labels"] = row["input_ids"] % 3
    return data


@pytest.mark.parametrize(
    ("family", "sizes"), values_first(["bert row", "bert token", "bert span", "gpt2 row"], [(4, 2), (2, 2), (1, 1)])
)
def test_other_heads(ranks: Worlds, family: str, sizes: tuple[int, int]) -> None:
    world, tmp_size = sizes
    task = Task({"gradient_accumulation_steps": 2, "max_steps": 2}, rows=full_rows(family), family=family)
    check(ranks, world, task, tmp_size=tmp_size)
