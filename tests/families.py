"""Every family and head that is served, as tiny random models and the batches that fit them.

Heads, key/value heads, MLP features and words divide unevenly over 2 and 4 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from .tiny import IGNORE, Attention, Batch, batch, build

Head = Literal["words", "row", "token", "span", "none"]
Padding = Literal["none", "right", "left"]
PADDINGS: tuple[Padding, ...] = ("none", "right", "left")
LABELS = 3


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model type with a head.

    Attributes:
        model_type: of the config.
        auto: the class that makes the model.
        settings: of the config.
        dropouts: the settings that are probabilities of dropout.
        head: what labels are for: words, the row, each token, the span that answers; none where there is no loss.
        options: further arguments of the model.
        token_types: how many kinds of tokens batches tell apart.
        without_gradient: how names of parameters end whose exact gradient is zero: softmax ignores what all share.
        attentions: the implementations of attention it has.
    """

    model_type: str
    auto: Any
    settings: Mapping[str, Any]
    dropouts: tuple[str, ...] = ("attention_dropout",)
    head: Head = "words"
    options: Mapping[str, Any] = field(default_factory=dict)
    token_types: int = 0
    without_gradient: tuple[str, ...] = ()
    attentions: tuple[Attention, ...] = ("sdpa", "eager")

    def model(
        self,
        *,
        attn: str | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        dropout: float = 0.0,
        **settings: Any,
    ) -> PreTrainedModel:
        """The model, with its first implementation of attention unless told; ``settings`` are of its config."""
        given: dict[str, Any] = {"num_labels": LABELS} if self.head in ("row", "token") else {}
        given |= dict.fromkeys(self.dropouts, dropout)
        config = AutoConfig.for_model(self.model_type, **{**_COMMON, **self.settings, **given, **settings})
        return build(self.auto.from_config, config, attn or self.attentions[0], dtype, seed, **self.options)

    def batch(self, size: int, seq: int, *, padding: Padding = "none", seed: int = 0) -> Batch:
        """Inputs and labels; padding on the left mirrors that on the right."""
        rows = batch(size, seq, padded=padding != "none", seed=seed)
        generator = torch.Generator().manual_seed(seed + 1)
        words = rows.pop("labels")
        if self.token_types:
            rows["token_type_ids"] = torch.randint(self.token_types, (size, seq), generator=generator)
        if self.head == "words":
            rows["labels"] = words
        elif self.head == "token":
            drawn = torch.randint(LABELS, (size, seq), generator=generator)
            rows["labels"] = drawn.masked_fill(words == IGNORE, IGNORE)
        if padding == "left":
            rows = {name: tensor.flip(1) for name, tensor in rows.items()}
        if self.head == "row":
            rows["labels"] = torch.randint(LABELS, (size,), generator=generator)
        elif self.head == "span":
            for name in ("start_positions", "end_positions"):
                rows[name] = torch.randint(seq, (size,), generator=generator)
        return rows

    def has_gradient(self, name: str) -> bool:
        """Whether the exact gradient of a parameter differs from zero."""
        return not name.endswith(self.without_gradient)


_COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "use_cache": False,
}
_SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 50,
    "max_position_embeddings": 64,
}
_GROUPED: dict[str, Any] = {**_SIZES, "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3}
_WIDE: dict[str, Any] = {**_GROUPED, "head_dim": 8}  # heads together are wider than the stream
_MIXED: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_GPT2: dict[str, Any] = {"n_embd": 40, "n_layer": 2, "n_head": 5, "n_inner": 50, "n_positions": 64}
_GPT2_DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
_NEOX_DROPOUTS = ("attention_dropout", "hidden_dropout")
_BERT_DROPOUTS = ("attention_probs_dropout_prob", "hidden_dropout_prob")
_KEY_BIAS = "self.key.bias"  # scores of a query all move alike
_SPAN_BIASES = ("layer.1.output.LayerNorm.bias", "qa_outputs.bias")  # as do those of all positions


def _bert(auto: Any, head: Head, **rest: Any) -> Tiny:
    defaults = {"token_types": 2, "without_gradient": (_KEY_BIAS,)}
    return Tiny("bert", auto, _SIZES, _BERT_DROPOUTS, head, **{**defaults, **rest})


def _grouped(model_type: str, settings: Mapping[str, Any], **rest: Any) -> Tiny:
    return Tiny(model_type, AutoModelForCausalLM, settings, **rest)


FAMILIES: dict[str, Tiny] = {
    "llama": _grouped("llama", {**_GROUPED, "attention_bias": True, "mlp_bias": True}),
    "mistral": _grouped("mistral", {**_WIDE, "sliding_window": 5}),
    "qwen2": _grouped("qwen2", {**_GROUPED, "use_sliding_window": True, **_MIXED}),
    "qwen3": _grouped("qwen3", {**_WIDE, "attention_bias": True}),
    "gemma2": _grouped(
        "gemma2",
        {**_WIDE, **_MIXED, "attention_bias": True, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        attentions=("eager",),
    ),
    "gemma3": _grouped("gemma3_text", {**_WIDE, **_MIXED, "attention_bias": True, "query_pre_attn_scalar": 8}),
    "phi3": _grouped(
        "phi3",
        {**_SIZES, "num_attention_heads": 10, "num_key_value_heads": 5, "original_max_position_embeddings": 64},
        dropouts=("attention_dropout", "resid_pdrop"),
    ),
    "gpt2": _grouped("gpt2", {**_GPT2, "tie_word_embeddings": False}, dropouts=_GPT2_DROPOUTS),
    "gpt2 tied": _grouped("gpt2", {**_GPT2, "tie_word_embeddings": True}, dropouts=_GPT2_DROPOUTS),
    "gpt2 row": Tiny("gpt2", AutoModelForSequenceClassification, _GPT2, _GPT2_DROPOUTS, "row"),
    "neox": _grouped("gpt_neox", _SIZES, dropouts=_NEOX_DROPOUTS),
    "neox sequential": _grouped("gpt_neox", {**_SIZES, "use_parallel_residual": False}, dropouts=_NEOX_DROPOUTS),
    "bert": _bert(AutoModelForMaskedLM, "words"),
    "bert row": _bert(AutoModelForSequenceClassification, "row"),
    "bert token": _bert(AutoModelForTokenClassification, "token"),
    "bert span": _bert(AutoModelForQuestionAnswering, "span", without_gradient=(_KEY_BIAS, *_SPAN_BIASES)),
    "bert pooler": _bert(AutoModel, "none"),
    "bert bare": _bert(AutoModel, "none", options={"add_pooling_layer": False}),
    "roberta": Tiny(
        "roberta", AutoModelForMaskedLM, {**_SIZES, "type_vocab_size": 1}, _BERT_DROPOUTS, without_gradient=(_KEY_BIAS,)
    ),
}


def most_different(names: Iterable[str]) -> list[Any]:
    """Families for ``parametrize``: those that differ most in every run, the others when slow tests run too."""
    return [name if name in ("llama", "bert") else pytest.param(name, marks=pytest.mark.slow) for name in names]
