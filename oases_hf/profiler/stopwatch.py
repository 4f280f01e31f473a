"""Watches on a running schedule: how long instructions take, what they keep, and what they need meanwhile."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..allocator import allocated_bytes
from ..runtime.watch import Clock, Watch
from ..schedule import Backward, Forward, Instruction, Recompute, StartAsync, Sync, block_of

Key = tuple[type[Instruction], int]
View = tuple[int, int, int]
"""A storage, where in it, and how many elements."""
Timed = tuple[type[Instruction], int, str]


class Stopwatch:
    """Times every instruction, by its kind and block, and by the tensor that is communicated.

    Attributes:
        times: ms of each time that an instruction ran.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._spans: list[tuple[Timed, Any, Any]] = []
        self.times: dict[Timed, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, op: Instruction) -> Iterator[None]:
        """Time ``op``."""
        start = self._clock.now()
        yield
        tensor = op.collective.tensor if isinstance(op, StartAsync | Sync) else ""
        self._spans.append(((type(op), block_of(op), tensor), start, self._clock.now()))

    def together(self, block: int, *what: tuple[type[Instruction], str]) -> list[float]:
        """What some instructions of a block, by kind and tensor, took in all, each time that they ran."""
        times = (self.times.get((kind, block, tensor)) for kind, tensor in what)
        return [sum(each) for each in zip(*filter(None, times), strict=True)]

    def read(self) -> float:
        """Sort what was timed since the last reading into :attr:`times`; returns the sum of it."""
        total = 0.0
        for key, start, end in self._spans:
            self.times[key].append(self._clock.ms(start, end))
            total += self.times[key][-1]
        self._spans.clear()
        return total


class Lead:
    """Keeps a GPU from beginning a pass before it was launched: as in a recording, launches take no time.

    Not a whole step: what models do before their layers may wait for the device, as for a mask, and the loss too.

    Args:
        watch: for every instruction.
        clock: of the device.
        seconds: to keep it.
    """

    def __init__(self, watch: Watch, clock: Clock, seconds: float) -> None:
        self._watch, self._clock, self._seconds = watch, clock, seconds
        self._half: type[Instruction] = Backward
        self._laps: list[tuple[Any, Any]] = []

    def __call__(self, op: Instruction) -> AbstractContextManager[None]:
        """Watch ``op``, which may be the first of a pass."""
        half = Forward if isinstance(op, Forward) else Backward if isinstance(op, Recompute | Backward) else self._half
        if half is not self._half:
            self._half, begin = half, self._clock.now()
            self._clock.hold(self._seconds)
            self._laps.append((begin, self._clock.now()))
        return self._watch(op)

    def read(self) -> float:
        """For how many ms the device was kept since the last reading."""
        laps, self._laps = self._laps, []
        return sum(self._clock.ms(*lap) for lap in laps)


class KeptBytes:
    """Counts what the graph of each block keeps for backward, parameters aside, as its recompute makes it.

    Args:
        parameters: of the model.
        on_gpu: count each tensor as its share of the segments of a GPU's allocator.

    Attributes:
        bytes: by block, of its last sub-batch.
        shared: of these, what the graph of its first one keeps the very same of; 0 where that is the last.
    """

    def __init__(self, parameters: Iterator[Tensor], *, on_gpu: bool) -> None:
        self._held = {_storage(p) for p in parameters}
        self._taken: Callable[[int], int] = allocated_bytes if on_gpu else int
        self._first: dict[int, dict[View, Tensor]] = {}
        self.bytes: dict[int, int] = {}
        self.shared: dict[int, int] = {}

    @contextmanager
    def __call__(self, op: Instruction) -> Iterator[None]:
        """Count while a Recompute runs."""
        if not isinstance(op, Recompute):
            yield
            return
        seen: dict[View, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if (storage := _storage(tensor)) not in self._held:
                seen[storage, int(tensor.storage_offset()), tensor.numel()] = tensor.detach()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        first = seen if op.sub_batch == 0 else self._first[op.block]
        self._first[op.block] = first  # held, so that no other storage gets its identity
        self.bytes[op.block] = self._bytes(seen)
        self.shared[op.block] = 0 if first is seen else self._bytes({view: seen[view] for view in seen.keys() & first})

    def _bytes(self, views: Mapping[View, Tensor]) -> int:
        """What views take; of a storage that sub-batches share, as of the stack's input, what is seen of it."""
        seen: Counter[int] = Counter()
        whole: dict[int, int] = {}
        for (storage, *_), tensor in views.items():
            seen[storage] += tensor.nbytes
            whole[storage] = tensor.untyped_storage().nbytes()
        return sum(self._taken(min(size, seen[storage])) for storage, size in whole.items())


class PeakBytes:
    """The most that an instruction allocates beyond what was there before.

    Attributes:
        bytes: by kind of instruction and block, of the sub-batch that needs most: the first casts weights for all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: dict[Key, int] = {}

    @contextmanager
    def __call__(self, op: Instruction) -> Iterator[None]:
        """Watch recompute and backward."""
        if not isinstance(op, Recompute | Backward):
            yield
            return
        with peak_bytes(self._device) as peak:
            yield
        key = type(op), op.block
        self.bytes[key] = max(peak(), self.bytes.get(key, 0))


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Count the most bytes of tensors that are held at once inside, beyond what was there before; call the result.

    On GPUs torch's allocator counts, on CPUs what operators return; while these are watched, torch runs what is
    compiled as if it were not.
    """
    if device.type != "cuda":
        with _Returned() as returned:
            yield lambda: returned.peak
        return
    peak = 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield lambda: peak
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before


class _Returned(TorchDispatchMode):
    """Counts the bytes of what operators return, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._held = 0
        self._tensors: Counter[int] = Counter()  # by storage, those that share it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it asks again for the plain tensors inside
        result = func(*args, **(kwargs or {}))
        given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in filter(_has_data, tree_leaves(result)):
            storage, size_bytes = _storage(tensor), tensor.untyped_storage().nbytes()
            if storage in given and not self._tensors[storage]:
                continue
            self._tensors[storage] += 1
            if self._tensors[storage] == 1:
                self._held += size_bytes
                self.peak = max(self.peak, self._held)
            weakref.finalize(tensor, self._gone, storage, size_bytes).atexit = False
        return result

    def _gone(self, storage: int, size_bytes: int) -> None:
        self._tensors[storage] -= 1
        if self._tensors[storage] == 0:
            self._held -= size_bytes


def _has_data(value: object) -> bool:
    """Whether it is a tensor whose elements are somewhere; fake ones are taken to be."""
    return isinstance(value, Tensor) and value.device.type != "meta"


def _storage(tensor: Tensor) -> int:
    """The identity of what ``tensor`` is a view of, as long as that lives; fake tensors have no address."""
    identity: int = tensor.untyped_storage()._cdata
    return identity
