"""Reading and writing models on disk, where everything has Hugging Face names and full shapes."""

from .export import full_state_dict, save_pretrained
from .plain import load_export, load_plain_optimizer
from .reading import Checkpoint
from .state import Saving, finish

__all__ = [
    "Checkpoint",
    "Saving",
    "finish",
    "full_state_dict",
    "load_export",
    "load_plain_optimizer",
    "save_pretrained",
]
