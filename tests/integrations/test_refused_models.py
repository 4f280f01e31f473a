"""Models, degrees and plans that do not go together are refused by name, and the model is left as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from oases_hf import Plan
from oases_hf.errors import OasesError

from ..ranks import Worlds
from ..tiny import tiny_llama
from .refusing import Refusal, install, refusal, trainer


def unknown(model: PreTrainedModel) -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    )


def in_trainer(make: Callable[[PreTrainedModel], nn.Module], model: PreTrainedModel) -> None:
    trainer(make(model))


def in_a_loop(make: Callable[[PreTrainedModel], nn.Module], model: PreTrainedModel) -> None:
    install(make(model))


def few_heads(model: PreTrainedModel) -> PreTrainedModel:
    return tiny_llama(heads=2, kv_heads=1)


def few_features(model: PreTrainedModel) -> PreTrainedModel:
    return tiny_llama(ffn=3)


def with_adapters(model: PreTrainedModel) -> PreTrainedModel:
    object.__setattr__(model, "_hf_peft_config_loaded", True)
    return model


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    object.__setattr__(model, "is_quantized", True)
    return model


def with_another_projection(path: str, model: PreTrainedModel) -> PreTrainedModel:
    projection = model.get_submodule(path)
    projection.__class__ = type("Rounded", (type(projection),), {})
    return model


class Scaled(LlamaDecoderLayer):
    """A layer that does more than Hugging Face's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


class ScaledMLP(LlamaMLP):
    """An MLP that does more than Hugging Face's."""

    def forward(self, x: Any) -> Any:
        return 2 * cast(Any, super()).forward(x)


def with_changed_layers(model: PreTrainedModel) -> PreTrainedModel:
    model.get_submodule("model.layers.1").__class__ = Scaled
    return model


def with_a_changed_part(model: PreTrainedModel) -> PreTrainedModel:
    model.get_submodule("model.layers.0.mlp").__class__ = ScaledMLP
    return model


def with_a_forward_of_its_own(model: PreTrainedModel) -> PreTrainedModel:
    attention = cast(Any, model.get_submodule("model.layers.0.self_attn"))
    object.__setattr__(attention, "forward", attention.forward)
    return model


def with_cross_attention(model: PreTrainedModel) -> PreTrainedModel:
    model.config.add_cross_attention = True
    return model


def on_the_meta_device(model: PreTrainedModel) -> nn.Module:
    return cast(nn.Module, cast(Any, tiny_llama()).to("meta"))


def plan(model: str = "llama, hidden 32, 2 layers", tmp_size: int = 2, blocks: int = 4) -> Plan:
    return Plan(model, tmp_size, (tmp_size,) * blocks)


