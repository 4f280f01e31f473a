"""How many times the noise right runs differ: what ``outcome.MULTIPLE`` has to be above.

    torchrun --nproc-per-node 2 -m tests.verify.noise

On CPU ranks or, with one for each, on GPUs. A loss is one number, whose noise may be none by luck, as may be that of
float64, where Hugging Face rounds to float32 alike in all runs: there the ratio says nothing, and the least counts.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState

from oases_hf.joining import device_of_rank, process_group, silence_libraries
from oases_hf.launching import Seat
from oases_hf.verify import outcome, verification
from oases_hf.verify.settings import PRECISIONS, Precision, Settings
from oases_hf.verify.subject import Subject

from ..families import FAMILIES

NAMES = ("llama", "gpt2", "bert")
SEEDS = range(3)
# Wide enough for other kernels than those of the tiniest matrices; seen on GPUs only.
WIDE = {"hidden_size": 480, "intermediate_size": 1000, "num_hidden_layers": 4}


@contextmanager
def nothing_but_noise() -> Iterator[None]:
    """What is allowed is the noise, no multiple of it; of losses and gradients, nothing if there is none."""
    none = dict.fromkeys(PRECISIONS, 0.0)
    with (
        mock.patch.object(outcome, "MULTIPLE", dict.fromkeys(outcome.MULTIPLE, 1.0)),
        mock.patch.object(verification, "LEAST", none),
    ):
        yield


def ratios(folder: str, dtype: Precision, device: torch.device, size: int) -> dict[str, float]:
    """The largest ratio of difference and noise of losses, gradients and updates."""
    found: dict[str, float] = {}
    for seed, schedule in itertools.product(SEEDS, ("oases", "megatron")):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        settings = Settings(folder, tmp_size=size, dtype=dtype, seed=seed, schedule=schedule)
        for row in verification.verify(Subject.load(settings), device, lambda line: None).rows:
            ratio = row.difference / row.allowed if row.allowed else 0.0
            found[row.what] = max(ratio, found.get(row.what, 0.0))
    return found


def main() -> None:
    """Print the ratios of every family and precision."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    silence_libraries()
    device = device_of_rank(None)
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        for name in NAMES:  # before there is a process group, of which HF lets the first rank alone save
            changes: dict[str, Any] = WIDE if device.type == "cuda" else {}
            FAMILIES[name].model(dtype=torch.float32, **changes).save_pretrained(f"{root}/{name}")
        stack.enter_context(process_group(device, timedelta(minutes=10), Seat(rank, size, "env://")))
        stack.enter_context(nothing_but_noise())
        for name, dtype in itertools.product(NAMES, PRECISIONS):
            found = ratios(f"{root}/{name}", dtype, device, size)
            if rank == 0:
                figures = "".join(f"  {what} {ratio:.2g}" for what, ratio in found.items())
                print(f"{device.type} × {size}  {name:<6}{dtype:<9}{figures}", flush=True)


if __name__ == "__main__":
    main()
