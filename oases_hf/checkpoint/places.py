"""Which part of which named tensor a rank holds."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..models.converted import Converted
from ..parallel.sharding import Slice
from .stored import Stored

PARAMETERS, OPTIMIZER, RANDOM = "parameters", "optimizer", "random"
"""What the names of tensors of training state begin with."""


def place_of(state: Converted, name: str) -> Slice | None:
    """What this rank holds of a tensor; None when it is all of it."""
    layout = state.layouts.get(name)
    return layout.slices[state.mesh.tmp.rank] if layout is not None and layout.sharded else None


def read_part(stored: Stored, key: str, state: Converted, name: str, tensor: Tensor) -> Tensor:
    """This rank's part of what is stored under ``key`` for a tensor of the model, or something of its shape.

    Raises:
        CheckpointError: it is missing, or of another shape.
    """
    wanted = state.layouts[name].shape if name in state.layouts else tuple(tensor.shape)
    for part in stored.parts.get(key, ()):
        if part.shape != wanted:
            raise CheckpointError(f"{key} has shape {part.shape}, and the model's has {wanted}")
    return stored.read(key, place_of(state, name))


def parameter_names(model: PreTrainedModel) -> dict[nn.Parameter, str]:
    """The name of each parameter; of tied ones the first."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
        if isinstance(parameter, nn.Parameter):
            names.setdefault(parameter, name)
    return names
