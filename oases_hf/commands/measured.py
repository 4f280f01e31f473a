"""One rank of ``oases-hf profile``, and the costs as a table for a terminal."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import timedelta

from ..costs import CostTable, Curve
from ..joining import device_of_rank, process_group, silence_libraries
from ..launching import PASS, Seat
from ..parallel.mesh import Mesh
from ..profiler import Running, Workload, profile
from .subject import architecture_of, autocast_of

MIB = 2**20


def run_rank(options: argparse.Namespace, seat: Seat) -> int:
    """Measure as one of the ranks; the first prints the costs, and writes them where it is told.

    Returns:
        The exit code.

    Raises:
        ConfigError: options, ranks and model do not go together.
        UnsupportedModelError: no family serves the model.
    """
    began = time.perf_counter()
    silence_libraries()
    model, device = architecture_of(options), device_of_rank(options.device)
    workload = Workload(options.batch, options.seq, options.sub_batches, 2 * model.dtype.itemsize)

    def say(line: str) -> None:
        if seat.rank == 0:
            print(line, flush=True)

    with process_group(device, timedelta(seconds=options.time_limit_s), seat):
        mesh = Mesh.build(options.tmp_size)
        say(f"{model.model_class.__name__} from {options.model or options.config}")
        say(
            f"{mesh.data.size} × {mesh.tmp.size} ranks, batch {options.batch} × {options.seq} tokens, "
            f"{options.dtype} on {device.type}{', compile=True' * options.compile}"
            f"{f', comm_dtype={options.comm_dtype}' if options.comm_dtype else ''}"
        )
        running = Running(device, autocast_of(options, device), options.compile, options.comm_dtype)
        costs = profile(model, mesh, workload, running, say=say)
        if options.out and seat.rank == 0:
            costs.save(options.out)
    say(f"\n{table(costs)}\n\n{time.perf_counter() - began:.1f} s")
    return PASS


def table(costs: CostTable) -> str:
    """A row per kind of block, degree and number of sub-batches, and a line per group size and collective."""
    lines = [
        f"{'block':<11}{'degree':>6}{'sub-batches':>13}{'forward ms':>12}{'recompute ms':>14}{'backward ms':>13}"
        f"{'spread':>8}",
        *_timings(costs),
        "",
        *(_link("all-reduce", ranks, curve) for ranks, curve in sorted(costs.all_reduce.items())),
        *(_link("all-gather", ranks, curve) for ranks, curve in sorted(costs.all_gather.items())),
        *(_link("exchange with owners", ranks, curve) for ranks, curve in sorted(costs.exchange.items())),
    ]
    return "\n".join(lines).rstrip()


def _timings(costs: CostTable) -> Iterator[str]:
    """Times of all sub-batches of a micro-batch together."""
    for kind in costs.kinds:
        for degree, by_number in sorted(kind.timings.items()):
            for number, timing in sorted(by_number.items()):
                once = (timing.forward_ms, timing.recompute_ms, timing.backward_ms)
                times = "{:>12.2f}{:>14.2f}{:>13.2f}".format(*(number * ms for ms in once))
                yield f"{kind.name:<11}{degree:>6}{number:>13}{times}{timing.spread:>8.0%}"


def _link(name: str, ranks: int, curve: Curve) -> str:
    """Time of the shortest message, and bytes of the tensor over time of the longest."""
    (short, short_ms), (long, long_ms) = curve.points[0], curve.points[-1]
    return (
        f"{name} of {ranks} ranks: {short_ms:.2f} ms for {short / 1024:g} KiB, "
        f"{long / long_ms / 1e6:.2f} GB/s at {long / MIB:g} MiB"
    )
