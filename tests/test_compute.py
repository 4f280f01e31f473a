"""What a step computes and leaves behind in one process, counted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oases_hf.parallel.autograd import apply
from oases_hf.plan import Recompute

from .parallel import parallel
from .ranks import Worlds
from .tiny import batch, tiny_llama

LAYERS, ROWS, SEQ, HIDDEN = 2, 4, 6, 32


def tensors_alive(defer: bool) -> list[int]:
    """How many tensors there are after each of a few steps."""
    model: Any = tiny_llama(layers=LAYERS, hidden=HIDDEN).train()
    state = parallel(model, 1)
    state.stack.defer = defer
    counts = []
    for _ in range(4):
        model(**batch(ROWS, SEQ)).loss.backward()
        model.zero_grad(set_to_none=True)
        counts.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    return counts


@pytest.mark.parametrize("defer", [False, True])
def test_a_step_leaves_no_tensors_behind(ranks: Worlds, defer: bool) -> None:
    (counts,) = ranks(1).run(tensors_alive, defer)
    assert counts[1:] == [counts[1]] * 3


_ATEN = torch.ops.aten
PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.addmm.out, _ATEN.bmm.default)


class Matmuls(TorchDispatchMode):
    """Counts the floating-point operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.count += 2 * result.numel() * args[-2].shape[-1]
        return result


def counted(step: Callable[[], None]) -> int:
    matmuls = Matmuls()
    with matmuls:
        step()
    return matmuls.count


def step_of(model: Any) -> Callable[[], None]:
    def step() -> None:
        model(**batch(ROWS, SEQ)).loss.backward()

    return step


def operations() -> tuple[int, int, int]:
    """Of a step: HF's without and with checkpointing, and ours."""
    bare, checkpointed, ours = (tiny_llama(layers=LAYERS, hidden=HIDDEN, attn="eager").train() for _ in range(3))
    checkpointed._set_gradient_checkpointing()
    parallel(ours, 1)
    found = [counted(step_of(model)) for model in (bare, checkpointed, ours)]
    return found[0], found[1], found[2]


def test_recompute_spares_what_backward_does_not_need(ranks: Worlds) -> None:
    ((bare, checkpointed, ours),) = ranks(1).run(operations)
    assert bare < ours < checkpointed, "HF recomputes the output projection of attention, to go on from it"


class Kept(torch.autograd.Function):
    """Identity whose backward takes what it returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the same in memory of its own."""
        y = x.clone()
        ctx.save_for_backward(y)
        ctx.total = y.sum()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient, once the result was seen to be there still."""
        (y,) = ctx.saved_tensors
        assert torch.equal(y.sum(), ctx.total), "what backward takes was changed"
        return grads[0]


class Copies(TorchDispatchMode):
    """Counts copies of a sub-batch of the stream."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies: bool = func in (_ATEN.clone.default, _ATEN._to_copy.default, _ATEN.copy_.default)
        self.count += int(copies and args[0].numel() == ROWS // 2 * SEQ * HIDDEN)
        return func(*args, **(kwargs or {}))


def copies_in_forward(kept: bool) -> int:
    """Where nothing is recomputed, with or without blocks that keep what they returned; backward runs, too."""
    model: Any = tiny_llama(layers=LAYERS, hidden=HIDDEN, ffn=HIDDEN + 8).train()
    nothing: Recompute = "none"
    parallel(model, 2, recompute=[nothing] * 2 * LAYERS)
    if kept:
        for layer in model.model.layers:
            layer.mlp.forward = partial(lambda own, x: apply(Kept, own(x)), layer.mlp.forward)
    with Copies() as copies:
        loss = model(**batch(ROWS, SEQ)).loss
    loss.backward()
    count: int = copies.count
    return count


def test_an_output_is_copied_before_its_sum_only_where_backward_takes_it(ranks: Worlds) -> None:
    bare, kept = (ranks(2).run(copies_in_forward, how) for how in (False, True))
    assert bare == [0, 0]
    assert kept == [2 * 2 * LAYERS] * 2, "the function's own, and that for the sum, of two sub-batches"


def held_by_hooks(recompute: Recompute) -> list[bool]:
    """Whether what hooks inside layers are given is as it was when the step is over, in forward and backward."""
    model: Any = tiny_llama(layers=LAYERS, hidden=HIDDEN).train()
    parallel(model, 2, recompute=[recompute] * 2 * LAYERS)
    held: list[tuple[Tensor, Tensor]] = []

    def hold(module: Any, *given: Any) -> None:
        tensors = [each for value in given for each in (value if isinstance(value, tuple) else (value,))]
        held.extend((each, each.clone()) for each in tensors if isinstance(each, Tensor))

    for layer in model.model.layers:
        for module in (layer.mlp, layer.mlp.down_proj, layer.input_layernorm):
            module.register_forward_hook(hold)
            module.register_full_backward_hook(hold)
    model(**batch(ROWS, SEQ)).loss.backward()
    return [torch.equal(each, as_it_was) for each, as_it_was in held]


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_what_hooks_are_given_stays_as_it_is(ranks: Worlds, recompute: Recompute) -> None:
    for found in ranks(2).run(held_by_hooks, recompute):
        assert len(found) > 8 * LAYERS
        assert all(found), found
