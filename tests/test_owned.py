"""Optimizer state that one of several ranks keeps: what all of them would compute, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from oases_hf import save_pretrained
from oases_hf.convert import plain
from oases_hf.errors import BackwardError
from oases_hf.integrations.optimizers import watch_steps
from oases_hf.models.converted import Converted, converted
from oases_hf.owners import Held, deal
from oases_hf.parallel.mesh import DONE, Axis, Pending
from oases_hf.plan import Recompute, ShardOptimizer

from .families import FAMILIES
from .footprint import Footprint, footprint
from .pairwise import pairs_first
from .parallel import full_gradients, full_parameters, parallel
from .parity import assert_gradients, float64_math
from .ranks import Worlds
from .reference import Run, label_count, loss_of, reference
from .test_families import batches
from .tiny import Batch, batch, tiny_llama
from .training import assert_trains_as

STEPS, LIMIT = 5, 0.5
WAYS: tuple[ShardOptimizer, ...] = ("keep", "reduce")
RECOMPUTE: tuple[Recompute, ...] = ("full", "none")


def owned_model(model: PreTrainedModel, tmp_size: int, degrees: Sequence[int], how: ShardOptimizer) -> Converted:
    """Convert the model, and have its optimizers' steps spread."""
    recompute = RECOMPUTE * (len(degrees) // 2)
    state = parallel(model.train(), tmp_size, degrees=degrees, recompute=recompute, shard_optimizer=how)
    watch_steps(state)
    return state


def micro_batch(model: PreTrainedModel, data: Batch, share: float, last: bool) -> float:
    """As Accelerate's backward has it: the gradient of a micro-batch with so large a share of the step's labels."""
    state = converted(model)
    state.gradients.reopen()
    state.stack.reduce_now = last or state.gradients.eager
    with float64_math():
        loss = loss_of(model, data) * share
        (loss * state.mesh.data.size).backward()
    if last:
        state.gradients.finish()
    elif state.gradients.eager:
        state.gradients.hand_over()
    return float(loss)


def weights(how: ShardOptimizer) -> dict[str, Tensor]:
    """On a rank: those after five steps without clipping."""
    model = tiny_llama(layers=2)
    owned_model(model, 4, (2,) * 4, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        model.zero_grad()
        micro_batch(model, batch(4, 12, padded=True, seed=step), 1.0, last=True)
        optimizer.step()
    return full_parameters(model)


@pytest.mark.parametrize("how", WAYS)
def test_two_replicas_to_the_last_bit(ranks: Worlds, how: ShardOptimizer) -> None:
    for ours, theirs in zip(ranks(4).run(weights, how), ranks(4).run(weights, "off"), strict=True):
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def train(family: str, tmp_size: int, degrees: tuple[int, ...], how: ShardOptimizer, wanted: Run) -> None:
    """On a rank: five AdamW steps of two micro-batches for each TMP world, clipped, against one process.

    In every other step the first of its micro-batches goes through HF's own loop, so nothing of it is reduced early.
    """
    model = FAMILIES[family].model()
    state = owned_model(model, tmp_size, degrees, how)
    world, worlds = state.mesh.data.rank, state.mesh.data.size

    def step(number: int) -> float:
        data = batches(family, "right", 2 * worlds, number)
        counts = [label_count(model, rows) for rows in data]
        first, second = data[world], data[worlds + world]
        model.zero_grad()
        with nullcontext() if number % 2 else plain(model):
            loss = micro_batch(model, first, counts[world] / sum(counts), last=False)
        loss += micro_batch(model, second, counts[worlds + world] / sum(counts), last=True)
        return float(state.mesh.data.all_reduce(torch.tensor(loss, dtype=torch.float64)))

    assert_trains_as(wanted, model, family, LIMIT, step)


LAYOUTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "two replicas": (4, (2, 2, 2, 2)),
    "mixed": (4, (4, 2, 1, 1)),
    "replicas and worlds": (2, (1, 2, 2, 1)),
    "worlds": (1, (1, 1, 1, 1)),
}


@pytest.mark.parametrize(("layout", "how", "family"), pairs_first([*LAYOUTS], WAYS, ["llama", "bert", "gpt2 tied"]))
def test_five_steps(ranks: Worlds, layout: str, how: ShardOptimizer, family: str) -> None:
    tmp_size, degrees = LAYOUTS[layout]
    micro_batches = 2 * 4 // tmp_size
    data = [rows for step in range(STEPS) for rows in batches(family, "right", micro_batches, step)]
    wanted = reference(FAMILIES[family].model(), data, steps=STEPS, accumulate=micro_batches, max_grad_norm=LIMIT)
    ranks(4).run(train, family, tmp_size, degrees, how, wanted)


def held_by(state: Converted) -> list[Held]:
    """What this rank holds of everything that has an owner."""
    sync = state.gradients
    return [Held(p.numel() * p.element_size(), sync.replicas(sync.layouts[p]).ranks) for p in sync.ownership.owners]


def kept_bytes(how: ShardOptimizer) -> tuple[int, Footprint, Footprint, int]:
    """On a rank, of parameters with owners in float32: their elements, and the bytes predicted and measured.

    Last the most gradient bytes at any time. Three steps of two micro-batches.
    """
    model = tiny_llama(layers=4, dtype=torch.float32)
    state = owned_model(model, 4, (2,) * 8, how)
    owned = list(state.gradients.ownership.owners)
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[int] = []
    between = 0

    def gradients() -> int:
        return sum(p.grad.nbytes for p in owned if p.grad is not None)

    def start(own: Callable[..., None], parameters: Iterable[nn.Parameter]) -> None:
        seen.append(gradients())
        own(parameters)

    with mock.patch.object(
        state.gradients, "start", lambda parameters, own=state.gradients.start: start(own, parameters)
    ):
        for step in range(3):
            model.zero_grad()
            micro_batch(model, batch(4, 12, seed=step), 0.5, last=False)
            between = gradients()
            micro_batch(model, batch(4, 12, seed=9 + step), 0.5, last=True)
            optimizer.step()
    moments = [optimizer.state[p][name] for p in owned if p in optimizer.state for name in ("exp_avg", "exp_avg_sq")]
    parameters = sum(p.nbytes for p in owned)
    measured = Footprint(parameters, between, sum(moment.nbytes for moment in moments))
    predicted = footprint(held_by(state), state.mesh.world.rank, how)
    return sum(p.numel() for p in owned), predicted, measured, max(seen)


@pytest.mark.parametrize(("how", "per_parameter"), [("keep", 12), ("reduce", 10)])
def test_bytes_kept(ranks: Worlds, how: ShardOptimizer, per_parameter: int) -> None:
    """With two replicas: 16 bytes of float32 and AdamW, less half the state, less half the gradients."""
    found = ranks(4).run(kept_bytes, how)
    for _, predicted, measured, most in found:
        assert predicted == measured
        blocks = 2 * measured.parameters // 8  # attention and MLP of a layer: two blocks are on their way
        assert most <= measured.gradients + (blocks if how == "reduce" else 0)
    for pair in (found[::2], found[1::2]):
        assert sum(measured.total for _, _, measured, _ in pair) == per_parameter * sum(count for count, *_ in pair)


def sent_bytes(how: ShardOptimizer) -> tuple[int, int, int]:
    """On a rank: the bytes of what has owners, or would, and what replicas send in backwards and in the step."""
    model = tiny_llama(layers=2)
    state = owned_model(model, 4, (2,) * 4, how)
    optimizer = torch.optim.AdamW(model.parameters())
    traffic = state.mesh.axis(4, 2).traffic
    for number in range(3):
        micro_batch(model, batch(4, 12, seed=number), 1 / 3, last=number == 2)
    in_backward = traffic.bytes
    optimizer.step()
    parts = [p for p, layout in state.gradients.layouts.items() if layout.sharded and layout.replicas == 2]
    return sum(p.nbytes for p in parts), in_backward, traffic.bytes - in_backward


def test_bytes_sent(ranks: Worlds) -> None:
    """Of two replicas each sends what the other owns, which is half: gradients in backward, parameters in the step."""
    plainly, keeping, reducing = (ranks(4).run(sent_bytes, how) for how in ("off", *WAYS))
    for (size, rows_and_sums, nothing), keep, reduce in zip(plainly, keeping, reducing, strict=True):
        assert nothing == 0
        assert keep == (size, rows_and_sums - size // 2, size // 2)
        assert reduce == (size, rows_and_sums + size // 2, size // 2)


def saved_after_a_step(folder: Path, how: ShardOptimizer) -> None:
    model = tiny_llama()
    owned_model(model, 4, (2,) * 4, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    micro_batch(model, batch(4, 12), 1.0, last=True)
    optimizer.step()
    save_pretrained(model, folder / how)


def test_export_right_after_a_step(ranks: Worlds, tmp_path: Path) -> None:
    for how in ("off", "keep"):
        ranks(4).run(saved_after_a_step, tmp_path, how)
    expected, found = (AutoModelForCausalLM.from_pretrained(tmp_path / how).state_dict() for how in ("off", "keep"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(expected["lm_head.weight"], tiny_llama().state_dict()["lm_head.weight"])


ONLY = "model.layers.1.mlp.up_proj.weight"


def one_trained(how: ShardOptimizer, wanted: dict[str, Tensor], norm: float) -> bool:
    """On a rank: a step on a model of which one matrix is trained; returns whether this rank has optimizer state."""
    model = tiny_llama(layers=2).requires_grad_(False)
    model.get_parameter(ONLY).requires_grad_(True)
    state = owned_model(model, 4, (2,) * 4, how)
    optimizer = torch.optim.AdamW(model.parameters())
    micro_batch(model, batch(4, 12), 1.0, last=True)
    assert_gradients(full_gradients(model), wanted)
    assert float(state.gradients.clip(model.parameters(), 0.1)) == pytest.approx(norm, rel=1e-10)
    assert float(state.gradients.norm(model.parameters(), torch.inf)) > 0
    optimizer.step()
    full_parameters(model)  # compares what ranks hold alike
    return len(optimizer.state) > 0


@pytest.mark.parametrize("how", WAYS)
def test_ranks_that_own_nothing(ranks: Worlds, how: ShardOptimizer) -> None:
    model = tiny_llama(layers=2).requires_grad_(False)
    model.get_parameter(ONLY).requires_grad_(True)
    wanted = reference(model, [batch(4, 12)], steps=1)
    stepped = ranks(4).run(one_trained, how, wanted.gradients, wanted.grad_norms[0])
    assert stepped == [True, True, False, False]


def late_term(how: ShardOptimizer) -> str:
    """On a rank: a term of the loss on the weights adds to gradients that are on their way."""
    model = tiny_llama(layers=2)
    state = owned_model(model, 4, (2,) * 4, how)
    state.stack.reduce_now = True
    words = model.get_parameter("model.embed_tokens.weight")
    words.register_hook(lambda grad: add_to(model.get_parameter(ONLY)))
    model(**batch(4, 12)).loss.backward()
    with pytest.raises(BackwardError) as raised:
        state.gradients.finish()
    return str(raised.value)


def add_to(parameter: nn.Parameter) -> None:
    """Add to a gradient, be it there or freed already."""
    with torch.no_grad():
        parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad.add_(1.0)


@pytest.mark.parametrize("how", WAYS)
def test_gradients_that_come_too_late_are_refused(ranks: Worlds, how: ShardOptimizer) -> None:
    for said in ranks(4).run(late_term, how):
        assert said.startswith("a gradient changed after its reduction over other ranks had started")


def summed_by_operators(wanted: dict[str, Tensor]) -> None:
    """On a rank: a step whose sums are written as gloo writes them on GPUs: later, by operators, which are changes."""
    own, begun = Axis.start_all_reduce, list[Tensor]()

    def start_all_reduce(axis: Axis, tensor: Tensor, *args: Any) -> Pending:
        own(axis, tensor, *args).wait()
        for earlier in begun:
            earlier.copy_(earlier.clone())
        begun.append(tensor.detach())
        return DONE

    model = tiny_llama(layers=2)
    owned_model(model, 4, (2,) * 4, "off")
    with mock.patch.object(Axis, "start_all_reduce", start_all_reduce):
        micro_batch(model, batch(4, 12), 1.0, last=True)
    assert_gradients(full_gradients(model), wanted)


def test_a_sum_that_a_backend_writes_by_operators_is_no_change(ranks: Worlds) -> None:
    ranks(4).run(summed_by_operators, reference(tiny_llama(layers=2), [batch(4, 12)], steps=1).gradients)


def test_dealing() -> None:
    """Each group of ranks by itself, the largest first to whom has least; ties go to the first."""
    near, far = (0, 2), (1, 3)
    held = [Held(1, near), Held(5, near), Held(3, near), Held(4, far), Held(4, far), Held(3, near)]
    assert deal(held) == [0, 0, 2, 1, 3, 2]
    assert footprint(held[:3], 0, "off") == Footprint(9, 9, 18)
    assert footprint(held[:3], 2, "keep") == Footprint(9, 9, 8)
    assert footprint(held[:3], 2, "reduce", state_bytes_per_byte=0.5) == Footprint(9, 4, 2)
