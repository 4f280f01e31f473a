"""Time all contenders on the GPUs of this machine, a rank on each, within one memory limit.

    python scripts/bench/gpu.py --json rows.json --png rows.png          # all: hours
    python scripts/bench/gpu.py --quick --json rows.json --png rows.png  # one shape, one regime, layers only: minutes
    python scripts/bench/gpu.py --shapes LLaMA-7B,GPT-3 --regimes no-p2p-bf16 --parts whole --names megatron,oases,auto

Contenders: the schedules, the peers of contenders.py, other libraries' layers (rivals.py), and ``auto``, the plan that
the planner makes from measured costs for the memory limit; each with recompute of all blocks and of none, ``auto`` also
of some. Megatron's and our schedule also with deferred weight gradients. Ratios are to the better of megatron's two at
equal recompute. What our schedule computes and what it sends is timed by itself, too: no schedule is faster than the
longer of the two. Shapes are the paper's models as LLaMA layers of 12 hidden² parameters: hidden size, number of layers
and batch are the paper's, sequences have 1024 tokens. ``layers`` are timed forward and backward; ``whole`` models
through Trainer, with float32 weights and AdamW, to the optimizer's step, ours in a bare loop and with sums in bf16,
too. A regime is a set of processes of its own, with NCCL_P2P_DISABLE=1 or without. Each contender is alone in memory;
one that runs out of it, or fails, has a row that says so, and ranks are started anew for the rest.

Other libraries' layers are Megatron-Core's (pip install megatron-core; without Transformer Engine) and DeepSpeed
Domino's (pip install deepspeed), which recompute nothing. They are timed as layers alone, and where they can be
imported; a row says where not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from oases_hf.launching import FAIL, PASS, run_ranks
from scripts.bench import gpu_rank
from scripts.bench.contenders import PEERS
from scripts.bench.paper_plans import SEQUENCE
from scripts.bench.rivals import RIVALS
from scripts.bench.rows import Row, plot, print_table, write_json
from scripts.bench.schedules import SCHEDULES
from scripts.bench.tasks import (
    AUTO,
    BOUNDED,
    PARTS,
    Entry,
    Job,
    Shape,
    Task,
    broken,
    entries,
    llama_ffn,
    paper_shapes,
)
from scripts.bench.timing import ratio

QUICK = {"shapes": "LLaMA-7B", "regimes": "no-p2p-bf16", "parts": "layers", "layers": 8, "rounds": 3}
ENOUGH_S = 600.0
"""For ranks to start and end, beside their tasks."""


@dataclass(frozen=True)
class Regime:
    """How GPUs may talk to each other, and what is computed in."""

    name: str
    dtype: str
    p2p: bool

    def environment(self) -> tuple[str, ...]:
        """For ``env``."""
        return ("-u", "NCCL_P2P_DISABLE") if self.p2p else ("NCCL_P2P_DISABLE=1",)


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("p2p-bf16", "bf16", p2p=True),  # over NVLink, where there is one
        Regime("no-p2p-bf16", "bf16", p2p=False),
        Regime("no-p2p-fp32", "fp32", p2p=False),
    )
}
CONTENDERS = (*SCHEDULES, *PEERS, *RIVALS, AUTO)
MEGATRON = tuple(Entry("megatron", defer=defer).title for defer in (False, True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="unless given: " + ", ".join(f"--{k} {v}" for k, v in QUICK.items()))
    add("--shapes", default="", help="of the paper's models (default: all)")
    add("--hidden", type=int, help="one shape of your own instead, with --heads, --layers and --batch")
    add("--heads", type=int, default=8, help="of that (default: 8)")
    add("--batch", type=int, default=8, help="of that: sequences (default: 8)")
    add("--layers", type=int, help="instead of the paper's numbers; 4 of a shape of your own")
    add("--regimes", default="", help=f"of {', '.join(REGIMES)} (default: all)")
    add("--parts", default="", help="layers, whole (default: both)")
    add("--names", default="", help=f"of {', '.join(CONTENDERS)} (default: all)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries it out (default: cuda)")
    add("--ranks", type=int, default=torch.cuda.device_count(), help="default: one on each GPU")
    add("--seq", type=int, default=SEQUENCE, help=f"tokens of a sequence (default: {SEQUENCE})")
    add("--vocab", type=int, default=32000, help="of whole models (default: 32000)")
    add("--rounds", type=int, default=7, help="steps that are timed (default: 7)")
    add("--memory-gib", type=float, default=24.0, help="that a rank may use (default: 24)")
    add("--time-limit-s", type=float, default=300.0, help="of a contender on a shape (default: 300)")
    add("--json", type=Path, help="write the rows to this file")
    add("--png", type=Path, help="draw the rows")
    return parser


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; names become what they name."""
    parser = _parser()
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(argv)
    shapes = _own_shape(options) if options.hidden else paper_shapes(options.layers)
    if options.hidden:
        options.shapes = ""
    choices: dict[str, Collection[str]] = {"shapes": shapes, "regimes": REGIMES, "parts": PARTS, "names": CONTENDERS}
    for option, known in choices.items():
        given = [each for each in getattr(options, option).split(",") if each] or list(known)
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{option}: {', '.join(unknown)} unknown; choose from {', '.join(known)}")
        setattr(options, option, given)
    options.shapes = [shapes[name] for name in options.shapes]
    options.regimes = [REGIMES[name] for name in options.regimes]
    gpus = torch.cuda.device_count()
    if options.ranks < 2 or (options.device == "cuda" and options.ranks > gpus):
        parser.error(f"--ranks {options.ranks}: needs 2 or more, and as many GPUs; here are {gpus}. Or --device cpu")
    return options


