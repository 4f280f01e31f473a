"""NCCL's settings. They are the user's: they are read here, and changed nowhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

FILES = (Path("/etc/nccl.conf"), Path.home() / ".nccl.conf")

Settings = tuple[tuple[str, str], ...]


def settings_here(environment: Mapping[str, str]) -> Settings:
    """What holds on this machine, for a process of this ``environment``."""
    return settings(environment, [path.read_text(errors="replace") for path in FILES if path.is_file()])


def settings(environment: Mapping[str, str], files: Sequence[str]) -> Settings:
    """The settings that matter here; ``files`` are the contents of NCCL's, which the environment overrides.

    Args:
        environment: of this process.
        files: lines of ``NAME=VALUE``; a later file overrides an earlier one.
    """
    pairs = re.findall(r"^\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", "\n".join(files), re.MULTILINE)
    told = {n: v for n, v in environment.items() if re.match(r"(TORCH_)?NCCL_|GLOO_|CUDA_VISIBLE_DEVICES$", n)}
    return tuple(sorted((dict(pairs) | told).items()))


def p2p_disabled_by(settings: Settings) -> str | None:
    """The setting that keeps NCCL from copies between GPUs; None for none."""
    told = dict(settings)
    if told.get("NCCL_P2P_DISABLE") not in (None, "", "0"):
        return f"NCCL_P2P_DISABLE={told['NCCL_P2P_DISABLE']}"
    if told.get("NCCL_P2P_LEVEL", "").upper() in ("LOC", "0"):
        return f"NCCL_P2P_LEVEL={told['NCCL_P2P_LEVEL']}"
    return None
