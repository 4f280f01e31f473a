"""What a model's blocks and its collectives cost on one cluster: frozen data, JSON on disk.

The profiler measures a :class:`CostTable`; the planner and the simulator read it. Times are milliseconds,
sizes bytes. ``T`` is the TMP size, a block of degree ``d`` has ``T / d`` replicas, a micro-batch of a TMP world
(``rows`` sequences) is run in ``K`` sub-batches. Where ranks differ, figures are those of the most loaded one.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError, naming
from .messages import message_ms

Value = TypeVar("Value")


@dataclass(frozen=True)
class Curve:
    """Time over message size: linear between the points that were measured.

    Below the smallest point the time is that point's (latency), above the largest the last slope goes on; a single
    point is latency below, and bandwidth above.

    Attributes:
        points: (bytes, ms), bytes growing; measured times may dip.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        """Refuse what is no function of the size; raises ConfigError."""
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] <= 0:
            raise ConfigError(f"curve {self.points}: give at least one point, and sizes that grow from above 0")

    def __call__(self, size_bytes: float) -> float:
        """Milliseconds for a message of ``size_bytes``."""
        sizes = [size for size, _ in self.points]
        first_bytes, first_ms = self.points[0]
        if size_bytes <= first_bytes:
            return first_ms
        if len(sizes) == 1:
            return first_ms * size_bytes / first_bytes
        after = min(bisect_right(sizes, size_bytes), len(sizes) - 1)
        (low, low_ms), (high, high_ms) = self.points[after - 1 : after + 1]
        slope = (high_ms - low_ms) / (high - low)
        if size_bytes > high:  # a dip at the end is noise: longer messages do not take less time
            return high_ms + max(slope, 0.0) * (size_bytes - high)
        return low_ms + slope * (size_bytes - low)


@dataclass(frozen=True)
class Timing:
    """One sub-batch of one block, on one rank, at one degree and number of sub-batches.

    Attributes:
        forward_ms: the forward without its all-reduce, but with what follows it (residual, norm).
        recompute_ms: the forward again in backward, without communication and without the last matmul.
        backward_ms: the backward without its all-reduce, nor recompute.
        weight_ms: of ``backward_ms``, the part that computes gradients of weights and can be deferred.
        graph_bytes: what autograd keeps between forward and backward, the block's input included.
        runtime_bytes: the peak of temporaries beside that, in forward or backward.
        spread: relative spread of the measurements (interquartile range over median).
        shared_bytes: of ``graph_bytes``, what other sub-batches keep the very same of, such as casts of weights.
    """

    forward_ms: float
    recompute_ms: float
    backward_ms: float
    weight_ms: float
    graph_bytes: int
    runtime_bytes: int
    spread: float = 0.0
    shared_bytes: int = 0

    @property
    def own_bytes(self) -> int:
        """Of ``graph_bytes``, what is of one sub-batch alone."""
        return self.graph_bytes - self.shared_bytes

    def graphs_bytes(self, sub_batches: int) -> int:
        """What the graphs of so many sub-batches keep together."""
        return sub_batches * self.own_bytes + self.shared_bytes

    def scaled(self, factor: float) -> Timing:
        """That of ``factor`` times as many rows."""
        return replace(
            self,
            forward_ms=factor * self.forward_ms,
            recompute_ms=factor * self.recompute_ms,
            backward_ms=factor * self.backward_ms,
            weight_ms=factor * self.weight_ms,
            graph_bytes=round(factor * self.own_bytes) + self.shared_bytes,
            runtime_bytes=round(factor * self.runtime_bytes),
        )


