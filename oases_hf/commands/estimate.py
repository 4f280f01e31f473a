"""The options of ``oases-hf estimate``: the memory of a rank, before there are ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import ConfigError, UnsupportedModelError
from .options import above_zero, add_comm_dtype, add_model, count, new_file

SUMMARY = "estimate the memory of a rank for every degree, without weights, ranks or GPUs"
DESCRIPTION = """Estimate what a rank holds at its peak, for every degree and recompute choice of all blocks:
parameters, gradients, optimizer state, activations kept for backward, temporaries (of a block and of the loss, both at
once, as with CUDA graphs), and the states of embedding and head. One layer is run on tensors without data, in seconds.
With --cluster also what they take there, by data sheets. Exit code: 0 estimated, 2 wrong usage."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add_model(parser)
    add_comm_dtype(parser)
    add("--data-size", type=count, metavar="D", default=1, help="TMP worlds; each holds all states (default: 1)")
    add("--sub-batches", type=count, metavar="K", default=2, help="that a batch is split into (default: 2)")
    add("--optimizer-bytes", type=count, metavar="N", default=8, help="of state per parameter (default: 8, AdamW's)")
    add(
        "--cluster",
        metavar="C",
        help="with --out: GPUs that one does not own yet: a name in oases_hf/simulator/clusters.json, or such a file",
    )
    add("--out", type=new_file, metavar="COSTS.json", help="write a cost table for `oases-hf plan` and `simulate`")
    add("--memory-gib", type=above_zero, metavar="M", help="that a rank may use: print the largest batch that fits")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Estimate, and print the memory; returns the exit code."""
    from .estimated import report

    try:
        for line in report(options):
            print(line, flush=True)
    except (ConfigError, UnsupportedModelError) as error:
        print(f"oases-hf estimate: error: {error}", file=sys.stderr)
        return 2
    return 0
