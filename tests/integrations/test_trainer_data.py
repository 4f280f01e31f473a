"""Which rank sees which rows, and what is counted of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from ..ranks import RankError, Worlds
from .fitting import Fit, Row, Task, assert_same, fit, one_process, rows
from .test_trainer import FAMILIES, ONE_PASS, check, per_worlds


def numbered() -> list[Row]:
    """Eight rows whose first token is their number."""
    data = rows(8)
    for number, row in enumerate(data):
        row["input_ids"][0] = number
    return data


def seen(ours: Fit) -> list[int]:
    """The numbers of the rows that a rank was given."""
    return [int(row[0]) for ids in ours.inputs for row in ids]


@pytest.mark.parametrize("order", ["sequential", "random"])
def test_worlds_are_disjoint_and_cover_all(ranks: Worlds, order: str) -> None:
    """Case 10."""
    task = Task({**ONE_PASS, "train_sampling_strategy": order}, rows=numbered())
    first, same, second, same_too = map(seen, check(ranks, 4, task, tmp_size=2))
    assert first == same
    assert second == same_too
    assert sorted(first + second) == list(range(8))
    assert (first == [0, 1, 4, 5]) == (order == "sequential")


class Stream(IterableDataset[Row]):
    """Rows without a length, unshuffled and in order on every rank."""

    def __iter__(self) -> Iterator[Row]:
        return iter(numbered())


def test_a_stream_is_dealt_out_to_worlds(ranks: Worlds) -> None:
    task = Task({"max_steps": 2}, rows=Stream())
    first, same, second, same_too = map(seen, check(ranks, 4, task, tmp_size=2))
    assert (first, second) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert (same, same_too) == (first, second)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in (None, "bert") else pytest.mark.slow) for family in FAMILIES]
)
def test_total_batch_and_steps_per_epoch(ranks: Worlds, family: str | None) -> None:
    """Case 11."""
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, **ONE_PASS}
    task = Task(sizes, rows=rows(192, seq=4, family=family), family=family)
    for ours in check(ranks, 4, task, tmp_size=2):
        assert ours.total_batch == 64
        assert (ours.steps, ours.epoch) == (3, 1.0)


@pytest.mark.parametrize("kind", ["all", "non_padding"])
@pytest.mark.parametrize(("world", "tmp_size"), [(2, 2), (4, 2)])
def test_tokens_are_counted_once(ranks: Worlds, kind: str, world: int, tmp_size: int) -> None:
    task = Task({"include_num_input_tokens_seen": kind})
    expected = one_process(ranks, per_worlds(task, world // tmp_size))
    for ours in check(ranks, world, task, tmp_size=tmp_size):
        assert ours.tokens_seen == expected.tokens_seen > 0
        assert ours.logged("num_input_tokens_seen") == expected.logged("num_input_tokens_seen")


def mask_by_rank(features: list[Row]) -> dict[str, Tensor]:
    """Mask tokens and labels at random, as a worker process does, whose generator is seeded by its rank."""
    whole: dict[str, Tensor] = default_data_collator(features)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    masked = torch.rand(whole["input_ids"].shape, generator=generator) < 0.3
    labels = whole["labels"].masked_fill(~masked, -100)
    labels[:, 3] = whole["input_ids"][:, 3]
    return {**whole, "input_ids": whole["input_ids"].masked_fill(masked, 0), "labels": labels}


def test_random_masks_are_those_of_the_first_rank(ranks: Worlds) -> None:
    task = Task(options={"data_collator": mask_by_rank})
    expected = one_process(ranks, task)
    fits = ranks(4).run(fit, task, {})
    assert_same(fits, expected)
    alone = ranks(4).run(masked_ids)
    assert all(not ids.equal(alone[0]) for ids in alone[1:]), "the ranks would have had equal batches anyway"


def masked_ids() -> Tensor:
    return mask_by_rank(rows(2))["input_ids"]


def test_two_worlds_keep_masks_of_their_own(ranks: Worlds) -> None:
    fits = ranks(4).run(fit, Task(options={"data_collator": mask_by_rank}), {"tmp_size": 2})
    first, same, second, same_too = [[ids == 0 for ids in ours.inputs] for ours in fits]
    assert all(here.equal(there) for here, there in zip(first, same, strict=True))
    assert all(here.equal(there) for here, there in zip(second, same_too, strict=True))
    assert not any(here.equal(there) for here, there in zip(first, second, strict=True))


def pad_by_rank(features: list[Row]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = default_data_collator(features)
    rank = int(os.environ["RANK"])
    return {name: tensor[:, : 12 - rank] for name, tensor in whole.items()}


def refusal(task: Task, oases: dict[str, Any]) -> str:
    try:
        fit(task, oases)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_batches_of_different_shapes_are_refused_everywhere(ranks: Worlds) -> None:
    for said in ranks(2).run(refusal, Task(options={"data_collator": pad_by_rank}), {}):
        assert said.startswith("DistributedError: the ranks (0, 1) share one batch and were given batches of different")
        assert "prepare the data loader with the accelerator after install, and pad to a length" in said


def test_no_rank_is_left_behind_when_batches_run_out_on_one(ranks: Worlds) -> None:
    """Rows of another number on one rank show as an error within the time a test may take, not as a wrong result."""
    with pytest.raises(RankError, match="raised"):
        ranks(2).run(fit, Task({"max_steps": 9}, options={"data_collator": fail_on_rank_1}), {}, timeout_s=30)


def fail_on_rank_1(features: list[Row]) -> dict[str, Tensor]:
    if os.environ["RANK"] == "1":
        raise ValueError("no rows left")
    whole: dict[str, Tensor] = default_data_collator(features)
    return whole
