"""Kill a process in the midst of saving, again and again, and load what is left.

    python -m tests.integrations.killing 1000

Prints how many of the kills hit a save that had begun and not ended, and how often the last checkpoint was the old or
the new one afterwards. Fails when it could not be loaded, or was not what was saved.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from transformers import Trainer

from oases_hf.checkpoint import Checkpoint
from oases_hf.checkpoint.files import DurableFile
from oases_hf.integrations.optimizers import plain
from oases_hf.integrations.resuming import last_checkpoint

from .fitting import Task, build, whole_parameters

SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 1}
WROTE, ENDED = b".", b"e"


def trained(step: int = 2) -> tuple[Trainer, dict[str, Tensor], dict[str, Tensor]]:
    """A Trainer about to save a step, ``kept`` with the checkpoint of step 1, and the parameters of both."""
    trainer = build(Task(SAVING, model={"layers": 1}), {})
    trainer.train()
    before = whole_parameters(trainer)
    shutil.copytree("out", "kept")
    trainer.state.global_step = step
    with torch.no_grad():
        for parameter in cast(Any, trainer.model).parameters():
            parameter.add_(1.0)
    return trainer, before, whole_parameters(trainer)


def in_a_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork, and call ``work`` in the child with where it may write; returns its id, and where that is read."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        work(writing)
        code = 0
    finally:
        os._exit(code)


def save_in_a_child(trainer: Trainer) -> tuple[int, int]:
    """Start a process that saves, and says whenever it has written something, and that it has ended."""

    def work(writing: int) -> None:
        own = DurableFile.write

        def write(file: DurableFile, data: bytes | memoryview) -> None:
            own(file, data)
            os.write(writing, WROTE)

        with mock.patch.object(DurableFile, "write", write):
            trainer._save_checkpoint(cast(Any, trainer.model), None)
        os.write(writing, ENDED)

    return in_a_child(work)


def restore() -> None:
    """What was there before step 2."""
    shutil.rmtree("out")
    shutil.copytree("kept", "out")


def check(trainer: Trainer, before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
    """Load the last checkpoint, which must be the old or the new one; returns which, and puts the parameters back."""
    folder = last_checkpoint(Path("out"))
    assert folder is not None
    checkpoint = Checkpoint(Path(folder), cast(Any, trainer.model))
    checkpoint.load_parameters()
    checkpoint.load_optimizer(plain(trainer.optimizer))
    now = whole_parameters(trainer)
    each = {"old": before, "new": after}
    (found,) = [which for which, expected in each.items() if all(now[name].equal(expected[name]) for name in expected)]
    with torch.no_grad():
        for name, parameter in cast(Any, trainer.model).named_parameters():
            parameter.copy_(after[name])
    return found


def kill(times: int, seed: int = 0) -> tuple[int, Counter[str]]:
    """How many kills hit a save, and how often which checkpoint was the last one then."""
    trainer, before, after = trained()
    child, reading = save_in_a_child(trainer)
    assert os.waitpid(child, 0)[1] == 0
    writes = len(os.read(reading, 2**16)) - len(ENDED)
    os.close(reading)
    draw, hits, found = random.Random(seed), 0, Counter[str]()
    for _ in range(times):
        restore()
        child, reading = save_in_a_child(trainer)
        for _ in range(draw.randrange(1, writes + 1)):
            assert os.read(reading, 1) == WROTE
        time.sleep(draw.uniform(0, 1e-3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        hits += ENDED not in os.read(reading, 2**16)
        os.close(reading)
        found[check(trainer, before, after)] += 1
    return hits, found


if __name__ == "__main__":
    count = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        hits, found = kill(count)
        print(f"{hits} of {count} kills hit a save; the last checkpoint then was {dict(found)}, whole each time")
        os.chdir("/")
