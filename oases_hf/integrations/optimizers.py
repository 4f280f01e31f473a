"""Optimizers, schedulers and gradient scalers around a sharded model."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..checkpoint.state import storable
from ..errors import BackwardError, CheckpointError, ConfigError
from ..models.converted import Converted
from .overrides import override

log = logging.getLogger(__name__)

# Parts of the names of optimizers that look at whole tensors; training_arguments.py has the reasons and figures.
_WHOLE = "adafactor muon lbfgs galore apollo lomo 8bit 4bit stableadamw grokadamw shampoo soap"
NOT_ELEMENTWISE = frozenset(_WHOLE.split())


def watch_steps(state: Converted) -> None:
    """Check every optimizer of this process before it steps, and spread what it stepped, if it holds this model's.

    The step raises ConfigError for an optimizer that was made before the model was sharded, or
    that looks at whole tensors, and BackwardError for gradients that are not summed over the ranks.
    """
    living = weakref.ref(state)  # the hook outlives the model
    seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    kept: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        state = living()
        if state is None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p in state.replaced for p in parameters):
            raise ConfigError(
                "an optimizer holds parameters from before the model was sharded, which train nothing; "
                "make it after OasesPlugin().install, from model.parameters()"
            )
        if not any(p in state.gradients.layouts for p in parameters):
            return
        if optimizer not in seen:
            seen.add(optimizer)
            _check_kind(type(optimizer), owned=bool(state.gradients.ownership.owners))
        if not state.gradients.complete:
            raise BackwardError(
                "an optimizer steps on gradients that were never summed over the ranks; call "
                "accelerator.backward(loss), not loss.backward(), and step when accelerator.sync_gradients is true"
            )

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        state = living()
        overflow = getattr(optimizer, "found_inf", None)  # left by a scaler to fused kernels, which then do nothing
        if state is not None and optimizer in seen and optimizer not in kept:
            kept.add(optimizer)
            _check_state(optimizer)
        if state is not None and not (overflow is not None and overflow.item()):
            state.gradients.ownership.broadcast(p for group in optimizer.param_groups for p in group["params"])

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _check_kind(kind: type[torch.optim.Optimizer], owned: bool) -> None:
    name = kind.__name__
    if owned and "schedulefree" in name.lower():
        raise ConfigError(
            f"{name} changes parameters between training and evaluation by its state, which with shard_optimizer only "
            f"their owners have; leave shard_optimizer off, or use AdamW or SGD, for example"
        )
    if any(part in name.lower() for part in NOT_ELEMENTWISE):
        raise ConfigError(f"{name} looks at whole tensors, and ranks hold parts of them; use AdamW or SGD, for example")
    if not kind.__module__.startswith("torch.optim"):
        log.warning("%s steps on parts of tensors; right only if it treats every element alike (said once)", name)


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Say at the first step, and not at the first save, that a state cannot be saved."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not storable(parameter, value):
                log.warning(
                    "%s keeps %s of parameters as something that cannot be split for other ranks: its checkpoints will "
                    "be refused; use AdamW or SGD, or save_only_model=True",
                    *(type(optimizer).__name__, key),
                )
                return


def scheduling(accelerator: Accelerator, worlds: int) -> Callable[[LRScheduler], AcceleratedScheduler]:
    """Prepare schedulers that step once per TMP world: Accelerate counts processes, as if each had its own batch."""
    own = accelerator.prepare_scheduler

    def prepare_scheduler(scheduler: LRScheduler) -> AcceleratedScheduler:
        prepared = own(scheduler)
        prepared.split_batches = True  # a call is one step, not one per process
        step_once, end = prepared.step, getattr(scheduler, "total_steps", math.inf)

        def step(*args: Any, **kwargs: Any) -> None:
            for _ in range(worlds):
                if scheduler._step_count <= end:  # as in Accelerate: OneCycleLR has no step beyond its last
                    step_once(*args, **kwargs)

        override(prepared, step=step)
        return prepared

    return prepare_scheduler


class _CommonScaler(ShardedGradScaler):
    """Agrees on overflows for fused optimizers too.

    For these, torch's looks at this rank's gradients alone when nothing was clipped, and else hands the kernels a
    figure of a shape that they fail on.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        found.update({device: overflow.squeeze() for device, overflow in found.items()})

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


def common_scaler(accelerator: Accelerator) -> torch.amp.GradScaler:
    """A gradient scaler whose ranks skip a step together, those too that own no gradient."""
    own = accelerator.scaler
    return _CommonScaler(
        device=accelerator.device.type,
        init_scale=own._init_scale,
        growth_factor=own._growth_factor,
        backoff_factor=own._backoff_factor,
        growth_interval=own._growth_interval,
        enabled=own._enabled,
    )


def plain(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """The optimizer itself, which Accelerate wraps."""
    if optimizer is None:
        raise CheckpointError("there is no optimizer yet; training state is saved and loaded while training")
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
