"""How far tensors of a sharded model are from those of a whole one."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..models.converted import Converted

Tensors = Mapping[str, Tensor]


def norm(tensor: Tensor) -> float:
    """The Euclidean norm, accumulated in float64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def distance(left: Tensor, right: Tensor) -> float:
    """The norm of the difference, taken in float32 or better."""
    wide = torch.promote_types(left.dtype, torch.float32)
    return norm(left.to(wide) - right.to(device=left.device, dtype=wide))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name, zeros where there is none; of tied parameters under the first name."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, tied ones under the first."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def on_cpu(tensors: Tensors) -> dict[str, Tensor]:
    """Copies in host memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def shard_distances(
    state: Converted, ours: Tensors, whole: Tensors | None, *, overwrite: bool = False
) -> dict[str, float]:
    """How far each tensor, spread over the ranks, is from the whole one; every rank calls it and learns the same.

    Of a part that several ranks hold, the one that is farthest off counts.

    Args:
        state: of the converted model.
        ours: this rank's parts, by parameter name.
        whole: what they should be parts of, on rank 0; None on other ranks.
        overwrite: make them parts of it afterwards.
    """
    mesh, squares = state.mesh, []
    for name, part in ours.items():
        layout = state.layouts[name]
        expected = part.new_empty(layout.shape) if whole is None else whole[name].to(part.device).contiguous()
        wanted = layout.local(mesh.world.broadcast(expected), mesh.tmp.rank)
        squares.append(distance(part, wanted) ** 2)
        if overwrite:
            part.copy_(wanted)
    everyone = torch.stack(mesh.tmp_control.all_gather(torch.tensor(squares, dtype=torch.float64))).T
    return {
        name: _total(state.layouts[name].slices or (0,) * mesh.tmp.size, of_ranks.tolist())
        for name, of_ranks in zip(ours, everyone, strict=True)
    }


def _total(parts: tuple[object, ...], squares: list[float]) -> float:
    """The distance of a tensor, from which part each rank holds and how far, squared, it is off."""
    if any(map(math.isnan, squares)):
        return math.nan
    worst: dict[object, float] = {}
    for part, square in zip(parts, squares, strict=True):
        worst[part] = max(square, worst.get(part, 0.0))
    return math.sqrt(sum(worst.values()))
