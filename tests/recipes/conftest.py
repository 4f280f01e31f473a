"""Fixtures of the recipes' tests."""

from __future__ import annotations

import string

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per character."""
    vocabulary = {character: index for index, character in enumerate(["~pad~", "~end~", *string.printable])}
    characters = Tokenizer(WordLevel(vocabulary, unk_token="~pad~"))
    characters.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="~pad~", eos_token="~end~")
