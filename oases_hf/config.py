"""The settings of a run. The one place, with the command line, that reads the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import ConfigError
from .messages import ALIGNMENT_BYTES
from .plan import Plan, Recompute, ShardOptimizer, check_schedule_name

CommDtype = Literal["bf16"]


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return words[text.lower()]


def _degree(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


_READ: dict[str, Callable[[str], Any]] = {
    "tmp_size": int,
    "degree": _degree,
    "schedule": str,
    "sub_batches": int,
    "recompute": str,
    "memory_gib": float,
    "batch_size": int,
    "sequence_length": int,
    "defer_weight_grads": _flag,
    "cuda_graphs": _flag,
    "compile": _flag,
    "gather_logits": _flag,
    "shard_optimizer": str,
    "message_mib": float,
    "comm_dtype": str,
    "plan": str,
    "trace": str,
    "trace_steps": _numbers,
    "async_save": _flag,
    "ignore_failed_saves": _flag,
    "peak_tflops": float,
}


@dataclass
class OasesConfig:
    """How to train; a field left out is read from the environment (``OASES_TMP_SIZE``, …), then defaulted.

    Attributes:
        tmp_size: ranks that share one batch; they form a TMP world, and the TMP worlds run data
            parallel. Default: ``degree``, or else all ranks.
        degree: ranks that split a block's weights. Default: ``tmp_size``. Where it is less, the TMP world holds
            several replicas of every block, each of which works on its share of the batch. ``auto``: measure, and plan
            a degree for each block.
        schedule: ``oases`` (default), or a baseline: ``megatron``, ``wang``, ``merak``, ``cross_pass``.
        sub_batches: parts of a batch that are interleaved. Default: what the schedule is made for.
        recompute: ``full`` (default): keep a block's input and compute the rest again in backward; ``none``: keep all
            that backward needs; ``auto`` (default with ``degree="auto"``): as planned, for each block.
        defer_weight_grads: compute weight gradients while the all-reduce of the input's gradient runs. Default: False;
            with ``degree="auto"``, where that is simulated to pay.
        cuda_graphs: on GPUs, record the kernels of the layers once per shape of a batch, and launch them together
            (default: True). With hooks in layers, or ``shard_optimizer="reduce"``, they are launched one by one all
            the same. Costs memory: what layers need between forward and backward is not there for the rest of the
            model then.
        compile: ``torch.compile`` what blocks compute up to their row-parallel projections, once for all layers that
            are alike (default: False). Of weight gradients, those of row-parallel projections alone can be put off
            then. With dropout on attention weights, or hooks in layers, blocks are not compiled all the same.
            ``degree="auto"`` measures blocks as they run then.
        gather_logits: return whole logits when training with labels (default: ``logits`` is None).
        shard_optimizer: of what several ranks hold alike (blocks of low degree, data parallelism), who keeps the
            optimizer's state. ``off`` (default): all of them. ``keep`` (or True): one of them, to whom the others hand
            their gradients once a step. ``reduce``: likewise, at every micro-batch: fewer bytes, more traffic. With
            ``degree="auto"`` the planner chooses, unless told.
        message_mib: send all-reduces of blocks in parts of at most so many MiB. Default: as a whole; with
            ``degree="auto"`` in parts where these were measured to be faster on this link.
        comm_dtype: ``bf16``: in training, send all-reduces of blocks in bf16 where they would be wider: under autocast
            the gradients of the stream, in half the bytes; without it, outputs of blocks too. Shares and sums are
            rounded, and added to the stream in the stream's type. Rows that move between blocks of different degrees,
            embedding, head, and gradients of weights are sent as they are, as is all in evaluation, in generation, and
            where layers run one by one. Default: all is sent as it is.
        plan: a Plan, or the path of its JSON file, instead of ``degree``, ``schedule``, ``sub_batches``,
            ``recompute``, ``shard_optimizer`` and ``message_mib``.
        memory_gib: with ``degree="auto"``, what a rank may use, in GiB. Default: nearly all of its device.
        batch_size: with ``degree="auto"``, rows of a micro-batch; OasesCallback knows it.
        sequence_length: with ``degree="auto"``, tokens of a row; OasesCallback looks at the first sample.
        trace: a folder for traces of what ran when, one file per rank, for chrome://tracing or ui.perfetto.dev.
        trace_steps: the optimizer steps to trace. Default: the third, when everything is warm.
        async_save: with Trainer, write checkpoints while training goes on, from a copy in the host's memory; one has
            its name at the end of a later step, so after callbacks' on_save, and the next one waits for it.
        ignore_failed_saves: with Trainer, train on when a checkpoint cannot be written, as on a full disk, instead of
            raising CheckpointError; the one before stays.
        peak_tflops: of a GPU in what is computed in, for the share of it that training reaches (``mfu_percent`` in
            logs). Default: of its data sheet, if it is known (``simulator/gpus.json``).

    Raises:
        ConfigError: a setting cannot be read, or settings contradict each other.
    """

    tmp_size: int | None = None
    degree: int | str | None = None
    schedule: str | None = None
    sub_batches: int | None = None
    recompute: str | None = None
    defer_weight_grads: bool | None = None
    gather_logits: bool | None = None
    shard_optimizer: str | bool | None = None
    plan: Plan | str | Path | None = None
    memory_gib: float | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    trace: str | Path | None = None
    trace_steps: tuple[int, ...] | None = None
    async_save: bool | None = None
    ignore_failed_saves: bool | None = None
    cuda_graphs: bool | None = None
    compile: bool | None = None
    peak_tflops: float | None = None
    message_mib: float | None = None
    comm_dtype: CommDtype | None = None

    def __post_init__(self) -> None:
        """Fill in from the environment, and check what can be checked without ranks and a model."""
        _check_environment()
        for setting in fields(self):
            if getattr(self, setting.name) is None:
                setattr(self, setting.name, _from_environment(setting.name))
        self._check_types()
        if isinstance(self.shard_optimizer, bool):
            self.shard_optimizer = "keep" if self.shard_optimizer else "off"
        if self.plan is not None:
            self._check_alone_with_plan()
        if isinstance(self.degree, str) and self.degree != "auto":
            raise ConfigError(f"degree={self.degree!r}; choose a number of ranks, or 'auto'")
        for name in ("tmp_size", "degree", "sub_batches", "batch_size", "sequence_length"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{name}={value}; choose 1 or more")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ConfigError(
                f"peak_tflops={self.peak_tflops:g}; give the peak of a GPU, in 1e12 operations per second"
            )
        if self.message_mib is not None and not 2**-16 <= self.message_mib < math.inf:
            raise ConfigError(f"message_mib={self.message_mib:g}; give the size of a message, in MiB, above 0")
        if self.comm_dtype not in (None, *get_args(CommDtype)):
            raise ConfigError(f"comm_dtype={self.comm_dtype!r}; choose bf16, or leave it out to send what is computed")
        check_schedule_name(self.schedule or "oases")
        self._check_planned()
        if self.tmp_size and isinstance(self.degree, int) and self.tmp_size % self.degree:
            raise ConfigError(
                f"degree={self.degree} does not divide tmp_size={self.tmp_size}; choose a divisor of {self.tmp_size}"
            )
        if self.shard_optimizer not in (None, *get_args(ShardOptimizer)):
            raise ConfigError(f"shard_optimizer={self.shard_optimizer!r}; choose off, keep or reduce")

    def _check_types(self) -> None:
        """Refuse what would fail later, and not say which setting it is of."""
        whole = ("tmp_size", "sub_batches", "batch_size", "sequence_length")
        flags = ("defer_weight_grads", "cuda_graphs", "compile", "gather_logits", "async_save", "ignore_failed_saves")
        for names, kind in ((whole, int), (flags, bool)):
            for name in names:
                value = getattr(self, name)
                if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
                    raise ConfigError(f"{name}={value!r}; give {'a whole number' if kind is int else 'True or False'}")
        if isinstance(self.trace_steps, int):
            self.trace_steps = (self.trace_steps,)

    def _check_planned(self) -> None:
        """What goes with ``degree="auto"`` only, and what does not."""
        auto = self.degree == "auto"
        if auto and self.schedule not in (None, "oases"):
            raise ConfigError(f"degree='auto' plans for the schedule oases, not {self.schedule}; leave schedule out")
        choices = (*get_args(Recompute), *(["auto"] if auto else []))
        if self.recompute not in (None, *choices):
            raise ConfigError(f"recompute={self.recompute!r}; choose {' or '.join(choices)}")
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ConfigError(f"memory_gib={self.memory_gib:g}; give what a rank may use, in GiB")

    def _check_alone_with_plan(self) -> None:
        held = ("degree", "schedule", "sub_batches", "recompute", "shard_optimizer", "message_mib")
        clashing = [name for name in held if getattr(self, name) is not None]
        if clashing:
            raise ConfigError(f"plan and {clashing[0]} are both set; the plan holds {clashing[0]}: leave one out")

    @property
    def message_bytes(self) -> int | None:
        """``message_mib`` in bytes, as a plan has it."""
        if self.message_mib is None:
            return None
        return round(self.message_mib * 2**20 / ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def over(self, other: OasesConfig) -> OasesConfig:
        """These settings, and those of ``other`` where there are none."""
        ours = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        theirs = {setting.name: getattr(other, setting.name) for setting in fields(other)}
        return OasesConfig(**{name: theirs[name] if value is None else value for name, value in ours.items()})

    def load_plan(self) -> Plan | None:
        """The plan that was given, read from its file if need be."""
        return Plan.load(self.plan) if isinstance(self.plan, str | Path) else self.plan


def _check_environment() -> None:
    """Refuse misspelt variables, which would be passed over; raises ConfigError."""
    known = {f"OASES_{name.upper()}" for name in _READ}
    odd = sorted(name for name in os.environ if name.startswith("OASES_") and name not in known)
    if odd := [name for name in odd if not name.startswith("OASES_HF_")]:
        raise ConfigError(f"{', '.join(odd)} in the environment is no setting; there are {', '.join(sorted(known))}")


def _from_environment(name: str) -> Any:
    variable = f"OASES_{name.upper()}"
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        return _READ[name](text)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{variable}={text!r} cannot be read as {_READ[name].__name__.strip('_')}") from error
