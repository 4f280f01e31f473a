"""Errors of one rank that all ranks are told: raised at once, they would leave the others waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import CheckpointError
from ..parallel.mesh import Mesh

FREE_SPACE = "free space or choose another folder"


@contextmanager
def noting(failures: list[Exception]) -> Iterator[None]:
    """Keep any error for :func:`agree`: raised at once, it would leave the other ranks waiting."""
    try:
        yield
    except Exception as error:
        failures.append(error)


def agree(mesh: Mesh, failures: list[Exception], what: str, advice: str = "") -> None:
    """Raise CheckpointError on all ranks if one of them failed: ``what``, why, and what to do."""
    failed = mesh.control.all_reduce(torch.tensor([len(failures)]))
    if int(failed):
        reason = str(failures[0]) if failures else "another rank reports the cause"
        said = f"{what}: {reason}" + (f"; {advice}" if advice else "")
        raise CheckpointError(said) from (failures[0] if failures else None)


@contextmanager
def together(mesh: Mesh, what: str, advice: str = "") -> Iterator[None]:
    """Raise on all ranks what one of them finds inside, which must not wait for others; all ranks call it."""
    failures: list[Exception] = []
    with noting(failures):
        yield
    agree(mesh, failures, what, advice)
