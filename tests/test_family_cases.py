"""GPT-2, BERT and others in particular: biases, packed weights, ties, old checkpoints, and faults that must show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from oases_hf import save_pretrained
from oases_hf.models.converted import Converted
from oases_hf.parallel.linear import RowParallel
from oases_hf.parallel.sharding import Layout

from .families import FAMILIES
from .pairwise import values_first
from .parallel import full_gradients, full_parameters, one_step, parallel
from .parity import assert_gradients, assert_loss, assert_updates, float64_math, gradient_deviation
from .ranks import Worlds
from .reference import gradients, reference
from .tiny import Batch

ROWS, SEQ = 5, 12


def data(name: str, step: int = 0) -> Batch:
    return FAMILIES[name].batch(ROWS, SEQ, padding="right", seed=step)


def logits_agree(name: str, training: bool) -> None:
    """Without labels, so that all logits come back."""
    alone, model = (FAMILIES[name].model().train(training) for _ in range(2))
    parallel(model, dist.get_world_size())
    inputs = {key: tensor for key, tensor in data(name).items() if key != "labels"}
    with float64_math():
        found, expected = (cast(Any, m)(**inputs).logits for m in (model, alone))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert", "neox", "phi3"])
def test_biases_are_added_once(ranks: Worlds, name: str, training: bool) -> None:
    """Case 3: those of row-parallel layers are not zero here."""
    ranks(2).run(logits_agree, name, training)


def packed_weights() -> None:
    """On a rank: logits, a step, and what is saved of GPT-2's packed queries, keys and values."""
    alone, model = (cast(Any, FAMILIES["gpt2"].model(n_head=4)).train() for _ in range(2))
    wanted = reference(alone, [data("gpt2")], steps=1)
    state = parallel(model, dist.get_world_size())
    name = "transformer.h.0.attn.c_attn.weight"
    save_pretrained(model, "untrained")
    assert_loss(one_step(model, [data("gpt2")]), wanted.losses[0])
    assert_gradients(full_gradients(model), wanted.gradients)
    dist.barrier()
    saved = safetensors.torch.load_file("untrained/model.safetensors")
    assert state.layouts[name].shape == saved[name].shape == (40, 120)
    assert model.transformer.h[0].attn.c_attn.weight.shape == (40, 120 // dist.get_world_size())
    for key, tensor in alone.named_parameters():
        assert saved[key].equal(tensor), key
    there = AutoModelForCausalLM.from_pretrained("untrained", dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(there.eval()(**data("gpt2")).logits, alone.eval()(**data("gpt2")).logits)


@pytest.mark.parametrize("world", [2, 4])
def test_packed_queries_keys_and_values(ranks: Worlds, world: int) -> None:
    """Case 4."""
    ranks(world).run(packed_weights)


def generated(name: str) -> None:
    """On a rank: the same words as in one process, from a cache that holds this rank's heads."""
    alone, model = (cast(Any, FAMILIES[name].model()).eval() for _ in range(2))
    parallel(model, 2)
    prompt = {key: FAMILIES[name].batch(3, 6, padding="left")[key] for key in ("input_ids", "attention_mask")}
    with float64_math(), torch.no_grad():
        found, expected = (m.generate(**prompt, pad_token_id=0, max_new_tokens=6, num_beams=2) for m in (model, alone))
    assert found.equal(expected)


@pytest.mark.parametrize("name", ["gpt2 tied", "neox", "gemma3", "phi3", "qwen3"])
def test_generation(ranks: Worlds, name: str) -> None:
    ranks(2).run(generated, name)


TIES: dict[str, list[tuple[str, str]]] = {
    "gpt2 tied": [("transformer.wte.weight", "lm_head.weight")],
    "bert": [
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ],
}


def tied(name: str) -> None:
    """On a rank: three steps; what is tied stays one parameter, whose gradient is that of all its uses."""
    start = FAMILIES[name].model().train()
    wanted = reference(start, [data(name, step) for step in range(3)], steps=3)
    model = FAMILIES[name].model().train()
    state = parallel(model, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(3):
        assert_loss(one_step(model, [data(name, step)]), wanted.losses[step])
        if step == 0:
            assert_gradients(full_gradients(model), wanted.gradients)
        optimizer.step()
        for one, other in TIES[name]:
            assert model.get_parameter(one) is model.get_parameter(other)
            assert state.layouts[one] == state.layouts[other]
    kept = {n: t for n, t in full_parameters(model).items() if FAMILIES[name].has_gradient(n)}
    assert_updates(kept, *({n: run[n] for n in kept} for run in (wanted.end, wanted.start)))


def gradients_of_uses(name: str) -> None:
    """The same model untied has one gradient per use; they add up to that of the tied one."""
    model = FAMILIES[name].model().train()
    whole = reference(model, [data(name)], steps=1).gradients
    for _, other in TIES[name]:
        module, _, parameter = other.rpartition(".")
        model.get_submodule(module)._parameters[parameter] = torch.nn.Parameter(
            model.get_parameter(other).detach().clone()
        )
    uses = reference(model, [data(name)], steps=1).gradients
    for one, other in TIES[name]:
        if one in uses:  # BERT's bias is used under one of its names only
            torch.testing.assert_close(uses[one] + uses[other], whole[one], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TIES)
def test_ties_stay(ranks: Worlds, name: str) -> None:
    """Case 7."""
    gradients_of_uses(name)
    ranks(2).run(tied, name)


def write_bin(model: PreTrainedModel, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def write_one_file(model: PreTrainedModel, folder: Path) -> None:
    unique = {name: parameter.detach() for name, parameter in model.named_parameters()}
    safetensors.torch.save_file(unique, folder / "model.safetensors", {"format": "pt"})


def from_folder(name: str, folder: Path) -> None:
    """On a rank: a checkpoint that plain from_pretrained reads, converted, takes a step as in one process."""
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    alone, model = (auto.from_pretrained(folder, dtype=torch.float64).train() for _ in range(2))
    wanted = reference(alone, [data(name)], steps=1)
    assert_gradients(wanted.gradients, reference(FAMILIES[name].model(), [data(name)], steps=1).gradients)
    parallel(model, 2)
    assert_loss(one_step(model, [data(name)]), wanted.losses[0])
    assert_gradients(full_gradients(model), wanted.gradients)


@pytest.mark.parametrize(("name", "write"), values_first(["llama", "gpt2 tied", "bert"], [write_bin, write_one_file]))
def test_older_checkpoints(
    ranks: Worlds, name: str, write: Callable[[PreTrainedModel, Path], None], tmp_path: Path
) -> None:
    """Case 21: a .bin file, or one file without an index."""
    model = FAMILIES[name].model()
    model.config.save_pretrained(tmp_path)
    write(model, tmp_path)
    ranks(2).run(from_folder, name, tmp_path)


# The first norm of a layer, and where there is one the norm behind its first block.
NORMS = {
    "gpt2": ("ln_1",),
    "neox": ("input_layernorm",),
    "bert": ("attention.output.LayerNorm",),
    "gemma3": ("input_layernorm", "post_attention_layernorm"),
}
Plant = Callable[[Any, Converted, tuple[str, ...]], AbstractContextManager[object]]


def bias_on_every_rank(model: Any, state: Converted, norms: tuple[str, ...]) -> AbstractContextManager[object]:
    return mock.patch.object(RowParallel, "project", lambda self, x: self.apply_to(x, self.bias))


@contextmanager
def swapped_sub_batch(model: Any, state: Converted, norms: tuple[str, ...]) -> Iterator[None]:
    block, *others = state.stack.blocks

    def run(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
        return block.run(layer, hidden, **{**context, "attention_mask": context["attention_mask"].flip(0)})

    state.stack.blocks = (replace(block, run=run), *others)
    yield


@contextmanager
def halved_norm(model: Any, state: Converted, norms: tuple[str, ...]) -> Iterator[None]:
    yield
    cast(Any, state.stack.layers()[0].get_submodule(norms[-1])).weight.grad /= 2


@contextmanager
def times_t(model: Any, state: Converted, norms: tuple[str, ...]) -> Iterator[None]:
    yield
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= state.mesh.tmp.size


@contextmanager
def norm_summed_the_other_way(model: Any, state: Converted, norms: tuple[str, ...]) -> Iterator[None]:
    """One whose gradients are shares is left alone, one behind a block, whose are whole, is summed."""
    parameter = state.stack.layers()[0].get_submodule(norms[-1]).get_parameter("weight")
    layout = state.gradients.layouts[parameter]
    other = Layout(layout.shape, layout.slices, not layout.partial_grad)
    state.gradients.layouts = {**state.gradients.layouts, parameter: other}
    yield


FAULTS: dict[str, Plant] = {
    "none": lambda *_: nullcontext(),
    "bias on every rank": bias_on_every_rank,
    "swapped sub-batch": swapped_sub_batch,
    "halved norm": halved_norm,
    "times T": times_t,
    "norm summed the other way": norm_summed_the_other_way,
}


def deviation_with(name: str, fault: str) -> float:
    """On a rank: how far gradients are off, relative to what is allowed, with something wrong on purpose."""
    alone, model = (FAMILIES[name].model().train() for _ in range(2))
    with float64_math():
        cast(Any, alone)(**data(name)).loss.backward()
    state = parallel(model, 2)
    with FAULTS[fault](model, state, NORMS[name]):
        one_step(model, [data(name)])
    local = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradient_deviation(
        local, {n: state.layouts[n].local(g, state.mesh.tmp.rank) for n, g in gradients(alone).items()}
    ).ratio


@pytest.mark.parametrize(("fault", "name"), values_first([*FAULTS], [*NORMS]))
def test_planted_faults_are_found(ranks: Worlds, name: str, fault: str) -> None:
    worst = max(ranks(2).run(deviation_with, name, fault))
    assert (worst > 100) == (fault != "none"), worst
    assert fault != "none" or worst <= 1
