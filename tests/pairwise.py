"""Covering arrays: few rows of settings that have every two values of different settings together somewhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

Row = tuple[object, ...]
Pair = tuple[int, object, int, object]


def pairs_of(row: Row) -> set[Pair]:
    """Every two values of a row, by their columns."""
    return {(i, left, j, right) for (i, left), (j, right) in itertools.combinations(enumerate(row), 2)}


def covering(*settings: Sequence[object]) -> list[Row]:
    """Rows that cover every pair of values; always the same, each the first that adds most."""
    product = list(itertools.product(*settings))
    left = set().union(*map(pairs_of, product))
    chosen = []
    while left:
        best = max(product, key=lambda row: len(pairs_of(row) & left))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen


def pairs_first(*settings: Sequence[object]) -> list[Any]:
    """Every combination for ``parametrize``: a covering array in every run, the others when slow tests run too."""
    return _others_slow(covering(*settings), settings)


def values_first(*settings: Sequence[object]) -> list[Any]:
    """As few as have every value in every run, the others when slow tests run too."""
    count = max(map(len, settings))
    return _others_slow([tuple(values[i % len(values)] for values in settings) for i in range(count)], settings)


def _others_slow(chosen: Sequence[Row], settings: Sequence[Sequence[object]]) -> list[Any]:
    return [pytest.param(*row, marks=[] if row in chosen else pytest.mark.slow) for row in itertools.product(*settings)]
