"""A cost table from measurements on the real ranks, or from the cache of what was measured before."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from ..convert import compiler
from ..costs import CostTable, Curve, ElementBytes, KindCosts, Outside, Slowdown, Timing
from ..errors import ConfigError
from ..models import Block, Family, family_of
from ..models.reading import keep_layers
from ..parallel.link import COMM_DTYPES
from ..parallel.mesh import Axis, Mesh
from .ends import DryEnds
from .layer import DegreeProfile, LayerProfile, Running
from .link import LinkProfile

Say = Callable[[str], None]

FIGURES = 2
"""Goes up when a figure of a table, as it is measured, comes to mean something else."""


@dataclass(frozen=True)
class Workload:
    """What is trained, as far as its costs depend on it.

    Attributes:
        rows: sequences in the micro-batch of a TMP world.
        sequence: tokens per sequence.
        sub_batches: numbers of sub-batches to measure; those above ``rows`` are left out.
        optimizer_state: bytes per parameter; AdamW keeps two floats.
    """

    rows: int
    sequence: int
    sub_batches: tuple[int, ...] = (1, 2, 4)
    optimizer_state: int = 8


@dataclass(frozen=True)
class Architecture:
    """A model as far as its costs depend on it: no weights are looked at."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> Architecture:
        """That of a model."""
        return cls(type(model), model.config, model.dtype)

    def of_one_layer(self) -> PreTrainedModel:
        """A random model with one of its layers; alike on all ranks, and no generator draws."""
        config = copy.deepcopy(self.config)
        keep_layers(config, 1)
        if config.pad_token_id is None:
            config.pad_token_id = 0  # else classifiers refuse batches of more than one row
        with torch.random.fork_rng([]), _default_dtype(self.dtype):
            torch.manual_seed(0)
            return self.model_class(config)


def profile(
    model: Architecture,
    mesh: Mesh,
    workload: Workload,
    running: Running,
    cache: Path | None = None,
    say: Say = lambda line: None,
) -> CostTable:
    """Measure one layer of ``model`` at every degree, and the links; every rank must call it.

    Args:
        model: of a served family.
        mesh: the ranks.
        workload: what is trained.
        running: how blocks run; not compiled where they cannot be.
        cache: folder of tables measured before; by default in the user's cache folder.
        say: is told of progress, on every rank.

    Raises:
        UnsupportedModelError: no family serves the model.
        ConfigError: a cached table cannot be read.
    """
    why_not = compiler(model.config).why_not((), training=True) if running.compile else None
    if why_not is not None:
        say(f"costs: {why_not}: blocks are not compiled")
        running = replace(running, compile=False)
    marks = fingerprint(model, mesh, workload, running)
    path = (cache or cache_folder()) / f"{_digest(marks)}.json"
    known = mesh.from_first(lambda: path.read_text() if path.exists() else None)
    if known is not None:
        say(f"costs: as measured before, {path}")
        return CostTable.from_json(known)
    table = _measure(model, mesh, workload, running, marks, say)
    if mesh.world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(path)
    say(f"costs: written to {path}")
    return table


