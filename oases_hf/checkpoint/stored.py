"""Tensors on disk: where each part of them is, and how to read any slice of one, whatever the parts are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..parallel.sharding import Slice, Span
from .files import DTYPES

PLACES = "oases"
"""The entry of a file's metadata that says where its tensors belong."""


@dataclass(frozen=True)
class Part:
    """A tensor in a file.

    Attributes:
        file: where it is.
        shape: of the whole tensor that it is of.
        place: what it is of the whole; None when it is all of it.
    """

    file: Path
    shape: tuple[int, ...]
    place: Slice | None


class Stored:
    """The tensors of some safetensors files, by name.

    Args:
        files: a tensor may have parts in several.

    Raises:
        CheckpointError: a file is none of safetensors.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.parts: dict[str, list[Part]] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            with _naming(file):
                # The library maps files lazily: nothing but the header is read yet.
                opened = self._open[file] = cast(Any, safe_open(file, "pt"))
                places = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
                for name in tuple(opened.keys()):
                    place = places.get(name)
                    shape = tuple(opened.get_slice(name).get_shape())
                    part = Part(file, shape, None) if place is None else _parsed(file, place)
                    self.parts.setdefault(name, []).append(part)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that is there."""
        file = self.parts[name][0].file
        with _naming(file):
            return DTYPES[self._open[file].get_slice(name).get_dtype()]

    def read(self, name: str, place: Slice | None = None) -> Tensor:
        """A tensor, or the slice of it that ``place`` names; it may be a view of a file, of which only that is read.

        Raises:
            CheckpointError: there is no such tensor, or parts of it are missing.
        """
        parts = self.parts.get(name)
        if parts is None:
            raise CheckpointError(f"{self._where()} has no tensor {name}")
        first = parts[0]
        if place is None and first.place is None:
            with _naming(first.file):
                whole: Tensor = self._open[first.file].get_tensor(name)
                return whole
        dim = place.dim if place is not None else first.place.dim if first.place is not None else 0
        if any(part.shape != first.shape or (part.place is not None and part.place.dim != dim) for part in parts):
            raise CheckpointError(f"{self._where()}: the parts of {name} are not of one tensor")
        everything = Slice(dim, (Span(0, first.shape[dim]),))
        wanted = place or everything
        found = [piece for part in parts for piece in self._pieces(name, part, part.place or everything, wanted)]
        return self._joined(name, found, wanted)

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()

    def _pieces(self, name: str, part: Part, place: Slice, wanted: Slice) -> Iterator[tuple[int, Tensor]]:
        """What one part has of the wanted slice, each with where it begins there."""
        with _naming(part.file):
            stored = self._open[part.file].get_slice(name)
            for begin, span in _numbered(wanted.spans):
                for at, held in _numbered(place.spans):
                    lo, hi = max(span.lo, held.lo), min(span.hi, held.hi)
                    if lo < hi:
                        rows = slice(at + lo - held.lo, at + hi - held.lo)
                        yield begin + lo - span.lo, stored[(slice(None),) * wanted.dim + (rows,)]

    def _joined(self, name: str, found: list[tuple[int, Tensor]], wanted: Slice) -> Tensor:
        end = 0
        pieces = []
        for begin, piece in sorted(found, key=lambda each: each[0]):
            if begin != end:
                break
            pieces.append(piece)
            end += piece.shape[wanted.dim]
        if end != wanted.size:
            raise CheckpointError(f"{self._where()}: a part of {name} is missing, behind {end} of {wanted.size} rows")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, wanted.dim)

    def _where(self) -> str:
        return str(next(iter(self._open)).parent) if self._open else "an empty checkpoint"


def place_text(shape: Iterable[int], place: Slice) -> dict[str, Any]:
    """A place as a file's metadata has it."""
    return {"shape": list(shape), "dim": place.dim, "spans": [[span.lo, span.hi] for span in place.spans]}


def _parsed(file: Path, text: dict[str, Any]) -> Part:
    return Part(file, tuple(text["shape"]), Slice(text["dim"], tuple(Span(lo, hi) for lo, hi in text["spans"])))


def _numbered(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Spans, each with where it begins when they are joined."""
    begin = 0
    for span in spans:
        yield begin, span
        begin += span.size


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Say which file is at fault."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; restore it, or use another checkpoint") from error
