"""The state of the random generators of a process, as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def capture() -> dict[str, Tensor]:
    """The state of Python's, NumPy's and torch's generators, that of the current GPU included."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[str, Any, int, int, float], np.random.get_state())
    if (version, kind) != (3, "MT19937"):
        raise ValueError(f"random generators of kinds {version} and {kind} are not known")
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: Mapping[str, Tensor]) -> None:
    """Put the generators where :func:`capture` found them; that of a GPU only where there is one."""
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(states["numpy_gauss"])))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
