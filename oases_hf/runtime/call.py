"""One call of a stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..schedule import Ready


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
    contexts: Sequence[Mapping[str, Any]]
    ready: Ready
    training: bool
    number: int
