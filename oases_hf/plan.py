"""What to do with each block of a model: frozen data, JSON on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import ConfigError

ScheduleName = Literal["megatron", "wang", "merak", "cross_pass", "oases"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def check_schedule_name(name: str) -> ScheduleName:
    """``name``, if it is that of a schedule; raises ConfigError, naming those there are."""
    for known in SCHEDULE_NAMES:
        if name == known:
            return known
    raise ConfigError(f"schedule {name!r} is unknown; choose one of {', '.join(SCHEDULE_NAMES)}")


@dataclass(frozen=True)
class Plan:
    """A degree for every block, and how the batch runs through them.

    Attributes:
        model: what the plan is for, as ``convert.describe`` writes it.
        tmp_size: the ranks that share one batch.
        degrees: for each block, in order, how many ranks split its weights.
        schedule: the name of the schedule.
        sub_batches: into how many parts a batch is split.
    """

    model: str
    tmp_size: int
    degrees: tuple[int, ...]
    schedule: ScheduleName = "oases"
    sub_batches: int = 2

    def __post_init__(self) -> None:
        """Refuse what no ranks can do; raises ConfigError."""
        check_schedule_name(self.schedule)
        if self.sub_batches < 1:
            raise ConfigError(f"sub_batches={self.sub_batches}; choose 1 or more")
        for block, degree in enumerate(self.degrees):
            if degree < 1 or self.tmp_size % degree:
                raise ConfigError(
                    f"block {block}: degree {degree} does not divide the TMP world of {self.tmp_size} ranks; "
                    f"choose one of {[d for d in range(1, self.tmp_size + 1) if self.tmp_size % d == 0]}"
                )

    def check(self, model: str, blocks: int, tmp_size: int) -> None:
        """Refuse to use the plan for anything but what it was made for; raises ConfigError."""
        if (self.model, len(self.degrees)) != (model, blocks):
            raise ConfigError(
                f"the plan is for {self.model} with {len(self.degrees)} blocks, the model is {model} with {blocks}; "
                f"make a plan for this model, or leave `plan` out"
            )
        if self.tmp_size != tmp_size:
            raise ConfigError(
                f"the plan is for tmp_size={self.tmp_size}, the run has tmp_size={tmp_size}; "
                f"set tmp_size={self.tmp_size}, or make a plan for {tmp_size}"
            )

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote; raises ConfigError when it is not one."""
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(**{**fields, "degrees": tuple(fields["degrees"])})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"this is no plan ({error}); write one with Plan.to_json") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file; raises ConfigError, naming the file."""
        try:
            return cls.from_json(Path(path).read_text())
        except (OSError, ConfigError) as error:
            raise ConfigError(f"plan {path}: {error}") from error
