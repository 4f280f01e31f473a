"""Contenders on one piece of work: paired timing, and what a step sends.

Timing is paired: each round runs every contender once, in an order that rotates, and ratios are medians
of the ratios within rounds, so that a slow phase of the machine does not fall on one contender alone.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
COLLECTIVES = ("reduce", "gather", "scatter", "broadcast", "alltoall")


@dataclass(frozen=True)
class World:
    """The ranks of a run, or a single process.

    Attributes:
        group: all ranks, on a CPU backend; None for a single one.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @classmethod
    def join(cls, rendezvous: str = "env://") -> World:
        """Join the ranks that a launcher started, as RANK and WORLD_SIZE say, where torch's ``init_method`` says."""
        env = os.environ
        rank, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        local, here = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", size))
        cpu = env.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
        cuda = not cpu and torch.cuda.device_count() >= here
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        if size == 1:
            return cls(0, 1, device, None)
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(
            backend, init_method=rendezvous, rank=rank, world_size=size, device_id=device if cuda else None
        )
        return cls(rank, size, device, dist.new_group(backend="gloo"))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        values: list[Any] = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Wait for the device and for every rank."""
        self.synchronize()
        if self.group is not None:
            dist.barrier(group=self.group)


class Contender(Protocol):
    """Something to time."""

    def prepare(self) -> None:
        """Do what is not timed; called before every step."""

    def step(self) -> object:
        """Do what is timed."""


def paired(contenders: Sequence[Contender], rounds: int, world: World) -> list[list[float]]:
    """The time of each contender in each round, on its slowest rank, in ms. One more round goes before, untimed."""
    gc.collect()
    gc.freeze()  # else every collection walks all of torch and transformers
    times = [[0.0] * rounds for _ in contenders]
    for turn in range(-1, rounds):
        for i in range(len(contenders)):
            index = (turn + i) % len(contenders)
            contenders[index].prepare()
            world.meet()
            start = time.perf_counter()
            contenders[index].step()
            world.synchronize()
            if turn >= 0:
                times[index][turn] = (time.perf_counter() - start) * 1e3
    everyone = world.gather(times)
    return [[max(t) for t in zip(*ranks, strict=True)] for ranks in zip(*everyone, strict=True)]


@contextmanager
def memory_limit(device: torch.device, gib: float) -> Iterator[None]:
    """Let this rank allocate no more inside; on a GPU. Building a contender is not limited."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def release(device: torch.device) -> None:
    """Free what nobody holds any more; timing had it frozen."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def held_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Count the most bytes that torch's tensors took of a GPU inside; call the result behind it. 0 on CPUs.

    The pools of recordings count whole: replays allocate nothing, and nothing else is put there. Nothing may be
    recorded inside: while that is done, memory of its pool counts as allocated, too.
    """
    if device.type != "cuda":
        yield lambda: 0
        return
    held = 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    yield lambda: held
    torch.cuda.synchronize()
    pools = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    spare = sum(segment["total_size"] - segment["allocated_size"] for segment in pools)
    held = torch.cuda.max_memory_allocated() + spare


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """How many times as fast ``of`` is as ``to``, given the times of both in the same rounds."""
    return statistics.median(b / a for a, b in zip(of, to, strict=True))


class Wire(TorchDispatchMode):
    """Counts the collectives called inside, whoever calls them.

    An all-reduce counts the bytes of its tensor; a gather or scatter, which moves half as much, half
    those of its whole tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it asks again for the plain tensors inside
        result = func(*args, **(kwargs or {}))
        operation = func.__name__.replace("_", "")
        if func.namespace in ("c10d", "_c10d_functional") and any(word in operation for word in COLLECTIVES):
            whole = max(_tensor_bytes(value) for value in (*args, result))
            self.calls += 1
            self.bytes += whole if operation.startswith("allreduce") else whole // 2
        return result


def _tensor_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if torch.is_tensor(leaf))
