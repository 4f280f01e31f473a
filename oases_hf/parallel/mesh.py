"""The mesh of ranks: TMP worlds that share a batch, data parallel across them.

Ranks are laid out ``world = data × tmp`` with the TMP world innermost: with 4 ranks and
``tmp_size=2`` the TMP worlds are (0, 1) and (2, 3), the data-parallel groups (0, 2) and (1, 3).
Within a TMP world, a block of degree ``d`` is split over ``d`` neighbours.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..errors import ConfigError, DistributedError, UnsupportedModelError

T = TypeVar("T")

RENDEZVOUS_TIMEOUT_S = 60.0
"""How long ranks wait for one that is elsewhere, and may come: to give up loses what was to be saved."""

POLL_S = 0.5
"""How often they look whether it has ended."""

# torch 2.13 calls it by another name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Protocol):
    """A collective that runs."""

    def wait(self) -> object:
        """Block the compute lane until the collective is done."""


class _Done:
    def wait(self) -> None:
        return None


DONE: Pending = _Done()


@dataclass
class Traffic:
    """What this rank handed to collectives: a count of calls, and the bytes of their tensors."""

    calls: int = 0
    bytes: int = 0

    def count(self, tensor: Tensor) -> None:
        """Add one collective over ``tensor``."""
        self.calls += 1
        self.bytes += tensor.numel() * tensor.element_size()


@dataclass
class Axis:
    """The ranks along one axis of the mesh that this rank belongs to.

    torch owns the process group: were it held here as well, its threads would outlive
    ``destroy_process_group`` and could abort the interpreter as it ends.
    """

    ranks: tuple[int, ...]
    rank: int
    reference: weakref.ref[dist.ProcessGroup] | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def __deepcopy__(self, memo: object) -> Axis:
        """Refuse: the copy of a model would share its hooks and its ranks with the original."""
        raise UnsupportedModelError("a converted model cannot be copied; copy the model before it is converted")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None for a single rank.

        Raises:
            DistributedError: the process group was destroyed.
        """
        if self.reference is None:
            return None
        group = self.reference()
        if group is None:
            raise DistributedError(
                f"the process group of the ranks {self.ranks} was destroyed; a converted model needs it as long as it "
                "is used: call destroy_process_group, or Accelerator.end_training, last"
            )
        return group

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce ``tensor`` in place over the axis, blocking; returns it."""
        self.start_all_reduce(tensor, op).wait()
        return tensor

    def start_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Start reducing ``tensor`` in place over the axis."""
        if self.group is None:
            return DONE
        self.traffic.count(tensor)
        work: Pending = dist.all_reduce(tensor, op=op, group=self.group, async_op=True)
        return work

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order; all must have one shape.

        Without a group there are no other ranks: room for what they would send follows.
        """
        if self.group is None:
            return [tensor, *(torch.empty_like(tensor) for _ in self.ranks[1:])]
        self.traffic.count(tensor)
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def whole_rows(self, part: Tensor) -> Tensor:
        """Room for the ``[n, …]`` of every rank: ``[size × n, …]``."""
        return part.new_empty(self.size * part.shape[0], *part.shape[1:])

    def start_gather_rows(self, part: Tensor, whole: Tensor) -> Pending:
        """Start to gather ``[n, …]`` of every rank into ``[size × n, …]``, which is there when it is awaited."""
        if self.group is None:
            whole.copy_(part)
            return DONE
        self.traffic.count(part)
        work: Pending = _gather(whole, part, group=self.group, async_op=True)
        return work

    def start_exchange(self, sent: Tensor, sends: Sequence[int], receives: Sequence[int]) -> tuple[Tensor, Pending]:
        """Start to send parts of ``sent``, ``[n]``, to the ranks of the axis, and to receive theirs, ``[m]``.

        Args:
            sent: what goes to all ranks, in their order.
            sends: elements that go to each rank.
            receives: elements that come from each rank.
        """
        received = sent.new_empty(sum(receives))
        if self.group is None:
            return received, DONE
        self.traffic.count(sent)
        work: Pending = dist.all_to_all_single(
            received, sent, list(receives), list(sends), group=self.group, async_op=True
        )
        return received, work

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite ``tensor`` with that of the axis' first rank; returns it."""
        if self.group is not None:
            self.traffic.count(tensor)
            dist.broadcast(tensor, src=self.ranks[0], group=self.group)
        return tensor


