"""Other libraries' tensor parallel layers, where those are installed: Megatron-Core's and DeepSpeed Domino's.

Each takes the place of the layers of a LlamaModel and computes what they compute, from the same weights: embedding,
last norm and rotary frequencies are the model's own, whole on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import rotate_half

from oases_hf.errors import ConfigError
from scripts.bench.contenders import Training, Work, precise
from scripts.bench.tasks import NOT_INSTALLED
from scripts.bench.timing import World


def imported(package: str, *modules: str) -> list[Any]:
    """The modules of a package that this project does not depend on; ConfigError where they cannot be imported."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what else is not installed
            return [import_module(module) for module in modules]
    except ImportError as error:
        raise ConfigError(f"{package} {NOT_INSTALLED}: {error}") from error


@dataclass(frozen=True)
class Place:
    """Where a library keeps a rank's shard of a parameter of a LLaMA layer.

    Attributes:
        name: of the library's parameter; its first dimension is ``groups`` × ``parts`` × rows.
        part: of each group, which the shard is.
        split: the dimension of the whole parameter that is split over ranks; None: every rank has all of it.
    """

    name: str
    groups: int = 1
    part: int = 0
    parts: int = 1
    split: int | None = 0

    def put(self, held: Tensor, whole: Tensor, rank: int, ranks: int) -> None:
        """Write a rank's shard of the whole parameter to the parameter that it holds."""
        shard = whole if self.split is None else whole.chunk(ranks, self.split)[rank]
        mine = self._part(held)
        mine.copy_(shard.reshape(mine.shape))

    def whole(self, held: Sequence[Tensor]) -> Tensor:
        """The whole parameter, or its gradient, from what the ranks hold."""
        shards = [self._part(each).reshape(-1, *each.shape[1:]) for each in held]
        return shards[0] if self.split is None else torch.cat(shards, self.split)

    def _part(self, held: Tensor) -> Tensor:
        grouped: Tensor = held.unflatten(0, (self.groups, self.parts, -1))
        return grouped[:, self.part]


def places(qkv: str, projection: str, first: str, second: str, norm: str, heads: int) -> dict[str, Place]:
    """Those of a LLaMA layer, in libraries that keep queries, keys and values by head, and gate over up.

    Args:
        heads: of one rank.
    """
    found = {
        "input_layernorm": Place("input_layernorm", split=None),
        "post_attention_layernorm": Place(norm, split=None),
        "self_attn.o_proj": Place(projection, split=1),
        "mlp.down_proj": Place(second, split=1),
    }
    found |= {f"self_attn.{each}_proj": Place(qkv, heads, part, 3) for part, each in enumerate("qkv")}
    return found | {f"mlp.{each}_proj": Place(first, 1, part, 2) for part, each in enumerate(("gate", "up"))}


class Stack(nn.Module):
    """A library's layers, which take ``[S, B, H]``, as the one layer of a LlamaModel.

    Args:
        block: has ``layers``.
        rotary: what they take for rotary embeddings.
    """

    def __init__(self, block: nn.Module, rotary: Any) -> None:
        super().__init__()
        self.block, self._rotary = block, rotary

    def forward(self, hidden_BSH: Tensor, **_: Any) -> Tensor:
        """From and to ``[B, S, H]``."""
        hidden_SBH = hidden_BSH.transpose(0, 1).contiguous()
        output: Tensor = self.block(hidden_SBH, attention_mask=None, rotary_pos_emb=self._rotary)
        return output.transpose(0, 1).contiguous()

    def parameter(self, layer: int, place: Place) -> nn.Parameter:
        """One of the library's."""
        return self.block.get_parameter(f"layers.{layer}.{place.name}.weight")


class Rival(Training):
    """A LlamaModel around a library's layers, which take their weights from its own."""

    def __init__(
        self, name: str, what: str, model: LlamaModel, stack: Stack, places: dict[str, Place], work: Work, world: World
    ) -> None:
        super().__init__(name, what, model, work, world, slice(0, work.batch))
        self.stack, self._places = stack, places
        with torch.no_grad():
            for index, layer in enumerate(model.layers):
                for name, place in places.items():
                    held, whole = stack.parameter(index, place), layer.get_parameter(f"{name}.weight")
                    place.put(held, whole, world.rank, world.size)
        model.layers = nn.ModuleList([stack])

    def whole_grad(self, name: str, shape: Sequence[int]) -> Tensor:
        if not name.startswith("layers."):
            return super().whole_grad(name, shape)
        _, layer, inside = name.removesuffix(".weight").split(".", 2)
        place = self._places[inside]
        grad = cast(Tensor, self.stack.parameter(int(layer), place).grad)
        return precise(place.whole(self._world.gather(grad.cpu())))


def angles(model: LlamaModel, work: Work) -> Tensor:
    """By which rotary embeddings rotate the two halves of a head, ``[S, D]``, in float32."""
    frequencies = cast(Tensor, model.rotary_emb.inv_freq)
    positions = torch.arange(work.ids.shape[1], device=frequencies.device)
    return torch.outer(positions, frequencies).repeat(1, 2)


