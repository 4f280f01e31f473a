"""Tiny models and batches are what the parity tests take them for, and the reference is plain HF."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from . import reference as plain
from .families import FAMILIES
from .parity import assert_gradients, float64_math
from .ranks import Worlds
from .tiny import IGNORE, batch, tiny_llama


def tensors_of(family: str) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 99)
    return plain.parameters(FAMILIES[family].model(seed=3)) | FAMILIES[family].batch(3, 8, padding="right", seed=3)


def cached_runs() -> bool:
    model = tiny_llama()
    runs = [plain.cached("llama", lambda: plain.reference(model, [batch(2, 4)], steps=1)) for _ in range(2)]
    return runs[0] is runs[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_makes_the_same(ranks: Worlds, family: str) -> None:
    here = tensors_of(family)
    for there in ranks(2).run(tensors_of, family):
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in here)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_parameter_hides_a_fault(family: str) -> None:
    for name, parameter in plain.parameters(FAMILIES[family].model()).items():
        assert parameter.dtype is torch.float64
        assert parameter.unique().numel() == parameter.numel(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_global_generator_is_left_alone(family: str) -> None:
    before = torch.get_rng_state()
    FAMILIES[family].model()
    FAMILIES[family].batch(2, 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_and_dtype(family: str) -> None:
    first, other, single = (
        plain.parameters(FAMILIES[family].model(**options)) for options in ({}, {"seed": 1}, {"dtype": torch.float32})
    )
    assert all(not torch.equal(first[name], other[name]) for name in first)
    assert all(torch.equal(first[name].float(), single[name]) for name in first)


def test_tied_embeddings_are_one_parameter() -> None:
    model = tiny_llama(tied=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_padded_batches_have_unequal_rows() -> None:
    full, padded = batch(4, 8), batch(4, 8, padded=True)
    assert bool(full["attention_mask"].all())
    assert len(padded["attention_mask"].sum(1).unique()) > 1
    for rows in (full, padded):
        counts = (rows["labels"][:, 1:] != IGNORE).sum(1)
        assert int(counts.min()) > 0
        assert len(counts.unique()) > 1
        assert bool((rows["labels"][rows["attention_mask"] == 0] == IGNORE).all())
        assert bool((rows["labels"] == IGNORE).sum() > (rows["attention_mask"] == 0).sum())


def test_reference_is_plain_hf() -> None:
    model, rows = tiny_llama(), batch(3, 8, padded=True)
    run = plain.reference(model, [rows], steps=1)
    with float64_math():
        loss = model(**rows).loss
        loss.backward()
    assert run.losses == (loss.item(),)
    assert_gradients(run.gradients, plain.gradients(model), relative=1e-15)
    assert all(torch.equal(run.start[name], value) for name, value in plain.parameters(model).items())


def test_reference_clips_and_keeps_frozen_parameters() -> None:
    model = tiny_llama()
    model.get_input_embeddings().requires_grad_(False)
    free, clipped = (plain.reference(model, [batch(3, 8)], steps=2, max_grad_norm=norm) for norm in (None, 0.1))
    name = "model.embed_tokens.weight"
    assert name not in clipped.gradients
    assert torch.equal(clipped.end[name], clipped.start[name])
    assert free.grad_norms[0] == clipped.grad_norms[0] > 0.1
    assert free.grad_norms[1] != clipped.grad_norms[1]


def test_runs_are_cached_by_key(ranks: Worlds) -> None:
    assert ranks(1).run(cached_runs) == [True]
