"""What was found, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .diagnosis import Finding
from .facts import Machine
from .measurements import AllReduce, Copy, Joined, Prediction, Step

GIB = 2**30

PAYS = 1.05
"""Simulated steps were up to some percent off measured ones: a smaller gain is none."""

VERDICTS = {
    "wrong": "WRONG: training would be wrong, or hang",
    "failed": "FAILED: not all could be checked",
    "warning": "FINE, with warnings: nothing found that makes training wrong, or hang",
    "fine": "FINE: nothing found that makes training wrong, or hang",
}
"""By the worst finding."""


def lines_of(found: object) -> Iterator[str]:
    """What to print of one thing that a process has found."""
    match found:
        case Machine():
            yield from _machine(found)
        case Copy():
            yield _copy(found)
        case Joined():
            yield f"{found.ranks} ranks on {found.device}"
        case AllReduce():
            yield _all_reduce(found)
        case Prediction():
            yield _prediction(found)
        case Step(name=name) if name.startswith("costs: "):  # what takes long
            yield name


def _machine(machine: Machine) -> Iterator[str]:
    versions = f"driver {machine.driver or 'unknown'}, CUDA {machine.cuda or 'none'}, NCCL {machine.nccl or 'none'}"
    yield f"{machine.host}: torch {machine.torch}, {versions}"
    for gpu in machine.gpus:
        size = f"{gpu.memory_bytes / GIB:.1f} GiB"
        yield f"GPU {gpu.index}: {gpu.name}, {size}, capability {gpu.capability}, PCI {gpu.pci or 'unknown'}"
    for link in machine.links:
        states = f"{link.path or 'unknown'}, P2P {link.p2p or 'unknown'}"
        access = "can" if link.access else "cannot"
        yield f"GPUs {link.first} and {link.second}: {states}, {access} read each other's memory"
    bridges = "off" if machine.acs == () else f"on in {len(machine.acs or ())} PCI bridges"
    bridges = "unknown: run as root, with lspci" if machine.acs is None else bridges
    shm = "none" if machine.shm_bytes is None else f"{machine.shm_bytes / GIB:.2f} GiB"
    yield f"IOMMU {machine.iommu or 'unknown'}; ACS {bridges}; /dev/shm {shm}"
    yield "set: " + (", ".join(f"{name}={value}" for name, value in machine.settings) or "nothing of NCCL or gloo")


def _copy(found: Copy) -> str:
    state = f"{found.wrong} elements wrong" if found.wrong else "right"
    way = "direct" if found.direct else "through the host"
    return f"copies from GPU {found.source} to GPU {found.target}: {state}, {found.gb_per_s:.2f} GB/s, {way}"


def _all_reduce(found: AllReduce) -> str:
    bad = ", ".join(f"rank {rank}" for rank, count in enumerate(found.wrong) if count)
    speed = f"{found.ms:.2f} ms, bus {found.bus_gb_per_s:.2f} GB/s"
    size = f"{found.size_bytes // 1024} KiB"
    return f"all-reduce of {found.ranks} ranks, {size}: {f'wrong on {bad}' if bad else 'right'}, {speed}"


def _prediction(found: Prediction) -> str:
    ratio = found.megatron_ms / found.oases_ms
    steps = f"megatron {found.megatron_ms:.1f} ms, oases {found.oases_ms:.1f} ms"
    note = "" if ratio >= PAYS else "; overlap does not pay here"
    return f"{found.model} at degree {found.degree}, simulated steps: {steps}, {ratio:.2f} times as fast{note}"


def transports_line(names: Sequence[str]) -> str:
    """How NCCL sends between the ranks."""
    return "NCCL sends by: " + (", ".join(names) or "unknown; it logs that when NCCL_DEBUG is unset, or INFO")


def verdict(findings: Sequence[Finding]) -> Iterator[str]:
    """All findings, the worst first, and what they come to."""
    worst = [level for level in VERDICTS if any(finding.level == level for finding in findings)]
    for level in worst:
        for finding in (each for each in findings if each.level == level):
            yield f"{level}: {finding.where}: {finding.what}" + (f"; fix: {finding.fix}" if finding.fix else "")
    yield VERDICTS[worst[0]] if worst else VERDICTS["fine"]
