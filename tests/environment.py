"""Environment variables of a rank, as a launcher on a machine without accelerators would set them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Ranks share few cores, and no test may reach for the network.
SHARED = {
    "ACCELERATE_USE_CPU": "true",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torch.distributed and accelerate read to know that this is one rank of ``size`` on one host."""
    return SHARED | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside; put the old ones back."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        restore_environment(before)


def restore_environment(values: Mapping[str, str]) -> None:
    """Make ``os.environ`` equal to ``values``."""
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)