@dataclass
class Mesh:
    """The axes that this rank takes part in.

    ``control`` and ``tmp_control`` are the world and the TMP world on a CPU backend, for agreements
    between ranks that must not wait for the accelerator.
    """

    world: Axis
    tmp: Axis
    data: Axis
    control: Axis
    tmp_control: Axis
    meetings: int = 0
    _axes: dict[tuple[int, int], Axis] = field(default_factory=dict)

    @classmethod
    def build(cls, tmp_size: int | None = None) -> Mesh:
        """Build the mesh over the initialised process group; every rank must call it.

        Args:
            tmp_size: ranks that share one batch; all of them when None.

        Raises:
            ConfigError: ``tmp_size`` does not divide the number of ranks.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        tmp_size = size if tmp_size is None else tmp_size
        if tmp_size < 1 or size % tmp_size:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            raise ConfigError(f"tmp_size={tmp_size} does not divide the {size} ranks; choose one of {divisors}")
        rank = dist.get_rank() if dist.is_initialized() else 0
        world, tmp, data = (_axis(size, *lay, rank) for lay in ((size, 1), (tmp_size, 1), (size, tmp_size)))
        return cls(
            world,
            tmp,
            data,
            control=_axis(size, size, 1, rank, "gloo"),
            tmp_control=_axis(size, tmp_size, 1, rank, "gloo"),
            _axes={(size, tmp_size): data, (tmp_size, 1): tmp},
        )

    def axis(self, within: int, stride: int = 1) -> Axis:
        """The ranks that, of each ``within`` neighbours, are ``stride`` apart; every rank must ask for it.

        So ``axis(d)`` shares a block of degree ``d``, ``axis(e, d)`` holds the rows of a replica of degree ``e`` in
        parts of degree ``d < e``, and ``axis(world size, d)`` holds the replicas of one share.
        """
        if (within, stride) not in self._axes:
            self._axes[within, stride] = _axis(self.world.size, within, stride, self.world.rank)
        return self._axes[within, stride]

    def from_first(self, find: Callable[[], T]) -> T:
        """What ``find`` returns, or raises, on the first rank, on every rank; it is called there only."""
        told: list[Any] = [None, None]
        if self.world.rank == 0:
            try:
                told[0] = find()
            except Exception as error:
                told[1] = error
        if self.control.group is not None:
            dist.broadcast_object_list(told, src=0, group=self.control.group)
        if told[1] is not None:
            raise told[1]
        found: T = told[0]
        return found

    def from_all(self, value: T) -> list[T]:
        """The ``value`` of every rank, in their order, on every rank."""
        told: list[Any] = [value] * self.world.size
        if self.control.group is not None:
            dist.all_gather_object(told, value, group=self.control.group)
        return told

    def meet(self, what: str) -> None:
        """Wait until every rank is here; raise on those that are when some are not.

        Raises:
            DistributedError: some rank has ended, or did not arrive in time.
        """
        group = self.control.group
        if group is None:
            return
        # Not monitored_barrier: without rank 0, its other ranks wait for the time limit of the group, half an hour.
        self.meetings += 1
        store = distributed_c10d._get_default_store()
        places = {rank: f"oases/{group.group_name}/{self.meetings}/{rank}" for rank in self.world.ranks}
        store.set(places[self.world.rank], what)
        deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while absent := [rank for rank, place in places.items() if not store.check([place])]:
            gone = [rank for rank in absent if store.check([ended(rank)])]
            if gone or time.monotonic() > deadline:
                # Whoever comes later waits for this rank again.
                store.delete_key(places[self.world.rank])
                self.meetings -= 1
                how = "ended without it" if gone else f"did not call it within {RENDEZVOUS_TIMEOUT_S:g} s"
                raise DistributedError(
                    f"{what} must be called on every rank; rank {', '.join(map(str, gone or absent))} {how}. "
                    f"Remove the `if rank == 0` around it, or what keeps that rank so long"
                )
            with contextlib.suppress(RuntimeError):  # not yet
                store.wait([places[absent[0]]], timedelta(seconds=min(POLL_S, RENDEZVOUS_TIMEOUT_S)))


def ended(rank: int) -> str:
    """The entry of the store by which a rank lets others know that it ends in order."""
    return f"oases/ended/{rank}"


def _axis(size: int, within: int, stride: int, rank: int, backend: str | None = None) -> Axis:
    """The axis of ``rank`` among those of all ``size`` ranks; groups are made by all ranks, in one order."""
    mine = Axis((rank,), 0)
    for lo in range(0, size, within):
        for first in range(lo, lo + stride):
            ranks = tuple(range(first, lo + within, stride))
            if len(ranks) == 1:
                continue
            group = dist.new_group(list(ranks), timeout=_world_timeout(), backend=backend)
            if rank in ranks:
                mine = Axis(ranks, ranks.index(rank), weakref.ref(group))
    return mine


def _world_timeout() -> timedelta:
    """The time limit of collectives that the process group was started with."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    limit: timedelta = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    return limit
