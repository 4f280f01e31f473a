"""One call of a stack."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..schedule import Ready

Context = Mapping[str, Any]
"""The arguments of a layer beside the hidden state, by name."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def contexts_of(calls: Sequence[Arguments], positional: Sequence[str], left_out: str) -> list[Context]:
    """What each layer is called with: one and the same mapping where the very same is given, as mostly to all.

    Args:
        calls: positional and named arguments of each layer.
        positional: names of the former.
        left_out: the name of an argument that is dropped.
    """
    known: dict[Hashable, Context] = {}
    found = []
    for args, kwargs in calls:
        context = {**dict(zip(positional, args, strict=False)), **kwargs}
        context.pop(left_out, None)
        found.append(known.setdefault(tuple((name, id(value)) for name, value in context.items()), context))
    return found


def distinct(contexts: Sequence[Context]) -> list[Context]:
    """Each mapping once."""
    return list({id(context): context for context in contexts}.values())


@dataclass(frozen=True)
class Call:
    """What a stack is called with.

    Attributes:
        layers: in order.
        hidden: the input, ``[B, S, H]``.
        contexts: what each layer is called with beside it.
        ready: the schedule.
        training: the model is in training mode.
        number: of the forward, which dropout masks depend on.
    """

    layers: Sequence[nn.Module]
    hidden: Tensor
    contexts: Sequence[Context]
    ready: Ready
    training: bool
    number: int
