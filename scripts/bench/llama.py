"""The LLaMA that benchmarks train, by the sizes that their command lines give."""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def config_of(options: argparse.Namespace, vocab: int, seq: int) -> LlamaConfig:
    """Of ``hidden``, ``ffn``, ``layers`` and ``heads``."""
    return LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        max_position_embeddings=seq,
        vocab_size=vocab,
        use_cache=False,
    )


def build(config: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
    """The whole model, alike on all ranks."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)
