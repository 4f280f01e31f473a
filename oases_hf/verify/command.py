"""The options of ``oases-hf verify``, and what it does with them: starts the ranks, or is one of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..errors import ConfigError
from ..launching import USAGE, Seat, on_ranks
from ..plan import SCHEDULE_NAMES
from .settings import ATTENTIONS, DEVICES, HEADS, PRECISIONS, Settings

SUMMARY = "compare training on TMP ranks with one plain Hugging Face process"
DESCRIPTION = """Train a model for a few AdamW steps twice, on the same data: in one plain Hugging Face process, and on
ranks that share each batch. Print losses, gradients and updates of both, step by step from the same weights, and PASS
or FAIL. A third run, of one process with other kernels, measures how far two right runs differ: the noise.
The first rank holds the model whole, and two copies of it per step in host memory.
Exit code: 0 PASS, 1 FAIL, 2 wrong usage, 3 the run could not be completed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options of ``Settings``."""
    defaults = {setting.name: setting.default for setting in fields(Settings)}
    parser.description = DESCRIPTION

    def add(name: str, text: str, **how: Any) -> None:
        default = defaults[name.lstrip("-").replace("-", "_")]
        parser.add_argument(name, default=default, help=_with_default(text, default), **how)

    parser.add_argument("model", nargs="?", metavar="MODEL", help="hub id or folder of a Hugging Face model")
    add("--config", "config.json, or the folder of one, to verify with random weights", metavar="FILE")
    add("--tmp-size", "ranks that share each batch", type=int, metavar="T")
    add("--steps", "AdamW steps", type=int, metavar="N")
    add("--batch", "rows per step", type=int, metavar="B")
    add("--seq", "tokens per row (default: 64, or what the model takes)", type=int, metavar="S")
    add("--dtype", "of weights and computation; mixed: bfloat16 autocast of float32 weights", choices=PRECISIONS)
    add("--schedule", "as OasesConfig's", choices=SCHEDULE_NAMES)
    add("--sub-batches", "as OasesConfig's", type=int, metavar="K")
    add("--defer-weight-grads", "as OasesConfig's", action="store_true")
    add("--head", "what to train (default: what the model's config names)", choices=HEADS)
    add("--attention", "of both sides (default: Hugging Face's choice)", choices=ATTENTIONS)
    add("--layers", "keep only the first L layers, to fit a large model on one device", type=int, metavar="L")
    add("--learning-rate", "of AdamW", type=float, metavar="LR")
    add("--seed", "of data and new weights", type=int)
    add("--device", "default: cuda with a GPU per rank, else cpu", choices=DEVICES)
    add("--time-limit-s", "seconds after which to give up", type=float, metavar="S")
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)


def _with_default(text: str, default: object) -> str:
    if default in (None, False):
        return text
    return f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Verify; returns the exit code.

    Under a launcher (torchrun, accelerate launch) this process is one rank of those that it started.

    Args:
        options: parsed by a parser with :func:`add_options`.
        arguments: the command line that they were parsed from, which the ranks get too.
    """
    try:
        settings = Settings(**{setting.name: getattr(options, setting.name) for setting in fields(Settings)})
    except ConfigError as error:
        print(f"oases-hf verify: error: {error}", file=sys.stderr)
        return USAGE

    def run_rank(seat: Seat) -> int:
        from .rank import run_rank

        return run_rank(settings, seat)

    return on_ranks(
        "oases-hf verify", arguments, settings.tmp_size, settings.time_limit_s, options.rendezvous, run_rank
    )
