"""The Accelerate plugin: converts a model, and makes an Accelerator train it as one process would."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, DynamoBackend, ParallelismConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoint import full_state_dict, save_pretrained
from ..checkpoint.export import MAX_SHARD_SIZE
from ..config import OasesConfig
from ..convert import check_plain
from ..errors import ConfigError, UnsupportedModelError
from ..models import family_of
from ..models.converted import Converted, loaded
from ..models.metrics import Metrics
from ..parallel.mesh import Mesh
from .banner import banner
from .evaluation import gathering
from .leaving import Progress, end_together
from .measuring import measure
from .optimizers import common_scaler, scheduling, watch_steps
from .overrides import override
from .planning import convert_as, device_of, mesh_of
from .states import keep_state
from .tracing import Tracer

TRACED_STEPS = (3,)
"""The steps that are traced unless told: the first ones warm up."""


@dataclass
class OasesPlugin(OasesConfig):
    """Settings, and :meth:`install`, which puts them to work on an Accelerator and a model.

    In a training loop of one's own::

        accelerator = Accelerator()
        model = OasesPlugin(degree=2).install(accelerator, model)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    """

    def install(self, accelerator: Accelerator, model: PreTrainedModel) -> PreTrainedModel:
        """Convert ``model`` in place and take over what ``accelerator`` would do wrongly; all ranks call it.

        A model of ``load_pretrained`` is converted already, and stays as it is.
        Call it before the optimizer is made and before ``accelerator.prepare``. Returns ``model``, on
        the accelerator's device.

        Raises:
            ConfigError: ranks, settings and model do not go together.
            UnsupportedModelError: the model cannot be sharded.
        """
        state = loaded(model)
        if state is None:
            check_plain(model)
        _check_accelerator(accelerator)
        if state is None:
            family_of(model.config)
            state = convert_as(self, model, mesh_of(self), accelerator)
        else:
            _check_same(self, state)
            state.loaded_with = None
        mesh = state.mesh
        cast(nn.Module, model).to(device_of(accelerator))  # sharded first: the whole model may not fit
        _neutralise(model)
        _tell_accelerate(accelerator, model, mesh)
        metrics = measure(self, accelerator, model, state)
        _take_over(accelerator, model, state, metrics, self._tracer(state, accelerator))
        if mesh.world.size > 1:
            watch_steps(state)
        if mesh.world.rank == 0:
            print(banner(model, state), flush=True)
        return model

    def _tracer(self, state: Converted, accelerator: Accelerator) -> Tracer | None:
        """What traces the steps that are asked for."""
        if self.trace is None:
            return None
        steps = self.trace_steps or TRACED_STEPS
        return Tracer(Path(self.trace), steps, state.mesh.world.rank, device_of(accelerator), end_together())


def _check_same(config: OasesConfig, state: Converted) -> None:
    """Refuse settings that say otherwise than what the model is converted to already; raises ConfigError."""
    plan = state.plan
    degrees, recompute = set(plan.degrees), set(plan.recompute)
    is_now: dict[str, Any] = {
        "tmp_size": plan.tmp_size,
        "degree": degrees.pop() if len(degrees) == 1 else None,
        "schedule": plan.schedule,
        "sub_batches": plan.sub_batches,
        "recompute": recompute.pop() if len(recompute) == 1 else None,
        "shard_optimizer": plan.shard_optimizer,
        "message_mib": plan.message_bytes and plan.message_bytes / 2**20,
        "defer_weight_grads": state.stack.defer,
        "cuda_graphs": state.stack.graphs is not None,
        "compile": state.stack.compiled is not None,
        "comm_dtype": next((link.comm_dtype for link in state.stack.links if link.comm_dtype), None),
        "gather_logits": state.vocabulary.gather_logits,
    }
    asked = {name: getattr(config, name) for name in is_now} | {"plan": config.load_plan()}
    for name, value in asked.items():
        if value not in (None, getattr(state.loaded_with, name), {**is_now, "plan": plan}[name]):
            raise ConfigError(
                f"{name}={value!r}, and load_pretrained has converted the model with {name}={is_now.get(name)!r}; give "
                f"settings to load_pretrained"
            )


def _check_accelerator(accelerator: Accelerator) -> None:
    """Refuse an Accelerator that does not run plain processes, or that has prepared something already."""
    if hasattr(accelerator, "oases"):
        raise ConfigError("this Accelerator has a converted model already; make an Accelerator for each")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and accelerator.num_processes == 1:
        raise ConfigError(
            f"{launched} processes were started, and this Accelerator runs as a single one, so they would train "
            f"{launched} unrelated models. Without GPUs set ACCELERATE_USE_CPU=true, and launch with "
            f"`accelerate launch --multi_gpu --num_processes {launched} --mixed_precision no --dynamo_backend no`"
        )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
        raise ConfigError(
            f"the Accelerator is set up for {accelerator.distributed_type.value}, which shards the model by itself; "
            f"run `accelerate config` without it, or leave oases out"
        )
    config = accelerator.state.parallelism_config
    if config is not None and config.total_size > 1:
        raise ConfigError("the Accelerator has a parallelism_config of its own; leave it out, and set tmp_size instead")
    dynamo = accelerator.state.dynamo_plugin.backend
    if dynamo != DynamoBackend.NO:
        raise ConfigError(
            f"dynamo_backend={dynamo.value.lower()}: torch.compile of a converted model is not supported; set it to no"
        )
    if accelerator._models or accelerator._optimizers or accelerator._dataloaders:
        raise ConfigError(
            "the Accelerator has prepared something already, and models and optimizers hold on to unsharded "
            "parameters, data loaders know no ranks that share a batch; "
            "call install first, then make the optimizer, then accelerator.prepare"
        )


def _tell_accelerate(accelerator: Accelerator, model: PreTrainedModel, mesh: Mesh) -> None:
    """Let data loaders and ``prepare`` know which ranks share a batch, and keep DistributedDataParallel away."""
    if mesh.world.size == 1:
        return
    # Data parallelism is called dp_shard: Accelerate has no dp_replicate × tp.
    config = ParallelismConfig(tp_size=mesh.tmp.size, dp_shard_size=mesh.data.size)
    # A state of this Accelerator's own: the usual one is shared, and other models of this process have no mesh.
    own = object.__new__(AcceleratorState)
    own.__dict__ = dict(accelerator.state.__dict__)
    own.parallelism_config = config
    own.device_mesh = config.get_device_mesh(accelerator.device.type)
    # What torch keeps there for torch.compile would outlive destroy_process_group: see Axis.
    getattr(own.device_mesh, "_pg_registry", {}).clear()
    accelerator.state = own
    object.__setattr__(model, "_tp_size", mesh.tmp.size)
    # Accelerate expects DTensors of a model on such a mesh, and says that it skips their preparation.
    logging.getLogger("accelerate.accelerator").addFilter(_is_news)
    if accelerator.dataloader_config.dispatch_batches is None:
        # Dispatching, the default for iterable datasets, knows no such mesh: it would give all ranks one batch.
        accelerator.dataloader_config.dispatch_batches = False


def _is_news(record: logging.LogRecord) -> bool:
    return "not sharded by DTensor" not in record.getMessage()


def _take_over(
    accelerator: Accelerator, model: PreTrainedModel, state: Converted, metrics: Metrics, tracer: Tracer | None
) -> None:
    """Replace the methods of this Accelerator that would be wrong on shards."""
    if accelerator.scaler is not None and state.mesh.world.size > 1:
        accelerator.scaler = common_scaler(accelerator)
    prepare = accelerator.prepare_model

    def prepare_model(other: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Accelerate's, which leaves DistributedDataParallel away when a model is for evaluation only."""
        return prepare(other, device_placement, evaluation_mode or other is model)

    def save_model(model: PreTrainedModel, save_directory: str, max_shard_size: int | str = "10GB", **_: Any) -> None:
        save_pretrained(accelerator.unwrap_model(model), save_directory, max_shard_size)

    def get_state_dict(model: PreTrainedModel, unwrap: bool = True) -> dict[str, Tensor]:
        return full_state_dict(accelerator.unwrap_model(model))

    object.__setattr__(accelerator, "oases", state)
    override(
        accelerator,
        backward=_backward(accelerator, model, state, metrics, tracer),
        clip_grad_norm_=_clip(accelerator, state),
        gather_for_metrics=gathering(accelerator, state),
        prepare_model=prepare_model,
        prepare_scheduler=scheduling(accelerator, state.mesh.data.size),
        save_model=save_model,
        get_state_dict=get_state_dict,
    )
    keep_state(accelerator, model, state)


