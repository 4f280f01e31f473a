"""Tiny random models and batches, a function of their arguments only: equal on every rank and in every process.

Every parameter is drawn anew, since HF's biases of zero and norm weights of one hide faults in their handling,
and weights are large enough for attention to be far from uniform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

Attention = Literal["sdpa", "eager"]
Batch = dict[str, Tensor]

IGNORE = -100


def tiny_llama(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 32,
    layers: int = 2,
    vocab: int = 99,
    ffn: int = 48,
    bias: bool = True,
    tied: bool = False,
    attn: Attention = "sdpa",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> PreTrainedModel:
    """Return a LlamaForCausalLM; ``hidden`` must be an even multiple of ``heads``."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        attention_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=tied,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build(AutoModelForCausalLM.from_config, config, attn, dtype, seed)


def batch(size: int, seq: int, vocab: int = 99, *, padded: bool = False, seed: int = 0) -> Batch:
    """Return input_ids, attention_mask and labels, each ``[size, seq]``.

    A fifth of the labels is masked, and those of padding. Padded rows (on the right, the first row is full) differ
    in length, so that rows have unequal numbers of labels; each has at least one that survives the shift.
    """
    if seq < 2:
        raise ValueError(f"seq is {seq}; a row needs two tokens to have a label after the shift")
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, vocab, (size, seq), generator=generator)
    lengths = torch.full((size,), seq)
    if padded:
        lengths[1:] = torch.randint(2, seq, (size - 1,), generator=generator) if seq > 2 else 2
    mask = torch.arange(seq) < lengths[:, None]
    counted = mask & (torch.rand((size, seq), generator=generator) > 0.2)
    counted[:, 1] = True
    labels = input_ids.masked_fill(~counted, IGNORE)
    return {"input_ids": input_ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter anew: matrices of unit gain, biases around 0, norm weights around 1 (tied ones once)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() > 1:
            noise /= parameter.shape[-1] ** 0.5
        elif name.endswith("bias"):
            noise *= 0.3
        else:
            noise = 1 + 0.3 * noise
        with torch.no_grad():
            parameter.copy_(noise)


def build(
    make: Callable[..., object], config: PretrainedConfig, attn: str, dtype: torch.dtype, seed: int, **options: object
) -> PreTrainedModel:
    """Make a model of the config, its parameters drawn anew."""
    with torch.random.fork_rng(devices=[]):  # HF initialises from the global generator
        model = cast(PreTrainedModel, make(config, dtype=dtype, attn_implementation=attn, **options))
    randomise(model, seed)
    return model
