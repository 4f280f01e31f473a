"""Calling autograd functions, typed."""

from __future__ import annotations

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    """The result of ``function`` on ``args``, recorded by autograd; for functions of one result."""
    result: Tensor = function.apply(*args)
    return result