REFUSALS = {
    "degree above the ranks": Refusal(
        partial(install, degree=4), 2, r"ConfigError: tmp_size=4 does not divide the 2 ranks; choose one of \[1, 2\]"
    ),
    "degree that does not divide": Refusal(
        partial(install, degree=3), 4, r"ConfigError: tmp_size=3 does not divide the 4 ranks; choose one of \[1, 2, 4\]"
    ),
    "tmp_size that does not divide": Refusal(
        partial(trainer, oases={"tmp_size": 3}),
        4,
        r"ConfigError: tmp_size=3 does not divide the 4 ranks; choose one of \[1, 2, 4\]",
    ),
    "degree that does not divide tmp_size": Refusal(
        partial(install, tmp_size=4, degree=3),
        4,
        "ConfigError: degree=3 does not divide tmp_size=4; choose a divisor of 4",
    ),
    "more ranks than heads": Refusal(
        partial(in_a_loop, few_heads),
        4,
        "ConfigError: 2 heads cannot be split over 4 ranks; choose a degree up to 2",
    ),
    "more ranks than features": Refusal(
        partial(in_a_loop, few_features), 4, "ConfigError: 3 MLP features cannot be split over 4 ranks"
    ),
    "unknown architecture": Refusal(
        partial(in_trainer, unknown),
        2,
        "UnsupportedModelError: model_type 'opt' has no family declaration; served are: .*llama",
    ),
    "unknown architecture, own loop": Refusal(
        partial(in_a_loop, unknown),
        2,
        "UnsupportedModelError: model_type 'opt' .*The README says how to declare one",
    ),
    "plan for another model": Refusal(
        partial(install, plan=plan("llama, hidden 64, 2 layers")),
        2,
        "ConfigError: the plan is for llama, hidden 64, 2 layers with 4 blocks, the model is llama, hidden 32, "
        "2 layers with 4; make a plan for this model, or leave `plan` out",
    ),
    "plan for more blocks": Refusal(
        partial(trainer, oases={"plan": plan(blocks=6)}),
        2,
        "ConfigError: the plan is for .* with 6 blocks, the model is .* with 4; make a plan for this model",
    ),
    "plan for more ranks": Refusal(
        partial(install, plan=plan(tmp_size=4), tmp_size=2),
        4,
        "ConfigError: the plan is for tmp_size=4, the run has tmp_size=2; set tmp_size=4, or make a plan for 2",
    ),
    "plan that is not there": Refusal(
        partial(install, plan="none.json"), 2, "ConfigError: plan none.json: .*No such file"
    ),
    "DDP around the model": Refusal(
        partial(in_a_loop, DistributedDataParallel),
        2,
        "UnsupportedModelError: DistributedDataParallel is not a transformers PreTrainedModel; hand over the model "
        "itself, before DDP, FSDP, DeepSpeed, torch.compile or PEFT wrap it",
    ),
    "DDP around the Trainer's model": Refusal(
        partial(in_trainer, DistributedDataParallel), 2, "UnsupportedModelError: .*DistributedDataParallel"
    ),
    "adapters": Refusal(
        partial(in_a_loop, with_adapters), 2, "UnsupportedModelError: .*PEFT adapters; merge them first"
    ),
    "quantised weights": Refusal(
        partial(in_a_loop, quantised), 2, "UnsupportedModelError: .*load it without quantization_config"
    ),
    "other linears": Refusal(
        partial(in_a_loop, partial(with_another_projection, "model.layers.1.mlp.up_proj")),
        2,
        "UnsupportedModelError: mlp.up_proj is a Rounded, neither nn.Linear nor Conv1D",
    ),
    "other linears in GPT-2": Refusal(
        partial(in_trainer, partial(with_another_projection, "transformer.h.1.attn.c_attn")),
        2,
        "UnsupportedModelError: attn.c_attn is a Rounded, neither nn.Linear nor Conv1D",
        "gpt2 tied",
    ),
    "layers that are changed": Refusal(
        partial(in_trainer, with_changed_layers), 2, "UnsupportedModelError: a layer is a Scaled of tests.integrations"
    ),
    "parts of layers that are changed": Refusal(
        partial(in_a_loop, with_a_changed_part), 2, "UnsupportedModelError: mlp is a ScaledMLP of tests.integrations"
    ),
    "a forward of its own": Refusal(
        partial(in_a_loop, with_a_forward_of_its_own),
        2,
        "UnsupportedModelError: self_attn is a LlamaAttention of transformers.* with a forward of its own",
    ),
    "other linears in BERT": Refusal(
        partial(in_trainer, partial(with_another_projection, "bert.encoder.layer.1.output.dense")),
        2,
        "UnsupportedModelError: output.dense is a Rounded, neither nn.Linear nor Conv1D",
        "bert row",
    ),
    "cross-attention in GPT-2": Refusal(
        partial(in_trainer, with_cross_attention), 2, "UnsupportedModelError: gpt2: cross-attention .*", "gpt2 tied"
    ),
    "cross-attention in BERT": Refusal(
        partial(in_trainer, with_cross_attention), 2, "UnsupportedModelError: bert: cross-attention .*", "bert"
    ),
    "plan of LLaMA for GPT-2": Refusal(
        partial(trainer, oases={"plan": plan()}),
        2,
        "ConfigError: the plan is for llama, hidden 32, 2 layers with 4 blocks, the model is gpt2, hidden 40, 2 layers",
        "gpt2 tied",
    ),
    "plan for more blocks of BERT": Refusal(
        partial(trainer, oases={"plan": plan("bert, hidden 40, 2 layers", blocks=6)}),
        2,
        "ConfigError: the plan is for .* with 6 blocks, the model is .* with 4; make a plan for this model",
        "bert row",
    ),
    "meta tensors": Refusal(
        partial(in_a_loop, on_the_meta_device), 2, "UnsupportedModelError: .*is a meta tensor; load the model whole"
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(ranks: Worlds, name: str) -> None:
    attempt, world, expected, family = REFUSALS[name]
    for said, whole in ranks(world).run(refusal, attempt, family, timeout_s=20):
        assert re.match(expected, said, re.DOTALL), said
        assert whole, "weights were touched before the refusal"


def after_conversion() -> list[str]:
    """On a rank: what a converted model refuses."""
    accelerator = Accelerator(cpu=True)
    model = cast(Any, install(tiny_llama(), accelerator))
    attempts: list[Callable[[], object]] = [
        lambda: model.resize_token_embeddings(120),
        lambda: model.save_pretrained("export", variant="fp16"),
        lambda: install(model, accelerator),
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
        except OasesError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_a_converted_model_refuses(ranks: Worlds) -> None:
    for resize, save, again in ranks(2).run(after_conversion):
        assert resize.startswith("UnsupportedModelError: resize_token_embeddings after conversion: resize before")
        assert save == "ConfigError: save_pretrained of a converted model does not take variant"
        assert again == "UnsupportedModelError: LlamaForCausalLM is converted already; convert a model once"
