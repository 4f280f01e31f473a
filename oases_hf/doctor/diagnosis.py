"""What is wrong with a machine and its ranks, from what was found: no measuring here, so made-up machines test it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from ..launching import BROKEN, FAIL, PASS
from .facts import Machine
from .measurements import AllReduce, Copy, Failure, Hang, Joined

Level = Literal["wrong", "failed", "warning", "fine"]

SHM_BYTES = 2**30
"""Of /dev/shm, as NCCL's manual asks of containers; their 64 MiB by default are too few."""


@dataclass(frozen=True)
class Finding:
    """One thing that was judged.

    Attributes:
        level: ``wrong``: training would be wrong or hang; ``failed``: it is not known.
        fix: what to do; empty when nothing.
    """

    level: Level
    where: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Examination:
    """All that was found.

    Attributes:
        machine: None when looking at it went wrong.
        asked: the device that was asked for; None for GPUs if there are enough.
        ranks_here: on this machine.
        on_machine: what went wrong with looking at the machine, or with copies.
        on_ranks: what went wrong on the ranks.
        transports: of NCCL between the ranks; empty when it did not log them.
    """

    machine: Machine | None
    asked: Literal["cpu", "cuda"] | None
    ranks_here: int
    copies: tuple[Copy, ...] = ()
    on_machine: Hang | Failure | None = None
    joined: Joined | None = None
    all_reduces: tuple[AllReduce, ...] = ()
    on_ranks: Hang | Failure | None = None
    transports: tuple[str, ...] = ()

    @property
    def on_gpus(self) -> Machine | None:
        """The machine, if the ranks are on its GPUs."""
        machine = self.machine
        if machine is None or self.asked == "cpu" or not 0 < self.ranks_here <= len(machine.gpus):
            return None
        return machine

    @property
    def copies_right(self) -> bool:
        """Whether there were copies between GPUs, all of them right."""
        return bool(self.copies) and self.on_machine is None and not any(copy.wrong for copy in self.copies)


def diagnose(found: Examination) -> tuple[Finding, ...]:
    """Judge all that was found."""
    return (*_seats(found), *_on_ranks(found), *_sums(found), *_copies(found), *_setup(found))


def exit_code(findings: tuple[Finding, ...]) -> int:
    """That says the worst of the findings."""
    levels = {finding.level for finding in findings}
    return FAIL if "wrong" in levels else BROKEN if "failed" in levels else PASS


def _seats(found: Examination) -> Iterator[Finding]:
    """Whether each GPU has one process."""
    if found.machine is None or found.asked == "cpu":
        return
    gpus, ranks, where = len(found.machine.gpus), found.ranks_here, "processes"
    if gpus == 0:
        if found.machine.driver:
            what = f"nvidia-smi knows GPUs, but torch {found.machine.torch} sees none"
            fix = "look at CUDA_VISIBLE_DEVICES, and install a torch that is built for the driver's CUDA"
            yield Finding("warning", where, what, fix)
        return
    launch = f"start one process per GPU: accelerate launch --multi_gpu --num_processes {gpus}"
    if ranks > gpus:
        yield Finding("wrong", where, f"{ranks} ranks on {gpus} GPUs; NCCL takes one per GPU", launch)
    if ranks < gpus:
        yield Finding("warning", where, f"{ranks} ranks on {gpus} GPUs, so others were not checked on ranks", launch)


def _on_ranks(found: Examination) -> Iterator[Finding]:
    trouble = found.on_ranks
    if isinstance(trouble, Hang):
        yield _hang(trouble, "wrong", _link_fix(found))
    elif trouble and "Duplicate GPU detected" in trouble.log:
        fix = "start one process per GPU: accelerate launch --multi_gpu, or torchrun, which set LOCAL_RANK"
        yield Finding("wrong", "processes", "several ranks use one GPU, which NCCL refuses", fix)
    elif trouble:
        yield _failure(trouble)


def _hang(hang: Hang, level: Level, fix: str) -> Finding:
    elsewhere = "".join(f"; meanwhile {_ranks(ranks)} in: {step}" for step, ranks in hang.elsewhere)
    what = f"hangs on {_ranks(hang.ranks)}: not done after {hang.limit_s:g} s{elsewhere}"
    return Finding(level, hang.step, what, fix)


def _failure(failure: Failure) -> Finding:
    what = f"rank {failure.rank} ended with exit code {failure.code}; it wrote last:\n{failure.log}"
    return Finding("failed", failure.step, what.rstrip())


