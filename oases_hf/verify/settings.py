"""What a verification compares; checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError
from ..plan import check_schedule_name

Precision = Literal["float32", "float64", "bfloat16", "mixed"]
Device = Literal["cpu", "cuda"]
Head = Literal["causal", "masked", "sequence", "token", "qa"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DEVICES: tuple[Device, ...] = get_args(Device)
HEADS: tuple[Head, ...] = get_args(Head)
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)


@dataclass(frozen=True)
class Settings:
    """What to compare, and how. The command line has an option for each.

    Attributes:
        model: hub id or folder; None with ``config``.
        config: a config.json, or the folder of one, for random weights.
        tmp_size: ranks that share the batch.
        steps: AdamW steps.
        batch: rows per step.
        seq: tokens per row; None for 64, or as many as the model takes.
        dtype: of weights and computation; ``mixed`` is float32 weights computed with under bfloat16 autocast,
            as Trainer's ``bf16=True`` does.
        schedule: as ``OasesConfig``; so are ``sub_batches`` and ``defer_weight_grads``.
        head: what the model is trained on; None for what the config's ``architectures`` name.
        attention: of both sides; None for Hugging Face's choice.
        layers: keep only the first so many, for models that do not fit one device whole.
        learning_rate: of AdamW, whose other settings are torch's defaults.
        seed: of the data, and of weights that no checkpoint has.
        device: None for GPUs when there is one for each rank, else the CPU.
        time_limit_s: after which a run that is not done is given up.

    Raises:
        ConfigError: a setting cannot work.
    """

    model: str | None = None
    config: str | None = None
    tmp_size: int = 2
    steps: int = 3
    batch: int = 4
    seq: int | None = None
    dtype: Precision = "float32"
    schedule: str | None = None
    sub_batches: int | None = None
    defer_weight_grads: bool = False
    head: Head | None = None
    attention: Attention | None = None
    layers: int | None = None
    learning_rate: float = 1e-3
    seed: int = 0
    device: Device | None = None
    time_limit_s: float = 1800.0

    def __post_init__(self) -> None:
        """Refuse what cannot work whatever the model."""
        if (self.model is None) == (self.config is None):
            raise ConfigError("give a model (hub id or folder), or --config with a config.json, and not both")
        for name in ("tmp_size", "steps", "batch", "sub_batches", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_option(name)} {value}: choose 1 or more")
        if self.seq is not None and self.seq < 2:
            raise ConfigError(f"--seq {self.seq}: a row needs 2 tokens to have something to predict")
        for name in ("learning_rate", "time_limit_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{_option(name)} {getattr(self, name):g}: choose a number above 0")
        if self.schedule is not None:
            check_schedule_name(self.schedule)

    @property
    def name(self) -> str:
        """The model or config, as it was given."""
        return str(self.model or self.config)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
