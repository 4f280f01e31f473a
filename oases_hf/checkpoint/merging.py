"""A folder that ``from_pretrained`` reads from a training checkpoint, in one process, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers.utils import CONFIG_NAME

from ..errors import CheckpointError
from .export import MAX_SHARD_SIZE, PLAN_NAME, into_files, write_index
from .files import TensorFile, write_durably
from .manifest import MANIFEST_NAME, Manifest
from .places import PARAMETERS
from .stored import Stored

OF_TRAINING = frozenset(
    {MANIFEST_NAME, "trainer_state.json", "training_args.bin", "scheduler.pt", "scaler.pt", "scheduler.bin"}
)
"""Files of a checkpoint that are no part of a model."""


def merge(checkpoint: Path, out: Path, dtype: torch.dtype | None = None, max_shard_size: str = MAX_SHARD_SIZE) -> None:
    """Write the model of a training checkpoint as Hugging Face does.

    Args:
        checkpoint: that ``Trainer`` or ``save_state`` has written.
        out: a folder; made if it is not there.
        dtype: of floating point tensors; that trained in when None.
        max_shard_size: the most bytes of one file.

    Raises:
        CheckpointError: the checkpoint is not whole, or a file is not as it was written.
    """
    manifest = Manifest.read(checkpoint)
    for name in manifest.files:
        manifest.check_content(checkpoint, name)
    stored = Stored(manifest.tensor_files(checkpoint))
    begin = f"{PARAMETERS}/"
    own = [name.removeprefix(begin) for name in stored.parts if name.startswith(begin)]
    sources = {manifest.in_exports.get(name, name): begin + name for name in own}
    shapes = {
        name: torch.empty(stored.parts[source][0].shape, dtype=_as(stored.dtype(source), dtype), device="meta")
        for name, source in sources.items()
    }
    split = into_files(shapes, max_shard_size)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; choose a new folder")
    out.mkdir(parents=True, exist_ok=True)
    for file, names in split.filename_to_tensors.items():
        with TensorFile(out / file, {name: shapes[name] for name in names}, {"format": "pt"}) as writer:
            for name in names:
                writer.add(stored.read(sources[name]).to(shapes[name].dtype))
    write_index(out, split)
    for name in manifest.files:
        if not name.endswith((".safetensors", ".pkl")) and name not in OF_TRAINING:
            shutil.copyfile(checkpoint / name, out / name)
    if dtype is not None:
        config = json.loads((out / CONFIG_NAME).read_text())
        write_durably(out / CONFIG_NAME, json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2))
    write_durably(out / PLAN_NAME, json.dumps(manifest.plan, indent=2) + "\n")


def _as(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own
