"""BERT and RoBERTa: post-norm; the norm behind each block is of the stream and the block's output together."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PretrainedConfig

from .family import Block, Column, Family, Join, Row, Units, even_units


def _attention(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    output = layer.attention.output
    return cast(Tensor, output.dropout(output.dense(layer.attention.self(hidden, **context)[0])))


def _mlp(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.output.dropout(layer.output.dense(layer.intermediate(hidden))))


def _units(config: PretrainedConfig, degree: int, rank: int) -> Units:
    width = config.hidden_size // config.num_attention_heads
    return even_units(degree, rank, heads=config.num_attention_heads, head_width=width, ffn=config.intermediate_size)


def _localize(layer: Any, units: Units) -> None:
    attention = layer.attention.self
    attention.all_head_size = units["heads"].span.size
    attention.num_attention_heads = attention.all_head_size // attention.attention_head_size


def _refuse(config: PretrainedConfig) -> str | None:
    if config.add_cross_attention:
        return "cross-attention (add_cross_attention=True) is not supported"
    return "chunk_size_feed_forward is not supported; set it to 0" if config.chunk_size_feed_forward else None


BERT = Family(
    model_types=("bert", "roberta"),
    stack="encoder.layer",
    blocks=(
        Block(
            "attention",
            entries=("attention.self",),
            run=_attention,
            linears={
                "attention.self.query": Column("heads"),
                "attention.self.key": Column("heads"),
                "attention.self.value": Column("heads"),
                "attention.output.dense": Row("heads"),
            },
            join=Join("attention.output.LayerNorm", of="sum"),
        ),
        Block(
            "mlp",
            entries=("intermediate",),
            run=_mlp,
            linears={"intermediate.dense": Column("ffn"), "output.dense": Row("ffn")},
            join=Join("output.LayerNorm", of="sum"),
        ),
    ),
    units=_units,
    localize=_localize,
    per_sample=("attention_mask", "position_ids"),
    cache=("cache", "past_key_values"),
    positional=("attention_mask", "encoder_hidden_states"),
    attention_dropout="attention_probs_dropout_prob",
    own_dropouts=("attention.self.dropout",),
    refuse=_refuse,
)
