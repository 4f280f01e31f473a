"""The list of a model's layers, which HF's own loop runs as one.

While the base model's forward runs, iterating over a :class:`StackList` yields stand-ins for the layers: they note the
arguments of each, and the last one runs all layers together. At any other time it is the plain list of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from .call import Arguments
from .stack import Stack


@dataclass
class _Loop:
    """One go of HF's loop over the layers: it notes each layer's arguments, and runs the stack at the last."""

    stack: Stack
    layers: list[nn.Module]
    calls: list[Arguments] = field(default_factory=list)

    def call(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for the next layer."""
        self.calls.append((args, kwargs))
        return hidden if len(self.calls) < len(self.layers) else self.stack.run(self.layers, hidden, self.calls)


class _Step:
    """A layer as HF's loop sees it while the stack is to run."""

    def __init__(self, loop: _Loop, layer: nn.Module) -> None:
        self._loop = loop
        self._layer = layer

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._loop.call(hidden, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class StackList(nn.ModuleList):
    """A ModuleList of layers; see the module's docstring."""

    stack: Stack

    def _layers(self) -> list[nn.Module]:
        return list(super().__iter__())

    def _steps(self) -> list[_Step]:
        loop = _Loop(self.stack, self._layers())
        return [_Step(loop, layer) for layer in loop.layers]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers; inside the base model's forward, stand-ins that run the stack together."""
        return cast(Iterator[nn.Module], iter(self._steps())) if self.stack._inside else super().__iter__()

    def __getitem__(self, index: int | slice) -> Any:
        """One layer, or a list of layers or stand-ins."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        layers = self._layers()[index]
        return self._steps() if self.stack._inside and len(layers) == len(self) else layers


@contextmanager
def one_by_one(stack: Stack) -> Iterator[None]:
    """Run layers by HF's own loop inside, each communicating by itself."""
    before, stack.plain = stack.plain, True
    try:
        yield
    finally:
        stack.plain = before
