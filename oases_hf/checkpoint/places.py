"""Which part of which named tensor a rank holds."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ..models.converted import Converted
from ..parallel.sharding import Slice

PARAMETERS, OPTIMIZER, RANDOM = "parameters", "optimizer", "random"
"""What the names of tensors of training state begin with."""


def place_of(state: Converted, name: str) -> Slice | None:
    """What this rank holds of a tensor; None when it is all of it."""
    layout = state.layouts.get(name)
    return layout.slices[state.mesh.tmp.rank] if layout is not None and layout.sharded else None


def parameter_names(model: PreTrainedModel) -> dict[nn.Parameter, str]:
    """The name of each parameter; of tied ones the first."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
        if isinstance(parameter, nn.Parameter):
            names.setdefault(parameter, name)
    return names
