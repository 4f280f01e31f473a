"""A process that ends anywhere in a save leaves a checkpoint to go on from; damaged ones are refused or passed over."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from transformers import Trainer
from transformers.trainer_callback import TrainerState

from oases_hf.checkpoint.files import DurableFile
from oases_hf.checkpoint.manifest import MANIFEST_NAME
from oases_hf.errors import CheckpointError
from oases_hf.integrations.resuming import last_checkpoint
from oases_hf.models.converted import converted

from ..launch import run_launcher
from ..ranks import Worlds
from .fitting import Task, build, whole_parameters

SAVED, FAILED, CRASHED = range(3)
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 1}


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
            (os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (shutil, "rmtree"), (torch, "save"),
            (DurableFile, "write"), (TrainerState, "save_to_json"),
        ]  # fmt: skip
        return [mock.patch.object(place, name, self.after(getattr(place, name))) for place, name in places]


def save(trainer: Trainer, last: int | None) -> int:
    """In a process of its own: the save of step 2; returns how it ended, or how many calls it made."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            countdown = Countdown(last)
            for patch in countdown.everywhere():
                patch.start()
            trainer._save_checkpoint(cast(Any, trainer.model), None)
            os.write(writing, countdown.calls.to_bytes(4, "little"))
            code = SAVED
        finally:
            os._exit(code)
    os.close(writing)
    said = os.read(reading, 4)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if last is None:
        assert code == SAVED
        return int.from_bytes(said, "little")
    return code


def crashes() -> int:
    """In a process that can fork: crash behind every call of a save, and load what is there; returns how often."""
    trainer = build(Task(SAVING), {})
    trainer.train()
    before = whole_parameters(trainer)
    shutil.copytree("out", "kept")
    trainer.state.global_step = 2
    with torch.no_grad():
        for parameter in cast(Any, trainer.model).parameters():
            parameter.add_(1.0)
    after = whole_parameters(trainer)
    count = save(trainer, None)
    assert sorted(os.listdir("out")) == ["checkpoint-2"]
    found = []
    for last in range(1, count + 1):
        shutil.rmtree("out")
        shutil.copytree("kept", "out")
        assert save(trainer, last) == CRASHED
        folder = last_checkpoint(Path("out"))
        assert folder is not None
        trainer._load_from_checkpoint(folder)
        trainer._load_optimizer_and_scheduler(folder)
        expected = after if folder.endswith("2") else before
        now = whole_parameters(trainer)
        assert all(torch.equal(now[name], value) for name, value in expected.items()), last
        found.append(folder[-1])
        # Saved anew, what a crash left is in nobody's way.
        with torch.no_grad():
            for name, parameter in cast(Any, trainer.model).named_parameters():
                parameter.copy_(after[name])
    assert found == sorted(found)
    assert {"1", "2"} == set(found)
    return count


def test_a_crash_behind_every_call(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\nfrom {__name__} import crashes; print(crashes())")
    done = run_launcher([script])  # no rank: one that has threads cannot fork
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 100


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
