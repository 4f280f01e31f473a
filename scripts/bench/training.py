"""Optimizer steps by a plan, through Accelerate as users do: how long they take, and wait for collectives of blocks."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from transformers import LlamaForCausalLM

from oases_hf import OasesPlugin
from oases_hf.convert import describe
from oases_hf.costs import CostTable
from oases_hf.integrations.planning import device_of
from oases_hf.parallel.mesh import Axis, Mesh, Pending
from oases_hf.profiler import Architecture, Running, Workload, profile
from oases_hf.profiler.profile import Say
from oases_hf.runtime.graphs import WARM
from oases_hf.schedule import Instruction, StartAsync, Sync
from scripts.bench.llama import build, config_of
from scripts.bench.timing import held_bytes, memory_limit, release

SEED = 0


@dataclass(frozen=True)
class Measured:
    """Medians of steps, on the slowest rank.

    Attributes:
        ms: of an optimizer step.
        steps_ms: of each.
        waiting_ms: of a step, what the executor spends to hand collectives over, and waits for them; on CPUs only, on
            GPUs the host does not wait.
        peak_bytes: that the fullest rank held in these steps, as :func:`held_bytes` counts; 0 on CPUs.
    """

    ms: float
    steps_ms: tuple[float, ...]
    waiting_ms: float
    peak_bytes: int


class Waiting:
    """Counts the time in which an executor, instead of computing, hands all-reduces over or waits for them."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._communicating = False

    @contextmanager
    def watch(self, op: Instruction) -> Iterator[None]:
        """While an instruction runs: of what others wait for, nothing counts."""
        self._communicating = isinstance(op, StartAsync | Sync)
        yield
        self._communicating = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside."""
        own = Axis.start_all_reduce

        def start_all_reduce(axis: Axis, tensor: Tensor, *args: Any) -> Pending:
            with self.timing():
                return _Timed(own(axis, tensor, *args), self)

        with mock.patch.object(Axis, "start_all_reduce", start_all_reduce):
            yield

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Count what happens inside, if it is the executor's."""
        start = time.perf_counter()
        yield
        self.ms += (time.perf_counter() - start) * 1e3 * self._communicating


@dataclass
class _Timed:
    work: Pending
    waiting: Waiting

    def wait(self) -> object:
        """Wait, and count it."""
        with self.waiting.timing():
            return self.work.wait()


def begin_anew() -> None:
    """Let accelerate forget what it was used for in this process."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


def accelerator_of(options: argparse.Namespace) -> Accelerator:
    """Anew, for a model in the precision of ``options``."""
    begin_anew()
    return Accelerator(mixed_precision=options.mixed_precision)


def whole_model(options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    """Alike on all ranks."""
    with device:
        return build(config_of(options, options.vocab, options.seq), SEED)


def profiled(
    options: argparse.Namespace, sub_batches: Sequence[int], say: Say = lambda line: None
) -> tuple[CostTable, str, Mesh]:
    """The costs of the model of ``options`` on all ranks, measured anew, what a plan for it is for, and the ranks."""
    accelerator = accelerator_of(options)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model, mesh = whole_model(options, device_of(accelerator)), Mesh.build(dist.get_world_size())
    workload = Workload(options.batch, options.seq, tuple(sub_batches))
    with tempfile.TemporaryDirectory() as cache:
        running = Running(accelerator.device, accelerator.autocast)
        costs = profile(Architecture.of(model), mesh, workload, running, cache=Path(cache), say=say)
    return costs, describe(model), mesh


def measure(
    options: argparse.Namespace, plugin: OasesPlugin, memory_gib: float = math.inf, max_grad_norm: float | None = None
) -> Measured:
    """Optimizer steps as ``plugin`` says: ``options.steps`` of them, behind one that warms up.

    Args:
        options: sizes, precision, accumulation and steps.
        plugin: converts the model.
        memory_gib: that a rank may use, once the model is converted.
        max_grad_norm: gradients are clipped to this norm.
    """
    accelerator = accelerator_of(options)
    device = device_of(accelerator)
    release(device)  # the plan before
    model: Any = plugin.install(accelerator, whole_model(options, device))
    gpu, waiting = device.type == "cuda", Waiting()
    if not gpu:  # what is watched is not recorded
        model.oases.stack.watch = waiting.watch
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=gpu))
    tokens = torch.randint(options.vocab, (options.batch, options.seq), generator=torch.Generator().manual_seed(SEED))
    tokens = tokens.to(device)

    def step(micro_batches: int) -> None:
        for micro in range(micro_batches):
            accelerator.gradient_state._set_sync_gradients(micro == micro_batches - 1)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss / options.accumulation)
        if max_grad_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()

    times = []
    with memory_limit(device, memory_gib), waiting.counting():
        step(WARM + 1 if gpu else 1)
        with held_bytes(device) as peak_bytes:
            for _ in range(options.steps):
                dist.barrier()
                start, waited = time.perf_counter(), waiting.ms
                step(options.accumulation)
                times.append(((time.perf_counter() - start) * 1e3, waiting.ms - waited))
    steps_ms, waiting_ms = zip(*times, strict=True)
    most = torch.tensor([*steps_ms, statistics.median(waiting_ms), peak_bytes()], dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    *slowest_ms, waited_ms, peak = most.tolist()
    return Measured(statistics.median(slowest_ms), tuple(slowest_ms), waited_ms, int(peak))
