"""Reading what plain Hugging Face has written: a model's folder, and the optimizer of a Trainer of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import CheckpointError
from ..models.converted import Converted, converted
from .agreement import together
from .export import named_tensors
from .files import of_folder
from .names import found_under
from .places import parameter_names, read_part
from .stored import Stored


def export_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder.

    Raises:
        CheckpointError: there are none, or the index names files elsewhere.
    """
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    if not (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        raise CheckpointError(
            f"{folder} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; choose another folder"
        )
    return files_of_index(folder / SAFE_WEIGHTS_INDEX_NAME)


def files_of_index(index: Path) -> list[Path]:
    """The files that an index of a folder names; raises CheckpointError if it is damaged, or leads elsewhere."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error!r}); restore it") from error
    for name in names:
        if not of_folder(name):
            raise CheckpointError(f"{index} names {name!r}, which is no file of this folder; refused")
    return [index.parent / name for name in names]


def load_export(model: PreTrainedModel, folder: Path) -> None:
    """Overwrite the tensors of a converted model with those of a model's folder; every rank must call it.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or a file cannot be read; all ranks raise.
    """
    state = converted(model)
    with together(state.mesh, f"{folder} cannot be loaded"), torch.no_grad():
        stored = Stored(export_files(folder))
        for name, tensor, keys in stored_under(model, stored):
            tensor.copy_(read_part(stored, keys[0] if keys else name, state, name, tensor))


def stored_under(model: PreTrainedModel, stored: Stored) -> Iterator[tuple[str, Tensor, list[str]]]:
    """Each tensor of ``model``, its first name, and what it is called in files: more than once when ties are saved."""
    found = found_under(model, stored.parts)
    for names, tensor in named_tensors(model):
        yield names[0], tensor, list(dict.fromkeys(found[name] for name in names if name in found))


def load_plain_optimizer(model: PreTrainedModel, optimizer: Optimizer, file: Path) -> None:
    """Give ``optimizer`` the state that one process has saved with ``torch.save``; every rank must call it.

    Its groups must have the same parameters in the same order, as a Trainer's of the same model have.

    Raises:
        CheckpointError: they do not, or the file cannot be read; all ranks raise.
    """
    state = converted(model)
    with together(state.mesh, f"{file} cannot be loaded"):
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        theirs = [len(group["params"]) for group in saved["param_groups"]]
        ours = [len(group["params"]) for group in optimizer.param_groups]
        if theirs != ours:
            raise CheckpointError(f"{file.name} has groups of {theirs} parameters, and the optimizer of {ours}")
        names = parameter_names(model)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept = {
            i: {key: _local(state, names[p], key, value) for key, value in saved["state"].get(i, {}).items()}
            for i, p in enumerate(parameters)
            if not state.gradients.ownership.elsewhere(p)
        }
        optimizer.load_state_dict({**saved, "state": {i: each for i, each in kept.items() if each}})


def _local(state: Converted, name: str, key: str, value: Any) -> Any:
    """This rank's part of what an optimizer keeps of a parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    layout = state.layouts[name]
    if tuple(value.shape) != layout.shape:
        raise CheckpointError(f"{key} of {name} has shape {tuple(value.shape)}, and the parameter has {layout.shape}")
    return layout.local(value, state.mesh.tmp.rank).clone()
