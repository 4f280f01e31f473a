"""CUDA graphs of a stack: its forward and backward, recorded once per kind of input, then replayed.

What is computed between two collectives is a graph. Collectives, and sums of gradients, are no part of any: they are
done anew each time, so ranks need not agree on who replays. A recording reads its input, and what the layers were
called with, from tensors of its own, and adds to gradients that stay where they are. All recordings share one pool of
memory: what one keeps between its forward and its backward is overwritten by the next, so while one forward waits for
its backward, others are not replayed.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.actions import Outside, at_once
from ..schedule import Instruction, ReduceGrads
from .block import Autocast
from .call import Call
from .executor import Run
from .recorder import Recorder, Steps

Make = Callable[[Call, Outside], Run]
"""Makes a run of a call, and says what does all that is not computation."""

WARM = 2
"""Forwards of a kind that run without a recording: libraries set themselves up, and what comes once is not recorded."""

KEPT = 8
"""Recordings at most; the one that was not used for longest goes."""


class GradientBuffers:
    """Where recordings add to gradients, whatever becomes of ``parameter.grad`` between steps."""

    def __init__(self) -> None:
        self._of: dict[nn.Parameter, Tensor] = {}

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let gradients live in their buffers: with what they are now, or zero where there are none."""
        fresh = []
        for parameter in parameters:
            grad, buffer = parameter.grad, self._of.get(parameter)
            if buffer is None:
                buffer = self._of[parameter] = torch.zeros_like(parameter) if grad is None else grad
            elif grad is None:
                fresh.append(buffer)
            elif grad is not buffer:
                buffer.copy_(grad)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)


@dataclass(frozen=True)
class Recording:
    """A forward and its backward.

    Attributes:
        inputs: the tensors that it reads: the hidden one, then what the layers are called with.
        output: of the forward.
        grad: of the output.
        input_grad: what the backward makes of it.
        forward: the steps of the one.
        backward: of the other.
        run: whose actions are among the steps.
    """

    inputs: Sequence[Tensor]
    output: Tensor
    grad: Tensor
    input_grad: Tensor
    forward: Steps
    backward: Steps
    run: Run


class Replayed:
    """One forward and its backward by a recording; stands in for a :class:`Run`.

    Attributes:
        waiting: the backward is still to come.
    """

    def __init__(self, recording: Recording, inputs: Sequence[Tensor], number: int, attach: Callable[[], None]) -> None:
        self._recording, self._attach = recording, attach
        recording.run.masks.number = number
        self.waiting = True
        for own, given in zip(recording.inputs, inputs, strict=True):
            own.copy_(given)

    def forward(self, hidden: Tensor) -> Tensor:
        """Replay the forward half on ``hidden``, ``[B, S, H]``, which is among the inputs."""
        for step in self._recording.forward:
            step()
        return self._recording.output.clone()

    def backward(self, grad: Tensor, ops: Sequence[Instruction]) -> Tensor:
        """Replay the backward half on the gradient of the output, ``[B, S, H]``; returns that of the input.

        Gradients of parameters are reduced where ``ops`` say so.
        """
        self._attach()
        self._recording.grad.copy_(grad)
        self._recording.run.reducing = any(isinstance(op, ReduceGrads) for op in ops)
        for step in self._recording.backward:
            step()
        self.waiting = False
        return self._recording.input_grad.clone()


