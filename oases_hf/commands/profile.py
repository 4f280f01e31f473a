"""The options of ``oases-hf profile``: measures on the ranks what planning is computed from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..launching import Seat, on_ranks
from .options import above_zero, add_comm_dtype, add_model, counts, new_file

SUMMARY = "measure the blocks of a model and the links between ranks, for planning"
DESCRIPTION = """Measure one layer of a model at every degree, and the collectives between the ranks, or reuse what was
measured before. Starts the ranks on this machine, or is one of them under a launcher (torchrun, accelerate launch),
whose ranks are then TMP worlds of T. No weights are read.
Exit code: 0 measured, 2 wrong usage, 3 the run could not be completed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add_model(parser)
    add_comm_dtype(parser)
    add("--sub-batches", type=counts, metavar="1,2,…", default=(1, 2, 4), help="to measure (default: 1,2,4)")
    add("--compile", action="store_true", help="measure blocks compiled, for trainings with compile=True")
    add("--device", choices=("cpu", "cuda"), help="default: cuda with a GPU per rank, else cpu")
    add("--out", type=new_file, metavar="FILE", help="write the cost table for `oases-hf plan FILE`")
    add("--time-limit-s", type=above_zero, metavar="S", default=1800.0, help="after which to give up (default: 1800)")
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks, or measure as one of them; returns the exit code."""

    def run_rank(seat: Seat) -> int:
        from .measured import run_rank

        return run_rank(options, seat)

    return on_ranks("oases-hf profile", arguments, options.tmp_size, options.time_limit_s, options.rendezvous, run_rank)
