"""``oases-hf verify``: whether training with this package equals plain Hugging Face, measured on the user's machine."""
