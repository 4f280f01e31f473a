"""What load_pretrained costs a rank, as the kernel counts: ``python -m tests.integrations.lean SMALL BIG`` on each."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from accelerate import PartialState
from torch import nn
from transformers import AutoModelForCausalLM

from oases_hf import load_pretrained


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes, of one rank.

    Attributes:
        read: from the disk.
        peak: of memory that is not a file's, beyond what was there before.
        share: of the parameters that it holds.
        largest: of the largest one.
    """

    read: int
    peak: int
    share: int
    largest: int


def counter(file: str, name: str) -> int:
    """A number that the kernel keeps of this process; with a unit, in bytes."""
    line = next(line for line in Path("/proc/self", file).read_text().splitlines() if line.startswith(f"{name}:"))
    number, *unit = line.split()[1:]
    return int(number) * (1024 if unit else 1)


class Peak:
    """The most memory of this process inside, looked up all the time by a thread."""

    def __enter__(self) -> Peak:
        self.bytes = self.before = counter("status", "RssAnon")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.bytes = max(self.bytes, counter("status", "RssAnon"))


def main() -> None:
    PartialState(cpu=True)  # starts what communicates, which takes memory once
    load_pretrained(AutoModelForCausalLM, sys.argv[1])  # of one small layer: what is imported and built once
    before = counter("io", "read_bytes")
    with Peak() as peak:
        model = load_pretrained(AutoModelForCausalLM, sys.argv[2])
    sizes = [parameter.nbytes for parameter in cast(nn.Module, model).parameters()]
    cost = Cost(counter("io", "read_bytes") - before, peak.bytes - peak.before, sum(sizes), max(sizes))
    print(json.dumps(asdict(cost)))


if __name__ == "__main__":
    main()
