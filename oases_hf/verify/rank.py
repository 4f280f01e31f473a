"""One rank of a verification, as a process."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars

from ..errors import ConfigError, UnsupportedModelError
from .launch import FAIL, PASS, USAGE
from .settings import Settings
from .subject import Subject
from .verification import verify


def run_rank(settings: Settings, rank: int, size: int, rendezvous: str) -> int:
    """Verify as rank ``rank`` of ``size``; rank 0 prints the report, or in one sentence why there is none.

    Args:
        settings: what to compare.
        rank: of this process.
        size: how many there are.
        rendezvous: where they meet, as torch.distributed's ``init_method``.

    Returns:
        The exit code.
    """
    _silence_libraries()
    try:
        subject, device = Subject.load(settings), _device(settings)  # what is wrong with these shows before ranks meet
        with _process_group(device, timedelta(seconds=settings.time_limit_s), rank, size, rendezvous):
            report = verify(subject, device, lambda line: print(line, flush=True))
    except (ConfigError, UnsupportedModelError) as error:
        if rank == 0:
            print(f"oases-hf verify: error: {error}", file=sys.stderr)
        return USAGE
    return PASS if report.ok else FAIL


@contextlib.contextmanager
def _process_group(device: torch.device, limit: timedelta, rank: int, size: int, rendezvous: str) -> Iterator[None]:
    """The ranks' process group inside; what broke may leave it waiting for others, so only refusals end it too."""
    if size == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rendezvous, limit, size, rank, device_id=device)
    else:
        dist.init_process_group("gloo", rendezvous, limit, size, rank)
    try:
        yield
    except (ConfigError, UnsupportedModelError):
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _device(settings: Settings) -> torch.device:
    """The device of this rank; raises ConfigError when there are too few."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if settings.device == "cuda" and gpus < ranks_here:
        raise ConfigError(f"--device cuda: {ranks_here} ranks on {gpus} GPUs, each needs one; choose --device cpu")
    if settings.device == "cpu" or gpus < ranks_here:
        return torch.device("cpu")
    return torch.device("cuda", local)


def _silence_libraries() -> None:
    """Leave the terminal to the report."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