@dataclass(frozen=True)
class KindCosts:
    """One kind of block, such as attention.

    Attributes:
        name: of the kind.
        parameters: degree → elements that the most loaded rank holds.
        timings: degree → number of sub-batches → :class:`Timing`.
        saved_hiddens: hidden tensors saved per block for recompute (2 for a norm on the block's output, else 1).
        norm_hiddens: hidden tensors saved per block that is not recomputed, beside its graph (1 where a norm follows).
        unowned: degree → of ``parameters``, those whose optimizer state every rank keeps (norms, shared KV heads).
    """

    name: str
    parameters: Mapping[int, int]
    timings: Mapping[int, Mapping[int, Timing]]
    saved_hiddens: int = 1
    norm_hiddens: int = 0
    unowned: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element.

    Attributes:
        forward: of hidden tensors.
        partial: of a block's output; less than ``forward`` under autocast.
        gradient: of gradients of hidden tensors.
        parameter: of parameters.
        parameter_gradient: of their gradients.
        optimizer_state: of what the optimizer keeps, per parameter.
        comm: that all-reduces of blocks send at most; None: what is computed is sent as it is.
    """

    forward: int
    partial: int
    gradient: int
    parameter: int
    parameter_gradient: int
    optimizer_state: int
    comm: int | None = None

    @property
    def sent_partial(self) -> int:
        """Of a block's output on its way through the all-reduce."""
        return min(self.partial, self.comm or self.partial)

    @property
    def sent_gradient(self) -> int:
        """Of the gradient of a block's input on its way through the all-reduce."""
        return min(self.gradient, self.comm or self.gradient)


