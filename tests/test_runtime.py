"""What a step costs in collectives and bytes, and what the executor does in odd situations."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from oases_hf.convert import plain
from oases_hf.errors import BackwardError, UnsupportedModelError
from oases_hf.models.converted import Converted
from oases_hf.plan import SCHEDULE_NAMES, ScheduleName
from oases_hf.schedule.builders import WANG_PIECES

from .parallel import full_gradients, parallel
from .parity import assert_gradients, float64_math
from .ranks import Worlds
from .reference import gradients
from .tiny import batch, tiny_llama

LAYERS, ROWS, SEQ, HIDDEN = 2, 4, 6, 32
HIDDEN_BYTES = ROWS * SEQ * HIDDEN * 8
# Outside the stack: all-reduces of embedding, head and (twice) loss, and three broadcasts of the batch.
OUTSIDE = 1 + 1 + 2 + 3
ALL_REDUCES: dict[ScheduleName, int] = {"megatron": 6, "wang": 6, "merak": 6, "cross_pass": 5, "oases": 4}
KEPT_PER_LAYER: dict[ScheduleName, int] = {"megatron": 1, "wang": 1, "merak": 1, "cross_pass": 1, "oases": 2}


def made(tmp_size: int, **options: Any) -> tuple[Any, Converted]:
    model = tiny_llama(layers=LAYERS, hidden=HIDDEN).train()
    return model, parallel(model, tmp_size, **options)


def kept_bytes(state: Converted) -> int:
    """The bytes kept by the forwards whose backward is still to come."""
    return sum(run.kept_bytes for run in state.stack._live)


def costs(schedule: ScheduleName, sub_batches: int) -> tuple[int, int, int, int]:
    """On a rank: all-reduces of the stack, their bytes, bytes kept after forward, and after backward."""
    model, state = made(2, schedule=schedule, sub_batches=sub_batches)
    traffic = state.mesh.tmp.traffic
    model(**batch(ROWS, SEQ))  # the parts outside the stack, and a forward whose graph is dropped
    assert kept_bytes(state) == 0, "a dropped graph keeps nothing"
    traffic.calls = traffic.bytes = 0
    loss = model.model(batch(ROWS, SEQ)["input_ids"]).last_hidden_state.pow(2).sum()
    kept = kept_bytes(state)
    loss.backward()
    embedding = 1
    return traffic.calls - embedding, traffic.bytes - embedding * HIDDEN_BYTES, kept, kept_bytes(state)


@pytest.mark.parametrize("sub_batches", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_collectives_and_kept_bytes(ranks: Worlds, schedule: ScheduleName, sub_batches: int) -> None:
    reduces = ALL_REDUCES[schedule]
    calls = reduces if schedule != "wang" else (reduces - 2) * WANG_PIECES + 2
    for found in ranks(2).run(costs, schedule, sub_batches):
        assert found[0] == calls * LAYERS * sub_batches
        assert found[1] == reduces * LAYERS * HIDDEN_BYTES, "sub-batches and pieces share the same bytes"
        assert found[2] == KEPT_PER_LAYER[schedule] * LAYERS * HIDDEN_BYTES
        assert found[3] == 0


def whole_step_calls() -> int:
    model, state = made(2)
    model(**batch(ROWS, SEQ)).loss.backward()
    state.gradients.finish()
    return state.mesh.tmp.traffic.calls


def test_a_step_has_one_bucket_and_no_other_collective(ranks: Worlds) -> None:
    bucket = 1
    stack = ALL_REDUCES["oases"] * LAYERS * 2
    assert ranks(2).run(whole_step_calls) == [OUTSIDE + stack + bucket] * 2


def no_grad_keeps_nothing() -> None:
    model, state = made(2)
    with torch.no_grad():
        loss = model(**batch(ROWS, SEQ)).loss
    assert not loss.requires_grad
    assert len(state.stack._live) == 0


def test_a_forward_without_grad_keeps_nothing(ranks: Worlds) -> None:
    ranks(2).run(no_grad_keeps_nothing)


def plain_loop_is_right() -> None:
    data = batch(ROWS, SEQ, padded=True)
    alone = tiny_llama(layers=LAYERS, hidden=HIDDEN).train()
    model, state = made(2)
    with float64_math():
        alone(**data).loss.backward()
        with plain(model):
            model(**data).loss.backward()
        state.gradients.finish()
    assert_gradients(full_gradients(model), gradients(alone))


def test_hf_own_loop_on_converted_layers(ranks: Worlds) -> None:
    ranks(2).run(plain_loop_is_right)


def say_once(rows: int) -> list[str]:
    model, _ = made(2)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("oases_hf")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            model(**batch(rows, SEQ)).loss.backward()
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.parametrize(("rows", "messages"), [(1, 1), (2, 0), (3, 0)])
def test_a_batch_too_small_to_split_is_said_once(ranks: Worlds, rows: int, messages: int) -> None:
    for said in ranks(2).run(say_once, rows):
        assert len(said) == messages
        assert all("a batch of 1 cannot be split into 2" in line for line in said)


def errors_of_backward() -> list[str]:
    model, _ = made(2)
    messages = []
    loss = model(**batch(ROWS, SEQ)).loss
    with pytest.raises(BackwardError) as raised:
        torch.autograd.grad(loss, [model.model.norm.weight, model.model.embed_tokens.weight], create_graph=True)
    messages.append(str(raised.value))
    loss = model(**batch(ROWS, SEQ)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(BackwardError) as raised:
        loss.backward()
    messages.append(str(raised.value))
    return messages


def test_what_backward_cannot_do_is_named(ranks: Worlds) -> None:
    for messages in ranks(2).run(errors_of_backward):
        assert "create_graph=True" in messages[0]
        assert "run the forward again" in messages[1]


def note_of_failure() -> str:
    model, state = made(2)
    own = state.stack.blocks[1].run

    def broken(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("out of luck")
        return own(layer, hidden, **context)

    state.stack.blocks = (state.stack.blocks[0], type(state.stack.blocks[1])("mlp", broken))
    loss = model(**batch(ROWS, SEQ)).loss
    with pytest.raises(ValueError, match="out of luck") as raised:
        loss.backward()
    return "\n".join(raised.value.__notes__)


def test_a_failing_step_shows_the_schedule_around_it(ranks: Worlds) -> None:
    for note in ranks(2).run(note_of_failure):
        assert note.startswith("backward schedule, R3.0 of model.layers.1.mlp: [R3.0] B3.0 >g3.0 R3.1")


def two_forwards(stepping: bool) -> None:
    """Both losses' gradients add up, also when data-parallel reduction starts in backward."""
    first, second = (batch(ROWS, SEQ, seed=seed) for seed in (1, 2))
    alone = tiny_llama(layers=LAYERS, hidden=HIDDEN).train()
    model = tiny_llama(layers=LAYERS, hidden=HIDDEN).train()
    state = parallel(model, 2)
    state.stack.reduce_now = stepping
    with float64_math():
        (alone(**first).loss + 2 * alone(**second).loss).backward()
        losses = model(**first).loss, model(**second).loss
        (losses[0] + 2 * losses[1]).backward()
        state.gradients.finish()
    assert_gradients(full_gradients(model), gradients(alone))


