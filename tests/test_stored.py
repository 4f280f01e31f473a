"""Tensors on disk: whatever the parts, any slice is read back; files are there whole or not at all."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oases_hf.checkpoint.files import DTYPES, DurableFile, TensorFile, digest, write_durably
from oases_hf.checkpoint.manifest import MANIFEST_NAME, Manifest
from oases_hf.checkpoint.plain import export_files
from oases_hf.checkpoint.stored import PLACES, Stored, place_text
from oases_hf.errors import CheckpointError
from oases_hf.parallel.sharding import Slice, Span, bounds


def shares(length: int, parts: int, dim: int, packed: int = 1) -> list[Slice]:
    """Slices of a dimension that has ``packed`` sections, of each of which every part has its share."""
    section = length // packed
    return [
        Slice(dim, tuple(bounds(section, parts, part).scaled(1, section * i) for i in range(packed)))
        for part in range(parts)
    ]


def write(folder: Path, name: str, full: Tensor, slices: Sequence[Slice]) -> list[Path]:
    files = []
    for number, place in enumerate(slices):
        path = folder / f"{number}.safetensors"
        metadata = {PLACES: json.dumps({name: place_text(full.shape, place)})}
        part = place.of(full)
        file = TensorFile(path, {name: part}, metadata)
        with file:
            file.add(part)
        assert file.written == digest(path)
        files.append(path)
    return files


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("packed", [1, 3])
def test_any_slice_from_any_parts(tmp_path: Path, dim: int, packed: int) -> None:
    full = torch.arange(12.0 * 15).view(12, 15) if dim == 0 else torch.arange(15.0 * 12).view(15, 12)
    for written in (1, 2, 3, 4):
        stored = Stored(write(tmp_path, "x", full, shares(12, written, dim, packed)))
        assert torch.equal(stored.read("x"), full)
        for wanted in (1, 2, 3, 4):
            for place in shares(12, wanted, dim, packed):
                assert torch.equal(stored.read("x", place), place.of(full))


def test_random_slices(tmp_path: Path) -> None:
    full, draw = torch.randn(20, 3), random.Random(0)
    for _ in range(50):
        cuts = sorted(draw.sample(range(1, 20), 3))
        parts = [Slice(0, (Span(*pair),)) for pair in pairwise((0, *cuts, 20))]
        stored = Stored(write(tmp_path, "x", full, parts))
        lo, hi, other = sorted(draw.sample(range(21), 3))
        for place in (Slice(0, (Span(lo, hi),)), Slice(0, (Span(hi, other), Span(lo, hi)))):
            assert torch.equal(stored.read("x", place), place.of(full))


def test_a_whole_tensor_is_read_by_slices(tmp_path: Path) -> None:
    full = torch.randn(6, 4)
    save_file({"x": full, "number": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    stored = Stored([tmp_path / "model.safetensors"])
    assert torch.equal(stored.read("x", Slice(1, (Span(1, 3),))), full[:, 1:3])
    assert stored.read("number") == 3.0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    full = torch.randn(8, 2)
    files = write(tmp_path, "x", full, shares(8, 4, 0))
    with pytest.raises(CheckpointError, match="a part of x is missing, behind 2 of 8 rows"):
        Stored([files[0], files[2], files[3]]).read("x")
    with pytest.raises(CheckpointError, match="has no tensor y"):
        Stored(files).read("y")
    (tmp_path / "odd").mkdir()
    (other,) = write(tmp_path / "odd", "x", torch.randn(9, 2), shares(9, 1, 0))
    with pytest.raises(CheckpointError, match="the parts of x are not of one tensor"):
        Stored([files[0], other]).read("x")


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    for content in (b"", b"short", (2**60).to_bytes(8, "little") + b"{}", (10).to_bytes(8, "little") + b"not json!!"):
        bad.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.safetensors cannot be read"):
            Stored([bad])


def test_what_is_written_is_safetensors(tmp_path: Path) -> None:
    tensors = {name: torch.tensor([[0, 1], [1, 0]]).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"number": torch.tensor(2.5), "empty": torch.empty(0, 3), "turned": torch.randn(3, 2).t()}
    with TensorFile(tmp_path / "x.safetensors", tensors, {"format": "pt"}) as file:
        for tensor in tensors.values():
            file.add(tensor)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype is tensor.dtype
        assert torch.equal(read[name], tensor)
    stored = Stored([tmp_path / "x.safetensors"])
    assert {name: stored.dtype(name) for name in DTYPES} == dict(DTYPES)


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    write_durably(tmp_path / "x", "before")
    with pytest.raises(TypeError), DurableFile(tmp_path / "x") as file:
        file.write(cast(Any, "text"))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "before"


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/file.safetensors", ".."])
def test_files_of_other_folders_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"")
    Manifest({}, 1, None, [], {}, {name: digest(tmp_path / "outside.safetensors")}).write(folder)
    with pytest.raises(CheckpointError, match="is no file of this folder; refused"):
        Manifest.read(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="is no file of this folder; refused"):
        export_files(folder)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "outside.safetensors").write_bytes(b"")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "x.safetensors").symlink_to(tmp_path / "outside.safetensors")
    Manifest({}, 1, None, [], {}, {"x.safetensors": digest(folder / "x.safetensors")}).write(folder)
    with pytest.raises(CheckpointError, match="is no file of this folder; refused"):
        Manifest.read(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2}', '{"format": 1, "files": 3}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{MANIFEST_NAME} is (damaged|of another version)"):
        Manifest.read(tmp_path)