def _own_shape(options: argparse.Namespace) -> dict[str, Shape]:
    name, ffn = f"hidden {options.hidden}", llama_ffn(options.hidden)
    return {name: Shape(name, options.hidden, ffn, options.heads, options.layers or 4, options.batch)}


def jobs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Regime, Job]]:
    """One for every regime and part that any contender takes part in."""
    for regime in options.regimes:
        for part in options.parts:
            if not (entered := list(entries(options.names, part, regime.dtype))):
                continue
            yield (
                regime,
                Job(
                    folder,
                    regime.name,
                    regime.dtype,
                    options.seq,
                    options.vocab,
                    options.rounds,
                    options.memory_gib,
                    options.time_limit_s,
                    tuple(Task(part, shape, entry) for shape in options.shapes for entry in entered),
                ),
            )


def run_job(job: Job, command: Sequence[str], ranks: int) -> None:
    """Run it on ranks, which are started again after each task that fails.

    Raises:
        SystemExit: ranks do not even begin.
    """
    job.save()
    while left := job.tasks[len(job.rows) :]:
        code = run_ranks("gpu", command, ranks, ENOUGH_S + len(left) * job.time_limit_s)
        why = job.take_why()
        if code == PASS:
            return
        if not job.begun:
            raise SystemExit("gpu: the ranks did not begin, for the reason above")
        late = f"did not end within {job.time_limit_s:g} s" if code == FAIL else "a rank was ended"
        job.add(job.failed(job.tasks[len(job.rows)], why or late))


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """With how many times as fast each row is as megatron in its setting, at equal recompute; its better row counts."""
    megatron: dict[tuple[str, str], Row] = {}
    for row in sorted((row for row in rows if row.name in MEGATRON and row.ms), key=lambda row: row.ms or 0.0):
        megatron.setdefault((row.setting, row.recompute), row)
    found = []
    for row in rows:
        base = megatron.get((row.setting, row.recompute))
        ratio_to = ratio(row.rounds_ms, base.rounds_ms) if row.rounds_ms and base else None
        found.append(replace(row, ratio_to_megatron=ratio_to))
    return found


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """How near our schedule comes to what it computes and what it sends, Trainer to a bare loop, and what plans add."""
    for recompute in ("full", "none"):
        ms = {row.name: row.ms for row in rows if row.recompute == recompute and row.ms}
        computing = ms.get(Entry(BOUNDED, variant="computing only").title)
        sending = ms.get(Entry(BOUNDED, variant="all-reduces only").title)
        for name in (Entry(BOUNDED, defer=defer).title for defer in (False, True)):
            if name in ms and computing and sending:
                yield (
                    f"{name}, recompute {recompute}: {ms[name] / max(computing, sending):.2f} x the longer of computing"
                    f" and all-reduces, {1 - computing / ms[name]:.1%} exposed"
                )
        ours, bare = Entry(BOUNDED).title, Entry(BOUNDED, variant="bare loop").title
        if ours in ms and bare in ms:
            yield f"{ours}, recompute {recompute}: through Trainer {ms[bare] / ms[ours]:.2f} x the speed of a bare loop"
    planned = next((row.ms for row in rows if row.name == Entry(AUTO, "auto").title), None)
    full = [row.ms for row in rows if row.name in MEGATRON and row.recompute == "full" and row.ms]
    if planned and full:
        yield f"as planned, recompute and all: {min(full) / planned:.2f} x as fast as megatron with full recompute"


def report(rows: Sequence[Row]) -> None:
    """Print the rows, a table for each setting."""
    for setting in dict.fromkeys(row.setting for row in rows):
        print(f"== {setting}")
        chosen = [row for row in rows if row.setting == setting]
        print_table(chosen)
        for line in notes(chosen):
            print(line)
    sys.stdout.flush()


def run(options: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    """Yields the rows of every job, also of one that is interrupted."""
    for regime, job in jobs(options, folder):
        environment = [*regime.environment(), f"XDG_CACHE_HOME={folder}"]  # there costs are kept, for this run only
        environment += ["ACCELERATE_USE_CPU=true"] * (options.device == "cpu")
        try:
            run_job(job, ["env", *environment, sys.executable, gpu_rank.__file__, str(job.file)], options.ranks)
        finally:
            yield with_ratios(job.rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns FAIL when a contender is broken."""
    options = parse_options(argv)
    rows: list[Row] = []
    print(
        f"{options.ranks} ranks on {options.device}, {options.memory_gib:g} GiB each, sequences of {options.seq} tokens"
    )
    with tempfile.TemporaryDirectory(prefix="oases-bench-") as folder:
        for found in run(options, Path(folder)):
            report(found)
            rows += found
            if options.json:
                write_json(rows, options.json)
    if options.png:
        plot(rows, options.png)
    return FAIL if any(map(broken, rows)) else PASS


if __name__ == "__main__":
    sys.exit(main())
