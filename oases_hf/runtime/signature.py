"""Which calls of a stack launch the same, as far as can be told, and which cannot be recorded at all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.linear import hooked
from .block import Autocast
from .call import Call, distinct

_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnrecordableError(Exception):
    """What keeps a call from being recorded."""


def signature(call: Call) -> Hashable:
    """Of two calls with equal ones, a recording of one serves the other.

    Whoever changes what a layer computes by other means (an attribute, its configuration) changes nothing of it.

    Raises:
        UnrecordableError: the call cannot be recorded.
    """
    if torch.is_anomaly_enabled() or torch._C._len_torch_dispatch_stack():
        raise UnrecordableError("somebody watches operators")
    for name, value in (item for context in distinct(call.contexts) for item in context.items()):
        for leaf in _leaves(value):
            if torch.is_tensor(leaf):
                if leaf.device != call.hidden.device or leaf.requires_grad:
                    raise UnrecordableError(
                        f"{name}, a tensor on {leaf.device}{' that requires a gradient' * leaf.requires_grad}"
                    )
            elif leaf is not None and not isinstance(leaf, bool | int | float | str):
                raise UnrecordableError(f"{name} of type {type(leaf).__name__}")
    inputs = _form([call.hidden, call.contexts], {})
    # Schedules are cached, so their identity stays.
    return id(call.ready), call.training, inputs, Autocast.of(call.hidden.device.type), _state(call.layers)


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody watches a module's calls; HF's own captures are asked for, and stay when they were."""
    kinds = _HOOKS(module)
    return any(kinds) and any(
        getattr(hook, "__module__", "") != "transformers.utils.output_capturing"
        for hooks in kinds
        for hook in hooks.values()
    )


def hooks_inside(layers: Sequence[nn.Module]) -> bool:
    """Whether somebody watches the calls of modules of some layer."""
    return any(map(is_hooked, _modules(layers)))


def _modules(layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """All modules of layers; a GPU has nothing to do meanwhile, and nn.Module.modules takes several times as long."""
    waiting = list(layers)
    while waiting:
        module = waiting.pop()
        waiting += [child for child in module._modules.values() if child is not None]
        yield module


def _state(layers: Sequence[nn.Module]) -> Hashable:
    """Where the tensors of all modules are, which of them train, and which modules do; UnrecordableError on hooks."""
    state: list[Hashable] = []
    note = state.append
    for module in _modules(layers):
        if is_hooked(module):
            raise UnrecordableError("hooks inside a layer")
        note(module.training)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            if hooked(tensor):
                raise UnrecordableError("hooks inside a layer")
            note(tensor.data_ptr())
            note(tensor.dtype)
            note(tensor.requires_grad)
    return tuple(state)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested containers, each once, in order."""
    return list({id(leaf): leaf for leaf in _leaves(value) if torch.is_tensor(leaf)}.values())


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested containers with every tensor changed."""
    if torch.is_tensor(value):
        return change(value)
    if isinstance(value, Mapping):
        return {name: with_tensors(item, change) for name, item in value.items()}
    return type(value)(with_tensors(item, change) for item in value) if isinstance(value, tuple | list) else value


def _leaves(value: Any) -> Iterator[Any]:
    """What nested containers hold."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _form(value: Any, numbers: dict[int, int]) -> Hashable:
    """Of tensors, all but their values; which tensors and mappings are the same one as others."""
    if isinstance(value, torch.Tensor | Mapping):
        if (number := numbers.get(id(value))) is not None:
            return number
        numbers[id(value)] = len(numbers)
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, Mapping):
        return tuple((name, _form(item, numbers)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(_form(item, numbers) for item in value)
    return type(value), value