@pytest.mark.parametrize(("world", "stepping"), [(2, False), (2, True), (4, True)])
def test_two_forwards_before_one_backward(ranks: Worlds, world: int, stepping: bool) -> None:
    ranks(world).run(two_forwards, stepping)


def with_dropout() -> tuple[Any, Converted]:
    model = tiny_llama(layers=LAYERS, hidden=HIDDEN, attn="eager").train()
    model.config.attention_dropout = 0.3
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return model, parallel(model, 2)


def generator_stays() -> float:
    model, _ = with_dropout()
    before = torch.get_rng_state()
    loss = model(**batch(ROWS, SEQ)).loss
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before), "samplers and collators draw from it"
    return float(loss)


def test_dropout_leaves_the_global_generator_alone(ranks: Worlds) -> None:
    first, second = ranks(2).run(generator_stays)
    assert first == second


def directional_derivative() -> tuple[float, float]:
    """With one mask per forward number, the loss along the gradient changes as the gradient says."""
    model, state = with_dropout()
    assert state.stack.seeds is not None
    data, step = batch(ROWS, SEQ), 1e-6

    def loss() -> Tensor:
        state.stack.seeds.forwards = 0  # type: ignore[union-attr]
        return model(**data).loss  # type: ignore[no-any-return]

    with float64_math():
        loss().backward()
        state.gradients.finish()
        squared = float(state.gradients.norm(list(model.parameters()))) ** 2
        moved = []
        for sign in (1, -2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=sign * step)
                moved.append(float(loss()))
    return (moved[0] - moved[1]) / (2 * step), squared


def test_recompute_draws_the_masks_of_forward(ranks: Worlds) -> None:
    for slope, squared in ranks(2).run(directional_derivative):
        assert slope == pytest.approx(squared, rel=1e-6)


def twice() -> str:
    model, _ = made(2)
    with pytest.raises(UnsupportedModelError) as raised:
        parallel(model, 2)
    return str(raised.value)


def test_a_model_is_converted_once(ranks: Worlds) -> None:
    assert "converted already" in ranks(2).run(twice)[0]
