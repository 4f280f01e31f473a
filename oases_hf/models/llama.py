"""LLaMA and its relatives: pre-norm; grouped-query attention and a gated MLP, one block each."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import Tensor
from transformers import PretrainedConfig

from ..errors import ConfigError
from ..parallel.sharding import bounds, head_share
from .family import Block, Column, Family, Join, Part, Row, Units
from .reading import head_width


def _attention(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.self_attn(hidden_states=layer.input_layernorm(hidden), **context)[0])


def _mlp(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.mlp(layer.post_attention_layernorm(hidden)))


def _gemma_mlp(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.mlp(layer.pre_feedforward_layernorm(hidden)))


def _phi_attention(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.resid_attn_dropout(_attention(layer, hidden, **context)))


def _phi_mlp(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.resid_mlp_dropout(_mlp(layer, hidden)))


def _units(config: PretrainedConfig, degree: int, rank: int) -> Units:
    share = head_share(config.num_attention_heads, config.num_key_value_heads, degree, rank)
    width = head_width(config)
    ffn = config.intermediate_size
    if degree > ffn:
        raise ConfigError(f"{ffn} MLP features cannot be split over {degree} ranks; choose a degree up to {ffn}")
    return {
        "query": Part(share.query.scaled(width), config.num_attention_heads * width),
        "key_value": Part(share.key_value.scaled(width), config.num_key_value_heads * width),
        "ffn": Part(bounds(ffn, degree, rank), ffn),
    }


def _packed_units(config: PretrainedConfig, degree: int, rank: int) -> Units:
    """As ``_units``; a matrix that packs queries, keys and values cannot have shared and unshared parts."""
    if degree > config.num_key_value_heads:
        raise ConfigError(
            f"{config.num_key_value_heads} key/value heads, packed with the queries, cannot be split over {degree} "
            f"ranks; choose a degree up to {config.num_key_value_heads}"
        )
    return _units(config, degree, rank)


def _localize(layer: Any, units: Units) -> None:
    layer.self_attn.num_key_value_groups = units["query"].span.size // units["key_value"].span.size


def _localize_packed(layer: Any, units: Units) -> None:
    _localize(layer, units)
    attention = layer.self_attn
    # Its forward finds where queries end from the config.
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads = units["query"].span.size // attention.head_dim
    attention.num_key_value_heads = units["key_value"].span.size // attention.head_dim


_ATTENTION: dict[str, Column | Row] = {
    "self_attn.q_proj": Column("query"),
    "self_attn.k_proj": Column("key_value"),
    "self_attn.v_proj": Column("key_value"),
    "self_attn.o_proj": Row("query"),
}
_MLP: dict[str, Column | Row] = {
    "mlp.gate_proj": Column("ffn"),
    "mlp.up_proj": Column("ffn"),
    "mlp.down_proj": Row("ffn"),
}
_PACKED_ATTENTION: dict[str, Column | Row] = {
    "self_attn.qkv_proj": Column("query", "key_value", "key_value"),
    "self_attn.o_proj": Row("query"),
}
_PACKED_MLP: dict[str, Column | Row] = {"mlp.gate_up_proj": Column("ffn", "ffn"), "mlp.down_proj": Row("ffn")}

_PER_SAMPLE = ("attention_mask", "position_ids", "position_embeddings")
_CACHE = ("cache", "past_key_values")

LLAMA = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    stack="layers",
    blocks=(
        Block("attention", ("input_layernorm",), _attention, _ATTENTION),
        Block("mlp", ("post_attention_layernorm",), _mlp, _MLP),
    ),
    units=_units,
    localize=_localize,
    per_sample=_PER_SAMPLE,
    cache=_CACHE,
    rms_norms=True,
)

GEMMA = Family(
    model_types=("gemma2", "gemma3_text"),
    stack="layers",
    blocks=(
        Block("attention", ("input_layernorm",), _attention, _ATTENTION, Join("post_attention_layernorm", of="output")),
        Block("mlp", ("pre_feedforward_layernorm",), _gemma_mlp, _MLP, Join("post_feedforward_layernorm", of="output")),
    ),
    units=_units,
    localize=_localize,
    per_sample=_PER_SAMPLE,
    cache=_CACHE,
)

PHI3 = Family(
    model_types=("phi3",),
    stack="layers",
    blocks=(
        Block(
            "attention",
            ("input_layernorm",),
            _phi_attention,
            _PACKED_ATTENTION,
            dropouts=("resid_attn_dropout",),
        ),
        Block("mlp", ("post_attention_layernorm",), _phi_mlp, _PACKED_MLP, dropouts=("resid_mlp_dropout",)),
    ),
    units=_packed_units,
    localize=_localize_packed,
    per_sample=_PER_SAMPLE,
    cache=_CACHE,
    rms_norms=True,
)
