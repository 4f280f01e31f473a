"""All-reduces between the ranks: whether sums are right, and how long they take."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from ..parallel.mesh import Axis, Mesh
from ..profiler.link import LinkProfile
from .measurements import AllReduce
from .watching import Teller

SIZES = (2**16, 2**20, 2**24, 2**26)
"""Bytes of the messages."""

ROUNDS = 4
"""The first of which makes connections, and is not timed."""


def check_links(mesh: Mesh, device: torch.device, teller: Teller, limit_s: float) -> bool:
    """All-reduce in groups of every size that divides the ranks; every rank must call it.

    Args:
        mesh: the ranks.
        device: of this rank.
        teller: is told of every step, and what was found.
        limit_s: for each size of group and message.

    Returns:
        Whether all sums were right on all ranks.
    """
    timer, right = LinkProfile(mesh, device), True
    for ranks in (size for size in range(2, mesh.world.size + 1) if mesh.world.size % size == 0):
        teller.step(f"making groups of {ranks} ranks", limit_s)
        axis = mesh.axis(ranks)
        for size_bytes in SIZES:
            teller.step(f"all-reduce of {ranks} ranks, {size_bytes / 1024:g} KiB", limit_s)
            found = _all_reduce(mesh, axis, timer, device, size_bytes)
            teller.found(found)
            right = right and not any(found.wrong)
    return right


def _all_reduce(mesh: Mesh, axis: Axis, timer: LinkProfile, device: torch.device, size_bytes: int) -> AllReduce:
    wrong, times = 0, []
    for turn in range(ROUNDS):
        pattern = _pattern(size_bytes // 4, turn, device)
        message = pattern * (mesh.world.rank + 1)
        times.append(timer.once(axis.start_all_reduce, message))
        wrong += int((message != pattern * sum(rank + 1 for rank in axis.ranks)).sum())
    (ms,) = timer.slowest([statistics.median(times[1:])])
    return AllReduce(axis.size, size_bytes, ms, tuple(mesh.from_all(wrong)))


def _pattern(elements: int, turn: int, device: torch.device) -> Tensor:
    """Whole numbers from 1 to 251, small enough that sums of their multiples are exact; others each turn."""
    places = torch.arange(elements, dtype=torch.int32, device=device)
    return ((places + 31 * turn) % 251 + 1).to(torch.float32)
