"""A Trainer run on the ranks, and what it leaves to compare: the same with OasesCallback and without it."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from oases_hf import OasesCallback, OasesConfig
from oases_hf.models.converted import Converted

from .. import reference as plain
from ..families import FAMILIES
from ..parallel import full_gradients, full_parameters
from ..parity import ZERO_GRADIENT_FLOOR, assert_gradients, assert_loss, assert_updates, float64_math
from ..ranks import Worlds
from ..tiny import batch, tiny_llama
from .collectives import Call, recorded

Row = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Fit:
    """What a run leaves on one rank. Tensors are whole, by parameter name."""

    losses: tuple[float, ...]
    """Per optimizer step, exact, as one process would log it."""
    logs: tuple[dict[str, float], ...]
    gradients: dict[str, Tensor]
    """Of the first step, after clipping."""
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    trained: frozenset[str]
    """The parameters that the optimizer has."""
    calls: tuple[tuple[Call, ...], ...]
    """Per micro-batch, the collectives of its forward and backward."""
    inputs: tuple[Tensor, ...]
    """Per micro-batch, the token ids that this rank's model was given."""
    total_batch: int
    steps: int
    epoch: float | None
    tokens_seen: int
    warnings: tuple[str, ...]

    def logged(self, name: str) -> list[float]:
        """What was logged under a name, step by step."""
        return [entry[name] for entry in self.logs if name in entry]


@dataclass(frozen=True, slots=True)
class Task:
    """What to train, and how; picklable, so its functions are those of a module.

    Attributes:
        arguments: of TrainingArguments, over those of :func:`arguments`.
        model: of ``tiny_llama``, or of the family's model.
        rows: the data set.
        prepare: called with the model before there is a Trainer.
        trainer: the class to use.
        options: further arguments of the Trainer.
        attach: attach the callback to a Trainer that exists.
        alter: called with the Trainer, once it is ready.
        exact: compute in float64 throughout.
        family: a row of FAMILIES, in place of ``tiny_llama``.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    rows: Any = None
    prepare: Callable[[PreTrainedModel], object] | None = None
    trainer: type[Trainer] = Trainer
    options: Mapping[str, Any] = field(default_factory=dict)
    attach: bool = False
    alter: Callable[[Trainer], object] | None = None
    exact: bool = True
    family: str | None = None


def rows(count: int, seq: int = 12, *, padded: bool = True, seed: int = 0, family: str | None = None) -> list[Row]:
    """A data set of rows of equal length; padded ones have unequal numbers of labels."""
    if family is None:
        whole = batch(count, seq, padded=padded, seed=seed)
    else:
        whole = FAMILIES[family].batch(count, seq, padding="right" if padded else "none", seed=seed)
    return [{name: tensor[i] for name, tensor in whole.items()} for i in range(count)]


def arguments(**overrides: Any) -> TrainingArguments:
    """Quick and quiet: AdamW without decay, warm-up or clipping, in the order of the data set."""
    values: dict[str, Any] = {
        "output_dir": "out",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(**(values | overrides))


def build(task: Task, oases: Mapping[str, Any] | None) -> Trainer:
    """On a rank: the Trainer of a task, with OasesCallback, or as one plain process has it when ``oases`` is None."""
    if oases is None:
        alone()
    model = (FAMILIES[task.family].model if task.family else tiny_llama)(**task.model)
    if task.prepare is not None:
        task.prepare(model)
    data = rows(16, family=task.family) if task.rows is None else task.rows
    callback = None if oases is None else OasesCallback(OasesConfig(**oases))
    callbacks: list[Any] = [] if callback is None or task.attach else [callback]
    trainer = task.trainer(model, arguments(**task.arguments), train_dataset=data, callbacks=callbacks, **task.options)
    if callback is not None and task.attach:
        callback.attach(trainer)
    if task.alter is not None:
        task.alter(trainer)
    return trainer


def fit(task: Task, oases: Mapping[str, Any] | None, resume: bool | str | None = None) -> Fit:
    """On a rank: train, from the checkpoint ``resume`` on, and read what came of it."""
    trainer = build(task, oases)
    state = state_of(trainer)
    recorder = _Recorder()
    trainer.add_callback(recorder)
    warnings = _Warnings()
    logging.getLogger("oases_hf").addHandler(warnings)
    recorder.watch(trainer)
    start = whole_parameters(trainer)
    with ExitStack() as stack:
        if task.exact:
            stack.enter_context(float64_math())
        trainer.train(resume)
    logging.getLogger("oases_hf").removeHandler(warnings)
    return Fit(
        losses=tuple(_mean_over_worlds(recorder.losses, state)),
        logs=tuple(cast(Any, trainer.state.log_history)),
        gradients=recorder.gradients,
        start=start,
        end=whole_parameters(trainer),
        trained=_trained(trainer),
        calls=tuple(recorder.calls),
        inputs=tuple(recorder.inputs),
        total_batch=trainer.get_total_train_batch_size(trainer.args),
        steps=trainer.state.global_step,
        epoch=trainer.state.epoch,
        tokens_seen=trainer.state.num_input_tokens_seen,
        warnings=tuple(warnings.messages),
    )


def alone() -> None:
    """Let this rank look like a process that nobody launched; the next run puts the environment back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def state_of(trainer: Trainer) -> Converted | None:
    """What conversion left on the model; None without it."""
    return getattr(trainer.model, "oases", None)


