"""GPT-NeoX: queries, keys and values interleaved per head; attention and MLP side by side, or one after the other."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PretrainedConfig

from .family import Block, Column, Family, Part, Row, Units, even_units


def _attention(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    output = layer.attention(layer.input_layernorm(hidden), **context)[0]
    return cast(Tensor, layer.post_attention_dropout(output))


def _mlp(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return cast(Tensor, layer.post_mlp_dropout(layer.mlp(layer.post_attention_layernorm(hidden))))


def _both(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    return _attention(layer, hidden, **context) + _mlp(layer, hidden)


def _units(config: PretrainedConfig, degree: int, rank: int) -> Units:
    width = config.hidden_size // config.num_attention_heads
    even = even_units(degree, rank, heads=config.num_attention_heads, head_width=width, ffn=config.intermediate_size)
    packed = Part(even["heads"].span.scaled(3), 3 * even["heads"].of)
    return {**even, "packed": packed}


def _localize(layer: Any, units: Units) -> None:
    """Nothing: the code reads head counts from shapes."""


_ATTENTION: dict[str, Column | Row] = {"attention.query_key_value": Column("packed"), "attention.dense": Row("heads")}
_MLP: dict[str, Column | Row] = {"mlp.dense_h_to_4h": Column("ffn"), "mlp.dense_4h_to_h": Row("ffn")}


def _family(blocks: tuple[Block, ...], parallel: bool) -> Family:
    def refuse(config: PretrainedConfig) -> str | None:
        return None if config.use_parallel_residual is parallel else f"use_parallel_residual={not parallel}"

    return Family(
        model_types=("gpt_neox",),
        stack="layers",
        blocks=blocks,
        units=_units,
        localize=_localize,
        per_sample=("attention_mask", "position_ids", "position_embeddings"),
        cache=("layer_past",),
        refuse=refuse,
    )


# Side by side, attention and MLP share one all-reduce per direction.
GPT_NEOX_PARALLEL = _family(
    (
        Block(
            "layer",
            ("input_layernorm", "post_attention_layernorm"),
            _both,
            {**_ATTENTION, **_MLP},
            dropouts=("post_attention_dropout", "post_mlp_dropout"),
        ),
    ),
    parallel=True,
)
GPT_NEOX_SEQUENTIAL = _family(
    (
        Block("attention", ("input_layernorm",), _attention, _ATTENTION, dropouts=("post_attention_dropout",)),
        Block("mlp", ("post_attention_layernorm",), _mlp, _MLP, dropouts=("post_mlp_dropout",)),
    ),
    parallel=False,
)
