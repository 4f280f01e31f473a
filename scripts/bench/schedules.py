"""Time the schedules against each other, and against Hugging Face's and torch's own ways, on the same LLaMA layers.

    accelerate launch --multi_gpu --num_processes 2 --mixed_precision no --dynamo_backend no
        scripts/bench/schedules.py --peers hf,fsdp
    torchrun --nproc-per-node 2 scripts/bench/schedules.py --schedules megatron,oases --json rows.json
    python scripts/bench/schedules.py --peers hf       # one process: degree 1

A step is forward and backward of a LlamaModel with random weights and no head, from token ids and a given output
gradient, with all gradient sums; everything is recomputed in backward unless told. Before anything is timed, outputs
and gradients of all are compared with the first one's. Times are medians over rounds, ratios are medians of the ratios
within rounds; each round runs every contender once, in an order that rotates.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch reads it when imported

import torch
import torch.distributed as dist
from torch import Tensor

from oases_hf.launching import PASS, Seat, as_rank
from oases_hf.plan import Recompute
from oases_hf.profiler.stopwatch import peak_bytes
from oases_hf.runtime.graphs import WARM
from oases_hf.schedule import kind
from scripts.bench.contenders import PEERS, VOCAB, Training, Work, scheduled
from scripts.bench.llama import config_of
from scripts.bench.rows import Row, print_table, write_json
from scripts.bench.timing import World, held_bytes, paired, ratio, release

SCHEDULES = ("megatron", "megatron_5", "wang", "merak", "cross_pass", "oases")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Relative to the norm. HF computes norms in fp32, whatever the dtype; bf16 was 0.06 off after 8 layers.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.2}


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, default in {"hidden": 512, "heads": 8, "ffn": 1376, "layers": 4, "seq": 128, "batch": 8}.items():
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    add("--dtype", choices=DTYPES, default="fp32")
    add("--degree", type=int, help="ranks that split the weights; the rest runs data parallel (default: all)")
    add(
        "--schedules",
        default=",".join(SCHEDULES),
        help="megatron_5 is megatron whose recompute stops early, as PyTorch's does",
    )
    add("--sub-batches", type=int, help="of the schedules that interleave any (default: 2)")
    add("--peers", default="", help="hf, fsdp: transformers' tensor parallelism, torch's fully_shard")
    add("--recompute", choices=get_args(Recompute), default="full", help="of every contender (default: full)")
    add("--rounds", type=int, default=7)
    add("--defer-weight-grads", action="store_true")
    add("--json", type=Path, help="write the rows to this file")
    add("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.schedules, options.peers = (
        [n for n in text.split(",") if n] for text in (options.schedules, options.peers)
    )
    for name in options.schedules:
        kind(name)
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))} unknown; choose from {', '.join(PEERS)}")
    return options


def build(options: argparse.Namespace, world: World) -> list[Training]:
    """The contenders that were asked for, schedules first."""
    work = Work(config_of(options, VOCAB, options.seq), DTYPES[options.dtype], options.batch, options.seq, world.device)
    degree = options.degree or world.size
    contenders: list[Training] = []
    if options.schedules:
        how = (options.sub_batches, degree, options.defer_weight_grads)
        contenders += scheduled(options.schedules, *how, work, world, options.recompute)
    for name in options.peers:
        contenders.append(peer := PEERS[name](work, world, degree))
        peer.recompute = options.recompute
    difference = check_alike(contenders, compared(work.shapes()), TOLERANCES[work.dtype])
    if world.rank == 0:
        print(f"outputs and gradients of all contenders are alike; the largest difference is {difference:.1e}")
    return contenders


def compared(shapes: dict[str, tuple[int, ...]], most: int | None = None) -> dict[str, tuple[int, ...]]:
    """Those parameters whose gradients are compared: all outside the layers, and of the first and last layer.

    ``most`` leaves those out that have more elements.
    """
    layers = [name.split(".")[1] for name in shapes if name.startswith("layers.")]
    return {
        n: shape
        for n, shape in shapes.items()
        if (not n.startswith("layers.") or n.split(".")[1] in (layers[0], layers[-1]))
        and (most is None or math.prod(shape) <= most)
    }


@dataclass(frozen=True)
class Observed:
    """The output of a contender's step and its gradients, by what they are; all whole."""

    name: str
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, contender: Training, shapes: dict[str, tuple[int, ...]]) -> Observed:
        """Those of a step, and of parameters of those shapes."""
        contender.prepare()
        found = {"output": contender.whole_output(contender.step())}
        found |= {f"gradient of {name}": contender.whole_grad(name, shape) for name, shape in shapes.items()}
        contender.prepare()
        return cls(contender.name, found)

    def difference(self, first: Observed, tolerance: float) -> float:
        """The largest from those of ``first``, relative to its norm; ArithmeticError when more than ``tolerance``."""
        errors = {what: float((self.tensors[what] - of).norm() / of.norm()) for what, of in first.tensors.items()}
        what, worst = max(errors.items(), key=lambda item: float("inf") if math.isnan(item[1]) else item[1])
        if not worst <= tolerance:
            raise ArithmeticError(
                f"{self.name}: the {what} is {worst:.1e} (relative to the norm) off that of {first.name}; "
                f"{tolerance:.0e} is tolerated. Nothing was timed"
            )
        return worst


