"""Gradients made whole across ranks, once per optimizer step, and their norm.

Within a TMP world, gradients of parameters that several ranks hold but each sees only a share of
(``Layout.partial_grad``) are summed through one flat bucket. Those of a block of low degree are summed
over its replicas, which saw different rows. Across data-parallel ranks every gradient is averaged, as
DistributedDataParallel would. Sum and average are one all-reduce; those of a block start as soon as its
backward is done, when the executor says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import BackwardError, ConfigError
from .mesh import Axis, Mesh, Pending
from .sharding import Layout


class GradientSync:
    """Owner of what is left to communicate of a step's gradients.

    Args:
        mesh: the ranks.
        layouts: every parameter of the model and how it is spread over the TMP world.

    Attributes:
        complete: no gradient is a rank's share of a sum, or of an average.
        early: reductions may start before :meth:`finish`.
    """

    def __init__(self, mesh: Mesh, layouts: Mapping[nn.Parameter, Layout]) -> None:
        self.mesh = mesh
        self.layouts = layouts
        self.complete = True
        self.early = True
        self._pending: dict[nn.Parameter, tuple[Pending, int]] = {}
        self._finished = False

    def begin(self) -> None:
        """Note that a backward adds shares to gradients, which :meth:`finish` has to complete."""
        self.complete = False

    def not_early(self) -> None:
        """Let no reduction start before :meth:`finish` of this step: something may add to gradients until then."""
        self.early = False

    def reopen(self) -> None:
        """Let another backward add to gradients that are finished; call it before each, it does nothing otherwise."""
        for work, _ in self._pending.values():  # of a step whose backward failed
            work.wait()
        self._pending.clear()
        if not self._finished:
            return
        self._finished = False
        tmp = self.mesh.tmp
        for parameter, layout in self.layouts.items():
            shares = layout.holders(tmp.rank, tmp.size) if layout.partial_grad else layout.replicas
            if shares > 1 and parameter.grad is not None:
                # Shares of a sum again: of whole gradients, the next sum would count each as often.
                parameter.grad.div_(shares)

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start to sum the gradients of ``parameters`` over replicas, and to average them over data-parallel ranks."""
        if not self.early:
            return
        for parameter in parameters:
            if parameter.grad is not None and not self.layouts[parameter].partial_grad:
                self._start(parameter, parameter.grad)

    def replicas(self, layout: Layout) -> Axis:
        """The ranks that hold the same part of a parameter and work on other rows."""
        return self.mesh.axis(self.mesh.world.size, self.mesh.tmp.size // layout.replicas)

    def _start(self, parameter: nn.Parameter, grad: Tensor) -> None:
        axis = self.replicas(self.layouts[parameter])
        if axis.size == 1:
            return
        if self.mesh.data.size > 1:
            grad.div_(self.mesh.data.size)
        self._pending[parameter] = axis.start_all_reduce(grad), grad._version

    def finish(self) -> None:
        """Make every gradient what one process would have, after a step's last backward."""
        self._agree_on_missing()
        self._sum_partial()
        for parameter, layout in self.layouts.items():
            if parameter.grad is not None and parameter not in self._pending and not layout.partial_grad:
                self._start(parameter, parameter.grad)
        pending, self._pending = self._pending, {}
        for parameter, (work, version) in pending.items():
            work.wait()
            if parameter.grad is None or parameter.grad._version != version:
                raise BackwardError(
                    "a gradient changed after its reduction over other ranks had started; add terms of the "
                    "loss that do not go through the model in a backward of their own, before the model's"
                )
        self._finished = self.complete = self.early = True

    def _agree_on_missing(self) -> None:
        """Give a zero gradient to parameters that some other rank has a gradient of."""
        control = self.mesh.control
        if control.group is None:
            return
        trainable = [parameter for parameter in self.layouts if parameter.requires_grad]
        present = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.uint8)
        control.all_reduce(present, dist.ReduceOp.MAX)
        for parameter, somewhere in zip(trainable, present.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _sum_partial(self) -> None:
        if self.mesh.world.group is None:
            return
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Layout]]] = {}
        for parameter, layout in self.layouts.items():
            if layout.partial_grad and parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append((parameter.grad, layout))
        for shares in by_dtype.values():
            _sum_bucket(shares, self.mesh)

    def norm(self, parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of ``parameters`` as one process would compute it, the same on every rank.

        A parameter that several ranks of the TMP world hold counts once.
        """
        tmp = self.mesh.tmp
        grads = [(p.grad, self.layouts[p].holders(tmp.rank, tmp.size)) for p in parameters if p.grad is not None]
        if not grads:
            return torch.tensor(0.0)
        wide = [torch.promote_types(grad.dtype, torch.float32) for grad, _ in grads]
        each = torch._foreach_norm([grad for grad, _ in grads], norm_type)
        norms = torch.stack([norm.to(dtype) for norm, dtype in zip(each, wide, strict=True)])
        if norm_type == torch.inf:
            return tmp.all_reduce(norms.max(), dist.ReduceOp.MAX)
        holders = torch.tensor([n for _, n in grads], dtype=norms.dtype, device=norms.device)
        return tmp.all_reduce((norms**norm_type / holders).sum()) ** (1.0 / norm_type)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of ``parameters`` so that their norm is at most ``max_norm``; returns the norm before.

        Raises:
            ConfigError: a parameter is not the model's.
        """
        parameters = list(parameters)
        for parameter in parameters:
            if parameter not in self.layouts:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is not one of the converted model's; "
                    f"clip model.parameters() alone, and make other modules part of the model before it is converted"
                )
        total = self.norm(parameters, norm_type)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total


def _sum_bucket(shares: list[tuple[Tensor, Layout]], mesh: Mesh) -> None:
    """Sum gradients over the TMP world and average them over data-parallel ranks, all in one all-reduce.

    The bucket has the coordinates of the full tensors.
    """
    rank = mesh.tmp.rank
    sizes = [layout.numel for _, layout in shares]
    bucket = shares[0][0].new_zeros(sum(sizes))
    full = [flat.view(layout.shape) for flat, (_, layout) in zip(bucket.split(sizes), shares, strict=True)]
    for whole, (grad, layout) in zip(full, shares, strict=True):
        if layout.sharded:
            layout.slices[rank].put(whole, grad)
        else:
            whole.copy_(grad)
    (mesh.tmp if mesh.data.size == 1 else mesh.world).all_reduce(bucket.div_(mesh.data.size))
    for whole, (grad, layout) in zip(full, shares, strict=True):
        grad.copy_(layout.local(whole, rank))
