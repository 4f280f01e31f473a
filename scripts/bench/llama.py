"""The LLaMA that benchmarks train, by the sizes that their command lines give."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def config_of(sizes: Any, vocab: int, seq: int) -> LlamaConfig:
    """Of what has ``hidden``, ``ffn``, ``layers`` and ``heads``: a command line's options, or a shape."""
    return LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=seq,
        vocab_size=vocab,
        use_cache=False,
    )


def build(config: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
    """The whole model, alike on all ranks."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)
