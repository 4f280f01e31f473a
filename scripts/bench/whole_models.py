"""Whole models through Trainer, from embedding to optimizer: how long a step takes on the slowest rank."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, fields
from typing import Any, cast
from unittest import mock

import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from oases_hf import OasesCallback, OasesConfig, OasesPlugin
from oases_hf.config import CommDtype
from oases_hf.errors import ConfigError
from oases_hf.integrations.planning import SPARE
from oases_hf.models.converted import converted
from oases_hf.runtime.graphs import WARM
from scripts.bench.contenders import loaded_in_parallel
from scripts.bench.llama import build
from scripts.bench.rows import Recomputed, Row, in_a_word
from scripts.bench.tasks import AUTO, Job, Task
from scripts.bench.timing import World, held_bytes, memory_limit
from scripts.bench.training import begin_anew, measure

WARM_UP = WARM + 2
"""Steps before those that are timed; the optimizer's state is made in the first, recordings in a later one."""

PEERS_OF_TRAINER = {"hf": "tensor parallelism", "fsdp": "FSDP2"}

_NAMES = {field.name for field in fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _NAMES else "gradient_checkpointing"
"""The argument, as this version of transformers calls it."""

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
"""Of the first step's loss, relative, between contenders."""


class Steps(TrainerCallback):
    """Times optimizer steps within a memory limit, and keeps the losses that are logged.

    Attributes:
        peak_bytes: that was held in the steps behind those that warm up, as :func:`held_bytes` counts; 0 on CPUs.
    """

    def __init__(self, world: World, memory_gib: float) -> None:
        self.peak_bytes: Callable[[], int] = int
        self.ms: list[float] = []
        self.losses: list[float] = []
        self._world = world
        self._memory_gib = memory_gib
        self._limited = ExitStack()
        self._last = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Limit memory from here on: whole models were there before."""
        self._limited.enter_context(memory_limit(self._world.device, self._memory_gib))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """No limit any more."""
        self._limited.close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the device; what Trainer does between two steps counts to the second."""
        self._world.synchronize()
        before, self._last = self._last, time.perf_counter()
        self.ms.append((self._last - before) * 1e3)
        if len(self.ms) == WARM_UP:
            self.peak_bytes = self._limited.enter_context(held_bytes(self._world.device))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the loss of a step; the last log has none."""
        if "loss" in kwargs["logs"]:
            self.losses.append(kwargs["logs"]["loss"])


def row(job: Job, task: Task, world: World) -> Row:
    """Train by a contender for a few steps.

    Raises:
        ConfigError: it does not go with these ranks.
        ArithmeticError: the first step's loss is not that of the other contenders.
    """
    if task.entry.variant == "bare loop":
        return _bare_loop(job, task, world)
    begin_anew()
    steps = Steps(world, job.memory_gib)
    with redirect_stdout(sys.stderr), mock.patch.dict(os.environ):  # accelerate leaves there that FSDP is used
        made = _trainer(job, task, world, steps)
        made.train()
    if world.rank == 0:
        _compare(job, task, steps.losses[0])
    ranks = world.gather((steps.peak_bytes(), steps.ms[WARM_UP:]))
    ms = tuple(max(times) for times in zip(*(times for _, times in ranks), strict=True))
    what, recompute = _described(made, task)
    return Row(
        task.entry.name,
        what,
        statistics.median(ms),
        peak_memory_bytes=max(peak for peak, _ in ranks) or None,
        rounds_ms=ms,
        recompute=recompute,
    )


def _bare_loop(job: Job, task: Task, world: World) -> Row:
    """Train by our schedule through Accelerate alone; gradients are clipped as Trainer does by default."""
    shape, entry = task.shape, task.entry
    options = argparse.Namespace(
        **asdict(shape),
        seq=job.seq,
        vocab=job.vocab,
        batch=shape.rows,
        mixed_precision="bf16" if job.dtype == "bf16" else "no",
        accumulation=1,
        steps=job.rounds,
    )
    plugin = OasesPlugin(schedule=entry.name, recompute=entry.recompute)
    with redirect_stdout(sys.stderr):
        found = measure(options, plugin, job.memory_gib, TrainingArguments.max_grad_norm)
    return Row(
        entry.name,
        "Accelerate alone",
        found.ms,
        peak_memory_bytes=found.peak_bytes or None,
        rounds_ms=found.steps_ms,
        recompute="full" if entry.recompute == "full" else "none",
    )


def _trainer(job: Job, task: Task, world: World, steps: Steps) -> Trainer:
    entry, shape = task.entry, task.shape
    if entry.name in PEERS_OF_TRAINER and world.device.type == "cpu":
        raise ConfigError(f"Trainer has no {PEERS_OF_TRAINER[entry.name]} on CPUs")
    with world.device:
        whole = build(shape.config("whole", job.seq, job.vocab))
    callbacks: list[TrainerCallback] = [steps]
    rows = shape.rows
    settings: dict[str, Any] = {CHECKPOINTING: entry.recompute == "full"}
    if entry.name == "hf":
        whole = cast(LlamaForCausalLM, loaded_in_parallel(whole, world))
    elif entry.name == "fsdp":
        if rows % world.size:
            raise ConfigError(f"{rows} sequences do not divide evenly over {world.size} data-parallel ranks")
        rows //= world.size
        settings = {"fsdp": True, "fsdp_config": {"activation_checkpointing": entry.recompute == "full"}}
    else:
        callbacks.append(OasesCallback(_config(job, task)))
        settings = {}
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(job.vocab, (shape.rows, job.seq), generator=generator)
    arguments = TrainingArguments(
        str(job.folder / "trainer"),
        max_steps=WARM_UP + job.rounds,
        per_device_train_batch_size=rows,
        bf16=job.dtype == "bf16",
        use_cpu=world.device.type == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    dataset: Any = [{"input_ids": ids, "labels": ids} for ids in samples]
    return Trainer(whole, arguments, train_dataset=dataset, callbacks=callbacks)


def _config(job: Job, task: Task) -> OasesConfig:
    entry = task.entry
    if entry.name == AUTO:
        return OasesConfig(degree="auto", recompute=entry.recompute, memory_gib=job.memory_gib * SPARE)
    comm_dtype: CommDtype | None = "bf16" if entry.variant == "bf16 sums" else None
    return OasesConfig(
        schedule=entry.name, recompute=entry.recompute, defer_weight_grads=entry.defer, comm_dtype=comm_dtype
    )


def _compare(job: Job, task: Task, loss: float) -> None:
    file = job.folder / f"{job.setting(task)}.loss"
    if not file.exists():
        file.write_text(str(loss))
    first = float(file.read_text())
    if not abs(loss / first - 1) <= TOLERANCES[job.dtype]:
        raise ArithmeticError(f"{task.entry.title}: the first loss is {loss}, that of the first contender {first}")


def _described(made: Trainer, task: Task) -> tuple[str, Recomputed]:
    """What it is, and recomputes, in a few words."""
    if task.entry.name not in PEERS_OF_TRAINER:
        plan = converted(cast(PreTrainedModel, made.model)).plan
        return plan.summary(), in_a_word(plan.recompute)
    if task.entry.name == "fsdp" and not made.is_fsdp_enabled:
        raise RuntimeError("Trainer did not shard the model")
    return f"{PEERS_OF_TRAINER[task.entry.name]} of Trainer", "full" if task.entry.recompute == "full" else "none"
