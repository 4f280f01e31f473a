"""Optimizer state kept once: of the ranks that hold the same, one owns a parameter and steps it.

Gradients are summed on the owner alone. The others have none when the optimizer steps, so that it passes over their
parameters and makes no state for them; what the owner made of a parameter is then sent to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from ..owners import Held, deal
from .mesh import Axis


class Ownership:
    """Which rank owns which parameter.

    Args:
        axes: for each parameter that gets an owner, the ranks that hold the same.
        rank: this rank's number in the world.
    """

    def __init__(self, axes: Mapping[nn.Parameter, Axis], rank: int) -> None:
        held = [Held(p.numel() * p.element_size(), axis.ranks) for p, axis in axes.items()]
        self.owners = dict(zip(axes, deal(held), strict=True))
        self._axes = axes
        self._rank = rank

    def elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether another rank owns ``parameter``."""
        return self.owners.get(parameter, self._rank) != self._rank

    def broadcast(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every rank what the owners have made of ``parameters``; all ranks call it right after a step."""
        stepped = set(parameters)
        pending = [
            self._axes[parameter].start_broadcast(parameter.detach(), owner)
            for parameter, owner in self.owners.items()
            if parameter in stepped and parameter.requires_grad
        ]
        for work in pending:
            work.wait()
