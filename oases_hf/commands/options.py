"""Types of options: argparse says what is wrong with a value, and ends with exit code 2."""

from __future__ import annotations

import argparse


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


for _type, _name in ((count, "whole number"), (counts, "list of whole numbers"), (above_zero, "number")):
    _type.__name__ = _name  # argparse says "invalid whole number value: 'x'"
fraction.__name__ = "number"