def _backward(
    accelerator: Accelerator, model: PreTrainedModel, state: Converted, metrics: Metrics, tracer: Tracer | None
) -> Callable[..., None]:
    own = accelerator.backward
    held, progress = 0, end_together()

    @contextmanager
    def no_sync() -> Iterator[None]:
        """What ``accelerator.no_sync(model)`` enters."""
        nonlocal held
        held += 1
        try:
            yield
        finally:
            held -= 1

    def backward(loss: Tensor, **kwargs: Any) -> None:
        stepping = accelerator.sync_gradients and not held
        gradients = state.gradients
        gradients.reopen()
        state.stack.reduce_now = stepping or gradients.eager
        own(loss, **kwargs)
        if stepping:
            gradients.finish()
            progress.completed = True
            metrics.meter.complete()
            if tracer is not None:
                tracer.complete()
        elif gradients.eager:
            gradients.hand_over()

    object.__setattr__(model, "no_sync", no_sync)
    progress.restart()
    model.register_forward_pre_hook(partial(_begin_forward, state, tracer, progress))
    return backward


def _begin_forward(state: Converted, tracer: Tracer | None, progress: Progress, *_: Any) -> None:
    """Forward pre-hook of the model."""
    progress.forward()
    if tracer is not None:
        state.stack.watch = tracer.watch()


