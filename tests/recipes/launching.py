"""Recipes started as their users start them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ..launch import run_launcher

RECIPES = Path(__file__).parents[2] / "recipes"
TWO_RANKS = ("--multi_gpu", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no")

# (arguments of the launcher, options of the recipe): the line of the recipes' docstrings, and the files beside them.
LAUNCHERS = [
    pytest.param(TWO_RANKS, (), id="options"),
    *(
        pytest.param(("--config_file", str(file)), ("--tmp_size", "2"), id=file.stem)
        for file in sorted(RECIPES.glob("accelerate/*.yaml"))
    ),
]


def run_recipe(
    name: str, options: Sequence[str], folder: Path, launcher: Sequence[str] | None = TWO_RANKS, timeout_s: float = 120
) -> list[str]:
    """Return the lines that a recipe prints; without a launcher it runs as one process."""
    start = [] if launcher is None else ["-m", "accelerate.commands.launch", *launcher, "--main_process_port", "0"]
    done = run_launcher(
        [*start, RECIPES / name, *options],
        # Recipes ask for the CPU by themselves, also on a machine with GPUs that are hidden from them.
        env={"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "cache")},
        timeout_s=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
