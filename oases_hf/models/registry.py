"""The families there are."""

from .family import Family
from .llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)
