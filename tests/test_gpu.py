"""On GPUs, one rank each: the schedules on NCCL, and mixed precision through Accelerate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_on_gpus() -> None:
    count = min(4, torch.cuda.device_count())
    done = launch(count, [Path(__file__).with_name("gpu_rank.py")], env={"ACCELERATE_USE_CPU": "false"}, timeout_s=500)
    for process in done:
        assert process.returncode == 0, process.stdout + process.stderr
        assert "compared 30" in process.stdout
        assert "with dropout 40" in process.stdout
        assert "mixed 12" in process.stdout
        assert "rounded 15" in process.stdout
        assert "compiled 8" in process.stdout
        assert re.search(r"owned [1-9]\d*\n", process.stdout)
        assert "precisions 2" in process.stdout
        assert "switches 8" in process.stdout
        assert "long rows 6" in process.stdout
