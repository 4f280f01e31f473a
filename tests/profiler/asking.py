"""What is asked of a profile: by a plugin that plans, and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate import Accelerator

from oases_hf import OasesPlugin, cli
from oases_hf.costs import CostTable
from oases_hf.integrations import planning
from oases_hf.profiler import Running

from ..command_line import as_rank
from ..families import FAMILIES


class Asked(Exception):
    """In place of a profile."""


def asked_for(plugin: OasesPlugin, model: Any) -> Running:
    """How blocks are to run in the profile that ``plugin`` plans ``model`` by."""
    with mock.patch.object(planning, "profile", side_effect=Asked) as asked, pytest.raises(Asked):
        plugin.install(Accelerator(cpu=True), model)
    running: Running = asked.call_args.args[3]
    return running


def profiled(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> CostTable:
    """The costs of a GPT-2 that ``oases-hf profile`` measures on one CPU rank."""
    FAMILIES["gpt2"].model().save_pretrained(folder / "gpt2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    as_rank(monkeypatch, 0, 1)
    costs = folder / "costs.json"
    asked = ["profile", str(folder / "gpt2"), "--tmp-size", "1", "--batch", "2", "--seq", "8", "--device", "cpu"]
    assert cli.main([*asked, "--sub-batches", "1", *options, "--out", str(costs)]) == 0
    return CostTable.load(costs)
