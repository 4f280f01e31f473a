"""In messages of which size a tensor is summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

ALIGNMENT_BYTES = 16
"""Messages are multiples of it, so that each begins at an address that collectives are fast at."""

WORTH = 0.05
"""The part of its time that splitting must save: less may be noise."""


def message_count(size_bytes: float, message_bytes: int | None) -> int:
    """In how many messages of at most ``message_bytes``, equally long, a tensor is sent; None: as a whole."""
    return 1 if message_bytes is None else max(1, math.ceil(size_bytes / message_bytes))


def message_ms(curve: Callable[[float], float], size_bytes: float, message_bytes: int | None) -> float:
    """Time of a tensor in such messages, one after the other; ``curve`` is that of one message over its bytes."""
    count = message_count(size_bytes, message_bytes)
    return count * curve(size_bytes / count)


def message_elements(elements: int, element_bytes: int, message_bytes: int) -> int:
    """Of how many elements each message is; the last one may be shorter."""
    count = message_count(elements * element_bytes, message_bytes)
    step = ALIGNMENT_BYTES // element_bytes
    return -(-elements // count // step) * step


def best_message_bytes(points: Sequence[tuple[int, float]]) -> int | None:
    """The size that was measured to take the least time per byte.

    Args:
        points: (bytes, ms), bytes growing.

    Returns:
        None unless the largest one, in messages of that size, takes more than 5 % less time.
    """
    best, best_ms = min(points, key=lambda point: point[1] / point[0])
    largest, largest_ms = points[-1]
    return best if best_ms / best * largest < (1 - WORTH) * largest_ms else None
