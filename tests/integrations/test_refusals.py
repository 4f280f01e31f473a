"""Accelerators, Trainers and arguments that cannot work are refused by name, before the model is touched."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, ParallelismConfig
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, get_constant_schedule

from oases_hf import OasesCallback

from ..ranks import Worlds
from ..tiny import tiny_llama
from .fitting import arguments, rows
from .refusing import Refusal, install, refusal, trainer


def launched_but_alone(model: PreTrainedModel) -> None:
    """As `accelerate launch --multi_gpu` does without GPUs."""
    del os.environ["ACCELERATE_USE_CPU"]
    os.environ["WORLD_SIZE"] = "2"
    install(model, Accelerator())


def on_an_accelerator_for(kind: DistributedType, model: PreTrainedModel) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = kind
    install(model, accelerator)


def with_a_mesh_of_its_own(model: PreTrainedModel) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(dp_shard_size=2)
    install(model, accelerator)


def with_prepared_optimizer(model: PreTrainedModel) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.optim.SGD(model.parameters()))
    install(model, accelerator)


def with_prepared_loader(model: PreTrainedModel) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(DataLoader(cast(Any, rows(4))))
    install(model, accelerator)


def with_dynamo(model: PreTrainedModel) -> None:
    install(model, Accelerator(cpu=True, dynamo_backend="inductor"))


def with_ready_optimizer(model: PreTrainedModel) -> None:
    trainer(model, optimizers=(torch.optim.SGD(model.parameters()), None))


def with_ready_scheduler(model: PreTrainedModel) -> None:
    trainer(model, optimizers=(None, get_constant_schedule(torch.optim.SGD(model.parameters()))))


def with_late_callback(model: PreTrainedModel) -> None:
    late = Trainer(model, arguments(), train_dataset=cast(Any, rows(4)))
    late.add_callback(OasesCallback())
    late.train()


def with_several_gpus(model: PreTrainedModel) -> None:
    args = arguments()
    object.__setattr__(args, "_n_gpu", 2)
    Trainer(model, args, train_dataset=cast(Any, rows(4)), callbacks=[OasesCallback()])


def with_model_init(model: PreTrainedModel) -> None:
    trainer(None, model_init=lambda: tiny_llama())


REFUSALS = {
    "launched but alone": Refusal(
        launched_but_alone,
        1,
        "ConfigError: 2 processes were started, and this Accelerator runs as a single one.*set ACCELERATE_USE_CPU=true"
        ".*accelerate launch --multi_gpu --num_processes 2",
    ),
    "FSDP": Refusal(
        partial(on_an_accelerator_for, DistributedType.FSDP),
        2,
        "ConfigError: the Accelerator is set up for FSDP.*run `accelerate config` without it",
    ),
    "DeepSpeed": Refusal(
        partial(on_an_accelerator_for, DistributedType.DEEPSPEED),
        2,
        "ConfigError: the Accelerator is set up for DEEPSPEED.*run `accelerate config` without it",
    ),
    "a mesh of its own": Refusal(
        with_a_mesh_of_its_own, 2, "ConfigError: .*parallelism_config of its own; leave it out"
    ),
    "a prepared optimizer": Refusal(
        with_prepared_optimizer, 2, "ConfigError: .*prepared something already.*call install first"
    ),
    "a prepared data loader": Refusal(
        with_prepared_loader, 2, "ConfigError: .*prepared something already.*call install first"
    ),
    "torch.compile": Refusal(with_dynamo, 2, "ConfigError: dynamo_backend=inductor: .*set it to no"),
    "a ready optimizer": Refusal(
        with_ready_optimizer,
        2,
        "ConfigError: the optimizer holds on to unsharded parameters; pass optimizer_cls_and_kwargs",
    ),
    "a ready scheduler": Refusal(
        with_ready_scheduler,
        2,
        "ConfigError: the optimizer holds on to unsharded parameters; pass optimizer_cls_and_kwargs",
    ),
    "model_init": Refusal(
        with_model_init, 2, "ConfigError: model_init builds the model anew in train.*pass model= instead"
    ),
    "a callback added later": Refusal(
        with_late_callback,
        2,
        r"ConfigError: .*pass it as Trainer\(callbacks=\[OasesCallback\(\)\]\), or call .*attach\(trainer\)",
    ),
    "several GPUs in one process": Refusal(
        with_several_gpus, 1, "ConfigError: .*n_gpu=2: one process sees several GPUs.*start one process per GPU"
    ),
    "training arguments": Refusal(
        partial(trainer, arguments_={"use_liger_kernel": True}),
        2,
        "ConfigError: TrainingArguments ask for what a sharded model cannot do:\n- use_liger_kernel=True",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(ranks: Worlds, name: str) -> None:
    attempt, world, expected, _ = REFUSALS[name]
    for said, whole in ranks(world).run(refusal, attempt, timeout_s=20):
        assert re.match(expected, said, re.DOTALL), said
        assert whole, "weights were touched before the refusal"