def check_alike(contenders: Sequence[Training], shapes: dict[str, tuple[int, ...]], tolerance: float) -> float:
    """The largest difference of any output or gradient from the first contender's, relative to its norm.

    Raises ArithmeticError when that is more than ``tolerance``.
    """
    first, *others = contenders
    reference = Observed.of(first, shapes)
    found = (reference, *(Observed.of(other, shapes) for other in others))
    return max(each.difference(reference, tolerance) for each in found)


def measure(contenders: Sequence[Training], rounds: int, world: World) -> list[Row]:
    """Count, then time."""
    sent = [contender.sent() for contender in contenders]
    peaks = [_peak_bytes(contender, world.device) for contender in contenders]
    peaks = [max(ranks) for ranks in zip(*world.gather(peaks), strict=True)]
    times = paired(contenders, rounds, world)
    megatron = next((t for c, t in zip(contenders, times, strict=True) if c.name == "megatron"), None)
    return [
        Row(
            name=contender.name,
            what=contender.what,
            ms=statistics.median(ms),
            ratio_to_megatron=ratio(ms, megatron) if megatron else None,
            bytes=traffic.bytes,
            collectives=traffic.calls,
            layer_bytes=traffic.layer_bytes,
            peak_memory_bytes=peak,
            rounds_ms=tuple(ms),
            recompute=contender.recompute,
        )
        for contender, traffic, peak, ms in zip(contenders, sent, peaks, times, strict=True)
    ]


def _peak_bytes(contender: Training, device: torch.device) -> int:
    """Of a contender by itself: its parameters, and the most that it holds beside them when steps are recorded."""
    contender.forget()
    if device.type != "cuda":
        with peak_bytes(device) as peak:
            contender.step()
        contender.prepare()
        return contender.parameter_bytes() + peak()
    release(device)
    before = torch.cuda.memory_allocated()
    for _ in range(WARM + 1):
        contender.prepare()
        contender.step()
    with held_bytes(device) as held:
        contender.prepare()
        contender.step()
    contender.prepare()
    return contender.parameter_bytes() + held() - before


def report(rows: Sequence[Row], options: argparse.Namespace, world: World) -> None:
    """Print what was measured."""
    print(
        f"{options.layers} LLaMA layers, hidden {options.hidden}, {options.heads} heads, ffn {options.ffn}, batch "
        f"{options.batch} × {options.seq}, {options.dtype}; {world.size} ranks on {world.device.type}, degree "
        f"{options.degree or world.size}; {options.rounds} rounds; MB of one rank"
    )
    print_table(rows)
    last = next((row for row in rows if row.name == "oases"), None)
    others = [row for row in rows if row is not last]
    if last and others:
        print("oases is", ", ".join(f"{ratio(last.rounds_ms, r.rounds_ms):.2f} × {r.name}" for r in others))


def run(options: argparse.Namespace, seat: Seat) -> int:
    """What a rank does."""
    load = os.getloadavg()[0]
    world = World.join(seat.rendezvous)
    rows = measure(build(options, world), options.rounds, world)
    if world.rank == 0:
        report(rows, options, world)
        print(f"load average at the start: {load:.2f} on {os.cpu_count()} cores", flush=True)
        if options.json:
            write_json(rows, options.json)
    if dist.is_initialized():
        dist.destroy_process_group()
    return PASS


def main() -> int:
    """Run the benchmark; returns the exit code."""
    options = parse_options()
    return as_rank("schedules", options.rendezvous, partial(run, options))


if __name__ == "__main__":
    sys.exit(main())
