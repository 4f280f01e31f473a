"""What is done between computations: at once, or by who records them, at each replay."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Outside = Callable[..., None]
"""Called with an action, and the tensors it is on: all that is not computation on the device's current stream."""


def at_once(action: Callable[..., None], *tensors: Tensor) -> None:
    """Do it."""
    action(*tensors)
