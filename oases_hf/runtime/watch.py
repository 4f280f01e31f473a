"""Looking on while instructions run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ..schedule import Instruction

Watch = Callable[[Instruction], AbstractContextManager[None]]
_NOTHING = nullcontext()


def unwatched(op: Instruction) -> AbstractContextManager[None]:
    """Watch nothing."""
    return _NOTHING
