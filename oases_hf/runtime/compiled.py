"""What blocks compute up to their row-parallel projections, compiled once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .signature import hooks_inside, with_tensors

BACKEND = "inductor"

_numbers = count()


class Compiled:
    """The compiled blocks of a stack.

    Projections, which put their weight gradients off or have no reader, and the dropout behind them stay outside: what
    is compiled depends on no state that changes between calls.

    Args:
        masked: blocks draw dropout masks inside, while they train.
    """

    def __init__(self, masked: bool) -> None:
        self._masked = masked
        self._compile = cache(_compile)

    def afresh(self) -> Compiled:
        """The same with nothing compiled: for shapes that are not to be taken for changes of others."""
        return Compiled(self._masked)

    def why_not(self, layers: Sequence[nn.Module], training: bool) -> str | None:
        """What keeps ``layers`` from running compiled; None when nothing does."""
        if self._masked and training:
            # Forward and recompute are compiled apart, and torch may give up on either: masks could then differ.
            return "dropout on attention weights"
        # torch does not look again whether there are hooks.
        return "hooks inside a layer" if hooks_inside(layers) else None

    def __call__(self, run: Callable[..., Tensor], degree: int) -> Callable[..., Tensor]:
        """A block's ``run`` at a degree, for a link that captures what projections read; returns its own input."""
        return partial(self._run, run, degree)

    def _run(self, run: Callable[..., Tensor], degree: int, layer: nn.Module, hidden: Tensor, **context: Any) -> Tensor:
        x, context = with_tensors((hidden, context), _laid_out)
        self._compile(run, degree, torch.is_grad_enabled(), layer.training)(layer, x, **context)
        return hidden


def _laid_out(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own if it is a view of others' rows: each layout would be compiled for.

    A sub-batch begins somewhere in a batch; a mask that is one for all rows is not any more when it is recorded.
    """
    return tensor.clone() if tensor.storage_offset() or 0 in tensor.stride() else tensor


def _compile(run: Callable[..., Tensor], degree: int, grad: bool, training: bool) -> Callable[..., None]:
    """Compile ``run`` for layers at one degree, in one mode: torch makes few variants of a function."""

    def block(layer: nn.Module, hidden: Tensor, **context: Any) -> None:
        run(layer, hidden, **context)

    # torch counts variants by the code of a function, and notes by its name which sizes change.
    code = block.__code__.replace(co_name=f"block_{next(_numbers)}")
    own = FunctionType(code, block.__globals__, code.co_name, None, block.__closure__)
    result: Callable[..., None] = torch.compile(own, backend=BACKEND)
    return result
