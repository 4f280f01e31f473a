"""The memory of a rank as a table for a terminal."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch

from ..errors import ConfigError
from ..joining import silence_libraries
from ..planner import Choice, Memory, Problem, predict
from ..planner.problem import GIB
from ..profiler import Estimate
from ..simulator.cluster import ClusterSpec
from .subject import architecture_of, autocast_of

SUB_BATCHES = (1, 2, 4)
"""That a cost table for a cluster has."""

COLUMNS = ("parameters", "gradients", "optimizer", "saved", "temporaries", "outside", "total")


def report(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the table, as they become known.

    Raises:
        ConfigError: the config cannot be read, or its layers cannot be split.
        UnsupportedModelError: no family serves the model.
    """
    silence_libraries()
    if (options.cluster is None) != (options.out is None):
        raise ConfigError("--cluster and --out go together: give both, or neither")
    model, autocast = architecture_of(options), autocast_of(options, torch.device("cpu"))
    what = (model, options.tmp_size, options.seq, options.optimizer_bytes, autocast, options.data_size)
    estimate = Estimate(*what, options.comm_dtype)
    if options.cluster:
        cluster = ClusterSpec.load(options.cluster)
        dtype = "bfloat16" if options.dtype == "mixed" else options.dtype
        estimate.on(cluster, options.batch, SUB_BATCHES, dtype).save(options.out)
    dry = DryRun(estimate, model.config.num_hidden_layers, options.sub_batches)
    yield f"{model.model_class.__name__} from {options.model or options.config}, {dry.layers} layers"
    yield (
        f"{options.data_size} × {options.tmp_size} ranks, batch {options.batch} × {options.seq} tokens in "
        f"{min(options.sub_batches, options.batch)} sub-batches, {options.dtype}; GiB of a rank"
    )
    yield ""
    widths = "".join(f"{name:>{_width(name)}}" for name in COLUMNS)
    yield f"{'degree':<6}{'recompute':>11}{widths}{'largest batch' if options.memory_gib else '':>15}".rstrip()
    for choice in dry.choices():
        figures = dry.figures(choice, options.batch)
        line = f"{choice.degree:<6}{choice.recompute:>11}"
        line += "".join(f"{size / GIB:>{_width(name)}.3f}" for name, size in zip(COLUMNS, figures, strict=True))
        if options.memory_gib:
            line += f"{dry.largest_batch(choice, options.memory_gib * GIB):>15}"
        yield line


def _width(name: str) -> int:
    return max(9, len(name) + 2)


class DryRun:
    """The memory of a rank for one choice for all blocks.

    Args:
        estimate: of the model.
        layers: that it has.
        sub_batches: that a batch is split into, if it has as many rows.
    """

    def __init__(self, estimate: Estimate, layers: int, sub_batches: int) -> None:
        self.layers = layers
        self._estimate, self._sub_batches = estimate, sub_batches

    def choices(self) -> tuple[Choice, ...]:
        """All that there are for all blocks at once; raises ConfigError when layers cannot be split at all."""
        if not self._estimate.degrees:
            raise ConfigError("no degree that divides --tmp-size splits the layers; choose another")
        return self._problem(1).choices(self._estimate.degrees)

    def figures(self, choice: Choice, rows: int) -> tuple[int, ...]:
        """Bytes by what they hold, as ``COLUMNS`` says; the last is their sum."""
        outside, size = self._problem(rows).costs.outside.parameters, self._problem(rows).costs.element_bytes
        memory = self._memory(choice, rows)
        parts = (
            memory.parameters - outside * size.parameter,
            memory.gradients - outside * size.parameter_gradient,
            memory.optimizer - outside * size.optimizer_state,
            memory.saved,
            memory.runtime,
            outside * (size.parameter + size.parameter_gradient + size.optimizer_state),
        )
        return (*parts, sum(parts))

    def largest_batch(self, choice: Choice, limit_bytes: float) -> int:
        """The most rows that fit; 0 when one does not."""
        fits, too_many = 0, 1
        while self._memory(choice, too_many).total <= limit_bytes:
            fits, too_many = too_many, 2 * too_many
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._memory(choice, middle).total <= limit_bytes:
                fits = middle
            else:
                too_many = middle
        return fits

    def _problem(self, rows: int) -> Problem:
        sub_batches = min(self._sub_batches, rows)
        return Problem(self._estimate.table(rows, sub_batches), self.layers, math.inf, sub_batches=(sub_batches,))

    def _memory(self, choice: Choice, rows: int) -> Memory:
        problem = self._problem(rows)
        blocks = len(problem.blocks)
        degrees, recompute = (choice.degree,) * blocks, (choice.recompute,) * blocks
        return predict(problem, degrees, recompute, problem.sub_batches[0]).memory
