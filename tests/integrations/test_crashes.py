"""A process that ends anywhere in a save leaves a checkpoint to go on from; damaged ones are refused or passed over."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState

from oases_hf.checkpoint.files import DurableFile
from oases_hf.checkpoint.manifest import MANIFEST_NAME
from oases_hf.errors import CheckpointError
from oases_hf.integrations.resuming import last_checkpoint
from oases_hf.models.converted import converted

from ..launch import launch, run_launcher
from ..ranks import Worlds
from .fitting import Task, build, fit, rows, whole_parameters
from .killing import SAVING, check, in_a_child, restore, trained
from .test_saving import assert_equal

CRASHED = 2


class Countdown:
    """Ends the process, as a power failure would, behind the call of that number; counts calls when it is None."""

    def __init__(self, last: int | None) -> None:
        self.last, self.calls = last, 0

    def after(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            self.calls += 1
            if self.calls == self.last:
                os._exit(CRASHED)
            return result

        return call

    def everywhere(self) -> list[Any]:
        """Patches of all that a save does to the disk."""
        places = [
            (os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"),
            (shutil, "rmtree"), (torch, "save"), (DurableFile, "write"), (TrainerState, "save_to_json"),
        ]  # fmt: skip
        return [mock.patch.object(place, name, self.after(getattr(place, name))) for place, name in places]


def save(trainer: Trainer, last: int | None) -> int:
    """In a process of its own: the save of step 2; returns how it ended, or how many calls it made."""

    def work(writing: int) -> None:
        countdown = Countdown(last)
        for patch in countdown.everywhere():
            patch.start()
        trainer._save_checkpoint(cast(Any, trainer.model), None)
        os.write(writing, countdown.calls.to_bytes(4, "little"))

    child, reading = in_a_child(work)
    said = os.read(reading, 4)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if last is None:
        assert code == 0
        return int.from_bytes(said, "little")
    return code


def crashes(step: int) -> int:
    """In a process that can fork: crash behind every call of a save, and load what is there; returns how often."""
    trainer, before, after = trained(step)
    count = save(trainer, None)
    assert sorted(os.listdir("out")) == [f"checkpoint-{step}"]
    found = []
    for last in range(1, count + 1):
        restore()
        assert save(trainer, last) == CRASHED
        found.append(check(trainer, before, after))
    assert found == sorted(found, reverse=True)
    assert set(found) == {"old", "new"}, found
    return count


def in_a_process(folder: Path, call: str) -> str:
    """What a call of this package prints in a fresh process: a rank has threads, and cannot fork."""
    script = folder / "script.py"
    script.write_text(
        f"import os; os.chdir({str(folder)!r})\nfrom {__package__} import test_crashes, killing\nprint({call})"
    )
    done = run_launcher([script])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "step", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["another folder", "the same folder"]
)
def test_a_crash_behind_every_call(tmp_path: Path, step: int) -> None:
    assert int(in_a_process(tmp_path, f"test_crashes.crashes({step})")) > 100


@pytest.mark.slow
def test_kills_in_the_midst_of_saves(tmp_path: Path) -> None:
    hits = int(in_a_process(tmp_path, "killing.kill(10)[0]"))
    assert hits >= 9


KILLED_RANK = """
import os, signal, sys
from unittest import mock
from oases_hf.checkpoint import files, manifest, state
from tests.integrations.fitting import Task, build

places = {"files": files.TensorFile, "manifest": manifest.Manifest, "state": state}
victim, place, name = int(sys.argv[1]), places[sys.argv[2]], sys.argv[3]
trainer = build(Task({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}), {})

def kill(*args, **kwargs):
    if trainer.state.global_step == 2 and trainer.args.process_index == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return own(*args, **kwargs)

own = getattr(place, name)
with mock.patch.object(place, name, kill):
    trainer.train()
