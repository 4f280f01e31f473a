"""Converted models on the ranks of a test: making them, and reading them as full tensors in HF layout."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from oases_hf import Plan
from oases_hf.convert import block_count, convert, describe
from oases_hf.models.converted import Converted, converted
from oases_hf.parallel.mesh import Mesh
from oases_hf.plan import Recompute, ScheduleName, ShardOptimizer

from .parity import float64_math
from .pickling import dumps
from .reference import label_count, loss_of
from .tiny import Batch


def parallel(
    model: PreTrainedModel,
    tmp_size: int,
    schedule: ScheduleName = "oases",
    sub_batches: int = 2,
    *,
    degrees: Sequence[int] | None = None,
    recompute: Sequence[Recompute] = (),
    shard_optimizer: ShardOptimizer = "off",
    message_bytes: int | None = None,
    **options: Any,
) -> Converted:
    """Convert the model, at a uniform degree unless told."""
    degrees = (tmp_size,) * block_count(model) if degrees is None else tuple(degrees)
    choices = tuple(recompute), shard_optimizer, message_bytes
    plan = Plan(describe(model), tmp_size, degrees, schedule, sub_batches, *choices)
    return convert(model, Mesh.build(tmp_size), plan, **options)


def one_step(model: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """Run this rank's share of a step on one batch per TMP world; returns its loss, the mean over all their labels."""
    state = converted(model)
    world, worlds = state.mesh.data.rank, state.mesh.data.size
    counts = [label_count(model, rows) for rows in batches]
    model.zero_grad(set_to_none=True)
    state.stack.reduce_now = True
    with float64_math():
        loss = loss_of(model, batches[world]) * (counts[world] / sum(counts))
        (loss * worlds).backward()  # what data-parallel ranks average is the sum over worlds
        state.gradients.finish()
    return float(state.mesh.data.all_reduce(loss.detach().clone()))


def full(model: PreTrainedModel, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors from each rank's parts; what several ranks hold must be equal to the last bit."""
    state = converted(model)
    axis = state.mesh.tmp
    local = {name: tensor.cpu() for name, tensor in local.items()}
    everyone: list[dict[str, Tensor]] = [local]
    if axis.group is not None:
        everyone = _gathered(local, axis.group)
    whole = {}
    for name in local:
        layout = state.layouts[name]
        whole[name] = torch.full(layout.shape, torch.nan, dtype=local[name].dtype)
        for rank, theirs in enumerate(everyone):
            if layout.sharded:
                layout.slices[rank].put(whole[name], theirs[name])
            else:
                whole[name].copy_(theirs[name])
            held = layout.slices.index(layout.slices[rank]) if layout.sharded else 0
            if not torch.equal(theirs[name], everyone[held][name]):
                raise AssertionError(f"{name} differs between ranks {held} and {rank}, which both hold it")
    return whole


def _gathered(local: dict[str, Tensor], group: Any) -> list[dict[str, Tensor]]:
    """Those of each rank of a group."""
    everyone = [b""] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dumps(local), group=group)
    return [pickle.loads(theirs) for theirs in everyone]


def full_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The full gradients by name; frozen parameters have none. Those of owners alone are theirs."""
    return _full_from_owners(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def full_moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """What the optimizer keeps of each parameter, by its key there and then by name; numbers are left out."""
    kept = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    shaped = {key for each in kept.values() for key, value in each.items() if torch.is_tensor(value) and value.dim()}
    keys: list[set[str]] = [shaped]
    if dist.is_initialized():
        keys = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(keys, shaped)
    return {
        key: _full_from_owners(model, {name: each[key] for name, each in kept.items() if key in each})
        for key in sorted(set.union(*keys))
    }


def _full_from_owners(model: PreTrainedModel, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors from each rank's parts, of which owners alone have some."""
    owners = converted(model).gradients.ownership.owners
    everyone: list[dict[str, Tensor]] = [{}]
    if owners:
        everyone = _gathered(local, dist.group.WORLD)
    for name, parameter in model.named_parameters():
        if parameter in owners and name in everyone[owners[parameter]]:
            assert (name in local) == (owners[parameter] == dist.get_rank()), f"{name}: only the owner keeps it"
            local[name] = everyone[owners[parameter]][name]
    return full(model, {name: local[name] for name, _ in model.named_parameters() if name in local})


def full_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """The full parameters by name, tied ones once."""
    return full(model, {name: p.detach() for name, p in model.named_parameters()})