def _clip(accelerator: Accelerator, state: Converted) -> Callable[..., Tensor]:
    def clip_grad_norm_(
        parameters: nn.Parameter | Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        accelerator.unscale_gradients()
        several = [parameters] if isinstance(parameters, nn.Parameter) else parameters
        return state.gradients.clip(several, max_norm, norm_type)

    return clip_grad_norm_


def _neutralise(model: PreTrainedModel) -> None:
    """Replace the methods of this model that would be wrong on shards, or would do twice what is done already."""

    def already_recomputed(*_: Any, **__: Any) -> None:
        """Do nothing: the executor recomputes every block already."""

    def resize_token_embeddings(*_: Any, **__: Any) -> None:
        raise UnsupportedModelError("resize_token_embeddings after conversion: resize before OasesPlugin().install")

    def export(save_directory: str, max_shard_size: int | str | None = None, **kwargs: Any) -> None:
        harmless = {"is_main_process", "safe_serialization", "save_function"}
        given = {name for name, value in kwargs.items() if value} - harmless
        if given:
            raise ConfigError(f"save_pretrained of a converted model does not take {', '.join(sorted(given))}")
        save_pretrained(model, save_directory, MAX_SHARD_SIZE if max_shard_size is None else max_shard_size)

    checkpointing = [
        n for n in ("gradient_checkpointing_enable", "activation_checkpointing_enable") if hasattr(model, n)
    ]
    override(
        model,
        resize_token_embeddings=resize_token_embeddings,
        save_pretrained=export,
        **dict.fromkeys(checkpointing, already_recomputed),
    )