"""


@pytest.mark.parametrize(
    ("victim", "module", "name", "step"),
    [
        pytest.param(0, "files", "add", 1, id="its file, rank 0", marks=pytest.mark.slow),
        pytest.param(1, "files", "add", 1, id="its file, rank 1", marks=pytest.mark.slow),
        pytest.param(0, "manifest", "write", 1, id="the manifest", marks=pytest.mark.slow),
        pytest.param(0, "state", "_publish", 2, id="the name"),
    ],
)
def test_a_rank_that_is_killed_before_it_writes(
    ranks: Worlds, tmp_path: Path, victim: int, module: str, name: str, step: int
) -> None:
    """The other one ends too, and training goes on from what is whole to what it would have come to."""
    script = tmp_path / "script.py"
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{KILLED_RANK}")
    done = launch(2, [script, str(victim), module, name])
    assert done[victim].returncode == -signal.SIGKILL
    assert done[1 - victim].returncode not in (0, -signal.SIGKILL)
    last = last_checkpoint(tmp_path / "out")
    assert last == str(tmp_path / "out" / f"checkpoint-{step}")
    task = Task({"max_steps": 3}, exact=False)
    for resumed, through in zip(ranks(2).run(fit, task, {}, last), ranks(2).run(fit, task, {}), strict=True):
        assert_equal(resumed.end, through.end)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def change(file: Path) -> None:
    """Put the file of another step in its place."""
    shutil.copyfile(file.parents[1] / "checkpoint-1" / file.name, file)


FIRST, SECOND = (f"oases-0000{rank}-of-00002.safetensors" for rank in range(2))
# The file, what happens to it, what is said, and whether that is seen without reading it: then the checkpoint is passed
# over. To read all of them to choose one takes as long as loading them; a changed one is refused when it is loaded.
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str, bool]] = {
    "cut": (SECOND, cut, f"{SECOND} has .* bytes, and was written with", True),
    "flipped": (SECOND, flip, f"{SECOND} has changed since it was written", False),
    "state flipped": ("trainer_state.json", flip, "trainer_state.json has changed since it was written", False),
    "missing": (FIRST, Path.unlink, f"{FIRST} is missing; restore it", True),
    "no manifest": (MANIFEST_NAME, Path.unlink, f"it has no {MANIFEST_NAME}, which is written last", True),
    "changed": (FIRST, change, f"{FIRST} has changed since it was written", False),
}


def damaged(name: str, damage: Callable[[Path], object]) -> tuple[str, str]:
    """On a rank: what is said of a damaged checkpoint, and which one a run goes on from by itself."""
    trainer = build(Task({**SAVING, "save_total_limit": None, "max_steps": 2}), {})
    trainer.train()
    state = converted(cast(Any, trainer.model))
    if state.mesh.world.rank == 0:
        damage(Path("out/checkpoint-2") / name)
    state.mesh.meet("damaging")
    again = build(Task({**SAVING, "max_steps": 3}), {})
    with pytest.raises(CheckpointError) as raised:
        again.train(resume_from_checkpoint="out/checkpoint-2")
    return str(raised.value), str(last_checkpoint(Path("out")))


@pytest.mark.parametrize(("name", "damage", "expected", "seen"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoints(
    ranks: Worlds, name: str, damage: Callable[[Path], object], expected: str, seen: bool
) -> None:
    found = ranks(2).run(damaged, name, damage)
    assert any(re.search(expected, said) for said, _ in found)
    assert {last for _, last in found} == {"out/checkpoint-1" if seen else "out/checkpoint-2"}


def full_in_the_second_save(trainer: Trainer, rank: int) -> Any:
    """No space is left on a rank, for a while."""
    own = DurableFile.write

    def write(file: DurableFile, data: bytes | memoryview) -> None:
        if trainer.state.global_step == 2 and dist.get_rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(file, data)

    return mock.patch.object(DurableFile, "write", write)


def full_disk(rank: int) -> str:
    """On a rank: no space is left on one of them in the second save; then training goes on from the first."""
    trainer = build(Task({**SAVING, "max_steps": 2}), {})
    with full_in_the_second_save(trainer, rank), pytest.raises(CheckpointError) as raised:
        trainer.train()
    assert last_checkpoint(Path("out")) == "out/checkpoint-1"
    dist.barrier()
    again = build(Task({**SAVING, "max_steps": 2}), {})
    again.train(resume_from_checkpoint=True)
    assert sorted(os.listdir("out")) == ["checkpoint-2"]
    return str(raised.value)


def going_on(rank: int) -> dict[str, Tensor]:
    """On a rank: the second save fails, which is not to matter; the first stays until the third."""
    trainer = build(Task({**SAVING, "max_steps": 3}, exact=False), {"ignore_failed_saves": True})
    seen = []

    class Look(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            seen.append(sorted(name for name in os.listdir("out") if name.startswith("checkpoint")))

    trainer.add_callback(Look())
    with full_in_the_second_save(trainer, rank):
        trainer.train()
    dist.barrier()
    assert seen[1] == ["checkpoint-1"]
    assert os.listdir("out") == ["checkpoint-3"]
    return whole_parameters(trainer)


@pytest.mark.parametrize("rank", [0, 1])
def test_going_on_without_a_checkpoint(ranks: Worlds, rank: int) -> None:
    through, *_ = ranks(2).run(fit, Task({"max_steps": 3}, exact=False), {})
    for found in ranks(2).run(going_on, rank):
        assert_equal(found, through.end)


BEST = {"metric_for_best_model": "loss", "greater_is_better": False, "eval_strategy": "steps", "eval_steps": 1}


def failed_best(arguments: dict[str, Any], settings: dict[str, Any]) -> tuple[str | None, list[str]]:
    """On a rank: the checkpoint of step 2, which is better than that of step 1, fails; which is the best, and is there.

    Trainer would load it at the end, or keep it when it deletes others.
    """
    given = {**SAVING, "max_steps": 2, **BEST, **arguments}
    trainer = build(
        Task(given, exact=False, options={"eval_dataset": rows(4, seed=9)}), {"ignore_failed_saves": True, **settings}
    )
    losses = iter([3.0, 2.0])
    own = trainer.evaluate

    def evaluate(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {**own(*args, **kwargs), "eval_loss": next(losses)}

    trainer.evaluate = evaluate  # type: ignore[method-assign]
    with full_in_the_second_save(trainer, 1):
        trainer.train()
    dist.barrier()
    return trainer.state.best_model_checkpoint, sorted(os.listdir("out"))


@pytest.mark.parametrize("settings", [{}, {"async_save": True}], ids=str)
@pytest.mark.parametrize("load", [True, False], ids=["loaded", "kept"])
def test_a_failed_save_is_not_the_best(ranks: Worlds, load: bool, settings: dict[str, Any]) -> None:
    for best, there in ranks(2).run(failed_best, {"load_best_model_at_end": load}, settings):
        assert (best, there) == ("out/checkpoint-1", ["checkpoint-1"])


def stopped_after_a_failure(rank: int) -> list[str]:
    """On a rank: writing step 2 behind fails, and a signal comes in step 3; what is there when the process ends."""
    trainer = build(Task({**SAVING, "max_steps": 9, "save_total_limit": None}), {"async_save": True})
    hold = threading.Event()
    own = DurableFile.write

    def write(file: DurableFile, data: bytes | memoryview) -> None:
        if dist.get_rank() == rank and "checkpoint-2" in str(file._path):
            hold.wait(5.0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(file, data)

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                hold.set()

    trainer.add_callback(Stop())
    with mock.patch.object(DurableFile, "write", write), pytest.raises(SystemExit) as raised:
        trainer.train()
    assert raised.value.code == 128 + signal.SIGTERM
    dist.barrier()
    return sorted(os.listdir("out"))


def test_a_signal_saves_after_a_save_that_failed(ranks: Worlds) -> None:
    for there in ranks(2).run(stopped_after_a_failure, 1):
        assert there == ["checkpoint-1", "checkpoint-3"]


def interrupted() -> tuple[str, list[str]]:
    """On a rank: training fails while a checkpoint is written behind; then it goes on from that one."""
    trainer = build(Task({**SAVING, "max_steps": 4}), {"async_save": True})

    class Fail(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise ValueError("out of luck")

    fail = Fail()
    trainer.add_callback(fail)
    own = DurableFile.write

    def write(file: DurableFile, data: bytes | memoryview) -> None:
        time.sleep(0.02)
        own(file, data)

    with mock.patch.object(DurableFile, "write", write), pytest.raises(ValueError, match="out of luck"):
        trainer.train()
    trainer.remove_callback(fail)
    begun = []

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

    trainer.add_callback(Look())
    trainer.train(resume_from_checkpoint=True)
    dist.barrier()
    return str(begun), sorted(os.listdir("out"))


def test_going_on_from_what_was_being_written(ranks: Worlds) -> None:
    for begun, there in ranks(2).run(interrupted):
        assert (begun, there) == ("[2]", ["checkpoint-4"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_leaves_the_last_checkpoint(ranks: Worlds, rank: int) -> None:
    said = ranks(2).run(full_disk, rank)
    assert all(each.startswith("out/checkpoint-2 could not be written: ") for each in said)
    assert "No space left on device; free space or choose another folder" in said[rank]