def cache_folder() -> Path:
    """Where tables are kept: ``oases_hf/costs`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oases_hf" / "costs"


def fingerprint(model: Architecture, mesh: Mesh, workload: Workload, running: Running) -> dict[str, str]:
    """What the figures hold for."""
    config, dtype = model.config, model.dtype
    shape = {k: v for k, v in sorted(config.to_dict().items()) if isinstance(v, int | float | str | bool)}
    device = running.device
    gpu = device.type == "cuda"
    return {
        "model": f"{config.model_type}, hidden {config.hidden_size}, {config.num_hidden_layers} layers",
        "layers": str(config.num_hidden_layers),
        "class": model.model_class.__name__,
        "config": hashlib.sha256(repr(shape).encode()).hexdigest()[:16],
        "attention": str(config._attn_implementation),
        "dtype": f"{dtype} computed in {running.computed(dtype)}, autocast to {running.autocast_dtype}",
        "blocks": "compiled" if running.compile else "not compiled",
        "sent": running.comm_dtype or "as computed",
        "device": torch.cuda.get_device_name(device) if gpu else f"cpu, {torch.get_num_threads()} threads",
        "ranks": f"{mesh.data.size} x {mesh.tmp.size}",
        "link": f"{dist.get_backend() if dist.is_initialized() else 'none'}, "
        + ", ".join(f"{name}={os.environ.get(name, '')}" for name in ("NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME")),
        "workload": repr(workload),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, figures {FIGURES}",
    }


def feasible_degrees(config: PretrainedConfig, family: Family, tmp_size: int) -> tuple[int, ...]:
    """The divisors of ``tmp_size`` over which a layer can be split."""
    found = []
    for degree in (d for d in range(1, tmp_size + 1) if tmp_size % d == 0):
        try:
            family.units(config, degree, 0)
        except ConfigError:
            continue
        found.append(degree)
    return tuple(found)


def _measure(
    model: Architecture, mesh: Mesh, workload: Workload, running: Running, marks: dict[str, str], say: Say
) -> CostTable:
    family = family_of(model.config)
    degrees = feasible_degrees(model.config, family, mesh.tmp.size)
    numbers = tuple(n for n in workload.sub_batches if n <= workload.rows)
    one = model.of_one_layer()
    found: dict[int, DegreeProfile] = {}
    slowdown = Slowdown()
    shape = (workload.rows, workload.sequence)
    compiling = ", compiling for each number of sub-batches" * running.compile
    for i, degree in enumerate(degrees):
        say(f"costs: degree {degree} ({i + 1} of {len(degrees)}){compiling}")
        layer = LayerProfile(copy.deepcopy(one), mesh, degree, shape, running)
        found[degree] = layer.measure(numbers)
        if degree == mesh.tmp.size:
            slowdown = layer.slowdown()
        del layer
    say("costs: links")
    all_reduce, all_gather, exchange = _links(mesh, degrees, running.device)
    kinds = [
        kind_costs(
            block,
            {degree: found[degree].parameters[i] for degree in degrees},
            {degree: found[degree].timings[i] for degree in degrees},
            {degree: found[degree].unowned[i] for degree in degrees},
        )
        for i, block in enumerate(family.blocks)
    ]
    return CostTable(
        fingerprint=marks,
        tmp_size=mesh.tmp.size,
        data_size=mesh.data.size,
        rows=workload.rows,
        sequence=workload.sequence,
        hidden=model.config.hidden_size,
        element_bytes=element_bytes(model.dtype, workload, running),
        kinds=tuple(kinds),
        all_reduce=all_reduce,
        all_gather=all_gather,
        exchange=exchange,
        slowdown=slowdown,
        outside=outside(model, mesh.tmp.size, workload, running, found[max(degrees)].outside_ms),
        optimizer_ms=max(each.optimizer_ms for each in found.values()),
        recorded=running.device.type == "cuda",
    )


Curves = dict[int, Curve]


def _links(mesh: Mesh, degrees: tuple[int, ...], device: torch.device) -> tuple[Curves, Curves, Curves]:
    """The curves of all groups that a plan may use: of all-reduces, gathers, and exchanges with owners."""
    link, world, tmp = LinkProfile(mesh, device), mesh.world.size, mesh.tmp.size
    holding = [*(mesh.axis(world, degree) for degree in degrees), mesh.data]
    reducing = [*map(mesh.axis, degrees), *holding]
    ends = sorted({*degrees, tmp})
    gathering = [mesh.axis(high, low) for low in ends for high in ends if low < high and high % low == 0]
    return (
        {size: link.all_reduce(axis) for size, axis in _by_size(reducing).items()},
        {size: link.all_gather(axis) for size, axis in _by_size(gathering).items()},
        {size: link.exchange(axis) for size, axis in _by_size(holding).items()},
    )


def _by_size(axes: Sequence[Axis]) -> dict[int, Axis]:
    """One axis, the first, of each size above 1."""
    return {axis.size: axis for axis in reversed(axes) if axis.size > 1}


def kind_costs(
    block: Block, parameters: dict[int, int], timings: dict[int, dict[int, Timing]], unowned: dict[int, int]
) -> KindCosts:
    """What a block of every layer costs: its elements, times and bytes, and the elements without owner, by degree."""
    saved_hiddens = 2 if block.join and block.join.of == "output" else 1
    return KindCosts(block.name, parameters, timings, saved_hiddens, 1 if block.join else 0, unowned)


def element_bytes(dtype: torch.dtype, workload: Workload, running: Running) -> ElementBytes:
    """The bytes per element of a model of ``dtype``."""
    partial, sent = running.computed(dtype).itemsize, COMM_DTYPES[running.comm_dtype]
    comm = None if sent is None else sent.itemsize
    return ElementBytes(dtype.itemsize, partial, *(dtype.itemsize,) * 3, workload.optimizer_state, comm)


def outside(model: Architecture, tmp_size: int, workload: Workload, running: Running, ms: float) -> Outside:
    """Embedding, head and loss, of which ``ms`` was measured; what they hold is counted without data."""
    dtype = running.autocast_dtype
    autocast = partial(torch.autocast, "cpu", dtype, enabled=dtype is not None)
    with FakeTensorMode():
        held = DryEnds(model.of_one_layer(), tmp_size).outside(workload.rows, workload.sequence, autocast)
    return replace(held, ms=ms)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _digest(marks: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(marks.items())).encode()).hexdigest()[:24]
