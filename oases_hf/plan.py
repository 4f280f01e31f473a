"""What to do with each block of a model: frozen data, JSON on disk."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import ConfigError, naming
from .messages import ALIGNMENT_BYTES

Recompute = Literal["full", "none"]
ShardOptimizer = Literal["off", "keep", "reduce"]
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
        degrees: for each block, in order, how many ranks split its weights. Those of a plan form a chain in which
            each divides the next, so that groups of ranks nest.
        schedule: the name of the schedule.
        sub_batches: into how many parts a batch is split.
        recompute: for each block, ``full``: its input is kept and the rest recomputed in backward; ``none``: all that
            backward needs is kept. Empty: ``full`` for all.
        shard_optimizer: of what several ranks hold alike, who keeps the optimizer's state: ``off``: all of them; else
            one of them, to whom gradients go at the last micro-batch of a step (``keep``) or at each (``reduce``).
        message_bytes: all-reduces of blocks are sent in parts of at most so many bytes, a multiple of 16; None: as a
            whole.
    """

    model: str
    tmp_size: int
    degrees: tuple[int, ...]
    schedule: ScheduleName = "oases"
    sub_batches: int = 2
    recompute: tuple[Recompute, ...] = ()
    shard_optimizer: ShardOptimizer = "off"
    message_bytes: int | None = None

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

        for low, high in itertools.pairwise(sorted(set(self.degrees))):
            if high % low:
                raise ConfigError(f"degrees {low} and {high} in one plan; each must divide the next higher one")
        if not self.recompute:
            object.__setattr__(self, "recompute", ("full",) * len(self.degrees))
        if len(self.recompute) != len(self.degrees) or not set(self.recompute) <= set(get_args(Recompute)):
            raise ConfigError(f"recompute {self.recompute} of {len(self.degrees)} blocks; give each `full` or `none`")
        if self.shard_optimizer not in get_args(ShardOptimizer):
            raise ConfigError(f"shard_optimizer={self.shard_optimizer!r}; choose off, keep or reduce")
        size = self.message_bytes
        if size is not None and (size < 1 or size % ALIGNMENT_BYTES):
            raise ConfigError(f"message_bytes={size}; choose a multiple of {ALIGNMENT_BYTES}, or None")

    @property
    def graphs_kept(self) -> frozenset[int]:
        """The blocks that are not recomputed."""
        return frozenset(i for i, choice in enumerate(self.recompute) if choice == "none")

    def summary(self) -> str:
        """Degrees, and what is not recomputed, in a few words: ``degree 2 in 8 blocks, 4 in 16; schedule …``."""
        runs = [(degree, len(list(run))) for degree, run in itertools.groupby(self.degrees)]
        counts = ", ".join(
            f"{degree} in {n}" + f" block{'s' * (n > 1)}" * (i == 0) for i, (degree, n) in enumerate(runs)
        )
        kept = len(self.graphs_kept)
        return (
            f"degree {counts}" + f", {kept} of them not recomputed" * (kept > 0) + f"; schedule {self.schedule}, "
            f"{self.sub_batches} sub-batch{'es' * (self.sub_batches > 1)}"
            + f"; optimizer state owned once ({self.shard_optimizer})" * (self.shard_optimizer != "off")
            + ("" if self.message_bytes is None else f"; messages of {self.message_bytes / 2**20:g} MiB")
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
            lists: dict[str, Any] = {name: tuple(fields[name]) for name in ("degrees", "recompute") if name in fields}
            return cls(**{**fields, **lists})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"this is no plan ({error}); write one with Plan.to_json") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file; raises ConfigError, naming the file."""
        with naming(f"plan {path}"):
            return cls.from_json(Path(path).read_text())
