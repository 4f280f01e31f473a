"""Gradients made whole across ranks, once per optimizer step, and their norm.

Within a TMP world, gradients of parameters that several ranks hold but each sees only a share of
(``Layout.partial_grad``) are summed through one flat bucket. Across data-parallel ranks every
gradient is averaged, as DistributedDataParallel would; those of a block start as soon as its
backward is done, when the executor says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import Mesh, Pending
from .sharding import Layout


class GradientSync:
    """Owner of what is left to communicate of a step's gradients.

    Args:
        mesh: the ranks.
        layouts: every parameter of the model and how it is spread over the TMP world.
    """

    def __init__(self, mesh: Mesh, layouts: Mapping[nn.Parameter, Layout]) -> None:
        self.mesh = mesh
        self.layouts = layouts
        self._pending: dict[nn.Parameter, Pending] = {}
        self._finished = False

    def reopen(self) -> None:
        """Let another backward add to gradients that are finished; call it before each, it does nothing otherwise."""
        if not self._finished:
            return
        self._finished = False
        tmp = self.mesh.tmp
        for parameter, layout in self.layouts.items():
            if layout.partial_grad and parameter.grad is not None:
                # Shares of a sum again: of whole gradients, the next sum would count each once per holder.
                parameter.grad.div_(layout.holders(tmp.rank, tmp.size))

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start averaging the gradients of ``parameters``, complete within the TMP world, over data-parallel ranks."""
        if self.mesh.data.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None and not self.layouts[parameter].partial_grad:
                self._start(parameter, parameter.grad)

    def _start(self, parameter: nn.Parameter, grad: Tensor) -> None:
        grad.div_(self.mesh.data.size)
        self._pending[parameter] = self.mesh.data.start_all_reduce(grad)

    def finish(self) -> None:
        """Make every gradient what one process would have, after a step's last backward."""
        self._finished = True
        self._agree_on_missing()
        self._sum_partial()
        if self.mesh.data.size > 1:
            for parameter in self.layouts:
                if parameter.grad is not None and parameter not in self._pending:
                    self._start(parameter, parameter.grad)
        for work in self._pending.values():
            work.wait()
        self._pending.clear()

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
        tmp = self.mesh.tmp
        if tmp.group is None:
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
        """Scale the gradients of ``parameters`` so that their norm is at most ``max_norm``; returns the norm before."""
        parameters = list(parameters)
        total = self.norm(parameters, norm_type)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total


def _sum_bucket(shares: list[tuple[Tensor, Layout]], mesh: Mesh) -> None:
    """Sum gradients over the TMP world in the coordinates of the full tensors, all in one all-reduce."""
    rank = mesh.tmp.rank
    sizes = [layout.numel for _, layout in shares]
    bucket = shares[0][0].new_zeros(sum(sizes))
    full = [flat.view(layout.shape) for flat, (_, layout) in zip(bucket.split(sizes), shares, strict=True)]
    for whole, (grad, layout) in zip(full, shares, strict=True):
        if layout.sharded:
            layout.slices[rank].put(whole, grad)
        else:
            whole.copy_(grad)
    mesh.tmp.all_reduce(bucket)
    for whole, (grad, layout) in zip(full, shares, strict=True):
        grad.copy_(layout.local(whole, rank))


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of several modules, each once."""
    return list(dict.fromkeys(chain.from_iterable(module.parameters() for module in modules)))
