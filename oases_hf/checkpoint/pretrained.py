"""A pretrained model of which every rank reads its part only.

It is made without weights, split as its plan says, and each rank then reads the slices that it holds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..errors import CheckpointError
from ..models.converted import converted
from .agreement import agree, noting
from .export import named_tensors
from .places import read_part
from .plain import stored_under
from .stored import Stored

log = logging.getLogger(__name__)

BUFFERS_ONCE_SAVED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Of buffers that files of older versions have, and models make by themselves now."""


class Pretrained:
    """The weights of a model that was made without any.

    Args:
        model: on the meta device.
        stored: tensors of this model, of its base model, or of a model that has it as its base.
        where: what messages call them.

    Attributes:
        model: as given.
        missing: what ``model`` has and ``stored`` has not.
        unexpected: the other way round.

    Raises:
        CheckpointError: nothing of the model is there, or a tensor is of another shape.
    """

    def __init__(self, model: PreTrainedModel, stored: Stored, where: Path) -> None:
        self.model, self._stored, self._where = model, stored, where
        self._keys: dict[str, list[str]] = {}  # of a tensor's first name
        self.missing: list[str] = []
        for name, tensor, keys in stored_under(model, stored):
            if not keys:
                self.missing.append(name)
                continue
            self._keys[name] = keys
            key, shape = keys[0], stored.parts[keys[0]][0].shape
            if shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{where}: {key} has shape {shape}, and {name} of {type(model).__name__} has "
                    f"{tuple(tensor.shape)}; load a config that fits, or another model class"
                )
        if not self._keys:
            raise CheckpointError(
                f"{where} has nothing of {type(model).__name__}: it has {', '.join(list(stored.parts)[:3])}, …; "
                f"choose the folder of such a model"
            )
        self.unexpected = sorted(stored.parts.keys() - {key for keys in self._keys.values() for key in keys})

    def report(self) -> None:
        """Warn of what is missing, and of what is there for nothing."""
        name = type(self.model).__name__
        missing = _without(self.missing, getattr(self.model, "_keys_to_ignore_on_load_missing", None))
        ignored = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        unexpected = _without(self.unexpected, (*ignored, *BUFFERS_ONCE_SAVED))
        if missing:
            log.warning(
                "%s has no %s: initialised at random, train it before you use the %s",
                *(self._where, ", ".join(missing), name),
            )
        if unexpected:
            log.warning("%s has %s, which %s has no use for", self._where, ", ".join(unexpected), name)

    def initialise_missing(self) -> None:
        """Give whole random weights to what is missing, as Hugging Face does, before the model is split."""
        missing = set(self.missing)
        for module_name, module in self.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if f"{module_name}.{name}".removeprefix(".") in missing:
                    whole = torch.empty_like(parameter, device="cpu")
                    module._parameters[name] = nn.Parameter(whole, parameter.requires_grad)
                else:
                    parameter._is_hf_initialized = True
        if missing:
            self.model.initialize_weights()
            self.model.tie_weights()

    def read_into(self, device: torch.device) -> None:
        """Give the converted model its weights, on ``device``; every rank must call it.

        The ranks read in one order, so that what several of them read comes from the disk once.

        Raises:
            CheckpointError: a file cannot be read; all ranks raise.
        """
        state, failures = converted(self.model), list[Exception]()
        with noting(failures), torch.no_grad():
            for names, tensor in named_tensors(self.model):
                parts = [read_part(self._stored, k, state, names[0], tensor) for k in self._keys.get(names[0], ())]
                if any(not torch.equal(parts[0], part) for part in parts[1:]):
                    both = " and ".join(self._keys[names[0]])
                    raise CheckpointError(
                        f"{both} are both stored, and differ, but the model's config ties them; load with "
                        f"tie_word_embeddings=False"
                    )
                if parts:
                    _replace(tensor, torch.empty_like(tensor, device=device).copy_(parts[0]))
        agree(state.mesh, failures, f"{self._where} cannot be loaded")
        self._stored.close()


def without_weights(auto_class: type, config: PretrainedConfig, dtype: torch.dtype, **settings: Any) -> PreTrainedModel:
    """A model whose parameters are meta tensors, and whose buffers are real.

    Args:
        auto_class: one of transformers' ``AutoModel…`` classes, or a model class.
        config: of the model.
        dtype: of its parameters.
        **settings: of the model class.
    """
    make = getattr(auto_class, "from_config", None) or auto_class._from_config  # type: ignore[attr-defined]
    with init_empty_weights(), no_init_weights():
        model: PreTrainedModel = make(config, dtype=dtype, **settings)
    model.tie_weights()
    model.eval()
    return model


def dtype_of(dtype: str | torch.dtype, config: PretrainedConfig, stored: Stored) -> torch.dtype:
    """What ``from_pretrained`` would take: for ``auto`` that of the config, or else of the first weights."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype):
            raise CheckpointError(f"dtype={dtype!r} is no type of torch; choose auto, float32, bfloat16 or float16")
        return named
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    kinds = (stored.dtype(name) for name in stored.parts)
    return next((kind for kind in kinds if kind.is_floating_point), torch.get_default_dtype())


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _replace(tensor: Tensor, real: Tensor) -> None:
    """Let a tensor of a model be ``real``: the same object, since others hold on to it."""
    if isinstance(tensor, nn.Parameter):
        swap_tensors(tensor, nn.Parameter(real, tensor.requires_grad))
    else:
        tensor.copy_(real)
