"""Metrics of a model that an Accelerator trains, and their way into Trainer's logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..config import OasesConfig
from ..models.converted import Converted
from ..models.metrics import Metrics, ModelOperations, peak_memory_of
from ..runtime.meter import Meter
from ..runtime.watch import Clock
from ..simulator.cluster import gpu_of
from .overrides import override
from .planning import device_of

_COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16"}
"""By what Accelerate calls mixed precision."""


def measure(config: OasesConfig, accelerator: Accelerator, model: PreTrainedModel, state: Converted) -> Metrics:
    """Measure the training of ``model`` from here on; also leaves that on ``state``."""
    device = device_of(accelerator)
    meter = Meter(Clock(device))
    metrics = state.metrics = Metrics(
        meter,
        partial(ModelOperations.of, model, state.layouts),
        state.mesh.tmp.size,
        config.peak_tflops or _peak_tflops(device, _computed_in(accelerator, model)),
        peak_memory_of(device),
    )
    model.base_model.register_forward_pre_hook(meter.enter)
    model.base_model.register_forward_hook(meter.leave)
    state.stack.wait = meter.wait
    metrics.restart()  # what loading took is not of training
    return metrics


def _computed_in(accelerator: Accelerator, model: PreTrainedModel) -> str:
    """What data sheets call the type that matrices are multiplied in."""
    mixed: str = accelerator.mixed_precision
    name = str(model.dtype).removeprefix("torch.") if mixed == "no" else _COMPUTED_IN.get(mixed, mixed)
    return "tf32" if name == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32" else name


def _peak_tflops(device: torch.device, computed_in: str) -> float | None:
    gpu = gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None else gpu.tflops.get(computed_in)


def measure_trainer(trainer: Trainer, metrics: Metrics) -> None:
    """Put ``metrics`` into the logs of training, before trackers get them."""
    if not trainer.args.skip_memory_metrics:
        metrics.peak_memory = None  # Trainer counts, from begin to end: to begin anew at a log would spoil that
    override(trainer, log=_logging(trainer.log, metrics))
    trainer.add_callback(_CountTraining(metrics))


def _logging(own: Callable[..., None], metrics: Metrics) -> Callable[..., None]:
    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(metrics.read())  # in place: Trainer reads there what came of its own figures
        own(logs, *args, **kwargs)

    return log


class _CountTraining(TrainerCallback):
    """Keeps time that is not of training from being counted as such."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Forget what a run before this one left."""
        self._metrics.restart()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop for evaluation and saving, also while they prepare themselves."""
        if control.should_evaluate or control.should_save:
            self._metrics.meter.stop()

    on_epoch_end = on_step_end
