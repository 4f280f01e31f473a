"""Trainer's checkpoints: which there are, the best one, and going on from what plain Hugging Face wrote."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from oases_hf import cli
from oases_hf.checkpoint import state as writing

from ..parity import assert_updates, float64_math
from ..ranks import Worlds
from .fitting import Task, build, fit, rows, whole_parameters
from .test_resuming import Compare
from .test_saving import assert_equal, reload

EVERY = {"save_strategy": "steps", "save_steps": 1}


def kept(arguments: dict[str, Any]) -> list[str]:
    """On a rank: the checkpoints after three steps; rank 1 is slow to write, and nobody waits for long."""
    own = writing._write

    def slow(*args: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.5)
        return own(*args)

    with mock.patch.object(writing, "_write", slow):
        fit(Task({**EVERY, **arguments}), {})
    return sorted(os.listdir("out"))


@pytest.mark.parametrize(
    ("arguments", "folders"),
    [
        ({}, ["checkpoint-1", "checkpoint-2", "checkpoint-3"]),
        ({"save_steps": 500}, ["checkpoint-3"]),
        ({"save_total_limit": 1}, ["checkpoint-3"]),
        ({"save_total_limit": 2}, ["checkpoint-2", "checkpoint-3"]),
    ],
    ids=str,
)
def test_checkpoints_that_are_kept(ranks: Worlds, arguments: dict[str, Any], folders: list[str]) -> None:
    """Case 19."""
    assert ranks(2).run(kept, arguments) == [folders] * 2


def only_model() -> None:
    """On a rank: checkpoints that are exports, which a run goes on from without an optimizer's state."""
    task = Task({**EVERY, "save_only_model": True, "max_steps": 2})
    trainer = build(task, {})
    trainer.train()
    dist.barrier()
    assert_equal(reload("out/checkpoint-2")[1], whole_parameters(trainer))
    again = build(Task({"max_steps": 3}, model={"seed": 3}), {})
    begin = Compare(again)
    again.add_callback(begin)
    again.train(resume_from_checkpoint=True)
    assert_equal(begin.parameters, whole_parameters(trainer))


def test_checkpoints_of_the_model_only(ranks: Worlds) -> None:
    ranks(2).run(only_model)


def best() -> tuple[str | None, dict[str, Tensor], dict[str, Tensor]]:
    """On a rank: the best checkpoint of a run whose loss grows, and the model it ends with."""
    arguments = {**EVERY, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    task = Task(
        {**arguments, "learning_rate": 0.5, "save_total_limit": 1, "max_steps": 4},
        options={"eval_dataset": rows(4, seed=9)},
    )
    trainer = build(task, {})
    seen: dict[str, dict[str, Tensor]] = {}
    own = trainer._save_checkpoint

    def noting(*args: Any) -> None:
        own(*args)
        seen[f"checkpoint-{trainer.state.global_step}"] = whole_parameters(trainer)

    cast(Any, trainer)._save_checkpoint = noting
    trainer.train()
    found = trainer.state.best_model_checkpoint
    return found, whole_parameters(trainer), seen[Path(str(found)).name]


def test_the_best_model_at_the_end(ranks: Worlds) -> None:
    for folder, ours, expected in ranks(2).run(best):
        assert folder is not None
        assert not folder.endswith("checkpoint-4")
        assert_equal(ours, expected)


def plain_run(out: str) -> None:
    """As one process, without OasesCallback: three steps, and a checkpoint."""
    trainer = build(
        Task({"output_dir": out, **EVERY, "save_steps": 3, "lr_scheduler_type": "linear", "max_steps": 6}), None
    )
    with float64_math():
        trainer.train()


def from_plain(out: str, settings: dict[str, Any]) -> Any:
    """On a rank: go on from the plain checkpoint."""
    arguments = {"output_dir": out, "lr_scheduler_type": "linear", "max_steps": 6}
    arguments["per_device_train_batch_size"] = 2 * int(settings.get("tmp_size", 2)) // dist.get_world_size()
    return fit(Task(arguments, model={"seed": 4}), settings, f"{out}/checkpoint-3").end


@pytest.mark.parametrize(
    ("world", "settings"),
    [(2, {}), (4, {"tmp_size": 4, "degree": 2, "shard_optimizer": "keep"}), (4, {"tmp_size": 2})],
    ids=str,
)
def test_going_on_from_a_plain_trainer(ranks: Worlds, tmp_path: Path, world: int, settings: dict[str, Any]) -> None:
    """Weights, AdamW's moments and the scheduler of one process."""
    out = str(tmp_path / "out")
    ranks(1).run(plain_run, out)
    expected = reload(f"{out}/checkpoint-6")[1]
    start = reload(f"{out}/checkpoint-3")[1]
    for end in ranks(world).run(from_plain, out, settings):
        assert_updates({name: end[name] for name in expected}, expected, start)


def merged() -> None:
    """On a rank: the model of a checkpoint, as one process makes it, in full and in half precision."""
    trainer = build(Task({**EVERY, "max_steps": 1}, exact=False), {"tmp_size": 4, "degree": 2})
    trainer.train()
    ours = whole_parameters(trainer)
    if dist.get_rank() == 0:
        assert cli.main(["merge", "out/checkpoint-1", "merged", "--max-shard-size", "20KB"]) == 0
        assert len(list(Path("merged").glob("*.safetensors"))) > 1
        assert_equal(reload("merged")[1], ours)
        assert cli.main(["merge", "out/checkpoint-1", "half", "--dtype", "bfloat16"]) == 0
        assert_equal(reload("half")[1], {name: value.bfloat16() for name, value in ours.items()})
        assert cli.main(["merge", "out/checkpoint-1", "merged"]) == 2
        assert cli.main(["merge", "out", "other"]) == 2
    dist.barrier()


def test_merge(ranks: Worlds) -> None:
    ranks(4).run(merged)