class MegatronCore(Rival):
    """Megatron-Core's layers recompute as their configuration says in each pass."""

    def prepare(self) -> None:
        config = cast(Any, self.stack.block.config)
        config.recompute_granularity = "full" if self.recompute == "full" else None
        super().prepare()


class Attention(nn.Module):
    """Causal attention by torch, for layers that bring none but their own, unfused one."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query_SBND: Tensor, key_SBND: Tensor, value_SBND: Tensor, *_: Any, **__: Any) -> Tensor:
        """To ``[S, B, N × D]``."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query_SBND, key_SBND, value_SBND))
        output_BNSD = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return output_BNSD.permute(2, 0, 1, 3).flatten(2)


def megatron_core(work: Work, world: World) -> MegatronCore:
    """Megatron-Core's layers, as they are without Transformer Engine and Apex."""
    specs, blocks, configs, groups = imported(
        "megatron-core",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.transformer.transformer_block",
        "megatron.core.transformer.transformer_config",
        "megatron.core.process_groups_config",
    )
    model = cast(LlamaModel, work.model())
    layer = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = Attention
    alone, _ = dist.new_subgroups(1, backend="gloo")  # rotary embeddings ask for a context parallel group
    ranks = groups.ProcessGroupCollection(tp=dist.group.WORLD, pp=None, cp=alone)
    settings = configs.TransformerConfig(
        **_sizes(work),
        normalization="RMSNorm",
        activation_func=functional.silu,
        gated_linear_unit=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        tensor_model_parallel_size=world.size,
        bf16=work.dtype == torch.bfloat16,
        use_cpu_initialization=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    block = blocks.TransformerBlock(settings, layer, post_layer_norm=False, pg_collection=ranks)
    block.to(work.dtype).to_empty(device=work.device)
    where = places(
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "pre_mlp_layernorm",
        settings.num_attention_heads // world.size,
    )
    stack = Stack(block, angles(model, work)[:, None, None])
    what = "its local layers; torch's fused attention for its own"
    return MegatronCore("megatron-core", what, model, stack, where, work, world)


class Domino(Rival):
    """DeepSpeed Domino's layers, whose last collectives stay theirs, and hold memory, until they are taken."""

    handles: dict[str, Any]

    def step(self) -> Tensor:
        output = super().step()
        self.handles.update(dict.fromkeys(self.handles))
        return output


def rotated(states_BNSD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """With rotary embeddings of ``[S, D]``."""
    cos, sin = cos_sin
    turned: Tensor = rotate_half(states_BNSD)
    return states_BNSD * cos + turned * sin


def gated(gate_up: Tensor) -> Tensor:
    """SwiGLU; gates are the first half of the last dimension."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def domino(work: Work, world: World) -> Domino:
    """DeepSpeed Domino's schedule and linear layers, with LLaMA's norms and activation for its LayerNorm and GELU."""
    blocks, linear = imported(
        "deepspeed", "deepspeed.runtime.domino.transformer", "deepspeed.runtime.domino.async_linear"
    )
    model, group = cast(LlamaModel, work.model()), dist.group.WORLD
    ranks = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: group, get_tensor_model_parallel_world_size=lambda: world.size
    )
    settings = SimpleNamespace(
        **_sizes(work),
        gated_linear_unit=False,
        apply_residual_connection_post_layernorm=False,
        domino_intra_layer_overlap=False,
        init_method=None,
        output_layer_init_method=None,
    )
    kind = blocks.ModelType.encoder_or_decoder
    block = blocks.DominoTransformer(settings, ranks, rotated, kind, post_layer_norm=False)
    for layer in block.layers:
        sizes = settings.hidden_size, 2 * settings.ffn_hidden_size // world.size
        layer.linear_fc1 = linear.DominoAsyncColumnParallelLinear(*sizes, group, settings, None, bias=False)
        layer.mlp_activation_func = gated
        layer.input_layernorm = nn.RMSNorm(settings.hidden_size, settings.layernorm_epsilon)
        layer.post_attention_layernorm = nn.RMSNorm(settings.hidden_size, settings.layernorm_epsilon)
    block.to(work.device, work.dtype)
    where = places(
        "self_attention.query_key_value",
        "self_attention.dense",
        "linear_fc1",
        "linear_fc2",
        "post_attention_layernorm",
        settings.num_attention_heads // world.size,
    )
    turns = angles(model, work)
    cos_sin = turns.cos().to(work.dtype), turns.sin().to(work.dtype)
    what = "2 sub-batches; LLaMA's norms and activation for its own"
    contender = Domino("domino", what, model, Stack(block, (cos_sin, cos_sin)), where, work, world)
    contender.handles = blocks.DominoUtil.HANDLE_DIC
    return contender


def _sizes(work: Work) -> dict[str, Any]:
    """What both libraries call by the same names; weights are written to them afterwards."""
    config = work.config
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.hidden_size // config.num_attention_heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": work.dtype,
        "perform_initialization": False,
    }


RIVALS = {"megatron-core": megatron_core, "domino": domino}