def _ranks(numbers: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _sums(found: Examination) -> Iterator[Finding]:
    for size, group in groupby(found.all_reduces, lambda each: each.ranks):
        rows = list(group)
        wrong = [row for row in rows if any(row.wrong)]
        if not wrong:
            yield Finding("fine", f"all-reduce of {size} ranks", f"right in all {len(rows)} sizes, on every rank")
            continue
        ranks = tuple(sorted({rank for row in wrong for rank, count in enumerate(row.wrong) if count}))
        sizes = ", ".join(f"{row.size_bytes // 1024} KiB" for row in wrong)
        what = f"not the sum on {_ranks(ranks)}, with messages of {sizes}"
        yield Finding("wrong", f"all-reduce of {size} ranks", what, _link_fix(found))


def _copies(found: Examination) -> Iterator[Finding]:
    """Copies, which training leaves to NCCL: where it may not do them, they do no harm."""
    if isinstance(found.on_machine, Failure):
        yield _failure(found.on_machine)
    machine = found.machine
    if machine is None:
        if isinstance(found.on_machine, Hang):
            yield _hang(found.on_machine, "wrong", "the driver hangs: restart the machine, then look into `dmesg`")
        return
    avoided = machine.p2p_disabled_by
    fix = f"keep {avoided}, with which NCCL does not copy so" if avoided else _p2p_fix(machine)
    if isinstance(found.on_machine, Hang):
        yield _hang(found.on_machine, "warning" if avoided else "wrong", fix)
    for copy in (copy for copy in found.copies if copy.wrong):
        level: Level = "warning" if avoided and copy.direct else "wrong"
        what = f"{copy.wrong} elements arrive wrong"
        yield Finding(level, f"copies from GPU {copy.source} to GPU {copy.target}", what, fix)
    if found.copies_right:
        yield Finding("fine", "copies", f"right, to the last bit, in all {len(found.copies)} directions")


def _setup(found: Examination) -> Iterator[Finding]:
    """What the machine's settings do to links between its GPUs."""
    machine = found.on_gpus
    if machine is None or len(machine.gpus) < 2:
        return
    yield from _p2p(found, machine)
    through_host = not machine.uses_p2p or not all(link.access for link in machine.links)
    if through_host and machine.shm_bytes is not None and machine.shm_bytes < SHM_BYTES:
        what = f"{machine.shm_bytes // 2**20} MiB, through which NCCL sends where GPUs cannot copy"
        yield Finding("warning", "/dev/shm", what, "give it 1 GiB or more (docker run --shm-size=1g)")
    of_here = found.joined is not None and found.joined.ranks == found.ranks_here
    if of_here and (network := [name for name in found.transports if name.startswith("NET/")]):
        what = f"{', '.join(network)} between GPUs of one machine, which is slow"
        yield Finding("warning", "NCCL", what, "unset NCCL_SHM_DISABLE, and see that /dev/shm has room")


def _p2p(found: Examination, machine: Machine) -> Iterator[Finding]:
    apart = [f"{link.first} and {link.second}" for link in machine.links if not link.access]
    if apart:
        yield Finding("fine", "P2P", f"not between GPUs {'; '.join(apart)}: NCCL goes through the host's memory there")
    if machine.p2p_disabled_by and found.copies_right and any(copy.direct for copy in found.copies):
        what = f"{machine.p2p_disabled_by} is set, though copies arrive right"
        yield Finding("warning", "P2P", what, "unset it, and run this again: links may be faster")
    if not machine.uses_p2p:
        return
    if machine.iommu == "translates" and not found.copies_right:
        yield Finding("warning", "IOMMU", "on, with which copies may hang or arrive wrong", _p2p_fix(machine))
    elif machine.iommu == "translates":
        yield Finding("fine", "IOMMU", "on, but copies arrive right")
    if machine.acs:
        what = f"on in the bridges {', '.join(machine.acs)}: what GPUs send each other goes by the CPU, which is slower"
        yield Finding("warning", "ACS", what, _acs_fix(machine.acs))


def _link_fix(found: Examination) -> str:
    """For all-reduces that hang or are wrong."""
    machine = found.on_gpus
    if machine is None:
        return "see that GLOO_SOCKET_IFNAME names the network that connects the ranks"
    if machine.uses_p2p:
        return _p2p_fix(machine)
    return "see how NCCL sends with NCCL_DEBUG=INFO, and try NCCL_SHM_DISABLE=1 and a newer driver"


def _p2p_fix(machine: Machine) -> str:
    found = []
    if machine.iommu == "translates":
        found.append("switch the IOMMU off (BIOS: VT-d or AMD-Vi), or boot with iommu=pt")
    if machine.acs:
        found.append(_acs_fix(machine.acs))
    found = found or ["look for the IOMMU and ACS in the BIOS, and for a newer driver"]
    return "; ".join([*found, "until then train with NCCL_P2P_DISABLE=1, and check that with it set here, too"])


def _acs_fix(bridges: tuple[str, ...]) -> str:
    return f"switch ACS off, in the BIOS or by `setpci -s ADDRESS ECAP_ACS+0x6.w=0000` for {', '.join(bridges)}"
