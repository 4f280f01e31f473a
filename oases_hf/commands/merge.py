"""The options of ``oases-hf merge``: a model from a training checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError

SUMMARY = "write the model of a training checkpoint as a folder that from_pretrained reads"
DESCRIPTION = """Write the model of a training checkpoint, of Trainer or accelerator.save_state, as Hugging Face does:
full tensors, configuration, tokenizer. One process, no GPU, one tensor in memory at a time.
Exit code: 0 written, 2 wrong usage, or a checkpoint that is not whole."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder")
    add("out", type=Path, metavar="OUT", help="a new folder")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: that trained in)")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="the most bytes of one file (default: 5GB)")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Write the model; returns the exit code."""
    import torch

    from ..checkpoint.merging import merge

    try:
        dtype = getattr(torch, options.dtype) if options.dtype else None
        merge(options.checkpoint, options.out, dtype, options.max_shard_size)
    except CheckpointError as error:
        print(f"oases-hf merge: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: written")
    return 0
