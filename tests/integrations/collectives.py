"""What a rank asks of torch.distributed, whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

NAMES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")


@dataclass(frozen=True, slots=True)
class Call:
    """One collective: which ranks, and what this rank gave; a barrier gives nothing."""

    name: str
    ranks: tuple[int, ...]
    numel: int = 0
    dtype: torch.dtype | None = None

    @property
    def of_numbers(self) -> bool:
        """Whether it moves activations, gradients or losses, and not batches or agreements between ranks."""
        return self.dtype is not None and self.dtype.is_floating_point


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The collectives called inside, in order."""
    calls: list[Call] = []
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(dist, name, _recording(name, getattr(dist, name), calls)))
        yield calls


def _recording(name: str, own: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        ranks = tuple(dist.get_process_group_ranks(kwargs.get("group")))
        given = (tensors[-1].numel(), tensors[-1].dtype) if tensors else ()
        calls.append(Call(name, ranks, *given))
        return own(*args, **kwargs)

    return call
