"""Trainer's checkpoints: which there are, the best one, and going on from what plain Hugging Face wrote."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from oases_hf import cli
from oases_hf.checkpoint import state as writing
from oases_hf.checkpoint.files import TensorFile
from oases_hf.errors import CheckpointError
from oases_hf.integrations.resuming import last_checkpoint

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
            time.sleep(0.2)
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
        assert cli.main(["merge", "nowhere", "other"]) == 2
        assert cli.main(["merge", "out/checkpoint-1", "/proc/other"]) == 2
    dist.barrier()


def test_merge(ranks: Worlds) -> None:
    ranks(4).run(merged)


def saved_behind(slow: int) -> tuple[dict[str, Tensor], list[list[str]]]:
    """On a rank: four steps, all of them saved, on one rank slowly; which checkpoints were there at each step."""
    trainer = build(Task({**EVERY, "max_steps": 4, "save_total_limit": 2}, exact=False), {"async_save": True})
    own, seen = TensorFile.add, list[list[str]]()

    def add(file: TensorFile, tensor: Tensor) -> None:
        if trainer.args.process_index == slow:
            time.sleep(0.01)
        own(file, tensor)

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            dist.barrier()  # behind the finishing, which is a callback before this one
            seen.append(sorted(path.name for path in Path("out").glob("checkpoint-*")))
            dist.barrier()

    trainer.add_callback(Look())
    with mock.patch.object(TensorFile, "add", add):
        trainer.train()
    return whole_parameters(trainer), seen


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_saving_while_training_goes_on(ranks: Worlds, slow: int) -> None:
    """A checkpoint is of the step it was begun at, though its writing ends later, and the next one waits for it."""
    through, *_ = ranks(2).run(fit, Task({"max_steps": 4}, exact=False), {})
    (end, seen), other = ranks(2).run(saved_behind, slow)
    assert seen == other[1]
    assert_equal(end, through.end)
    assert seen[0] == seen[1] == [], "the first is being written in the second step"
    assert "checkpoint-1" in seen[2], "the second waited for it"


def behind_checked() -> None:
    """On a rank: every checkpoint that was written behind has what a run to there ends with, and is resumed from."""
    trainer = build(Task({**EVERY, "max_steps": 4}, exact=False), {"async_save": True})
    trainer.train()
    dist.barrier()
    assert sorted(path.name for path in Path("out").iterdir()) == [f"checkpoint-{step}" for step in range(1, 5)]
    end = whole_parameters(trainer)
    for step in range(1, 4):
        again = fit(Task({"max_steps": 4}, exact=False, model={"seed": 5}), {}, f"out/checkpoint-{step}")
        assert_equal(again.end, end)


def test_what_was_saved_behind_is_resumed_from(ranks: Worlds) -> None:
    ranks(2).run(behind_checked)


def behind_failed(rank: int) -> tuple[str, int]:
    """On a rank: what is said when writing behind fails on one, and at which step."""
    trainer = build(Task({**EVERY, "max_steps": 9}), {"async_save": True})
    own = TensorFile.add

    def add(file: TensorFile, tensor: Tensor) -> None:
        if dist.get_rank() == rank and "checkpoint-2" in str(file._path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(file, tensor)

    with mock.patch.object(TensorFile, "add", add), pytest.raises(CheckpointError) as raised:
        trainer.train()
    assert last_checkpoint(Path("out")) == "out/checkpoint-1"
    return str(raised.value), trainer.state.global_step


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_behind_is_raised_at_the_next_step(ranks: Worlds, rank: int) -> None:
    for said, step in ranks(2).run(behind_failed, rank):
        assert said.startswith("out/checkpoint-2 could not be written")
        assert step == 3
