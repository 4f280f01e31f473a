"""Which calls of the layers count as alike: whatever a recording depends on makes them differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from oases_hf.runtime.call import Call, Context, contexts_of, distinct
from oases_hf.runtime.signature import UnrecordableError, hooks_inside, signature
from oases_hf.schedule import Ready

from .tiny import tiny_llama

MASK = torch.ones(2, 3)
READY = cast(Ready, object())


def call_of(layers: Any, contexts: list[Context] | None = None) -> Call:
    contexts = [{"attention_mask": MASK}] * len(layers) if contexts is None else contexts
    return Call(layers, torch.zeros(2, 3, 4), contexts, READY, True, 0)


class Empty(nn.Module):
    """A module of length 0, and so false, that holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def __len__(self) -> int:
        return 0


def layers() -> list[Any]:
    found: list[Any] = list(tiny_llama(layers=2).model.layers)
    found[0].mlp.register_buffer("steps", torch.zeros(1))
    found[1].mlp.empty = Empty()
    return found


def moved(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "a module evaluates": lambda layers: layers[1].mlp.act_fn.eval(),
    "a parameter is frozen": lambda layers: layers[0].mlp.up_proj.weight.requires_grad_(False),
    "a parameter has moved": lambda layers: moved(layers[1].self_attn.q_proj.weight),
    "a parameter behind what is false has moved": lambda layers: moved(layers[1].mlp.empty.inner.weight),
    "a buffer has moved": lambda layers: setattr(layers[0].mlp, "steps", torch.zeros(1)),
    "a type is another": lambda layers: setattr(
        layers[0].mlp.up_proj.weight, "data", layers[0].mlp.up_proj.weight.data.view(torch.int64)
    ),
    "a module is another": lambda layers: setattr(layers[0].mlp, "up_proj", nn.Linear(2, 2)),
    "a bias is gone": lambda layers: setattr(layers[0].mlp.up_proj, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_layers_are(change: str) -> None:
    found = [layer.train() for layer in layers()]
    if change == "a type is another":
        found[0].mlp.up_proj.weight.requires_grad_(False)
    before = signature(call_of(found))
    assert signature(call_of(found)) == before
    CHANGES[change](found)
    assert signature(call_of(found)) != before


def same(*tensors: Tensor) -> list[Context]:
    return [{"attention_mask": tensor} for tensor in tensors]


def test_which_arguments_are_the_same_one() -> None:
    """A recording copies each once."""
    found, other = layers() * 2, MASK.clone()
    orders = [(MASK,) * 4, (MASK, other) * 2, (MASK, MASK, other, other), (MASK, other, other, other)]
    signatures = [signature(call_of(found, same(*order))) for order in orders]
    assert len(set(signatures)) == len(orders)
    assert signature(call_of(found, same(other, MASK, other, MASK))) == signatures[1]
    assert signature(call_of(found, same(*(MASK.double() for _ in range(4))))) not in signatures


def test_layers_that_are_given_the_same_share_it() -> None:
    pair = MASK, MASK.clone()
    calls: list[Any] = [
        ((None,), {"attention_mask": pair[i], "position_embeddings": pair, "num_items_in_batch": torch.ones(())})
        for i in (0, 0, 1, 0)
    ]
    contexts = contexts_of(calls, ["cache"], "num_items_in_batch")
    assert contexts[0] is contexts[1] is contexts[3]
    assert distinct(contexts) == [contexts[0], contexts[2]]
    assert [context["attention_mask"] is pair[1] for context in contexts] == [False, False, True, False]
    assert set(contexts[0]) == {"cache", "attention_mask", "position_embeddings"}


@pytest.mark.parametrize("path", ["self_attn.q_proj", "mlp", "mlp.empty.inner"])
def test_hooks_are_found(path: str) -> None:
    found = layers()
    assert not hooks_inside(found)
    signature(call_of(found))
    found[1].get_submodule(path).register_forward_hook(lambda *_: None)
    assert hooks_inside(found)
    with pytest.raises(UnrecordableError, match="hooks inside a layer"):
        signature(call_of(found))


def test_hooks_on_parameters_are_found() -> None:
    found = layers()
    found[0].mlp.up_proj.weight.register_hook(lambda grad: grad)
    with pytest.raises(UnrecordableError, match="hooks inside a layer"):
        signature(call_of(found))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (MASK.clone().requires_grad_(), "extra, a tensor on cpu that requires a gradient"),
        (MASK.to("meta"), "extra, a tensor on meta"),
        ((MASK, [object()]), "extra of type object"),
    ],
)
def test_what_cannot_be_copied_is_named(value: object, why: str) -> None:
    found = layers()
    with pytest.raises(UnrecordableError, match=why):
        signature(call_of(found, [{"extra": value}] * 2))
