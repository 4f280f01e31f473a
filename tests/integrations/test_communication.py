"""What a training step communicates, and when: counted in the calls of torch.distributed, whoever makes them."""

from __future__ import annotations

from collections.abc import Iterable

from ..ranks import Worlds
from .collectives import Call
from .fitting import Fit, Task, fit, rows

LAYERS, SUB_BATCHES, BATCH, SEQ, HIDDEN = 2, 2, 2, 12, 32
HIDDENS = BATCH // SUB_BATCHES * SEQ * HIDDEN
"""Elements of what the all-reduces of the schedule move."""
SCHEDULED = 4 * LAYERS * SUB_BATCHES
AROUND = [BATCH * SEQ * HIDDEN, BATCH * SEQ, 2 * BATCH * SEQ, BATCH * SEQ * HIDDEN]
"""What else is all-reduced over the TMP world: embedding, maximum and sums of the loss, gradient of the head."""

TASK = Task({"gradient_accumulation_steps": 3, "max_steps": 2, "max_grad_norm": 1.0}, rows=rows(24, SEQ))


def sums(calls: tuple[Call, ...], group: tuple[int, ...]) -> list[int]:
    return [call.numel for call in calls if call.name == "all_reduce" and call.ranks == group and call.of_numbers]


def groups(rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The TMP world and the data-parallel ranks of a rank, with 2 × 2 ranks."""
    world, lane = divmod(rank, 2)
    return (2 * world, 2 * world + 1), (lane, lane + 2)


def shares(parameters: Iterable[str]) -> list[str]:
    """Norms, row-parallel biases: of each, every rank has a share of the gradient."""
    inside = [name for name in parameters if "layers" in name]
    return [name for name in inside if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))]


def of_micro_batches(fits: list[Fit], stepping: bool) -> list[tuple[int, tuple[Call, ...]]]:
    """(rank, calls) of all micro-batches with or without an optimizer step."""
    return [
        (rank, calls)
        for rank, ours in enumerate(fits)
        for number, calls in enumerate(ours.calls)
        if ((number + 1) % 3 == 0) == stepping
    ]


def test_micro_batches_without_a_step_communicate_within_tmp_worlds_only(ranks: Worlds) -> None:
    fits = ranks(4).run(fit, TASK, {"tmp_size": 2})
    found = of_micro_batches(fits, stepping=False)
    assert len(found) == 4 * 4
    for rank, calls in found:
        tmp, data = groups(rank)
        assert {call.ranks for call in calls} == {tmp}
        assert not sums(calls, data)
        sizes = sums(calls, tmp)
        assert sizes.count(HIDDENS) == SCHEDULED
        assert [size for size in sizes if size != HIDDENS] == AROUND


def test_gradients_are_averaged_under_the_backward(ranks: Worlds) -> None:
    """All but the first block's are on their way before the schedule's last all-reduce starts."""
    fits = ranks(4).run(fit, TASK, {"tmp_size": 2})
    for rank, calls in of_micro_batches(fits, stepping=True):
        tmp, data = groups(rank)
        parameters = fits[rank].trained
        last = max(i for i, call in enumerate(calls) if (call.ranks, call.numel) == (tmp, HIDDENS))
        early = sums(calls[:last], data)
        sharded = [name for name in parameters if "layers" in name and "norm" not in name]
        rows_biases = [name for name in sharded if name.endswith(("o_proj.bias", "down_proj.bias"))]
        attention_0 = [name for name in sharded if "layers.0.self_attn" in name and name not in rows_biases]
        assert len(early) == len(sharded) - len(rows_biases) - len(attention_0)
        shared = shares(parameters)
        assert len(sums(calls, data)) == len(parameters) - len(shared), "each once; the rest go through the bucket"


def test_one_bucket_a_step(ranks: Worlds) -> None:
    """Summed over the TMP world and averaged over data-parallel ranks at once."""
    fits = ranks(4).run(fit, TASK, {"tmp_size": 2})
    for rank, calls in of_micro_batches(fits, stepping=True):
        tmp, _ = groups(rank)
        bucket = sum(fits[rank].end[name].numel() for name in shares(fits[rank].trained))
        assert [size for size in sums(calls, tmp) if size != HIDDENS] == AROUND
        assert bucket in sums(calls, (0, 1, 2, 3))


def test_a_process_launched_alone_communicates_nothing(ranks: Worlds) -> None:
    (alone,) = ranks(1).run(fit, TASK, {})
    assert len(alone.calls) == 6
    assert not any(alone.calls)
