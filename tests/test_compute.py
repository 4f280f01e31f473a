"""What a step computes and leaves behind in one process, counted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