@dataclass(frozen=True)
class Slowdown:
    """Factors (≥ 1) on times while the other lane is busy: compute beside a collective, and the reverse."""

    compute: float = 1.0
    collective: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a speed-up; raises ConfigError."""
        if min(self.compute, self.collective) < 1.0:
            raise ConfigError(f"{self}: nothing runs faster beside something else; use 1.0 for no slow-down")


@dataclass(frozen=True)
class Outside:
    """Embedding, head and loss, split over all ``T`` ranks.

    Attributes:
        ms: forward and backward of one micro-batch, collectives included.
        parameters: elements that the most loaded rank holds.
        bytes: the peak of their activations and temporaries; none is alive while a block runs backward.
        unowned: of ``parameters``, those whose optimizer state every rank keeps (positions, norms, biases).
    """

    ms: float
    parameters: int
    bytes: int
    unowned: int = 0


@dataclass(frozen=True)
class CostTable:
    """All that a step's time and memory are computed from.

    Attributes:
        fingerprint: what the figures hold for: model, device, dtype, versions, …
        tmp_size: ``T``.
        data_size: TMP worlds that run data parallel.
        rows: sequences in the micro-batch of a TMP world.
        sequence: tokens per sequence.
        hidden: width of the hidden tensor.
        element_bytes: the dtypes.
        kinds: the blocks of one layer, in order; all layers are alike.
        all_reduce: ranks in the group → time over the tensor's bytes.
        all_gather: ranks in the group → time over the bytes of the *gathered* tensor.
        exchange: ranks in the group → time to sum what all hold on its owners, or to send what these made of it to all,
            over the bytes of it.
        slowdown: what overlap costs.
        outside: embedding, head and loss.
        optimizer_ms: per million elements that a rank updates.
        recorded: blocks run as recordings, which have memory to themselves: what they need is there beside what
            embedding, head and loss need, not before and after it.
    """

    fingerprint: Mapping[str, str]
    tmp_size: int
    data_size: int
    rows: int
    sequence: int
    hidden: int
    element_bytes: ElementBytes
    kinds: tuple[KindCosts, ...]
    all_reduce: Mapping[int, Curve]
    all_gather: Mapping[int, Curve]
    exchange: Mapping[int, Curve]
    slowdown: Slowdown
    outside: Outside
    optimizer_ms: float
    recorded: bool = False

    def degrees(self) -> tuple[int, ...]:
        """The degrees that every kind was measured at, growing."""
        return tuple(sorted(set.intersection(*(set(kind.timings) for kind in self.kinds))))

    def timing(self, kind: KindCosts, degree: int, sub_batches: int, rows: int | None = None) -> Timing:
        """Of one kind at a degree: as measured, or when a sub-batch is filled up to ``rows``.

        Raises:
            ConfigError: it was not measured at this degree or number of sub-batches.
        """
        by_sub_batches = _measured(kind.timings, degree, f"{kind.name}: degree")
        timing = _measured(by_sub_batches, sub_batches, f"{kind.name} at degree {degree}: sub_batches")
        measured_rows = self.sub_batch_rows(degree, sub_batches)
        return timing if rows is None or rows == measured_rows else timing.scaled(rows / measured_rows)

    def parameters(self, kind: KindCosts, degree: int) -> int:
        """Elements held by the most loaded rank; raises ConfigError if they were not counted."""
        return _measured(kind.parameters, degree, f"parameters of {kind.name}: degree")

    def all_reduce_ms(self, ranks: int, size_bytes: float, message_bytes: int | None = None) -> float:
        """Time of an all-reduce, in such messages; 0 for one rank; raises ConfigError if they were not measured."""
        if ranks == 1:
            return 0.0
        return message_ms(_measured(self.all_reduce, ranks, "all_reduce: group of"), size_bytes, message_bytes)

    def all_gather_ms(self, ranks: int, size_bytes: float) -> float:
        """Time to gather ``size_bytes`` in all; raises ConfigError if that group size was not measured."""
        return 0.0 if ranks == 1 else _measured(self.all_gather, ranks, "all_gather: group of")(size_bytes)

    def exchange_ms(self, ranks: int, size_bytes: float) -> float:
        """Time to sum ``size_bytes`` on owners, 0 for one rank; raises ConfigError if that size was not measured."""
        return 0.0 if ranks == 1 else _measured(self.exchange, ranks, "exchange: group of")(size_bytes)

    def sub_batch_rows(self, lowest_degree: int, sub_batches: int) -> int:
        """Rows of the largest sub-batch, filled up so that all replicas of a plan's lowest degree have equally many."""
        replicas = self.tmp_size // lowest_degree
        return -(-self.rows // sub_batches // replicas) * replicas

    def hidden_elements(self, degree: int, rows: int) -> int:
        """Elements of the hidden tensor of a sub-batch of ``rows`` on a rank of a block of ``degree``."""
        return rows // (self.tmp_size // degree) * self.sequence * self.hidden

    def to_json(self) -> str:
        """The table as JSON text."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """The table that :meth:`to_json` wrote; raises ConfigError when it is not one."""
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(**{**fields, **{name: parse(fields[name]) for name, parse in _PARSE.items()}})
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no cost table ({error!r}); write one with CostTable.to_json") from error

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a table from a file; raises ConfigError, naming the file."""
        with naming(f"cost table {path}"):
            return cls.from_json(Path(path).read_text())

    def save(self, path: str | Path) -> None:
        """Write the table to a file."""
        Path(path).write_text(self.to_json())


def _measured(table: Mapping[int, Value], key: int, what: str) -> Value:
    if key not in table:
        raise ConfigError(f"{what} {key} was not measured, only {sorted(table)}; choose one of these, or profile it")
    return table[key]


def _curves(fields: dict[str, Any]) -> dict[int, Curve]:
    return {int(ranks): Curve(tuple((size, ms) for size, ms in curve["points"])) for ranks, curve in fields.items()}


def _kind(fields: dict[str, Any]) -> KindCosts:
    return KindCosts(
        name=fields["name"],
        parameters={int(degree): count for degree, count in fields["parameters"].items()},
        timings={
            int(degree): {int(sub_batches): Timing(**timing) for sub_batches, timing in row.items()}
            for degree, row in fields["timings"].items()
        },
        saved_hiddens=fields["saved_hiddens"],
        norm_hiddens=fields["norm_hiddens"],
        unowned={int(degree): count for degree, count in fields["unowned"].items()},
    )


_PARSE: dict[str, Callable[[Any], Any]] = {
    "element_bytes": lambda fields: ElementBytes(**fields),
    "kinds": lambda fields: tuple(_kind(kind) for kind in fields),
    "all_reduce": _curves,
    "all_gather": _curves,
    "exchange": _curves,
    "slowdown": lambda fields: Slowdown(**fields),
    "outside": lambda fields: Outside(**fields),
}
