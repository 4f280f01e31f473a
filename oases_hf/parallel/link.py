"""Who communicates: parallel layers by themselves, or the executor that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..config import CommDtype
from ..messages import message_elements
from .actions import Outside, at_once
from .autograd import apply
from .casts import Casts
from .mesh import Axis, Pending
from .rng import DropoutSeeds, Seed, seed_of
from .sharding import Span

if TYPE_CHECKING:
    from .linear import Captured

WeightGrads = Callable[[Callable[[], None]], None]
"""Called in backward with what adds to the gradient of a weight, to do it at once or to put it off."""

COMM_DTYPES: Mapping[CommDtype | None, torch.dtype | None] = {None: None, "bf16": torch.bfloat16}
"""What settings call the types in which all-reduces of blocks are sent."""


@dataclass(frozen=True)
class _Together:
    """Collectives that are waited for as one."""

    parts: Sequence[Pending]

    def wait(self) -> None:
        """Wait for all of them."""
        for part in self.parts:
            part.wait()


@dataclass
class Link:
    """Who communicates: the layers themselves, or the executor that runs them. One per degree of a model.

    Layers that communicate by themselves all work on all rows, replicas alike: each replica's share of
    their gradients is then one part in ``replicas`` of what it computes.

    Attributes:
        axis: the ranks that share the layers' weights.
        replicas: how many such groups of ranks share the batch.
        replica: which of them this is.
        managed: the executor owns the collectives.
        captured: where row-parallel layers put their input instead of projecting it.
        weight_grads: takes what linear layers have to do for their weights' gradients. None: autograd does it, as it
            does in any case where somebody looks at what comes out of it.
        unread: nobody reads what row-parallel layers return; they record it for backward only.
        casts: makes the casts that autocast would make at each call.
        seed: what dropout masks that all ranks have in common are drawn from; asked when one is.
        draws: how many of these there were.
        outside: does what is not computation.
        message_bytes: the executor's all-reduces are sent in parts of at most so many bytes; None: as a whole.
        comm_dtype: what is wider is sent in this type by the executor's all-reduces, in training; None: as it is.
    """

    axis: Axis
    replicas: int = 1
    replica: int = 0
    managed: bool = False
    captured: list[Captured] | None = None
    weight_grads: WeightGrads | None = None
    unread: bool = False
    casts: Casts | None = None
    seed: Callable[[], str] = str
    draws: int = 0
    outside: Outside = at_once
    message_bytes: int | None = None
    comm_dtype: CommDtype | None = None

    def sent_as(self, dtype: torch.dtype) -> torch.dtype:
        """In which type the executor's all-reduces send, in training, what is of ``dtype``."""
        narrow = COMM_DTYPES[self.comm_dtype]
        return dtype if narrow is None or dtype.itemsize <= narrow.itemsize else narrow

    def start_all_reduce(self, share: Tensor) -> Pending:
        """Start summing ``share``, which is contiguous, in place over the ranks, one message after the other."""
        if self.message_bytes is None or share.nbytes <= self.message_bytes:
            return self.axis.start_all_reduce(share)
        length = message_elements(share.numel(), share.element_size(), self.message_bytes)
        return _Together([self.axis.start_all_reduce(part) for part in share.view(-1).split(length)])

    @contextmanager
    def executing(
        self,
        captured: list[Captured] | None = None,
        weight_grads: WeightGrads | None = None,
        unread: bool = False,
        casts: Casts | None = None,
        seed: Callable[[], str] = str,
        outside: Outside = at_once,
    ) -> Iterator[None]:
        """Let the executor own the collectives of the layers called inside; it draws masks from ``seed``."""
        before = vars(self).copy()
        self.managed, self.captured, self.unread, self.casts = True, captured, unread, casts
        self.weight_grads = weight_grads
        self.seed, self.draws, self.outside = seed, 0, outside
        try:
            yield
        finally:
            vars(self).update(before)
            if casts is not None:
                casts.forget_input()

    def next_seed(self) -> Seed:
        """The seed of the next mask; ranks that draw equally often get equal ones."""
        self.draws += 1
        return partial(_drawn, self.seed, self.draws)


def _drawn(seed: Callable[[], str], number: int) -> int:
    return seed_of(seed(), number)


@dataclass
class Dropout:
    """Where a converted model is in all that its dropout masks are drawn from.

    Attributes:
        base: what the user seeded, the same on all ranks.
        world: the TMP world of this rank.
        blocks: whose layers may draw by themselves.
        outside: whose layers draw that are in no block.
        executor: what the executor seeds blocks by, if they draw at all.
    """

    base: int
    world: int
    blocks: Sequence[Link]
    outside: Link
    executor: DropoutSeeds | None

    def seed(self, base: int) -> None:
        """Draw from ``base`` from here on."""
        self.base = base
        for link in self.blocks:
            link.seed = partial(str, f"{base}/plain/{self.world}/{link.axis.size}")
        self.outside.seed = partial(str, f"{self.blocks[0].seed()}/outside")
        if self.executor is not None:
            self.executor.base = base

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes, as JSON has it; the same on all ranks."""
        return {
            "base": self.base,
            "forwards": self.executor.forwards if self.executor else 0,
            "outside": self.outside.draws,
            "blocks": {str(link.axis.size): link.draws for link in self.blocks},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from where :meth:`state` was taken, by whatever plan."""
        self.seed(state["base"])
        self.outside.draws = state["outside"]
        for link in self.blocks:
            link.draws = state["blocks"].get(str(link.axis.size), 0)
        if self.executor is not None:
            self.executor.forwards = state["forwards"]


class ScaleGradient(torch.autograd.Function):
    """Identity whose backward scales the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Return ``x``."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Scale."""
        return grads[0] * ctx.factor, None


class CopyToGroup(torch.autograd.Function):
    """Identity whose backward sums the gradient over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Return ``x``."""
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum over the group."""
        return ctx.axis.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class ReduceFromGroup(torch.autograd.Function):
    """Sum over the group whose backward is the identity (equation 1 of the paper)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Sum over the group."""
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient."""
        return grads[0], None


def enter_block(x: Tensor, link: Link) -> Tensor:
    """What a block reads, when layers communicate by themselves."""
    x = apply(ScaleGradient, x, link.replicas) if link.replicas > 1 else x
    return apply(CopyToGroup, x, link.axis)


def leave_block(x: Tensor, link: Link) -> Tensor:
    """The whole output of a block from this rank's share, when layers communicate by themselves."""
    x = apply(ReduceFromGroup, x, link.axis)
    return apply(ScaleGradient, x, 1 / link.replicas) if link.replicas > 1 else x


class GatherFromGroup(torch.autograd.Function):
    """The last dimension of all ranks side by side; the backward is this rank's slice, never a sum.

    Right when what follows is computed alike on every rank, as a loss on gathered logits is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, spans: tuple[Span, ...]) -> Tensor:
        """Gather ``[..., x_V]`` to ``[..., V]``."""
        ctx.span = spans[axis.rank]
        widest = max(span.size for span in spans)
        parts = axis.all_gather(F.pad(x, (0, widest - x.shape[-1])))
        return torch.cat([part[..., : span.size] for part, span in zip(parts, spans, strict=True)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Slice."""
        return grads[0][..., ctx.span.lo : ctx.span.hi].contiguous(), None, None