def whole_parameters(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the full parameters."""
    model = cast(PreTrainedModel, trainer.model)
    return full_parameters(model) if state_of(trainer) else plain.parameters(model)


def _trained(trainer: Trainer) -> frozenset[str]:
    names = {parameter: name for name, parameter in cast(Any, trainer.model).named_parameters()}
    return frozenset(names[p] for group in cast(Any, trainer.optimizer).param_groups for p in group["params"])


class _Recorder(TrainerCallback):
    """Keeps the first step's gradients and every step's loss, exact."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        self.calls: list[tuple[Call, ...]] = []
        self.inputs: list[Tensor] = []
        self._sum = 0.0

    def watch(self, trainer: Trainer) -> None:
        own = trainer.training_step

        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            self.inputs.append(inputs["input_ids"].clone())
            with recorded() as calls:
                loss = own(model, inputs, *args, **kwargs)
            self.calls.append(tuple(calls))
            self._sum += float(loss)
            return loss

        trainer.training_step = training_step  # type: ignore[method-assign]

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.losses.append(self._sum)
        self._sum = 0.0
        if not self.gradients:
            self.gradients = full_gradients(model) if hasattr(model, "oases") else plain.gradients(model)


def _mean_over_worlds(losses: list[float], state: Converted | None) -> list[float]:
    if state is None or state.mesh.world.group is None:
        return losses
    everyone: list[list[float]] = [[] for _ in state.mesh.world.ranks]
    dist.all_gather_object(everyone, losses)
    assert all(there == losses for there in _of_one_world(everyone, state)), "the ranks of a TMP world differ in loss"
    return [sum(step) / len(step) for step in zip(*everyone, strict=True)]


def _of_one_world(everyone: list[list[float]], state: Converted) -> list[list[float]]:
    return [everyone[rank] for rank in state.mesh.tmp.ranks]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


_plain_fits: dict[bytes, Fit] = {}


def one_process(ranks: Worlds, task: Task) -> Fit:
    """What one plain process makes of the task; run once per session."""
    key = pickle.dumps(task)
    if key not in _plain_fits:
        (_plain_fits[key],) = ranks(1).run(fit, task, None)
    return _plain_fits[key]


def assert_same(fits: list[Fit], expected: Fit, family: str | None = None) -> None:
    """Fail unless every rank's run matches the plain one in losses, gradients, norms and updates."""
    floor = ZERO_GRADIENT_FLOOR if family and FAMILIES[family].without_gradient else 0.0
    for ours in fits:
        for loss, wanted in zip(ours.losses, expected.losses, strict=True):
            assert_loss(loss, wanted)
        assert_gradients(ours.gradients, expected.gradients)
        assert_updates(ours.end, expected.end, expected.start, floor=floor)
        for name in ("loss", "grad_norm", "learning_rate"):  # logged in float32
            for figure, wanted in zip(ours.logged(name), expected.logged(name), strict=True):
                assert_loss(figure, wanted, relative=1e-6)
