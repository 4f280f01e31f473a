"""The families there are."""

from .bert import BERT
from .family import Family
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX_PARALLEL, GPT_NEOX_SEQUENTIAL
from .llama import GEMMA, LLAMA, PHI3

FAMILIES: tuple[Family, ...] = (LLAMA, GEMMA, PHI3, GPT2, GPT_NEOX_PARALLEL, GPT_NEOX_SEQUENTIAL, BERT)
