"""What the kernel counts of a process, and what it keeps of files."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def counter(file: str, name: str) -> int:
    """A number in a file of /proc/self; with a unit, in bytes."""
    line = next(line for line in Path("/proc/self", file).read_text().splitlines() if line.startswith(f"{name}:"))
    number, *unit = line.split()[1:]
    return int(number) * (1024 if unit else 1)


def bytes_read() -> int:
    """What this process has caused to be read from disks so far."""
    return counter("io", "read_bytes")


class Peak:
    """The most memory of this process inside, beyond what was there before, without files: looked up all the time."""

    def __enter__(self) -> Peak:
        self._most = self._before = counter("status", "RssAnon")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        """Known once the context has ended."""
        return self._most - self._before

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self._most = max(self._most, counter("status", "RssAnon"))


def forget(folder: Path) -> int:
    """Have the kernel keep nothing of a folder's files in memory; returns their bytes."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(path.stat().st_size for path in folder.iterdir())
