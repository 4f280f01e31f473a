"""The line that says what was made of a model, and how its ranks are linked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.distributed as dist
from torch import nn

from ..models.converted import Converted
from ..nccl import Settings, p2p_disabled_by, settings_here


def banner(model: nn.Module, state: Converted) -> str:
    """What was made of the model, in one line."""
    plan, mesh = state.plan, state.mesh
    total = sum(layout.numel for layout in state.gradients.layouts.values())
    return (
        f"oases: {type(model).__name__}, {total / 1e6:.1f} M parameters, {state.sharded_fraction:.1%} of them sharded; "
        f"{plan.summary()}; "
        f"{mesh.world.size} ranks = {mesh.data.size} data parallel × {mesh.tmp.size} TMP; link {_link(mesh.world.size)}"
    )


def _link(ranks: int) -> str:
    """The backend, and by what NCCL sends."""
    backend: str = dist.get_backend() if dist.is_initialized() else "none"
    if backend != "nccl":
        return backend
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    pairs = permutations(range(min(here, torch.cuda.device_count())), 2)
    access = [torch.cuda.can_device_access_peer(*pair) for pair in pairs]
    return f"nccl {transport(settings_here(os.environ), access, several_machines=here < ranks)}"


def transport(settings: Settings, access: Sequence[bool], *, several_machines: bool) -> str:
    """By what NCCL can send between the ranks, and the setting that decides it, if one does.

    Args:
        settings: NCCL's.
        access: for the pairs of this machine's GPUs that are visible, whether CUDA lets one reach the other's memory.
        several_machines: the ranks are on more than this one.
    """
    disabled = p2p_disabled_by(settings)
    if disabled is not None:
        words = f"without P2P ({disabled})"
    elif not access:
        words = "(P2P unknown: one GPU is visible)"
    elif not any(access):
        words = "without P2P (no GPU can reach another's memory)"
    else:
        words = f"(P2P possible{' between some GPUs' * (not all(access))})"
    return words + ", and a network between machines" * several_machines
