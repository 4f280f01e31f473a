"""bf16 autocast under Trainer: what is kept and sent in which type, and how close the result is."""

from __future__ import annotations

import dataclasses
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from oases_hf.runtime.executor import Run

from ..parity import gradient_deviation
from ..ranks import Worlds
from .fitting import Fit, Task, fit, one_process, rows

BATCH, SEQ, HIDDEN, BLOCKS = 2, 12, 32, 4
TASK = Task(
    {"bf16": True, "max_grad_norm": 1.0, "per_device_train_batch_size": BATCH},
    model={"dtype": torch.float32},
    rows=rows(8, SEQ),
    exact=False,
)
FLOAT32 = dataclasses.replace(TASK, arguments={**TASK.arguments, "bf16": False})


@dataclasses.dataclass(frozen=True, slots=True)
class Types:
    """What a run computed and kept."""

    projections: tuple[tuple[bool, torch.dtype], ...]
    """Of the query projection, in order: whether autograd recorded, and the type of the result."""
    kept_bytes: tuple[int, ...]
    """After each forward of the stack."""


def watched(task: Task, oases: dict[str, Any]) -> tuple[Fit, Types]:
    """On a rank: train, and look at what the executor computes and keeps."""
    projections: list[tuple[bool, torch.dtype]] = []
    kept: list[int] = []
    forward = Run.forward

    def watch(trainer: Trainer) -> None:
        projection = cast(Any, trainer.model).model.layers[0].self_attn.q_proj
        projection.register_forward_hook(lambda *seen: projections.append((torch.is_grad_enabled(), seen[-1].dtype)))

    def keep(run: Run, hidden: Tensor) -> Tensor:
        out = forward(run, hidden)
        kept.append(run.kept_bytes)
        return out

    with mock.patch.object(Run, "forward", keep):
        ours = fit(dataclasses.replace(task, alter=watch), oases)
    return ours, Types(tuple(projections), tuple(kept))


def messages(ours: Fit, sub_batches: int) -> list[torch.dtype | None]:
    """The types of the schedule's all-reduces in the first micro-batch, in order."""
    numel = BATCH // sub_batches * SEQ * HIDDEN
    sums = [call for call in ours.calls[0] if call.name == "all_reduce" and call.of_numbers]
    return [call.dtype for call in sums if call.numel == numel]


def test_partials_are_sent_in_bf16_and_gradients_of_the_stream_in_float32(ranks: Worlds) -> None:
    for ours, types in ranks(2).run(watched, TASK, {}):
        assert messages(ours, 2) == [torch.bfloat16] * 8 + [torch.float32] * 8
        assert set(types.kept_bytes) == {BLOCKS * BATCH * SEQ * HIDDEN * torch.float32.itemsize}


@pytest.mark.parametrize("schedule", ["oases", "megatron"])
def test_recompute_is_in_bf16_too(ranks: Worlds, schedule: str) -> None:
    for ours, types in ranks(2).run(watched, TASK, {"schedule": schedule, "sub_batches": 1}):
        assert types.projections == ((False, torch.bfloat16), (True, torch.bfloat16)) * 3
        # Beside the schedule's: the embedding before it, the gradient of the head's input between its halves.
        recomputed = {"oases": 0, "megatron": 4}[schedule]
        assert messages(ours, 1).count(torch.bfloat16) == 4 + recomputed
        assert messages(ours, 1).count(torch.float32) == 4 + 2


def test_gradients_of_the_stream_are_sent_in_bf16_where_that_is_asked_for(ranks: Worlds) -> None:
    for ours, types in ranks(2).run(watched, TASK, {"comm_dtype": "bf16"}):
        assert messages(ours, 2) == [torch.bfloat16] * 16
        assert set(types.kept_bytes) == {BLOCKS * BATCH * SEQ * HIDDEN * torch.float32.itemsize}, "as ever"


@pytest.mark.parametrize(("world", "comm_dtype"), [(2, None), (4, None), (4, "bf16")])
def test_as_close_to_float32_as_one_process_in_bf16(ranks: Worlds, world: int, comm_dtype: str | None) -> None:
    exact, rounded = one_process(ranks, FLOAT32), one_process(ranks, TASK)
    noise = gradient_deviation(rounded.gradients, exact.gradients, relative=1.0).ratio
    assert 1e-4 < noise < 0.2
    for ours in ranks(world).run(fit, TASK, {"comm_dtype": comm_dtype}):
        assert gradient_deviation(ours.gradients, exact.gradients, relative=2 * noise).ok
        assert ours.losses == pytest.approx(exact.losses, rel=1e-2)
        assert {value.dtype for value in (*ours.gradients.values(), *ours.end.values())} == {torch.float32}


def test_a_model_in_bf16_keeps_and_sends_bf16(ranks: Worlds) -> None:
    pure = dataclasses.replace(FLOAT32, model={"dtype": torch.bfloat16})
    for ours, types in ranks(2).run(watched, pure, {}):
        assert messages(ours, 2) == [torch.bfloat16] * 16
        assert set(types.kept_bytes) == {BLOCKS * BATCH * SEQ * HIDDEN * torch.bfloat16.itemsize}
        assert ours.losses == pytest.approx(one_process(ranks, FLOAT32).losses, rel=3e-2)
