"""The mesh of ranks: TMP worlds that share a batch, data parallel across them.

Ranks are laid out ``world = data × tmp`` with the TMP world innermost: with 4 ranks and
``tmp_size=2`` the TMP worlds are (0, 1) and (2, 3), the data-parallel groups (0, 2) and (1, 3).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..errors import ConfigError, DistributedError, UnsupportedModelError

RENDEZVOUS_TIMEOUT_S = 20.0


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
        """The tensors of all ranks, in rank order; all must have one shape."""
        if self.group is None:
            return [tensor]
        self.traffic.count(tensor)
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

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
        everyone = [list(range(size))]
        tmp_worlds = [list(range(lo, lo + tmp_size)) for lo in range(0, size, tmp_size)]
        data_groups = [list(range(lane, size, tmp_size)) for lane in range(tmp_size)]
        return cls(
            world=_axis(everyone, rank),
            tmp=_axis(tmp_worlds, rank),
            data=_axis(data_groups, rank),
            control=_axis(everyone, rank, "gloo"),
            tmp_control=_axis(tmp_worlds, rank, "gloo"),
        )

    def meet(self, what: str) -> None:
        """Wait until every rank is here; raise on those that are when some are not.

        Raises:
            DistributedError: some rank did not arrive in time.
        """
        group = self.control.group
        if group is None:
            return
        # Not monitored_barrier: without rank 0, its other ranks wait for the time limit of the group, half an hour.
        self.meetings += 1
        store = distributed_c10d._get_default_store()
        places = {rank: f"oases/{group.group_name}/{self.meetings}/{rank}" for rank in self.world.ranks}
        store.set(places[self.world.rank], what)
        try:
            store.wait(list(places.values()), timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        except RuntimeError as error:
            missing = ", ".join(str(rank) for rank, place in places.items() if not store.check([place]))
            # Whoever comes later waits for this rank again.
            store.delete_key(places[self.world.rank])
            self.meetings -= 1
            raise DistributedError(
                f"{what} must be called on every rank; of the {self.world.size} ranks, {missing} did not call it "
                f"within {RENDEZVOUS_TIMEOUT_S:g} s. Remove the `if rank == 0` around it, or what keeps them so long"
            ) from error


def _axis(partition: list[list[int]], rank: int, backend: str | None = None) -> Axis:
    """The part of ``partition`` that ``rank`` is in; groups are made by all ranks, in one order."""
    mine = Axis((rank,), 0)
    for ranks in partition:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, timeout=_world_timeout(), backend=backend)
        if rank in ranks:
            mine = Axis(tuple(ranks), ranks.index(rank), weakref.ref(group))
    return mine


def _world_timeout() -> timedelta:
    """The time limit of collectives that the process group was started with."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    limit: timedelta = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    return limit
