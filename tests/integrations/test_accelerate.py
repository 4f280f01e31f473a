"""A loop of one's own on Accelerate, with OasesPlugin, computes what it computes in one process."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from oases_hf.errors import BackwardError
from oases_hf.models.converted import converted

from ..pairwise import values_first
from ..parity import assert_gradients, assert_loss, assert_updates
from ..ranks import Worlds
from ..tiny import Batch, batch
from .looping import Backward, Loop, Settings, loop, parameters, set_up


def two_losses(accelerator: Accelerator, model: PreTrainedModel, batch: Batch) -> None:
    """A loss, its backward, another loss and its backward: each synchronises."""
    accelerator.backward(model(**batch).loss)
    accelerator.backward(model(**batch).loss * 0.5)


def two_forwards(accelerator: Accelerator, model: PreTrainedModel, batch: Batch) -> None:
    """Two forwards before one backward."""
    first, second = model(**batch).loss, model(**{**batch, "labels": batch["labels"].flip(0)}).loss
    accelerator.backward(first + 0.5 * second)


def two_forwards_then_two_backwards(accelerator: Accelerator, model: PreTrainedModel, batch: Batch) -> None:
    first, second = model(**batch).loss, model(**{**batch, "labels": batch["labels"].flip(0)}).loss
    accelerator.backward(first)
    accelerator.backward(0.5 * second)


def held_back(accelerator: Accelerator, model: PreTrainedModel, batch: Batch) -> None:
    with accelerator.no_sync(model):
        accelerator.backward(model(**batch).loss)
    accelerator.backward(model(**batch).loss * 0.5)


def assert_same(loops: list[Loop], expected: Loop) -> None:
    for ours in loops:
        assert_gradients(ours.gradients, expected.gradients)
        assert_updates(ours.end, expected.end, expected.start)
        for norm, wanted in zip(ours.norms, expected.norms, strict=True):
            assert_loss(norm, wanted)
    assert all(ours.norms == loops[0].norms for ours in loops)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_and_clipping(ranks: Worlds, world: int, accumulate: int) -> None:
    (expected,) = ranks(1).run(loop, None, accumulate * world // 2)
    assert min(expected.norms) > 0.2, "nothing to clip"
    assert_same(ranks(world).run(loop, {"degree": 2}, accumulate), expected)


@pytest.mark.parametrize(
    ("backward", "world"),
    values_first([two_losses, two_forwards, two_forwards_then_two_backwards, held_back], [2, 4]),
)
def test_several_forwards_or_backwards_in_a_step(ranks: Worlds, backward: Backward, world: int) -> None:
    (expected,) = ranks(1).run(loop, None, world // 2, backward)
    assert_same(ranks(world).run(loop, {"degree": 2}, 1, backward), expected)


def learning_rates(settings: Settings) -> list[float]:
    """On a rank: those of 3 steps, with a schedule that ends after 12."""
    accelerator, model = set_up(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    rates = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    return rates


@pytest.mark.parametrize(("world", "worlds"), [(1, 1), (2, 1), (4, 2)])
def test_schedules_step_once_per_batch(ranks: Worlds, world: int, worlds: int) -> None:
    """As under DistributedDataParallel, where a schedule counts the batches of all processes."""
    settings = None if world == 1 else {"degree": 2}
    for rates in ranks(world).run(learning_rates, settings):
        assert rates == pytest.approx([1 - worlds * step / 12 for step in (1, 2, 3)])


def one_cycle() -> None:
    accelerator, model = set_up({"degree": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    for _ in range(3):
        optimizer.step()
        scheduler.step()


def test_a_schedule_that_ends_within_the_last_batches(ranks: Worlds) -> None:
    ranks(4).run(one_cycle)


def numbers(shuffle: bool) -> list[int]:
    """On a rank: what it is given of range(8)."""
    set_seed(3)
    accelerator, _ = set_up({"degree": 2})
    loader = accelerator.prepare(DataLoader(cast(Any, range(8)), batch_size=2, shuffle=shuffle))
    return [int(number) for part in loader for number in part]


@pytest.mark.parametrize("shuffle", [False, True])
def test_worlds_are_disjoint_and_cover_all(ranks: Worlds, shuffle: bool) -> None:
    """Case 10."""
    first, same, second, same_too = ranks(4).run(numbers, shuffle)
    assert (first, second) == (same, same_too)
    assert sorted(first + second) == list(range(8))
    assert (first == [0, 1, 4, 5]) != shuffle


def gathered(settings: Settings, count: int) -> list[Any]:
    """On a rank: all rows of a loader, as tensors, in structures, as scalars and as objects."""
    accelerator, _ = set_up(settings)
    loader = accelerator.prepare(DataLoader(cast(Any, range(count)), batch_size=2))
    found: list[Any] = [[], [], []]
    for part in loader:
        found[0] += accelerator.gather_for_metrics(part).tolist()
        pair = accelerator.gather_for_metrics({"twice": (2 * part,)})
        found[1] += pair["twice"][0].tolist()
        found[2] += accelerator.gather_for_metrics([f"row {int(number)}" for number in part])
    return found


@pytest.mark.parametrize("count", [5, 6, 7, 8])
@pytest.mark.parametrize("world", [2, 4])
def test_metrics_are_gathered_from_every_row_once(ranks: Worlds, world: int, count: int) -> None:
    (expected,) = ranks(1).run(gathered, None, count)
    assert len(expected[0]) == count
    assert ranks(world).run(gathered, {"degree": 2}, count) == [expected] * world


def scalars(settings: Settings) -> list[float]:
    accelerator, _ = set_up(settings)
    return [float(x) for x in accelerator.gather_for_metrics(torch.tensor(float(accelerator.process_index)))]


def test_scalars_are_gathered_once_per_world(ranks: Worlds) -> None:
    assert ranks(4).run(scalars, {"degree": 2}) == [[0.0, 2.0], [1.0, 3.0]] * 2


def scaled_step(settings: Settings, overflow: bool) -> tuple[bool, float, bool, dict[str, Tensor]]:
    """On a rank: a step with a gradient scaler; with an overflow, rank 1 alone finds inf in a shard of its own."""
    accelerator, model = set_up(settings, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    start = parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model.train()(**batch(4, 8)).loss)
    if overflow and accelerator.process_index == 1:
        weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
        assert converted(model).layouts["model.layers.1.mlp.up_proj.weight"].sharded
        assert weight.grad is not None
        weight.grad[0, 0] = torch.inf
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    end = parameters(model)
    moved = any(not end[name].equal(start[name]) for name in end)
    return isinstance(accelerator.scaler, ShardedGradScaler), accelerator.scaler.get_scale(), moved, end


@pytest.mark.parametrize("settings", [{"degree": 2}, {"degree": 4}])
def test_all_ranks_skip_a_step_in_which_one_overflows(ranks: Worlds, settings: Settings) -> None:
    for scaler, scale, moved, _ in ranks(4).run(scaled_step, settings, True):
        assert (scaler, scale, moved) == (True, 2.0**9, False)


def test_scaled_gradients_are_clipped_as_in_one_process(ranks: Worlds) -> None:
    ((_, _, _, expected),) = ranks(1).run(scaled_step, None, False)
    for scaler, scale, moved, end in ranks(2).run(scaled_step, {}, False):
        assert (scaler, scale, moved) == (True, 2.0**10, True)
        for name, value in expected.items():
            torch.testing.assert_close(end[name], value, rtol=1e-6, atol=1e-7)


def plain_backward() -> str:
    _, model = set_up({"tmp_size": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch(4, 8)).loss.backward()
    with pytest.raises(BackwardError) as raised:
        optimizer.step()
    return str(raised.value)


def test_a_step_on_gradients_that_were_never_summed_is_refused(ranks: Worlds) -> None:
    for message in ranks(2).run(plain_backward):
        assert "call accelerator.backward(loss), not loss.backward()" in message
