"""Verifications on ranks: right ones pass, and every planted fault is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oases_hf.errors import ConfigError, UnsupportedModelError
from oases_hf.verify.outcome import Row
from oases_hf.verify.settings import Settings
from oases_hf.verify.subject import Subject
from oases_hf.verify.verification import verify

from ..families import FAMILIES
from ..pairwise import values_first
from ..ranks import Worlds
from ..tiny import tiny_llama
from .faults import FAULTS, KEYS, LAST_NORM, NORM

SEQ = 24
SMALL: dict[str, Any] = {"seq": SEQ, "steps": 2}
TRAINED = [name for name, tiny in FAMILIES.items() if tiny.head != "none"]
DIFFERENT = ("gemma2", "neox", "gpt2 row", "bert row", "bert token", "bert span")


@dataclass
class Verified:
    """What one rank learnt."""

    ok: bool
    rows: tuple[Row, ...]
    lines: list[str] = field(default_factory=list)


def verified(settings: Settings, fault: str = "none") -> Verified:
    """On a rank."""
    lines: list[str] = []
    with FAULTS[fault]():
        report = verify(Subject.load(settings), torch.device("cpu"), lines.append)
    return Verified(report.ok, report.rows, lines)


Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a tiny model, by name; made when first asked for."""
    root = tmp_path_factory.mktemp("models")

    def get(name: str) -> str:
        path = root / name.replace(" ", "_")
        if not path.exists():
            make(name).save_pretrained(path)
        return str(path)

    return get


def make(name: str) -> PreTrainedModel:
    if name == "one KV head":
        return tiny_llama(heads=4, kv_heads=1, dtype=torch.float32)
    return FAMILIES[name].model(dtype=torch.float32)


def check(found: list[Verified], settings: Settings) -> Verified:
    """All ranks agree, the first one talks, and everything that was to be compared was."""
    first, *others = found
    assert all(other.rows == first.rows and other.ok == first.ok and not other.lines for other in others)
    steps = settings.steps
    wanted = [(what, step + 1) for what in ("loss", "gradients", "update") for step in range(steps)]
    assert [(row.what, row.step) for row in first.rows] == wanted
    assert first.lines[-1].startswith("PASS: " if first.ok else "FAIL: ")
    return first


@pytest.mark.parametrize(("name", "size"), values_first(["llama", "gpt2", "bert"], [3, 2]))
def test_right_models_pass(ranks: Worlds, folder: Folder, name: str, size: int) -> None:
    settings = Settings(folder(name), tmp_size=size, seq=SEQ)
    found = check(ranks(size).run(verified, settings), settings)
    assert found.ok, "\n".join(found.lines)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in DIFFERENT else pytest.mark.slow)
        for name in TRAINED
        if name not in ("llama", "gpt2", "bert")
    ],
)
def test_every_family_and_head_passes(ranks: Worlds, folder: Folder, name: str) -> None:
    settings = Settings(folder(name), **SMALL)
    found = check(ranks(2).run(verified, settings), settings)
    assert found.ok, "\n".join(found.lines)
    assert type(make(name)).__name__ in found.lines[0]


VARIANTS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16"},
    "mixed": {"dtype": "mixed"},
    "megatron": {"schedule": "megatron"},
    "three sub-batches": {"sub_batches": 3, "batch": 5},
    "deferred": {"defer_weight_grads": True},
    "one row": {"batch": 1},
    "eager": {"attention": "eager"},
    "one layer": {"layers": 1},
    "head": {"head": "sequence"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings(ranks: Worlds, folder: Folder, variant: str) -> None:
    settings = Settings(folder("llama"), **{**SMALL, **VARIANTS[variant]})
    found = check(ranks(2).run(verified, settings), settings)
    assert found.ok, "\n".join(found.lines)


def test_random_weights(ranks: Worlds, folder: Folder) -> None:
    settings = Settings(config=str(Path(folder("gpt2")) / "config.json"), **SMALL)
    found = check(ranks(2).run(verified, settings), settings)
    assert found.ok, "\n".join(found.lines)


def test_a_model_without_a_head_gets_one(ranks: Worlds, folder: Folder) -> None:
    settings = Settings(folder("bert bare"), **SMALL)
    found = check(ranks(2).run(verified, settings), settings)
    assert found.ok, "\n".join(found.lines)
    assert found.lines[0].startswith("BertForMaskedLM from ")


NAMED = {
    "norm gradient halved": re.escape(f"gradients of {NORM}"),
    "KV gradient not summed": re.escape(f"gradients of {KEYS}"),
    "one rank steps further": re.escape(f"update of {LAST_NORM}"),
}


@pytest.mark.parametrize(
    ("fault", "dtype"), values_first([fault for fault in FAULTS if fault != "none"], ["float32", "mixed"])
)
def test_planted_faults_are_found(ranks: Worlds, folder: Folder, fault: str, dtype: Any) -> None:
    settings = Settings(folder("one KV head"), dtype=dtype, **SMALL)
    found = check(ranks(2).run(verified, settings, fault), settings)
    assert not found.ok, "\n".join(found.lines)
    what = NAMED.get(fault, r"gradients of \S+\.\w+")
    assert re.match(rf"FAIL: {what}: off by \S+ at step 1, allowed is \S+$", found.lines[-1]), found.lines[-1]


def refusal(settings: Settings) -> str:
    """On a rank: why there is nothing to verify."""
    try:
        verified(settings)
    except (ConfigError, UnsupportedModelError) as error:
        return str(error)
    return "not refused"


def test_too_few_ranks(ranks: Worlds, folder: Folder) -> None:
    for message in ranks(2).run(refusal, Settings(folder("gpt2"), tmp_size=3)):
        assert message == "--tmp-size 3, and 2 ranks were started; start as many as that"
