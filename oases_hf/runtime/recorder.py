"""Records computation on GPUs as CUDA graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Steps = Sequence[Callable[[], None]]


class Recorder(Protocol):
    """Records computation without doing it."""

    def __call__(self, work: Callable[[], T]) -> tuple[T, Steps]:
        """What ``work`` returns, whose values are not there yet, and the steps that do it."""

    def outside(self, action: Callable[..., None], *tensors: Tensor) -> None:
        """Called by ``work``: make an action on tensors a step of its own."""

    def replaying(self) -> AbstractContextManager[None]:
        """Where steps are to be done: behind all that was launched before, and before what is launched then."""


class CudaRecorder:
    """Records CUDA graphs that share a pool of memory.

    They are recorded and replayed on a stream of their own, which all recorders of a GPU have in common: on the default
    stream, each graph of a process' second recording and later ones began some 60 µs late.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.index
        self._generator = torch.cuda.default_generators[self._device]
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream(self._device)
        self._steps: list[Callable[[], None]] = []
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._begin()
            self._end()
        self._anchor = self._graph  # a pool is gone with the last of its graphs

    def __call__(self, work: Callable[[], T]) -> tuple[T, Steps]:
        """Record ``work``; threads of data loaders and of NCCL may go on meanwhile."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what is cached cannot be given back while recording
        self._steps = []
        sound = self._generator.clone_state()
        with _nothing_collected(), torch.cuda.stream(self._stream):
            try:
                self._begin()
                result = work()
                self._end()
            except BaseException:
                self._abandon(sound)
                raise
        self._stream.synchronize()  # each beginning set what random numbers are seeded with, as replays do
        return result, self._steps

    def outside(self, action: Callable[..., None], *tensors: Tensor) -> None:
        """End a graph, and begin the next behind the action; the step does not keep the memory of the tensors."""
        self._end()
        self._steps.append(partial(action, *map(_unowned, tensors)))
        self._begin()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """On the stream of recordings; what the current one is told next waits for that."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def _abandon(self, sound: torch.Generator) -> None:
        """Leave the device as if nothing had been recorded."""
        with suppress(RuntimeError):  # that what was recorded is no graph says nothing of why
            self._graph.capture_end()
        with suppress(RuntimeError):  # there, torch stops before it ends this, and tells the generator
            torch._C._cuda_endAllocateToPool(self._device, self._pool)
            torch._C._cuda_releasePool(self._device, self._pool)
        self._generator.graphsafe_set_state(sound)
        self._steps, self._graph = [], torch.cuda.CUDAGraph()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._graph.capture_end()
        if not any("graph is empty" in str(warning.message).lower() for warning in said):
            self._steps.append(self._graph.replay)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of recordings. For each, and each thread, libraries keep work space: here not in a recorder's pool."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.enable_grad():
        x = torch.zeros(32, 32, device=f"cuda:{device}", requires_grad=True)
        (torch.addmm(x[0], x, x) + torch.mm(x, x)).sum().backward()
    stream.synchronize()
    return stream


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Let no garbage be collected inside: to free what is of a GPU ends the recording of a graph."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cuda_recorder(device: torch.device) -> CudaRecorder | None:
    """What records on a device, if it is a GPU."""
    return CudaRecorder(device) if device.type == "cuda" else None


class _Address:
    """Memory of a GPU, in the form in which libraries hand it to each other."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """A contiguous tensor at the same place, whose memory may be used again when nobody else holds it."""
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
