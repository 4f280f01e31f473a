"""Copies from one device to another: whether all bits arrive, and how fast."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from .measurements import Copy

SIZE_BYTES = 2**26
ROUNDS = 4
"""The first of which makes the connection, and is not timed."""


def check_copies(source: torch.device, target: torch.device, direct: bool) -> Copy:
    """Copy other bits each round, and compare all that arrived with what was sent, on the host."""
    sent = torch.empty(SIZE_BYTES // 4, dtype=torch.int32, device=source)
    received = torch.zeros_like(sent, device=target)
    random = torch.Generator(source).manual_seed(0)
    wrong, times = 0, []
    for _ in range(ROUNDS):
        sent.random_(-(2**31), 2**31 - 1, generator=random)
        times.append(_copy_ms(sent, received))
        wrong += int((sent.cpu() != received.cpu()).sum())
    return Copy(source.index, target.index, SIZE_BYTES, statistics.median(times[1:]), direct, wrong)


def _copy_ms(sent: Tensor, received: Tensor) -> float:
    _finish(sent, received)
    began = time.perf_counter()
    received.copy_(sent)
    _finish(sent, received)
    return (time.perf_counter() - began) * 1e3


def _finish(*tensors: Tensor) -> None:
    """Wait for the devices that the tensors are on."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
