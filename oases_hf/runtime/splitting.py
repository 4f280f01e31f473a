"""A layer's arguments, split by rows into those of its sub-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .call import Context


def unsplittable(contexts: Sequence[Context], per_sample: Sequence[str]) -> str | None:
    """What among the layers' arguments cannot be split by rows, or is not known to be; None when all can.

    Among these are flex attention's masks, and the lengths that collators for flash attention count over all rows.
    """
    for context in contexts:
        for name, value in context.items():
            tensor = torch.is_tensor(value)
            fits = value is None or tensor or isinstance(value, tuple | list)
            if not fits if name in per_sample else tensor and value.dim() > 0:
                return f"{name} of type {type(value).__name__}"
    return None


class Share(NamedTuple):
    """Which of the replicas this is, of how many; a sub-batch is filled up to a ``multiple`` of rows."""

    replica: int = 0
    replicas: int = 1
    multiple: int = 1


def parts_of(
    context: Context, per_sample: Sequence[str], batch: int, sub_batches: int, share: Share
) -> list[dict[str, Any]]:
    """The arguments for this replica's rows of each sub-batch of a batch of so many rows."""
    if sub_batches == 1 and share.multiple == 1:
        return [dict(context)]
    split = {name: value for name, value in context.items() if name in per_sample}
    return [
        {**context, **{name: _part(value, batch, sub_batches, k, share) for name, value in split.items()}}
        for k in range(sub_batches)
    ]


def _part(value: Any, batch: int, sub_batches: int, k: int, share: Share) -> Any:
    """Part ``k`` of what is given per sample; what is broadcast over samples stays whole."""
    if isinstance(value, tuple | list):
        return type(value)(_part(item, batch, sub_batches, k, share) for item in value)
    if torch.is_tensor(value) and value.dim() > 1 and value.shape[0] == batch:
        part = value.tensor_split(sub_batches)[k]
        if missing := -part.shape[0] % share.multiple:
            part = torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])
        return part.chunk(share.replicas)[share.replica]
    return value
