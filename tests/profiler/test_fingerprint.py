"""Cost tables that hold for different things are kept apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from transformers import LlamaForSequenceClassification

from oases_hf.parallel.mesh import Mesh
from oases_hf.profiler import Architecture, Running, Workload
from oases_hf.profiler.profile import fingerprint

from ..families import FAMILIES


def test_heads_and_autocast_tell_tables_apart() -> None:
    causal = Architecture.of(FAMILIES["llama"].model(dtype=torch.bfloat16))
    models = (causal, replace(causal, model_class=LlamaForSequenceClassification))
    bare = Running(torch.device("cpu"))
    mixed = replace(bare, autocast=partial(torch.autocast, "cpu", torch.bfloat16))
    marks = [fingerprint(m, Mesh.build(1), Workload(4, 8), running) for m in models for running in (bare, mixed)]
    assert len({str(each) for each in marks}) == 4
