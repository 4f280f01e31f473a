"""The end of a rank's process."""

from __future__ import annotations

import atexit
import sys
from functools import cache
from types import TracebackType

import torch.distributed as dist

from ..parallel.mesh import note_end


@cache
def end_quietly() -> None:
    """Leave the process group in order when the process ends; after an error, leave at once and say which rank."""
    if not dist.is_initialized():
        return
    own_hook, rank = sys.excepthook, dist.get_rank()
    failed = False

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        own_hook(kind, error, trace)
        print(f"oases: rank {rank} failed: {kind.__name__}: {error}", file=sys.stderr, flush=True)

    def leave() -> None:
        if dist.is_initialized() and not failed:
            note_end(rank)
            dist.destroy_process_group()

    sys.excepthook = hook
    atexit.register(leave)
