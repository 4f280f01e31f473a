"""Gradients made whole across ranks, once per optimizer step, and their norm.

Within a TMP world, gradients of parameters that several ranks hold but each sees only a share of
(``Layout.partial_grad``) are summed through one flat bucket. Those of a block of low degree are summed
over its replicas, which saw different rows. Across data-parallel ranks every gradient is averaged, as
DistributedDataParallel would. Sum and average are one all-reduce, or one exchange where parameters have
owners; those of a block start as soon as its backward is done, when the executor says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import BackwardError, ConfigError
from ..plan import ShardOptimizer
from .mesh import Axis, Mesh, Pending
from .ownership import Ownership
from .sharding import Layout


class GradientSync:
    """Owner of what is left to communicate of a step's gradients.

    Args:
        mesh: the ranks.
        layouts: every parameter of the model and how it is spread over the TMP world.
        shard_optimizer: as a plan has it.

    Attributes:
        complete: no gradient is a rank's share of a sum, or of an average.
        early: reductions may start before :meth:`finish`.
        eager: gradients go to their owners after every backward, with :meth:`hand_over` where it is not the last.
        ownership: which rank keeps which gradient, where not all that hold the parameter do.
    """

    def __init__(
        self, mesh: Mesh, layouts: Mapping[nn.Parameter, Layout], shard_optimizer: ShardOptimizer = "off"
    ) -> None:
        self.mesh = mesh
        self.layouts = layouts
        self.complete = True
        self.early = True
        self.eager = shard_optimizer == "reduce"
        self.ownership = Ownership({} if shard_optimizer == "off" else self._replicated(), mesh.world.rank)
        self._pending: list[tuple[Pending, dict[nn.Parameter, int | None]]] = []
        self._settled: dict[nn.Parameter, int | None] = {}
        self._whole: set[nn.Parameter] = set()

    def _replicated(self) -> dict[nn.Parameter, Axis]:
        """The parts that several ranks hold and train, and which; what is unfrozen later has no owner."""
        parts = {parameter: x for parameter, x in self.layouts.items() if x.ownable}
        axes = {parameter: self.replicas(layout) for parameter, layout in parts.items() if parameter.requires_grad}
        return {parameter: axis for parameter, axis in axes.items() if axis.size > 1}

    def begin(self) -> None:
        """Note that a backward adds shares to gradients, which :meth:`finish` has to complete."""
        self.complete = False

    def not_early(self) -> None:
        """Let no reduction start before :meth:`finish` of this step: something may add to gradients until then."""
        self.early = False

    def reopen(self) -> None:
        """Let another backward add to gradients that are whole; call it before each, it does nothing otherwise."""
        for work, _ in self._pending:  # of a step whose backward failed
            work.wait()
        self._pending.clear()
        self._settled.clear()
        whole, self._whole = self._whole, set()
        for parameter in whole:
            if parameter.grad is not None:
                self._reopen(parameter, parameter.grad)

    def _reopen(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Make a whole gradient a share of a sum again: the next sum would count it as often as it is held."""
        tmp, layout = self.mesh.tmp, self.layouts[parameter]
        if parameter in self.ownership.owners:
            if self.mesh.data.size > 1:  # the owner alone has it, and the next average would divide it
                grad.mul_(self.mesh.data.size)
            return
        shares = layout.holders(tmp.rank, tmp.size) if layout.partial_grad else layout.replicas
        if shares > 1:
            grad.div_(shares)

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start to sum the gradients of ``parameters`` over replicas, and to average them over data-parallel ranks."""
        if not self.early:
            return
        if self.ownership.owners:  # the blocks before the last: buffers are to be freed while others are computed
            self._settle(keep=1)
        self._start_all(parameters, owned_only=self.eager)

    def replicas(self, layout: Layout) -> Axis:
        """The ranks that hold the same part of a parameter and work on other rows."""
        return self.mesh.axis(self.mesh.world.size, self.mesh.tmp.size // layout.replicas)

    def several_hold(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether other ranks hold some of ``parameters`` and work on other rows."""
        return any(self.replicas(self.layouts[parameter]).size > 1 for parameter in parameters)

    def _start_all(self, parameters: Iterable[nn.Parameter], owned_only: bool) -> None:
        owned = []
        for parameter in parameters:
            grad, axis = parameter.grad, self.replicas(self.layouts[parameter])
            if grad is None or axis.size == 1 or self.layouts[parameter].partial_grad:
                continue
            has_owner = parameter in self.ownership.owners
            if owned_only and not has_owner:
                continue
            if self.mesh.data.size > 1:
                grad.div_(self.mesh.data.size)
            if has_owner:
                owned.append(parameter)
            else:
                # Of .data, versions count apart: gloo writes what it sums on GPUs by an operator.
                self._pending.append((axis.start_all_reduce(grad.data), {parameter: grad._version}))
        for exchange in self.ownership.start_sums(owned):
            self._pending.append((exchange, {parameter: _version(parameter) for parameter in exchange.parameters}))

    def _settle(self, keep: int = 0) -> None:
        """Await what was started, but for the last ``keep``."""
        awaited = max(0, len(self._pending) - keep)
        pending, self._pending = self._pending[:awaited], self._pending[awaited:]
        for work, versions in pending:
            for parameter, version in versions.items():
                _check_unchanged(parameter, version)
            work.wait()
            self._settled.update({parameter: _version(parameter) for parameter in versions})

    def finish(self) -> None:
        """Make every gradient what one process would have, after a step's last backward.

        Of a parameter that has an owner, only the owner then has a gradient.
        """
        self._agree_on_missing()
        self._sum_partial()
        self._reduce_rest(owned_only=False)
        self.complete = True

    def hand_over(self) -> None:
        """Give the gradients of a backward that is not the step's last to their owners, and free those of others."""
        self._agree_on_missing()
        self._reduce_rest(owned_only=True)

    def _reduce_rest(self, owned_only: bool) -> None:
        """Complete the gradients whose reduction has started, and the others but for those of the bucket."""
        begun = self._begun()
        self._start_all([parameter for parameter in self.layouts if parameter not in begun], owned_only)
        self._settle()
        settled, self._settled = self._settled, {}
        for parameter, version in settled.items():
            _check_unchanged(parameter, version)
        self._whole.update(settled)
        self.early = True

    def _begun(self) -> set[nn.Parameter]:
        """The parameters whose reduction has started."""
        return {*self._settled, *(parameter for _, versions in self._pending for parameter in versions)}

    def _agree_on_missing(self) -> None:
        """Give a zero gradient to parameters that some other rank has a gradient of, and not because it owns them."""
        control = self.mesh.control
        if control.group is None:
            return
        begun = self._begun()
        trainable = [parameter for parameter in self.layouts if parameter.requires_grad]
        present = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.uint8)
        control.all_reduce(present, dist.ReduceOp.MAX)
        for parameter, somewhere in zip(trainable, present.tolist(), strict=True):
            if somewhere and parameter.grad is None and parameter not in begun:
                parameter.grad = torch.zeros_like(parameter)

    def _sum_partial(self) -> None:
        if self.mesh.world.group is None:
            return
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Layout]]] = {}
        for parameter, layout in self.layouts.items():
            if layout.partial_grad and parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append((parameter.grad, layout))
                self._whole.add(parameter)
        for shares in by_dtype.values():
            _sum_bucket(shares, self.mesh)

    def norm(self, parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of ``parameters`` as one process would compute it, the same on every rank.

        A parameter that several ranks hold counts once.
        """
        parameters = list(parameters)
        if not parameters:
            return torch.tensor(0.0)
        # A rank that owns nothing has no gradient to tell the type by.
        dtype = reduce(torch.promote_types, (p.grad_dtype or p.dtype for p in parameters), torch.float32)
        total = torch.zeros((), dtype=dtype, device=parameters[0].device)
        held: defaultdict[int, list[Tensor]] = defaultdict(list)  # by how many ranks have the same
        for parameter in parameters:
            if parameter.grad is not None:
                held[self._gradients_of(parameter)].append(parameter.grad)
        for ranks, grads in held.items():
            norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=dtype))
            total = total.maximum(norms.max()) if norm_type == torch.inf else total + (norms**norm_type).sum() / ranks
        if norm_type == torch.inf:
            return self.mesh.world.all_reduce(total, dist.ReduceOp.MAX)
        return self.mesh.world.all_reduce(total) ** (1.0 / norm_type)

    def _gradients_of(self, parameter: nn.Parameter) -> int:
        """How many ranks have the same gradient as this one, itself included."""
        tmp = self.mesh.tmp
        if parameter in self.ownership.owners:
            return 1
        return self.layouts[parameter].holders(tmp.rank, tmp.size) * self.mesh.data.size

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


def _version(parameter: nn.Parameter) -> int | None:
    return None if parameter.grad is None else parameter.grad._version


def _check_unchanged(parameter: nn.Parameter, version: int | None) -> None:
    """Raise BackwardError unless the gradient is the one that was reduced, or was freed then."""
    if _version(parameter) != version:
        raise BackwardError(
            "a gradient changed after its reduction over other ranks had started; add terms of the "
            "loss that do not go through the model in a backward of their own, before the model's"
        )


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
