"""Options that commands share, and types of options, with which argparse refuses values: it ends with exit code 2."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from ..config import CommDtype

DTYPES = ("float32", "bfloat16", "mixed")


def add_model(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Give ``parser`` the options that say what is trained, and on how many ranks."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=required)
    what.add_argument("model", nargs="?", metavar="MODEL", help="hub id or folder of a Hugging Face model")
    what.add_argument("--config", metavar="FILE", help="config.json, or the folder of one, instead of MODEL")
    add("--tmp-size", type=count, metavar="T", required=required, help="ranks that share each batch")
    add("--batch", type=count, metavar="B", required=required, help="rows of a micro-batch")
    add("--seq", type=count, metavar="S", required=required, help="tokens of a row")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of weights and computation; mixed: bfloat16 autocast of float32 weights (default: float32)",
    )


def add_comm_dtype(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the option that says what all-reduces of blocks are sent in."""
    parser.add_argument("--comm-dtype", choices=get_args(CommDtype), help="for trainings with comm_dtype=bf16")


def count(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: choose 1 or more")
    return number


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1, in any order: ``1,2,4``."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def above_zero(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: choose a number above 0")
    return number


def fraction(text: str) -> float:
    """A number from 0 to below 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text}: choose a number from 0 to below 1")
    return number


def new_file(text: str) -> Path:
    """The path of a file to write, in a folder that is there."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder; make it first")
    return path


for _type, _name in ((count, "whole number"), (counts, "list of whole numbers"), (above_zero, "number")):
    _type.__name__ = _name  # argparse says "invalid whole number value: 'x'"
fraction.__name__ = "number"
