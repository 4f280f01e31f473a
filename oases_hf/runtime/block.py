"""What the executor works on: blocks, and what is kept of them between instructions.

Shapes: B batch, S sequence, H hidden; b is the part of B that a sub-batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..parallel.linear import Captured
from ..parallel.link import Link
from ..parallel.mesh import Axis


@dataclass(frozen=True)
class Block:
    """One block of a stack, ready to run.

    Attributes:
        name: where it is in the model, for messages.
        link: the ranks that share its weights.
        partial: maps a hidden ``[b, S, H]`` and a sub-batch number to this rank's share of the output.
        parameters: the parameters it uses.
        norm: what the reduced output goes through; None when it is just added to the stream.
        norm_of_sum: the norm is of the stream and the output together, not of the output alone.
        compiled: ``partial`` may only be called to stop before the projections.
        hooked: somebody may hold what its modules return, or their gradients.
    """

    name: str
    link: Link
    partial: Callable[[Tensor, int], Tensor]
    parameters: tuple[nn.Parameter, ...]
    norm: Callable[[Tensor], Tensor] | None = None
    norm_of_sum: bool = False
    compiled: bool = False
    hooked: bool = False

    def join(self, hidden: Tensor, reduced: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream behind the block, and what its norm was of, which backward needs."""
        if self.norm is None:
            return hidden + reduced, None
        if self.norm_of_sum:
            total = hidden + reduced
            return self.normed(total), total
        return hidden + self.normed(reduced), reduced

    def normed(self, x: Tensor) -> Tensor:
        """The norm of ``x``, ``[b, S, H]``, of which this rank has the rows of its replica."""
        assert self.norm is not None
        with self.link.executing():
            return self.norm(x)

    def norm_grad(self, of: Tensor, grad: Tensor) -> Tensor:
        """The gradient of what the norm was ``of``, from that of its result; adds to those of its weights."""
        leaf = of.detach().requires_grad_()
        with torch.enable_grad():
            normed = self.normed(leaf)
        torch.autograd.backward(normed, grad.to(normed.dtype))
        assert leaf.grad is not None
        return leaf.grad


SAVE_NO_RESULT = ("_LinearBackward", "AddBackward0", "MulBackward0", "NativeDropoutBackward0")
"""Nodes of autograd whose backward takes nothing of what they returned. What ends in another is copied for its sum."""


@dataclass
class Graph:
    """A block ready for backward.

    Attributes:
        leaf: its input.
        outputs: by piece, where gradients enter, and their type. The outputs themselves need not be kept.
        saved: backward may take an output, which must stay as it is.
    """

    leaf: Tensor
    outputs: dict[int, tuple[GradientEdge, torch.dtype]] = field(default_factory=dict)
    saved: bool = False

    def add(self, piece: int, output: Tensor) -> None:
        """Note a piece of the output."""
        self.outputs[piece] = torch.autograd.graph.get_gradient_edge(output), output.dtype
        self.saved |= type(output.grad_fn).__name__ not in SAVE_NO_RESULT


@dataclass
class Inner:
    """A block computed up to its row-parallel projections: what each is applied to, in pieces of tokens."""

    shape: torch.Size
    captured: list[Captured]
    pieces: Sequence[tuple[Tensor, ...]]
    recording: bool

    def project(self, piece: int) -> Tensor:
        """The share of one piece, ``[tokens, H]``."""
        shares = [captured.layer.project(x[piece]) for captured, x in zip(self.captured, self.pieces, strict=True)]
        first, *rest = [
            y if c.dropout is None else c.dropout.drop(y) for c, y in zip(self.captured, shares, strict=True)
        ]
        for other in rest:
            first = first + other
        return first


@dataclass(frozen=True)
class Rows:
    """How the rows of a sub-batch are spread over a TMP world whose blocks differ in degree.

    Attributes:
        multiple: what the rows are filled up to, so that all replicas have equally many.
        between: for a block, or the index behind the last, the ranks of which each has a part of the rows that the
            block, or the one before, has whole.
    """

    multiple: int
    between: Mapping[int, Axis]

    def split(self, x: Tensor, sub_batches: int) -> list[Tensor]:
        """The sub-batches of ``x``, ``[B, …]``, each with as many more rows of zeros as it takes."""
        return [self._filled(part) for part in x.tensor_split(sub_batches)]

    def _filled(self, part: Tensor) -> Tensor:
        missing = -part.shape[0] % self.multiple
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part

    def join(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """The inverse of :meth:`split`, for what was made of the sub-batches of ``like``."""
        sizes = [len(part) for part in like.tensor_split(len(parts))]
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def part(self, x: Tensor, block: int) -> Tensor:
        """This rank's rows of ``x``, ``[b, …]``, at ``block``."""
        axis = self.between[block]
        return x.chunk(axis.size)[axis.rank].clone()  # a view would keep all rows


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a forward, to be put back in its recompute."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, device: str) -> Autocast:
        """The state now."""
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> torch.autocast:
        """A context in which that state holds; casts that autocast makes, of which each is used once, are not kept."""
        return torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=False)
