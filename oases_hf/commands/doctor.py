"""The options of ``oases-hf doctor``: whether training would be right on this machine, and what overlap gains there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..doctor.examining import TITLE, examine
from ..launching import PASS, USAGE, Seat, as_rank
from .options import above_zero, add_model

SUMMARY = "check GPUs, links and collectives of this machine, and predict what overlap gains"
DESCRIPTION = """Look at GPUs, driver, NCCL and how GPUs are connected; copy from each GPU to each other, and all-reduce
in groups of every size, comparing each result with what it must be, in processes that are ended when they hang. Say
what is wrong, and how to mend it. With a model, --batch and --seq, also profile it, and compare simulated steps with
and without overlap. Starts a rank per GPU (two without GPUs, or --tmp-size), or is one of them under a launcher
(torchrun, accelerate launch), and then copies are not tried. NCCL's environment is left as it is.
Exit code: 0 fine, 1 training would be wrong or hang, 2 wrong usage, 3 not all could be checked."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add_model(parser, required=False)
    add("--device", choices=("cpu", "cuda"), help="default: cuda with a GPU per rank, else cpu")
    add("--time-limit-s", type=above_zero, metavar="S", default=60.0, help="for a step; longer is a hang (default: 60)")
    add("--rendezvous", help=argparse.SUPPRESS)
    add("--part", choices=("machine", "ranks"), help=argparse.SUPPRESS)
    add("--told", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Examine the machine and its ranks, or do a part of that; returns the exit code."""
    if options.part == "machine":
        from .diagnosed import look

        look(options)
        return PASS
    if options.part == "ranks":

        def run_rank(seat: Seat) -> int:
            from .diagnosed import run_rank

            return run_rank(options, seat)

        return as_rank(TITLE, options.rendezvous, run_rank)
    if complaint := _complaint(options):
        print(f"{TITLE}: error: {complaint}", file=sys.stderr)
        return USAGE
    return examine([sys.executable, "-m", "oases_hf.cli", *arguments], options.tmp_size, options.device)


def _complaint(options: argparse.Namespace) -> str | None:
    """What keeps options from going together."""
    if not (options.model or options.config):
        given = [f"--{name}" for name in ("batch", "seq") if getattr(options, name)]
        return f"{' and '.join(given)}: give the model, too" if given else None
    missing = [f"--{name}" for name in ("batch", "seq") if not getattr(options, name)]
    if missing:
        return f"give {' and '.join(missing)}, too: what a model takes depends on them"
    return "--batch 1: overlap needs two rows, for two sub-batches; choose 2 or more" if options.batch < 2 else None
