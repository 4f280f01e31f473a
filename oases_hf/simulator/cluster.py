"""Clusters that one does not own yet: what blocks and collectives take there, from data sheets.

A :class:`ClusterSpec` fills in the times of a cost table that has none (``oases_hf.profiler.Estimate`` makes those,
with what ranks hold): computation by floating point operations and by bytes, collectives by latency and bandwidth of
the slowest link that a group of ranks crosses. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..costs import CostTable, Curve, KindCosts, Slowdown, Timing
from ..errors import ConfigError, naming

SIZES = tuple(2**power for power in range(10, 31, 2))
"""Bytes at which curves have points."""

FUSED_OPTIMIZER_PASSES = 7
"""Tensors that a step of AdamW reads (parameter, gradient, two moments) or writes (all but the gradient)."""


@dataclass(frozen=True)
class Gpu:
    """One device.

    Attributes:
        name: of it.
        tflops: dtype → peak of matrix multiplication, in 1e12 operations per second.
        efficiency: the part of it that large matrix multiplications reach.
        memory_gib: of it.
        memory_gb_per_s: its bandwidth.
        launch_us: from one kernel to the next.
    """

    name: str
    tflops: Mapping[str, float]
    efficiency: float
    memory_gib: float
    memory_gb_per_s: float
    launch_us: float = 5.0


@dataclass(frozen=True)
class Link:
    """Between neighbours of a ring of ranks.

    Attributes:
        ranks: that it connects, the nearest ones: 2 for pairs, the GPUs of a node, or all.
        latency_us: of a message.
        gb_per_s: in one direction, as collectives reach it.
    """

    ranks: int
    latency_us: float
    gb_per_s: float


@dataclass(frozen=True)
class ClusterSpec:
    """GPUs and their links.

    Attributes:
        name: of it.
        gpu: each of them.
        gpus: how many there are.
        links: from the nearest ranks to all; a group of ranks is as fast as the slowest that it crosses.
        slowdown: of computation and collectives beside each other.
        source: where the figures are from.

    Raises:
        ConfigError: the links do not reach all GPUs.
    """

    name: str
    gpu: Gpu
    gpus: int
    links: tuple[Link, ...]
    slowdown: Slowdown = field(default_factory=Slowdown)
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse a cluster in pieces."""
        reach = [link.ranks for link in self.links]
        if reach != sorted(reach) or not reach or reach[-1] < self.gpus:
            raise ConfigError(f"cluster {self.name}: links of {reach} ranks; name the nearest first, up to {self.gpus}")

    def link(self, ranks: int) -> Link:
        """The slowest link that so many neighbours cross."""
        return next(link for link in self.links if link.ranks >= ranks)

    def all_reduce_ms(self, ranks: int, size_bytes: float) -> float:
        """The faster of a ring, 2 K (n - 1) / n bytes per link in 2 (n - 1) messages, and a tree, 2 K in fewer."""
        link = self.link(ranks)
        tree_ms = 2 * (math.ceil(math.log2(ranks)) * link.latency_us / 1e3 + size_bytes / link.gb_per_s / 1e6)
        return min(2 * self.all_gather_ms(ranks, size_bytes), tree_ms)

    def all_gather_ms(self, ranks: int, size_bytes: float) -> float:
        """A ring, half of an all-reduce; also of a reduction to owners."""
        if ranks == 1:
            return 0.0
        link = self.link(ranks)
        return (ranks - 1) * (link.latency_us / 1e3 + size_bytes / ranks / link.gb_per_s / 1e6)

    def compute_ms(self, operations: float, moved_bytes: float, dtype: str, kernels: int = 0) -> float:
        """Matrix multiplications, and what reads and writes memory beside them."""
        if dtype not in self.gpu.tflops:
            raise ConfigError(f"{self.gpu.name} has no figure for {dtype}, only {', '.join(self.gpu.tflops)}; add one")
        matmul_ms = operations / (self.gpu.tflops[dtype] * self.gpu.efficiency) / 1e9
        return matmul_ms + moved_bytes / self.gpu.memory_gb_per_s / 1e6 + kernels * self.gpu.launch_us / 1e3

    def timed(self, table: CostTable, work: Work) -> CostTable:
        """``table`` with times.

        Args:
            table: without any.
            work: what its blocks do.

        Raises:
            ConfigError: the cluster has fewer GPUs than the table has ranks.
        """
        ranks = table.tmp_size * table.data_size
        if ranks > self.gpus:
            raise ConfigError(f"cluster {self.name} has {self.gpus} GPUs, and {ranks} ranks are asked for")
        linked = self.linked(table, [n for n in range(2, ranks + 1) if ranks % n == 0])
        outside_ms = self.compute_ms(table.rows * work.outside_operations, 0, work.dtype)
        state_bytes = table.element_bytes.parameter * FUSED_OPTIMIZER_PASSES
        return replace(
            linked,
            fingerprint={**table.fingerprint, "device": self.gpu.name, "source": "data sheet"},
            kinds=tuple(self._kind(table, kind, work) for kind in table.kinds),
            outside=replace(table.outside, ms=outside_ms),
            optimizer_ms=1e6 * state_bytes / self.gpu.memory_gb_per_s / 1e6,
        )

    def linked(self, table: CostTable, groups: Collection[int]) -> CostTable:
        """``table`` with the times of collectives here, over groups of so many ranks."""
        sums, gathers = (
            {ranks: Curve(tuple((size, time(ranks, size)) for size in SIZES)) for ranks in groups}
            for time in (self.all_reduce_ms, self.all_gather_ms)
        )
        return replace(table, all_reduce=sums, all_gather=gathers, exchange=gathers, slowdown=self.slowdown)

    def _kind(self, table: CostTable, kind: KindCosts, work: Work) -> KindCosts:
        def timed(degree: int, sub_batches: int, timing: Timing) -> Timing:
            rows = table.sub_batch_rows(degree, sub_batches) // (table.tmp_size // degree)
            operations = work.operations[kind.name][degree] * rows
            # Everything that the graph keeps was written once, and is read once in backward.
            moved, last = 2.0 * timing.graph_bytes, work.last_matmul[kind.name][degree] * rows
            forward_ms = self.compute_ms(operations, moved, work.dtype, work.kernels)
            recompute_ms = self.compute_ms(operations - last, moved, work.dtype, work.kernels)
            backward_ms = self.compute_ms(2 * operations, 2 * moved, work.dtype, 2 * work.kernels)
            weight_ms = self.compute_ms(work.linear[kind.name][degree] * rows, 0, work.dtype)
            return replace(
                timing,
                forward_ms=forward_ms,
                recompute_ms=recompute_ms,
                backward_ms=backward_ms,
                weight_ms=weight_ms,
            )

        timings = {
            degree: {sub_batches: timed(degree, sub_batches, each) for sub_batches, each in row.items()}
            for degree, row in kind.timings.items()
        }
        return replace(kind, timings=timings)

    def to_json(self) -> str:
        """The cluster as JSON text."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        """The cluster that :meth:`to_json` wrote; raises ConfigError when it is not one."""
        try:
            fields: dict[str, Any] = json.loads(text)
            gpu = fields["gpu"]
            fields["gpu"] = gpu_named(gpu) if isinstance(gpu, str) else Gpu(**gpu)
            fields["links"] = tuple(Link(**link) for link in fields["links"])
            fields["slowdown"] = Slowdown(**fields.get("slowdown", {}))
            return cls(**fields)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"this is no cluster ({error!r}); write one with ClusterSpec.to_json") from error

    @classmethod
    def load(cls, name: str) -> ClusterSpec:
        """One of those that come with the package, by name, or that in a JSON file.

        Raises:
            ConfigError: there is none.
        """
        with naming(f"cluster {name}", f"choose a file, or {', '.join(shipped())}"):
            return cls.from_json(shipped()[name] if name in shipped() else Path(name).read_text())


@dataclass(frozen=True)
class Work:
    """What blocks do, by kind and degree; operations are of one row in forward, on the most loaded rank.

    Attributes:
        dtype: that they compute in.
        operations: floating point operations.
        linear: of these, those of linear layers, whose weights have gradients.
        last_matmul: of these, those of the row-parallel projection, which recompute leaves out.
        outside_operations: of embedding, head and loss, forward and backward of a row.
        kernels: that a block launches in forward.
    """

    dtype: str
    operations: Mapping[str, Mapping[int, float]]
    linear: Mapping[str, Mapping[int, float]]
    last_matmul: Mapping[str, Mapping[int, float]]
    outside_operations: float = 0.0
    kernels: int = 12


def gpu_named(name: str) -> Gpu:
    """One of those that come with the package; raises ConfigError when there is none of that name."""
    found = {gpu.name: gpu for gpu, _ in _gpus()}
    if name not in found:
        raise ConfigError(f"there is no GPU {name!r}; choose one of {', '.join(found)}, or give its figures")
    return found[name]


def gpu_of(device_name: str) -> Gpu | None:
    """The one that ``torch.cuda.get_device_name`` calls so; None when it does not come with the package."""
    return next((gpu for gpu, names in _gpus() if device_name in names), None)


def _gpus() -> list[tuple[Gpu, list[str]]]:
    text = resources.files(__package__).joinpath("gpus.json").read_text()
    return [(Gpu(**each["gpu"]), each["device_names"]) for each in json.loads(text)]


def shipped() -> dict[str, str]:
    """The clusters that come with the package: name → JSON text."""
    text = resources.files(__package__).joinpath("clusters.json").read_text()
    return {each["name"]: json.dumps(each) for each in json.loads(text)}
