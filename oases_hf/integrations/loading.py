"""``load_pretrained``: a model that no rank ever has whole."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from ..checkpoint.agreement import together
from ..checkpoint.manifest import has_safetensors
from ..checkpoint.plain import export_files
from ..checkpoint.pretrained import Pretrained, dtype_of, without_weights
from ..checkpoint.sources import Tensors, find, pickles_of, rewritten, unpickled
from ..checkpoint.stored import Stored
from ..config import OasesConfig
from ..errors import ConfigError, UnsupportedModelError
from ..models import family_of
from ..models.converted import Converted
from ..parallel.mesh import Mesh
from .planning import convert_as, device_of, mesh_of

HUB = ("revision", "token", "cache_dir", "local_files_only")
"""Settings that say how to download."""


def load_pretrained(
    auto_class: type,
    path: str | Path,
    config: OasesConfig | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    gguf_file: str | None = None,
    accelerator: Accelerator | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Load a pretrained model so that each rank reads, and holds, its part only; every rank must call it.

    What ``from_pretrained`` is to a model of one process. Give the model to a Trainer with ``OasesCallback()``, or to
    ``OasesPlugin().install``; neither needs settings then. A rank needs host memory for its part, on GPUs for the
    largest tensor of it only. Files other than safetensors are read whole on one rank of each node first.

    Args:
        auto_class: ``AutoModelForCausalLM`` or another of transformers' classes.
        path: a folder, or a hub id.
        config: how to split it; read from the environment when None.
        dtype: of the weights. ``auto``: that of the model's config, or else of its files.
        gguf_file: the name of a GGUF file in ``path``, to be read instead of others.
        accelerator: that will train the model: ``degree="auto"`` measures in its precision.
        **settings: of the model's config, like ``num_labels`` or ``attn_implementation``, or else of its class; for the
            hub ``revision``, ``token``, ``cache_dir`` and ``local_files_only``.

    Raises:
        CheckpointError: files are missing or damaged, or are those of another model; all ranks raise.
        ConfigError: ranks, settings and model do not go together.
        UnsupportedModelError: the model cannot be sharded.
    """
    on_cpu = not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    oases, local = config or OasesConfig(), PartialState(cpu=on_cpu)
    hub = {name: settings.pop(name) for name in HUB if name in settings}
    if "torch_dtype" in settings:
        raise ConfigError("torch_dtype is called dtype")
    mesh = mesh_of(oases)
    with together(mesh, f"{path} cannot be loaded"):
        folder = find(str(path), gguf_file, **hub)
        gguf = {"gguf_file": gguf_file} if gguf_file else {}
        model_config, unused = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **gguf, **settings)
        of_model = {name: value for name, value in unused.items() if name in settings}
    model_config.name_or_path = str(path)
    family_of(model_config)
    if getattr(model_config, "quantization_config", None):
        raise UnsupportedModelError(f"{path} is quantised; choose a model that is not, or dequantise it first")
    stored = _stored(auto_class, folder, {**gguf, **settings}, mesh, local.local_process_index)
    try:
        model = without_weights(auto_class, model_config, dtype_of(dtype, model_config, stored), **of_model)
    except TypeError as error:
        raise ConfigError(f"{error}; load_pretrained takes settings of the config and of the model's class") from error
    with together(mesh, f"{path} cannot be loaded"):
        pretrained = Pretrained(model, stored, folder)
    if mesh.world.rank == 0:
        pretrained.report()
    pretrained.initialise_missing()
    if model.can_generate() and gguf_file is None:
        with suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(folder)
    if oases.degree == "auto":
        accelerator = accelerator or Accelerator()
    state = convert_as(oases, model, mesh, accelerator, unread=True)
    pretrained.read_into(device_of(local))
    state.loaded_with = oases
    model.register_forward_pre_hook(functools.partial(_refuse_alone, state))
    cast(nn.Module, model).to(device_of(local))  # its buffers, which are not read
    return model


def _refuse_alone(state: Converted, model: nn.Module, *_: Any) -> None:
    """Forward pre-hook: refuse to train what nobody trains as it must be."""
    if state.loaded_with is not None and model.training and torch.is_grad_enabled():
        raise ConfigError(
            "a model of load_pretrained is trained by a Trainer with callbacks=[OasesCallback()], or after "
            "OasesPlugin().install(accelerator, model); neither has it"
        )


def _stored(auto_class: Any, folder: Path, settings: dict[str, Any], mesh: Mesh, local_rank: int) -> Stored:
    """The weights of a model's folder."""
    gguf = "gguf_file" in settings
    with together(mesh, f"{folder} cannot be loaded"):
        if not gguf and has_safetensors(folder):
            return Stored(export_files(folder))
        pickles = [] if gguf else pickles_of(folder)

    def read() -> Iterable[Tensors]:
        if not gguf:
            return unpickled(pickles)
        model, about = auto_class.from_pretrained(folder, output_loading_info=True, **settings)
        return [{name: value for name, value in model.state_dict().items() if name not in about["missing_keys"]}]

    return rewritten(read, mesh, local_rank)
