"""What a process does to become one of the ranks of a command."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars

from .errors import ConfigError, UnsupportedModelError
from .launching import Seat


@contextlib.contextmanager
def process_group(device: torch.device, limit: timedelta, seat: Seat) -> Iterator[None]:
    """The ranks' process group inside; what broke may leave it waiting for others, so only refusals end it too.

    Args:
        device: of this rank.
        limit: of the time that a collective may take.
        seat: of this rank; no group is made for a single one.
    """
    if seat.size == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", seat.rendezvous, limit, seat.size, seat.rank, device_id=device)
    else:
        dist.init_process_group("gloo", seat.rendezvous, limit, seat.size, seat.rank)
    try:
        yield
    except (ConfigError, UnsupportedModelError):
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def device_of_rank(wanted: Literal["cpu", "cuda"] | None) -> torch.device:
    """The device of this rank: None for GPUs where there is one for each; raises ConfigError when there are too few."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < ranks_here:
        raise ConfigError(f"--device cuda: {ranks_here} ranks on {gpus} GPUs, each needs one; choose --device cpu")
    if wanted == "cpu" or gpus < ranks_here:
        return torch.device("cpu")
    return torch.device("cuda", local)


def silence_libraries() -> None:
    """Leave the terminal to the command."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
