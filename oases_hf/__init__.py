"""Overlapped tensor model parallelism for Hugging Face models on machines with slow links."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import save_pretrained
    from .config import OasesConfig
    from .integrations.accelerate import OasesPlugin
    from .integrations.loading import load_pretrained
    from .integrations.trainer import OasesCallback
    from .plan import Plan

__all__ = ["OasesCallback", "OasesConfig", "OasesPlugin", "Plan", "load_pretrained", "save_pretrained"]

_HOMES = {
    "OasesCallback": ".integrations.trainer",
    "OasesConfig": ".config",
    "OasesPlugin": ".integrations.accelerate",
    "Plan": ".plan",
    "load_pretrained": ".integrations.loading",
    "save_pretrained": ".checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: schedules and plans need neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
