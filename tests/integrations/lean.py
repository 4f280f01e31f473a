"""What load_pretrained costs a rank, as the kernel counts: ``python -m tests.integrations.lean SMALL BIG`` on each."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import cast

from accelerate import PartialState
from torch import nn
from transformers import AutoModelForCausalLM

from oases_hf import load_pretrained
from scripts.bench.process import Peak, bytes_read


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


def main() -> None:
    PartialState(cpu=True)  # starts what communicates, which takes memory once
    load_pretrained(AutoModelForCausalLM, sys.argv[1])  # of one small layer: what is imported and built once
    before = bytes_read()
    with Peak() as peak:
        model = load_pretrained(AutoModelForCausalLM, sys.argv[2])
    sizes = [parameter.nbytes for parameter in cast(nn.Module, model).parameters()]
    cost = Cost(bytes_read() - before, peak.bytes, sum(sizes), max(sizes))
    print(json.dumps(asdict(cost)))


if __name__ == "__main__":
    main()
