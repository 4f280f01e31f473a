"""Worlds of ranks: results, reuse, failures, recovery."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch.distributed import distributed_c10d
from transformers import Trainer, TrainingArguments

from .ranks import RankError, World, Worlds
from .tiny import batch, tiny_llama

SIZES = [1, 2, 3, 4]


def whoami(offset: int = 0) -> tuple[int, int, int]:
    return dist.get_rank() + offset, dist.get_world_size(), os.getpid()


def reduced(values: torch.Tensor) -> torch.Tensor:
    mine = values * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    return mine


def state_seen_by_accelerate() -> tuple[int, int, str, int]:
    state = PartialState(cpu=True)
    return state.process_index, state.num_processes, state.distributed_type.value, torch.get_num_threads()


def train() -> tuple[int, int, float]:
    args = TrainingArguments(
        output_dir="out", max_steps=2, per_device_train_batch_size=1, report_to=[], disable_tqdm=True
    )
    rows = [{name: row[0] for name, row in batch(1, 8, seed=seed).items()} for seed in range(8)]
    trainer = Trainer(tiny_llama(dtype=torch.float32), args, train_dataset=cast(Any, rows))
    return args.world_size, args.process_index, trainer.train().training_loss


def leave_traces() -> None:
    os.environ["LEFT"] = "behind"
    Accelerator(cpu=True)
    dist.new_group([0, 1])
    torch.set_default_dtype(torch.float64)
    torch.rand(3)


def traces() -> list[object]:
    groups = len(distributed_c10d._world.pg_map)
    state = AcceleratorState._shared_state
    return ["LEFT" in os.environ, bool(state), groups, torch.get_default_dtype(), torch.rand(1).item()]


def raise_on(rank: int) -> None:
    print(f"this is rank {dist.get_rank()}")
    print("below Python", file=sys.stderr)
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def call_a_stray_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def unpicklable() -> object:
    return lambda: None


def worker_pids() -> int:
    loader = torch.utils.data.DataLoader[int](cast(Any, range(4)), num_workers=1)
    return sum(int(batch) for batch in loader)


@pytest.mark.parametrize("size", SIZES)
def test_results_come_in_rank_order(ranks: Worlds, size: int) -> None:
    results = ranks(size).run(whoami, offset=10)
    assert [result[:2] for result in results] == [(10 + rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(ranks: Worlds, size: int) -> None:
    total = torch.full((3,), size * (size + 1) / 2)
    assert all(torch.equal(result, total) for result in ranks(size).run(reduced, torch.ones(3)))


@pytest.mark.parametrize("size", SIZES)
def test_ranks_are_reused(ranks: Worlds, size: int) -> None:
    first, second = (ranks(size).run(whoami) for _ in range(2))
    assert first == second
    assert len({pid for *_, pid in first}) == size


@pytest.mark.parametrize("size", SIZES)
def test_accelerate_sees_the_world(ranks: Worlds, size: int) -> None:
    seen = ranks(size).run(state_seen_by_accelerate)
    assert seen == [(rank, size, "MULTI_CPU", 1) for rank in range(size)]


def test_trainer_runs_again_and_again(ranks: Worlds) -> None:
    first, second = (ranks(2).run(train) for _ in range(2))
    assert [result[:2] for result in first] == [(2, 0), (2, 1)]
    assert first == second


def test_a_run_leaves_nothing_behind(ranks: Worlds) -> None:
    before = ranks(2).run(traces)
    assert before[0][:4] == [False, False, 1, torch.float32]
    ranks(2).run(leave_traces)
    assert ranks(2).run(traces) == before


@pytest.mark.parametrize("size", SIZES)
def test_a_raising_rank_is_reported(ranks: Worlds, size: int) -> None:
    rank = size - 1
    with pytest.raises(RankError, match=f"rank {rank} of {size} raised: ValueError: no luck on {rank}") as error:
        ranks(size).run(raise_on, rank)
    report = error.value.reports[rank]
    assert "in raise_on" in report.details
    assert f"this is rank {rank}" in report.details
    assert "below Python" in report.details
    assert len(ranks(size).run(whoami)) == size


@pytest.mark.parametrize("size", SIZES)
def test_a_hanging_rank_times_out(ranks: Worlds, size: int) -> None:
    pids = [pid for *_, pid in ranks(size).run(whoami)]
    with pytest.raises(RankError, match=rf"ranks \[0\] of {size} are not done after 0.5 s") as error:
        ranks(size).run(hang_on, 0, timeout_s=0.5)
    assert [report.state for report in error.value.reports] == ["hanging", *["returned"] * (size - 1)]
    assert "in hang_on" in error.value.reports[0].details, "the stack of the hanging rank is missing"
    assert not set(pids) & {pid for *_, pid in ranks(size).run(whoami)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_dead_rank_is_reported(ranks: Worlds, size: int) -> None:
    with pytest.raises(RankError, match=f"rank 0 of {size} died: exit code 7"):
        ranks(size).run(die_on, 0)
    assert len(ranks(size).run(whoami)) == size


def test_a_stray_collective_is_found_before_it_meets_another(ranks: Worlds) -> None:
    with pytest.raises(RankError, match="ranks differ in the number of collectives"):
        ranks(2).run(call_a_stray_collective)
    ranks(2).run(reduced, torch.ones(3))


def test_a_result_that_cannot_travel_is_an_error(ranks: Worlds) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 raised: .*pickle"):
        ranks(1).run(unpicklable)


def test_data_loader_workers(ranks: Worlds) -> None:
    assert ranks(1).run(worker_pids) == [6]


def test_close_ends_the_ranks() -> None:
    world = World(2)
    pids = [pid for *_, pid in world.run(whoami)]
    world.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
