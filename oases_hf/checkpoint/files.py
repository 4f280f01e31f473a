"""Files that are there whole or not at all, and the writer of safetensors, one tensor at a time.

A file is written beside its place, synced to the disk, and renamed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
import xxhash
from torch import Tensor

PARTIAL = ".partial"
"""What the name of a file ends in until it is whole."""

PIECE_BYTES = 2**24
"""What is copied from a device, or gathered, and written at a time: more is slower, since memory is always new."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types of tensors, as safetensors names them."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """A file as it was written: its bytes, and their XXH3-128, which costs next to nothing beside a disk."""

    bytes: int
    xxh3: str


class DurableFile:
    """A file under its own name only once all of it is on the disk; use as a context, errors leave nothing.

    Args:
        path: where it is to be.

    Attributes:
        written: what it is, once the context has ended.
    """

    def __init__(self, path: Path) -> None:
        self.written = Written(0, "")
        self._path, self._partial = path, path.with_name(path.name + PARTIAL)
        self._hash, self._bytes = xxhash.xxh3_128(), 0
        self._file: IO[bytes]

    def __enter__(self) -> DurableFile:
        """Open it."""
        self._partial.unlink(missing_ok=True)  # a link there would lead elsewhere
        descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._file = open(descriptor, "wb", buffering=0)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        view = memoryview(data).cast("B")
        self._bytes += len(view)
        self._hash.update(view)
        while len(view):
            view = view[self._file.write(view) :]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sync and rename it, or remove it after an error."""
        try:
            with self._file:
                if error is None:
                    os.fsync(self._file.fileno())
            if error is None:
                os.rename(self._partial, self._path)
                sync_folder(self._path.parent)
                self.written = Written(self._bytes, self._hash.hexdigest())
        finally:
            self._partial.unlink(missing_ok=True)


class TensorFile(DurableFile):
    """A safetensors file; use as a context, and :meth:`add` its tensors in order.

    Args:
        path: where it is to be.
        tensors: names, dtypes and shapes; meta tensors do.
        metadata: of the header.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__(path)
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = text + b" " * (-len(text) % 8)

    def __enter__(self) -> TensorFile:
        """Open it, and write the header."""
        super().__enter__()
        try:
            self.write(len(self._header).to_bytes(8, "little") + self._header)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def add(self, tensor: Tensor) -> None:
        """Append the data of the next tensor."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            self.write(flat.view(torch.uint8).numpy().data)

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Append the data of the next tensors, or of their rows, each while the one behind it is made."""
        with ThreadPoolExecutor(1) as writer:
            written = writer.submit(lambda: None)
            for tensor in tensors:
                written.result()
                written = writer.submit(self.add, tensor)
            written.result()


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The data of ``tensor`` in the host's memory, one part after the other."""
    yield from (piece.cpu() for piece in tensor.detach().reshape(-1).split(PIECE_BYTES // tensor.element_size()))


def of_folder(name: str) -> bool:
    """Whether ``name`` is that of a file in a folder, not a way out of it."""
    return Path(name).name == name != ".."


def write_durably(path: Path, text: str) -> Written:
    """Write a text file."""
    file = DurableFile(path)
    with file:
        file.write(text.encode())
    return file.written


def digest(path: Path) -> Written:
    """What a file is that is there already."""
    hashed, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            hashed.update(block)
            size += len(block)
    return Written(size, hashed.hexdigest())


def sync_file(path: Path) -> None:
    """Wait until a file that somebody else wrote is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    sync_file(folder)
