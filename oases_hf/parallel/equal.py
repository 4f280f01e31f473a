"""Tensors that must be the same on several ranks: weights at the start, batches at every step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DistributedError
from .mesh import Axis, Mesh

_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensor: Tensor) -> list[int]:
    """Two sums over the bits of ``tensor``, exact."""
    bits = tensor.detach().contiguous().flatten().view(_AS_INTEGERS[tensor.element_size()])
    return [int(bits.sum(dtype=torch.int64)), int(bits[::2].sum(dtype=torch.int64))]


@torch.no_grad()
def make_equal(model: nn.Module, mesh: Mesh) -> list[str]:
    """Overwrite parameters and buffers that differ from rank 0's with rank 0's; returns their names.

    They differ when ranks initialise new weights from different seeds. Meta tensors are passed over: they have none.
    """
    if mesh.control.group is None:
        return []
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {name: tensor for name, tensor in everything.items() if not tensor.is_meta}
    if not tensors:
        return []
    digests = torch.tensor([_digest(tensor) for tensor in tensors.values()], dtype=torch.int64)
    everyone = torch.stack(mesh.control.all_gather(digests))
    differing = (everyone != everyone[0]).any(0).any(-1).tolist()
    names = [name for name, differs in zip(tensors, differing, strict=True) if differs]
    for name in names:
        axis = mesh.control if tensors[name].device.type == "cpu" else mesh.world
        axis.broadcast(tensors[name].data)
    return names


def make_batch_equal(batch: Mapping[str, Tensor], axis: Axis, control: Axis) -> dict[str, Tensor]:
    """The tensors of the axis' first rank, on every rank of it.

    Args:
        batch: this rank's tensors.
        axis: the ranks that share the batch.
        control: the same ranks on a CPU backend.

    Raises:
        DistributedError: the ranks have tensors of different names, shapes or types.
    """
    if axis.group is None:
        return dict(batch)
    shapes = {name: (tuple(t.shape), str(t.dtype)) for name, t in sorted(batch.items())}
    code = zlib.crc32(repr(shapes).encode())
    extremes = control.all_reduce(torch.tensor([code, -code]), dist.ReduceOp.MAX).tolist()
    if extremes[0] != -extremes[1]:
        raise DistributedError(
            f"the ranks {axis.ranks} share one batch and were given batches of different shapes; this rank has "
            f"{shapes}. Feed them the same samples: prepare the data loader with the accelerator after install, "
            f"and pad to a length that does not depend on chance"
        )
    return {name: axis.broadcast(batch[name].contiguous().clone()) for name in sorted(batch)}
