"""Made-up machines, and one that listens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oases_hf.doctor.diagnosis import Examination
from oases_hf.doctor.facts import Gpu, Link, Machine
from oases_hf.doctor.measurements import AllReduce, Copy, Joined
from oases_hf.doctor.watching import Teller

GOOD = Machine(
    host="box",
    gpus=tuple(Gpu(index, "RTX 3090", 24 * 2**30, "8.6", f"0000:0{index}:00.0") for index in (0, 1)),
    links=(Link(0, 1, "PHB", "OK", access=True),),
    driver="550.54",
    torch="2.11",
    cuda="12.8",
    nccl="2.21.5",
    settings=(),
    iommu="off",
    acs=(),
    shm_bytes=2**34,
)
"""Two GPUs that can copy to each other."""

APART = replace(GOOD, links=(Link(0, 1, "PHB", "CNS", access=False),))
"""Two GPUs that cannot."""

DISABLED = replace(GOOD, settings=(("NCCL_P2P_DISABLE", "1"),))


def all_reduce(size_bytes: int = 2**16, wrong: tuple[int, ...] = (0, 0)) -> AllReduce:
    return AllReduce(2, size_bytes, 1.0, wrong)


def copy(source: int = 0, target: int = 1, *, direct: bool = True, wrong: int = 0) -> Copy:
    return Copy(source, target, 2**26, 8.0, direct, wrong)


def examined(machine: Machine | None = GOOD, **changes: Any) -> Examination:
    """All was right on two ranks of a machine, but for ``changes``."""
    found = Examination(
        machine,
        asked=None,
        ranks_here=2,
        copies=(copy(), copy(1, 0)),
        joined=Joined(2, "cuda"),
        all_reduces=(all_reduce(), all_reduce(2**26)),
        transports=("P2P/CUMEM",),
    )
    return replace(found, **changes)


class Heard(Teller):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def found(self, what: object) -> None:
        self.told.append(what)
