"""What a command knows of a model without its weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from oases_hf.commands.subject import architecture_of
from oases_hf.parallel.mesh import Mesh
from oases_hf.profiler import Architecture, Running, Workload
from oases_hf.profiler.profile import fingerprint

from ..families import FAMILIES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_training_finds_what_the_command_measured(family: str, dtype: str, tmp_path: Path) -> None:
    """Both have one fingerprint, so one file in the cache."""
    FAMILIES[family].model().save_pretrained(tmp_path)
    auto = cast(Any, AutoModelForCausalLM)
    loaded: PreTrainedModel = auto.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    options = argparse.Namespace(model=str(tmp_path), config=None, seq=8, dtype=dtype)

    def marks(model: Architecture) -> dict[str, str]:
        return fingerprint(model, Mesh.build(1), Workload(4, 8), Running(torch.device("cpu")))

    assert marks(architecture_of(options)) == marks(Architecture.of(loaded))
