"""Reading and writing models on disk, where everything has Hugging Face names and full shapes."""

from .export import full_state_dict, save_pretrained

__all__ = ["full_state_dict", "save_pretrained"]
