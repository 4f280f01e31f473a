"""GPT-2: pre-norm; linears are Conv1D, queries, keys and values packed one behind the other."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PretrainedConfig

from .family import Block, Column, Family, Row, Units, even_units


def _attention(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.attn(layer.ln_1(hidden), **context)[0])


def _mlp(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.mlp(layer.ln_2(hidden)))


def _units(config: PretrainedConfig, degree: int, rank: int) -> Units:
    width = config.hidden_size // config.num_attention_heads
    inner = config.n_inner if config.n_inner is not None else 4 * config.hidden_size
    return even_units(degree, rank, heads=config.num_attention_heads, head_width=width, ffn=inner)


def _localize(layer: Any, units: Units) -> None:
    layer.attn.split_size = units["heads"].span.size
    layer.attn.num_heads = layer.attn.split_size // layer.attn.head_dim


def _refuse(config: PretrainedConfig) -> str | None:
    return "cross-attention (add_cross_attention=True) is not supported" if config.add_cross_attention else None


GPT2 = Family(
    model_types=("gpt2",),
    stack="h",
    blocks=(
        Block(
            "attention",
            entries=("ln_1",),
            run=_attention,
            linears={"attn.c_attn": Column("heads", "heads", "heads"), "attn.c_proj": Row("heads")},
        ),
        Block("mlp", entries=("ln_2",), run=_mlp, linears={"mlp.c_fc": Column("ffn"), "mlp.c_proj": Row("ffn")}),
    ),
    units=_units,
    localize=_localize,
    per_sample=("attention_mask", "position_ids"),
    cache=("cache", "past_key_values"),
    positional=("cache", "attention_mask", "encoder_hidden_states"),
    attention_dropout="attn_pdrop",
    own_dropouts=("attn.attn_dropout",),
    refuse=_refuse,
)