class Graphs:
    """The recordings of a stack.

    Args:
        find: what records on a device; None where nothing does.
        parameters: of the stack.
    """

    def __init__(self, find: Callable[[torch.device], Recorder | None], parameters: Sequence[nn.Parameter]) -> None:
        self._recorder = cache(find)
        self._parameters = parameters
        self._buffers = GradientBuffers()
        self._seen: Counter[Hashable] = Counter()
        self._recordings: OrderedDict[Hashable, Recording | None] = OrderedDict()
        self._given_up = False
        self._last: Callable[[], Replayed | None] = lambda: None

    def on(self, device: torch.device) -> bool:
        """Whether there can be recordings on ``device``."""
        return not self._given_up and self._recorder(device) is not None

    def attach(self) -> None:
        """Let gradients live where recordings add to them, if there are any."""
        if self._recordings:
            self._buffers.attach(p for p in self._parameters if p.requires_grad)

    def run(self, call: Call, make: Make, say: Callable[[str], None]) -> Run | Replayed:
        """What runs the forward of ``call``, and its backward: a recording, or a new run.

        Args:
            call: of a schedule with a backward.
            make: makes runs.
            say: tells the user something, once.
        """
        inputs = _tensors([call.hidden, call.contexts])
        key = (id(call.ready), call.training, _key([call.hidden, call.contexts], {}), self._state(call.hidden.device))
        if key not in self._recordings:
            self._seen[key] += 1
            if self._seen[key] <= WARM:
                return make(call, at_once)
            self._keep(key, self._record(inputs, call, make, say))
        self._recordings.move_to_end(key)
        recording, last = self._recordings[key], self._last()
        if recording is None:
            return make(call, at_once)
        if last is not None and last.waiting:
            say("a forward came before the backward of the one before: its kernels are launched one by one")
            return make(call, at_once)
        replayed = Replayed(recording, inputs, call.number, self.attach)
        self._last = weakref.ref(replayed)
        return replayed

    def _keep(self, key: Hashable, recording: Recording | None) -> None:
        self._recordings[key] = recording
        if len(self._recordings) > KEPT:
            old, _ = self._recordings.popitem(last=False)
            del self._seen[old]

    def _state(self, device: torch.device) -> Hashable:
        """Where the parameters are, which of them train, and what autocast does."""
        return Autocast.of(device.type), tuple((p.data_ptr(), p.requires_grad) for p in self._parameters)

    def _record(self, inputs: Sequence[Tensor], call: Call, make: Make, say: Callable[[str], None]) -> Recording | None:
        """Record a forward and its backward, before either runs; None where that fails."""
        grads = [p.grad for p in self._parameters]
        try:
            return self._record_both(inputs, call, make)
        except Exception as error:  # whatever a layer does that cannot be recorded: it can still be run
            say(f"no CUDA graph ({type(error).__name__}: {error}): kernels are launched one by one")
            self._given_up = True
            self._recordings.clear()
            return None
        finally:
            for parameter, grad in zip(self._parameters, grads, strict=True):
                parameter.grad = grad

    def _record_both(self, inputs: Sequence[Tensor], call: Call, make: Make) -> Recording:
        recorder = self._recorder(call.hidden.device)
        assert recorder is not None, "asked before"
        own = [tensor.detach().clone() for tensor in inputs]
        replaced = {id(given): mine for given, mine in zip(inputs, own, strict=True)}
        contexts = _map(call.contexts, lambda tensor: replaced[id(tensor)])
        run = make(replace(call, hidden=own[0], contexts=contexts), recorder.outside)
        self._buffers.attach(p for p in self._parameters if p.requires_grad)

        def forward() -> Tensor:
            # A cast that autocast has kept would be missing in the graph; one that the graph makes is no value yet.
            torch.clear_autocast_cache()
            output = run.forward(own[0])
            torch.clear_autocast_cache()
            return output

        with torch.no_grad():
            output, forward_steps = recorder(forward)
            grad = torch.zeros_like(output)
            input_grad, backward_steps = recorder(lambda: run.backward(grad, call.ready.early.backward))
        return Recording(own, output, grad, input_grad, forward_steps, backward_steps, run)


def unrecordable(call: Call) -> str | None:
    """What keeps a call from being recorded; None when nothing does."""
    if torch.is_anomaly_enabled() or torch._C._len_torch_dispatch_stack():
        return "somebody watches operators"
    if any(_hooked(module) for layer in call.layers for module in layer.modules()):
        return "hooks inside a layer"
    for name, value in (item for context in call.contexts for item in context.items()):
        for leaf in _leaves(value):
            if torch.is_tensor(leaf):
                if leaf.device != call.hidden.device or leaf.requires_grad:
                    return f"{name}, a tensor on {leaf.device}{' that requires a gradient' * leaf.requires_grad}"
            elif leaf is not None and not isinstance(leaf, bool | int | float | str):
                return f"{name} of type {type(leaf).__name__}"
    return None


def _hooked(module: nn.Module) -> bool:
    """Whether something in Python is called when a module runs, or a gradient comes."""
    hooks: tuple[Mapping[Any, Any], ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    of_parameters = (
        p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        for p in module._parameters.values()
        if p is not None
    )
    return any(hooks) or any(of_parameters)


def _leaves(value: Any) -> Iterator[Any]:
    """What nested containers hold."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested containers, each once, in order."""
    return list({id(leaf): leaf for leaf in _leaves(value) if torch.is_tensor(leaf)}.values())


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested containers with every tensor changed."""
    if torch.is_tensor(value):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map(item, change) for name, item in value.items()}
    return type(value)(_map(item, change) for item in value) if isinstance(value, tuple | list) else value


def _key(value: Any, numbers: dict[int, int]) -> Hashable:
    """What distinguishes inputs: of tensors, the form, and which of them are the same one."""
    if torch.is_tensor(value):
        number = numbers.setdefault(id(value), len(numbers))
        return number, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, Mapping):
        return tuple((name, _key(item, numbers)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(_key(item, numbers) for item in value)
    return type(value), value
