"""``load_pretrained``: a model that no rank ever has whole."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..checkpoint.agreement import together
from ..checkpoint.manifest import has_safetensors
from ..checkpoint.plain import export_files
from ..checkpoint.pretrained import Pretrained, dtype_of, without_weights
from ..checkpoint.sources import Tensors, find, pickles_of, rewritten, unpickled
from ..checkpoint.stored import Stored
from ..config import OasesConfig
from ..errors import ConfigError, UnsupportedModelError
from ..models import family_of
from ..models.converted import loaded
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
    mesh, device = mesh_of(oases), device_of(local)
    if gguf_file:
        settings["gguf_file"] = gguf_file
    pretrained = _unread(auto_class, str(path), settings, dtype, mesh, local.local_process_index)
    if oases.degree == "auto":
        accelerator = accelerator or Accelerator()
    state = convert_as(oases, pretrained.model, mesh, accelerator, unread=True)
    pretrained.read_into(device)
    state.loaded_with = oases
    pretrained.model.register_forward_pre_hook(_refuse_alone)
    cast(nn.Module, pretrained.model).to(device)  # its buffers, which are not read
    return pretrained.model


def _unread(
    auto_class: type, path: str, settings: dict[str, Any], dtype: str | torch.dtype, mesh: Mesh, local_rank: int
) -> Pretrained:
    """A whole model without its weights, and these; what they lack is initialised, and said."""
    folder, config, of_model = _found(path, settings, mesh)
    stored = _stored(auto_class, folder, settings, mesh, local_rank)
    try:
        model = without_weights(auto_class, config, dtype_of(dtype, config, stored), **of_model)
    except TypeError as error:
        raise ConfigError(f"{error}; load_pretrained takes settings of the config and of the model's class") from error
    if model.can_generate() and "gguf_file" not in settings:
        with suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(folder)
    with together(mesh, f"{path} cannot be loaded"):
        pretrained = Pretrained(model, stored, folder)
    if mesh.world.rank == 0:
        pretrained.report()
    pretrained.initialise_missing()
    return pretrained


def _found(path: str, settings: dict[str, Any], mesh: Mesh) -> tuple[Path, PretrainedConfig, dict[str, Any]]:
    """The folder of a model, its config, and the settings that are not of that; those of the hub are taken out."""
    if "torch_dtype" in settings:
        raise ConfigError("torch_dtype is called dtype")
    hub = {name: settings.pop(name) for name in HUB if name in settings}
    with together(mesh, f"{path} cannot be loaded"):
        folder = find(path, settings.get("gguf_file"), **hub)
        config, unused = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **settings)
    config.name_or_path = path
    family_of(config)
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(f"{path} is quantised; choose a model that is not, or dequantise it first")
    of_model = {name: value for name, value in unused.items() if name in settings and name != "gguf_file"}
    return folder, config, of_model


def _refuse_alone(model: nn.Module, _: Any) -> None:
    """Forward pre-hook: refuse to train what nobody trains as it must be."""
    if model.training and torch.is_grad_enabled() and loaded(model):
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
