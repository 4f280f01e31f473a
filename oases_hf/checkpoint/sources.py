"""Where a pretrained model's weights are: safetensors are read as they are, anything else is rewritten first."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..errors import CheckpointError
from ..parallel.mesh import Mesh
from .agreement import together
from .files import TensorFile
from .manifest import MANIFEST_NAME, has_safetensors
from .plain import files_of_index
from .stored import Stored

Tensors = Mapping[str, Tensor]

SAFETENSORS = (CONFIG_NAME, GENERATION_CONFIG_NAME, "model*.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model*.bin", WEIGHTS_INDEX_NAME)


def find(name: str, file: str | None = None, **hub: Any) -> Path:
    """The folder of a model: ``name`` itself, or where the hub's files of that id are, once they are downloaded.

    Args:
        name: a folder, or a hub id.
        file: the only one that is needed.
        **hub: ``revision``, ``token``, ``cache_dir`` or ``local_files_only``.

    Raises:
        CheckpointError: there is no such folder, and no such model.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        patterns = [file] if file else list(SAFETENSORS)
        folder = Path(snapshot_download(name, allow_patterns=patterns, **hub))
        if file is None and not has_safetensors(folder):
            snapshot_download(name, allow_patterns=list(PICKLES), **hub)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{name} is no folder here, and no model that the hub gives: {error}") from error
    return folder


def pickles_of(folder: Path) -> list[Path]:
    """The ``.bin`` files of a model's folder; raises CheckpointError when there are none."""
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    if (folder / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"{folder} is a training checkpoint: resume from it, or make a model of it with `oases-hf merge`"
        )
    if not (folder / WEIGHTS_INDEX_NAME).is_file():
        raise CheckpointError(
            f"{folder} has no weights: neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, nor an index of several; "
            f"choose another folder"
        )
    return files_of_index(folder / WEIGHTS_INDEX_NAME)


def unpickled(files: Iterable[Path]) -> Iterable[Tensors]:
    """What ``torch.save`` has written to ``files``; only tensors and plain containers are let in."""
    for file in files:
        try:
            # The older format cannot be mapped, and is read whole.
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except Exception as error:  # pickle may raise anything
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        yield {name: tensor for name, tensor in tensors.items() if torch.is_tensor(tensor)}


def rewritten(read: Callable[[], Iterable[Tensors]], mesh: Mesh, local_rank: int) -> Stored:
    """What ``read`` gives, as safetensors; it is called on one rank of each node, and every rank must call this.

    The files are gone as soon as all ranks have them open.

    Args:
        read: groups of tensors, each of which becomes a file.
        mesh: the ranks.
        local_rank: of this one, on its node.

    Raises:
        CheckpointError: they cannot be read, or written; all ranks raise.
    """
    folder = Path()
    try:
        advice = "it takes the model's size where temporary files are; TMPDIR names another folder"
        with together(mesh, "the weights cannot be rewritten as safetensors", advice):
            if local_rank == 0:
                folder = Path(tempfile.mkdtemp(prefix="oases-"))
                for number, tensors in enumerate(read()):
                    with TensorFile(folder / f"{number}.safetensors", tensors, {"format": "pt"}) as file:
                        for tensor in tensors.values():
                            file.add(tensor)
        there = mesh.from_all(folder)[mesh.world.rank - local_rank]
        with together(mesh, f"{there} cannot be read"):
            return Stored(sorted(there.iterdir()))
    finally:
        if folder != Path():
            shutil.rmtree(folder, ignore_errors=True)
