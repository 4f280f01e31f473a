"""A converted model outside the training loop: it generates, evaluates and shows its insides as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from oases_hf.convert import plain as one_by_one
from oases_hf.errors import BackwardError
from oases_hf.models.converted import converted

from .. import reference as plain
from ..parallel import full_gradients
from ..parity import assert_gradients, float64_math
from ..ranks import Worlds
from ..tiny import Batch, batch, tiny_llama
from .looping import set_up

ONCE = "trying to differentiate twice a function that was marked with @once_differentiable"
Results = dict[str, Any]
SIZES: dict[str, Any] = {"heads": 9, "kv_heads": 3, "hidden": 36, "tied": True}
PROMPT = batch(3, 7)
LEFT_PADDED: Batch = {
    "input_ids": torch.cat([torch.zeros(3, 2, dtype=torch.long), PROMPT["input_ids"]], 1),
    "attention_mask": torch.cat([torch.zeros(3, 2, dtype=torch.long), PROMPT["attention_mask"]], 1),
}


def prompt(padded: bool) -> Batch:
    chosen = LEFT_PADDED if padded else PROMPT
    return {name: chosen[name] for name in ("input_ids", "attention_mask")}


def greedy(model: PreTrainedModel) -> Results:
    generate = cast(Any, model).generate
    how = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    return {
        "greedy": generate(**prompt(False), **how),
        "left padded": generate(**prompt(True), **how),
        "without a cache": generate(**prompt(False), **how, use_cache=False),
        "beams": generate(**prompt(False), **how, num_beams=3),
        "one at a time": torch.cat([generate(row[None], **how) for row in PROMPT["input_ids"]]),
    }


def insides(model: PreTrainedModel) -> Results:
    out = model(**PROMPT, output_hidden_states=True, use_cache=True)
    by_config = copy.copy(model.config.output_hidden_states)
    model.config.output_hidden_states = True
    configured = model(**PROMPT)
    model.config.output_hidden_states = by_config
    return {
        "loss": out.loss,
        "logits": out.logits,
        **{f"hidden {i}": hidden for i, hidden in enumerate(out.hidden_states)},
        **{f"configured {i}": hidden for i, hidden in enumerate(configured.hidden_states)},
    }


def outputs(model: PreTrainedModel) -> Results:
    names = ("input_ids", "attention_mask")
    without_labels = {name: PROMPT[name] for name in names}
    cached = model(**without_labels, use_cache=True)
    further = model(PROMPT["input_ids"][:, :1], past_key_values=cached.past_key_values)
    loss, logits, *_ = model(**PROMPT, return_dict=False)
    return {
        "logits": model(**without_labels).logits,
        "with a cache": cached.logits,
        "one token more": further.logits,
        "tuple loss": loss,
        "tuple logits": logits,
        "by position": model(PROMPT["input_ids"], PROMPT["attention_mask"]).logits,
        "base model": cast(Any, model).model(**without_labels).last_hidden_state,
        "of the last token": model(**without_labels, logits_to_keep=1).logits,
    }


def both(use: Callable[[PreTrainedModel], Results], training: bool) -> tuple[Results, Results]:
    """On a rank: the results of a plain model, and of a converted one."""
    models = tiny_llama(**SIZES), converted_llama()
    found = []
    for model in models:
        model.train(training)
        with float64_math(), torch.set_grad_enabled(training):
            found.append({name: value.detach() for name, value in use(model).items()})
    return found[0], found[1]


def converted_llama(**settings: Any) -> PreTrainedModel:
    return set_up(settings, model=SIZES)[1]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("use", [greedy, insides, outputs])
def test_in_evaluation(ranks: Worlds, world: int, use: Callable[[PreTrainedModel], Results]) -> None:
    for expected, ours in ranks(world).run(both, use, False):
        assert_alike(ours, expected)


def test_insides_in_training(ranks: Worlds) -> None:
    for expected, ours in ranks(2).run(both, insides_in_training, True):
        assert_alike(ours, expected)


def insides_in_training(model: PreTrainedModel) -> Results:
    """Also the gradients: HF's own loop takes over from the executor."""
    out = model(**PROMPT, output_hidden_states=True)
    out.loss.backward()
    if hasattr(model, "oases"):
        converted(model).gradients.finish()
    gradients = full_gradients(model) if hasattr(model, "oases") else plain.gradients(model)
    return {"loss": out.loss, "last": out.hidden_states[-1], "first": out.hidden_states[0], **gradients}


def assert_alike(ours: Results, expected: Results) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=f"{name}: {{}}".format)
        else:
            assert ours[name].equal(value), name


def refused_backwards() -> list[str]:
    """On a rank: what is said to backwards of a second order, or a second time; then one that is right."""
    model = converted_llama().train()
    said = []
    for again in (False, True):
        loss = model(**PROMPT).loss
        try:
            if again:
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        except BackwardError as error:
            said.append(str(error))
    return said


def test_second_derivatives_and_second_backwards_are_refused(ranks: Worlds) -> None:
    for create_graph, second in ranks(2).run(refused_backwards):
        assert create_graph.startswith("create_graph=True: ")
        assert "leave create_graph out" in create_graph
        assert second.startswith("a second backward through one forward: ")
        assert "run the forward again, or sum the losses" in second


def after_a_refusal() -> None:
    """On a rank: a refused backward leaves nothing behind that would spoil the next."""
    expected = plain.reference(tiny_llama(**SIZES), [PROMPT], steps=1)
    model = converted_llama().train()
    with pytest.raises(BackwardError, match="create_graph"), float64_math():
        torch.autograd.grad(model(**PROMPT).loss, list(model.parameters()), create_graph=True)
    model.zero_grad()
    with float64_math():
        model(**PROMPT).loss.backward()
    converted(model).gradients.finish()
    assert_gradients(full_gradients(model), expected.gradients)


def test_training_goes_on_after_a_refusal(ranks: Worlds) -> None:
    ranks(2).run(after_a_refusal)


def second_derivatives_one_by_one() -> str:
    """On a rank: HF's own loop does not reach the executor, and is not silently wrong either."""
    model = converted_llama().train()
    with one_by_one(model):
        loss = model(**PROMPT).loss
    weight = model.get_parameter("model.norm.weight")
    (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
    try:
        first.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_second_derivatives_are_refused_layer_by_layer_too(ranks: Worlds) -> None:
    assert ranks(2).run(second_derivatives_one_by_one) == [ONCE] * 2
