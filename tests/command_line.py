"""Commands of ``oases-hf`` as one of several ranks, in the process of the test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from oases_hf import cli

from .environment import rank_environment

MODEL = "MODEL"
"""Stands for the folder of a model in arguments."""


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Set what a launcher would."""
    for name, value in rank_environment(rank, size, 29500).items():
        monkeypatch.setenv(name, value)


def assert_refused(
    command: str,
    arguments: Sequence[str],
    message: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both of two ranks refuse, before they wait for each other; the first says so, in one line."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for rank in (0, 1):
        as_rank(monkeypatch, rank, 2)
        assert cli.main([command, *(str(model) if word == MODEL else word for word in arguments)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"oases-hf {command}: error: {message}") if rank == 0 else said == ""
        assert said.count("\n") == (rank == 0)
