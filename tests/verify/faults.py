"""Faults planted into a converted model; there is no way to do so from the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oases_hf.models.converted import converted
from oases_hf.parallel.linear import RowParallel
from oases_hf.runtime.executor import Run
from oases_hf.verify import verification
from oases_hf.verify.training import parallel

NORM = "model.layers.0.input_layernorm.weight"
LAST_NORM = "model.norm.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"


@contextlib.contextmanager
def bias_added_twice() -> Iterator[None]:
    """Every rank adds the bias of row-parallel layers to its share."""

    def project(layer: RowParallel, x: Tensor) -> Tensor:
        return layer.apply_to(x, layer.bias)

    with mock.patch.object(RowParallel, "project", project):
        yield


@contextlib.contextmanager
def _altered(
    model_is_made: Callable[[PreTrainedModel], None] = lambda model: None,
    gradients_are_there: Callable[[PreTrainedModel], None] = lambda model: None,
) -> Iterator[None]:
    def altered(*arguments: Any) -> Any:
        model, optimizer, backward = parallel(*arguments)
        model_is_made(model)

        def faulty(batch: dict[str, Tensor]) -> float:
            loss = backward(batch)
            gradients_are_there(model)
            return loss

        return model, optimizer, faulty

    with mock.patch.object(verification, "parallel", altered):
        yield


@contextlib.contextmanager
def norm_gradient_halved() -> Iterator[None]:
    """As when a sum over two ranks is averaged."""

    def halve(model: PreTrainedModel) -> None:
        _gradient(model, NORM).div_(2)

    with _altered(gradients_are_there=halve):
        yield


@contextlib.contextmanager
def kv_gradient_not_summed() -> Iterator[None]:
    """Ranks that hold the same key/value head keep their own share of its gradient."""

    def forget(model: PreTrainedModel) -> None:
        gradients = converted(model).gradients
        whole = gradients.layouts[model.get_parameter(KEYS)]
        assert whole.partial_grad
        changed = {model.get_parameter(KEYS): type(whole)(whole.shape, whole.slices, partial_grad=False)}
        gradients.layouts = {**gradients.layouts, **changed}

    with _altered(forget):
        yield


@contextlib.contextmanager
def everything_times_t() -> Iterator[None]:
    """Gradients are sums over the ranks of what each has whole."""

    def multiply(model: PreTrainedModel) -> None:
        for name, _ in model.named_parameters():
            _gradient(model, name).mul_(converted(model).mesh.tmp.size)

    with _altered(gradients_are_there=multiply):
        yield


@contextlib.contextmanager
def sub_batches_swapped() -> Iterator[None]:
    """The stack returns the second half of the batch first."""
    own = Run.forward

    def forward(run: Run, hidden: Tensor) -> Tensor:
        return torch.cat(own(run, hidden).tensor_split(2)[::-1])

    with mock.patch.object(Run, "forward", forward):
        yield


@contextlib.contextmanager
def one_rank_steps_further() -> Iterator[None]:
    """A whole parameter is another on the last rank: what the first holds is right."""

    def move(model: PreTrainedModel) -> None:
        axis = converted(model).mesh.tmp
        if axis.rank == axis.size - 1:
            with torch.no_grad():
                model.get_parameter(LAST_NORM).mul_(2)

    with _altered(gradients_are_there=move):
        yield


def _gradient(model: nn.Module, name: str) -> Tensor:
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    return gradient


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "bias added twice": bias_added_twice,
    "norm gradient halved": norm_gradient_halved,
    "KV gradient not summed": kv_gradient_not_summed,
    "everything times T": everything_times_t,
    "sub-batches swapped": sub_batches_swapped,
    "one rank steps further": one_rank_steps_further,
}
