"""What the benchmark on GPUs is to do: contenders on shapes, in a folder that tells how far its ranks have come."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import LlamaConfig

from oases_hf.plan import SCHEDULE_NAMES
from scripts.bench.contenders import VOCAB
from scripts.bench.llama import config_of
from scripts.bench.paper_models import HEAD, models, read
from scripts.bench.rows import Row, read_json, write_json

Part = Literal["layers", "whole"]
Recompute = Literal["full", "none", "auto"]
Variant = Literal["", "computing only", "all-reduces only", "bare loop", "bf16 sums"]
PARTS: tuple[Part, ...] = ("layers", "whole")
AUTO = "auto"
OUT_OF_MEMORY = "out of memory"
DEFERRED = ("megatron", "oases")
BOUNDED = "oases"
VARIANTS: dict[Part, tuple[Variant, ...]] = {
    "layers": ("computing only", "all-reduces only"),
    "whole": ("bare loop", "bf16 sums"),
}
"""Of our schedule, what else is timed."""
NOT_IN_TRAINER = "megatron_5"
NOT_INSTALLED = "is not installed"
LAYERS_ONLY: dict[str, tuple[Recompute, ...]] = {"megatron-core": ("full", "none"), "domino": ("none",)}
"""Contenders that are no whole models, and what they recompute."""


@dataclass(frozen=True)
class Shape:
    """LLaMA layers, and the sequences that all ranks train at once."""

    name: str
    hidden: int
    ffn: int
    heads: int
    layers: int
    rows: int

    def config(self, part: Part, seq: int, vocab: int) -> LlamaConfig:
        """Of the model; ``vocab`` is of a whole one."""
        return config_of(self, vocab if part == "whole" else VOCAB, seq)


def paper_shapes(layers: int | None) -> dict[str, Shape]:
    """The paper's seven models as LLaMA layers: hidden size, layers unless given, and batch of a TMP world."""
    return {
        model.name: Shape(
            model.name,
            model.hidden,
            llama_ffn(model.hidden),
            model.hidden // HEAD,
            layers or model.layers,
            model.rows,
        )
        for model in models(read())
    }


def llama_ffn(hidden: int) -> int:
    """The width of the MLP that gives a layer 12 hidden² parameters, a multiple of 256 as LLaMA has it."""
    return -(-8 * hidden // (3 * 256)) * 256


@dataclass(frozen=True)
class Entry:
    """A contender.

    Attributes:
        name: a schedule, ``hf``, ``fsdp``, another library's layers, or ``auto``, our planner's plan.
        recompute: of every block; ``auto``, of our plan, by block.
        defer: weight gradients wait for the input gradient's all-reduce to start.
        variant: ``computing only`` or ``all-reduces only``, each without the other; ``bare loop``: a whole model
            without Trainer; ``bf16 sums``: what blocks send is rounded, where it is wider.
    """

    name: str
    recompute: Recompute = "full"
    defer: bool = False
    variant: Variant = ""

    @property
    def title(self) -> str:
        """Its name in tables."""
        if self.recompute == "auto":
            return f"{self.name}, by block"
        return self.name + ", deferred" * self.defer + (f", {self.variant}" if self.variant else "")


def entries(names: Sequence[str], part: Part, dtype: str) -> Iterator[Entry]:
    """The contenders of those names; those of one model follow each other."""
    variants = [variant for variant in VARIANTS[part] if dtype == "bf16" or variant != "bf16 sums"]
    both: tuple[Recompute, ...] = ("full", "none")
    schedules = [name for name in names if name in (*SCHEDULE_NAMES, NOT_IN_TRAINER)]
    for recompute in both:
        for name in schedules:
            if name != NOT_IN_TRAINER:
                yield Entry(name, recompute)
            elif part == "layers" and recompute == "full":
                yield Entry(name)
        yield from (Entry(name, recompute, defer=True) for name in schedules if name in DEFERRED)
        if BOUNDED in schedules:
            yield from (Entry(BOUNDED, recompute, variant=variant) for variant in variants)
    for name in (name for name in names if name not in schedules):
        if part == "layers" or name not in LAYERS_ONLY:
            yield from (Entry(name, recompute) for recompute in LAYERS_ONLY.get(name, both))
        if name == AUTO:
            yield Entry(name, "auto")


def broken(row: Row) -> bool:
    """Whether a contender failed for anything but memory, or a package that is not there."""
    return row.failure not in ("", OUT_OF_MEMORY) and NOT_INSTALLED not in row.failure


@dataclass(frozen=True)
class Task:
    """A contender on a shape: layers alone, or a whole model through Trainer."""

    part: Part
    shape: Shape
    entry: Entry


@dataclass(frozen=True)
class Job:
    """What one set of ranks is to do.

    Attributes:
        folder: of this run: where rows, costs and outputs to compare with are kept.
        regime: its name.
        dtype: ``bf16`` or ``fp32``; a whole model has float32 weights, and computes in this.
        memory_gib: that a rank may use.
        time_limit_s: of a task.
    """

    folder: Path
    regime: str
    dtype: str
    seq: int
    vocab: int
    rounds: int
    memory_gib: float
    time_limit_s: float
    tasks: tuple[Task, ...]

    def setting(self, task: Task) -> str:
        """What a task is about, but for its contender."""
        return f"{task.shape.name}, {self.regime}" + ", Trainer" * (task.part == "whole")

    @property
    def file(self) -> Path:
        """Where it is kept for the ranks."""
        return self.folder / f"{self.regime}-{self.tasks[0].part}.job"

    @property
    def rows(self) -> list[Row]:
        """Those of the tasks that are done."""
        return read_json(self._rows) if self._rows.exists() else []

    def add(self, row: Row) -> None:
        """The next task is done."""
        write_json([*self.rows, row], self._rows)

    def failed(self, task: Task, why: str) -> Row:
        """The row of a task that has no figures."""
        recompute = "some" if task.entry.recompute == "auto" else task.entry.recompute
        return Row(task.entry.title, "", recompute=recompute, setting=self.setting(task), failure=why)

    def begin(self) -> None:
        """Ranks have met, and set about a task."""
        self._began.touch()

    @property
    def begun(self) -> bool:
        """Whether ranks ever did."""
        return self._began.exists()

    def say_why(self, why: str) -> None:
        """Before this rank ends for want of memory, or an error; what the first says holds."""
        with suppress(FileExistsError), self._why.open("x") as file:
            file.write(why)

    def take_why(self) -> str:
        """What a rank said; then it is forgotten."""
        why = self._why.read_text() if self._why.exists() else ""
        self._why.unlink(missing_ok=True)
        return why

    def save(self) -> None:
        """Write :attr:`file`."""
        self.file.write_bytes(pickle.dumps(self))

    @staticmethod
    def load(file: Path) -> Job:
        """What :meth:`save` wrote, in this run."""
        job: Job = pickle.loads(file.read_bytes())
        return job

    @property
    def _rows(self) -> Path:
        return self.file.with_suffix(".rows")

    @property
    def _began(self) -> Path:
        return self.file.with_suffix(".began")

    @property
    def _why(self) -> Path:
        return self.file.with_suffix(".why")
