"""One call of a stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
    def modules(self) -> Sequence[nn.Module]:
        """All in its layers: to walk through them takes as long as to record some of their kernels."""
        return [module for layer in self.layers for module in layer.modules()]
