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
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from ..parallel.actions import Outside, at_once
from ..schedule import Instruction, ReduceGrads
from .call import Call, distinct
from .executor import Run
from .recorder import Recorder, Steps
from .signature import signature, tensors_of, with_tensors

Make = Callable[[Call, Outside], Run]
"""Makes a run of a call, and says what does all that is not computation."""

WARM = 2
"""Forwards of a kind that run without a recording: libraries set themselves up, and what comes once is not recorded."""

KEPT = 8
"""Recordings at most; the one that was not used for longest goes."""

WORTH = 20
"""Replays that make up for what a recording takes. When KEPT have gone that had fewer, no more are made."""

COUNTED = 1000
"""Kinds of calls whose forwards are counted, before counting begins anew."""


class GradientBuffers:
    """Where recordings add to gradients, whatever becomes of ``parameter.grad`` between steps."""

    def __init__(self) -> None:
        self._of: dict[nn.Parameter, Tensor] = {}

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let gradients live in their buffers: with what they are now, or zero where there are none."""
        fresh = []
        for parameter in parameters:
            grad, buffer = parameter.grad, self._buffer(parameter)
            if grad is None:
                fresh.append(buffer)
            elif grad.data_ptr() == buffer.data_ptr():
                continue
            else:
                buffer.copy_(grad)
            parameter.grad = buffer.detach()  # whatever is done to that tensor, the buffer stays where it is
        if fresh:
            torch._foreach_zero_(fresh)

    def _buffer(self, parameter: nn.Parameter) -> Tensor:
        buffer = self._of.get(parameter)
        if buffer is None or (buffer.dtype, buffer.device) != (parameter.dtype, parameter.device):
            grad = parameter.grad
            buffer = self._of[parameter] = torch.zeros_like(parameter) if grad is None else grad.detach()
        return buffer


@dataclass
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
        replaying: where steps are to be done.
        replays: so far.
    """

    inputs: Sequence[Tensor]
    output: Tensor
    grad: Tensor
    input_grad: Tensor
    forward: Steps
    backward: Steps
    run: Run
    replaying: Callable[[], AbstractContextManager[None]]
    replays: int = 0


class Replayed:
    """One forward and its backward by a recording; stands in for a :class:`Run`.

    Attributes:
        waiting: the backward is still to come.
    """

    def __init__(self, recording: Recording, inputs: Sequence[Tensor], number: int) -> None:
        self._recording, self._inputs, self._number = recording, inputs, number
        self.waiting = True

    def forward(self, hidden: Tensor) -> Tensor:
        """Replay the forward half on ``hidden``, ``[B, S, H]``, the first of the inputs."""
        recording, inputs = self._recording, self._inputs
        self._inputs = ()
        recording.run.masks.number = self._number
        recording.replays += 1
        try:
            with torch.no_grad():
                torch._foreach_copy_(list(recording.inputs), list(inputs))
            with recording.replaying():
                for step in recording.forward:
                    step()
        except BaseException:
            self.waiting = False
            raise
        return recording.output.clone()

    def backward(self, grad: Tensor, ops: Sequence[Instruction]) -> Tensor:
        """Replay the backward half on the gradient of the output, ``[B, S, H]``; returns that of the input.

        Gradients of parameters are reduced where ``ops`` say so; they must be in their buffers.
        """
        recording = self._recording
        self.waiting = False
        recording.grad.copy_(grad)
        recording.run.reducing = any(isinstance(op, ReduceGrads) for op in ops)
        with recording.replaying():
            for step in recording.backward:
                step()
        return recording.input_grad.clone()


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
        self._seen: Counter[int] = Counter()
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._failed = False
        self._wasted = 0
        self._last: Callable[[], Replayed | None] = lambda: None

    def on(self, device: torch.device) -> bool:
        """Whether there can be recordings on ``device``."""
        return not self._failed and self._recorder(device) is not None

    def attach(self) -> None:
        """Let gradients live where recordings add to them, if there are any."""
        if self._recordings:
            self._buffers.attach(p for p in self._parameters if p.requires_grad)

    def run(self, call: Call, make: Make, say: Callable[[str], None], *, alone: bool) -> Run | Replayed:
        """What runs the forward of ``call``, and its backward: a recording, or a new run.

        Args:
            call: of a schedule with a backward.
            make: makes runs.
            say: tells the user something, once.
            alone: no other forward waits for its backward.

        Raises:
            UnrecordableError: the call cannot be recorded.
        """
        key = signature(call)
        recording = self._recordings.get(key)
        if recording is None and alone and self._due(key, say):
            recording = self._record(key, call, make, say)
        if recording is None:
            return make(call, at_once)
        self._recordings.move_to_end(key)
        last = self._last()
        if last is not None and last.waiting:
            say("a forward came before the backward of the one before: its kernels are launched one by one")
            return make(call, at_once)
        replayed = Replayed(recording, tensors_of([call.hidden, distinct(call.contexts)]), call.number)
        self._last = weakref.ref(replayed)
        return replayed

    def _due(self, key: Hashable, say: Callable[[str], None]) -> bool:
        """Whether to record what has this signature now."""
        if self._wasted >= KEPT:
            say(
                "batches of too many shapes to record them all as CUDA graphs: kernels of new ones are launched one by "
                "one; let the collator pad, with pad_to_multiple_of"
            )
            return False
        if len(self._seen) >= COUNTED:
            self._seen.clear()
        self._seen[hash(key)] += 1
        return self._seen[hash(key)] > WARM

    def _record(self, key: Hashable, call: Call, make: Make, say: Callable[[str], None]) -> Recording | None:
        """Record a forward and its backward, before either runs; None where that fails."""
        grads = [p.grad for p in self._parameters]
        try:
            recording = self._recordings[key] = self._record_both(call, make)
        except Exception as error:  # whatever a layer does that cannot be recorded: it can still be run
            say(f"no CUDA graphs ({type(error).__name__}: {error}): kernels are launched one by one")
            self._failed = True
            self._recordings.clear()
            return None
        finally:
            torch.clear_autocast_cache()
            for parameter, grad in zip(self._parameters, grads, strict=True):
                parameter.grad = grad
        if len(self._recordings) > KEPT:
            _, old = self._recordings.popitem(last=False)
            self._wasted += old.replays < WORTH
        return recording

    def _record_both(self, call: Call, make: Make) -> Recording:
        recorder = self._recorder(call.hidden.device)
        assert recorder is not None, "asked before"
        inputs = tensors_of([call.hidden, distinct(call.contexts)])
        own = [tensor.detach().clone() for tensor in inputs]
        replaced = {id(given): mine for given, mine in zip(inputs, own, strict=True)}
        owned = {id(each): with_tensors(each, lambda tensor: replaced[id(tensor)]) for each in distinct(call.contexts)}
        contexts = [owned[id(context)] for context in call.contexts]
        self._buffers.attach(p for p in self._parameters if p.requires_grad)

        def forward() -> tuple[Run, Tensor]:
            run = make(replace(call, hidden=own[0], contexts=contexts), recorder.outside)
            return run, run.forward(own[0])

        # A cast that autocast has kept is missing in a graph; one that a graph makes is no value yet.
        torch.clear_autocast_cache()
        with torch.no_grad():
            (run, output), forward_steps = recorder(forward)
            torch.clear_autocast_cache()
            grad = torch.zeros_like(output)
            with torch.autocast(output.device.type, enabled=False):
                input_grad, backward_steps = recorder(lambda: run.backward(grad, call.ready.early.backward))
        return Recording(own, output, grad, input_grad, forward_steps, backward_steps, run, recorder.replaying)
