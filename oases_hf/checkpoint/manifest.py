"""The manifest of a training checkpoint: written last, so a folder that has one is a checkpoint that is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import CheckpointError
from .files import Written, digest, of_folder, write_durably

MANIFEST_NAME = "oases_checkpoint.json"
FILE_PATTERN = "oases-*.safetensors"
FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """What a training checkpoint is made of.

    Attributes:
        plan: what was trained by, as JSON has it.
        world_size: ranks that wrote it.
        rows_per_step: sequences of an optimizer step, where that is known.
        optimizers: of each optimizer its groups: settings, and the names of the parameters.
        dropout: the state of what dropout masks are drawn from.
        files: what each file of the folder is.
        in_exports: what exports call parameters that have another name there.
    """

    plan: Mapping[str, Any]
    world_size: int
    rows_per_step: int | None
    optimizers: list[list[dict[str, Any]]]
    dropout: Mapping[str, Any]
    files: Mapping[str, Written]
    in_exports: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Make ``folder`` a checkpoint."""
        write_durably(folder / MANIFEST_NAME, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """That of ``folder``.

        Raises:
            CheckpointError: there is none, it is damaged, or a file that it names is not there as it was written.
        """
        path = folder / MANIFEST_NAME
        try:
            fields = json.loads(path.read_text())
            if fields.pop("format") != FORMAT:
                raise CheckpointError(f"{path} is of another version of oases_hf; load it with that one")
            fields["files"] = {name: Written(**written) for name, written in fields["files"].items()}
            found = cls(**fields)
        except FileNotFoundError as error:
            if not folder.is_dir():
                raise CheckpointError(f"there is no folder {folder}") from error
            raise CheckpointError(
                f"{folder} is not a whole training checkpoint: it has no {MANIFEST_NAME}, which is written last; use "
                f"an earlier one"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}); use an earlier checkpoint") from error
        found.check_sizes(folder)
        return found

    def check_sizes(self, folder: Path) -> None:
        """Raise CheckpointError unless all files are there, as long as they were written."""
        for name, written in self.files.items():
            self._check_size(folder, name, written)

    def _check_size(self, folder: Path, name: str, written: Written) -> None:
        file = folder / name
        if not of_folder(name) or file.is_symlink():
            raise CheckpointError(f"{folder / MANIFEST_NAME} names {name!r}, which is no file of this folder; refused")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; restore it, or use an earlier checkpoint")
        if file.stat().st_size != written.bytes:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, and was written with {written.bytes}; restore it, or use an "
                f"earlier checkpoint"
            )

    def check_content(self, folder: Path, name: str) -> None:
        """Read a file; raises CheckpointError unless it is what was written."""
        if digest(folder / name) != self.files[name]:
            raise CheckpointError(
                f"{folder / name} has changed since it was written; restore it, or use an earlier checkpoint"
            )

    def tensor_files(self, folder: Path) -> list[Path]:
        """The files that hold parameters and optimizer state."""
        return [folder / name for name in sorted(self.files) if Path(name).match(FILE_PATTERN)]


def check_whole(folder: Path) -> None:
    """Raise CheckpointError unless training can go on from ``folder``: its writing was begun, and ended."""
    if not (is_export(folder) and (folder / "trainer_state.json").exists()):
        Manifest.read(folder)


def is_whole(folder: Path) -> bool:
    """Whether training can go on from ``folder``."""
    try:
        check_whole(folder)
    except CheckpointError:
        return False
    return True


def is_export(folder: Path) -> bool:
    """Whether a folder has a model as Hugging Face writes it, and no training state of ours."""
    return not (folder / MANIFEST_NAME).exists() and has_safetensors(folder)


def has_safetensors(folder: Path) -> bool:
    """Whether a folder has a model as Hugging Face writes it."""
    return any((folder / name).exists() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
