"""LLaMA: pre-norm; attention and a gated MLP, one block each."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PretrainedConfig

from ..errors import ConfigError
from ..parallel.sharding import bounds, head_share
from .family import Block, Column, Family, Part, Row, Units


def _attention(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.self_attn(hidden_states=layer.input_layernorm(hidden), **context)[0])


def _mlp(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.mlp(layer.post_attention_layernorm(hidden)))


def _units(config: PretrainedConfig, degree: int, rank: int) -> Units:
    share = head_share(config.num_attention_heads, config.num_key_value_heads, degree, rank)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if degree > config.intermediate_size:
        raise ConfigError(f"{config.intermediate_size} MLP features cannot be split over {degree} ranks")
    return {
        "query": Part(share.query.scaled(width), config.num_attention_heads * width),
        "key_value": Part(share.key_value.scaled(width), config.num_key_value_heads * width),
        "ffn": Part(bounds(config.intermediate_size, degree, rank), config.intermediate_size),
    }


def _localize(layer: Any, units: Units) -> None:
    layer.self_attn.num_key_value_groups = units["query"].span.size // units["key_value"].span.size


LLAMA = Family(
    model_types=("llama",),
    stack="layers",
    blocks=(
        Block(
            "attention",
            entries=("input_layernorm",),
            run=_attention,
            linears={
                "self_attn.q_proj": Column("query"),
                "self_attn.k_proj": Column("key_value"),
                "self_attn.v_proj": Column("key_value"),
                "self_attn.o_proj": Row("query"),
            },
        ),
        Block(
            "mlp",
            entries=("post_attention_layernorm",),
            run=_mlp,
            linears={"mlp.gate_proj": Column("ffn"), "mlp.up_proj": Column("ffn"), "mlp.down_proj": Row("ffn")},
        ),
    ),
    units=_units,
    localize=_localize,
    per_sample=("attention_mask", "position_ids", "position_embeddings"),
    cache=("cache", "past_key_values"),
)
