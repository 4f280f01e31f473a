"""What is known of a machine, and how to read it from what tools print and the kernel tells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..nccl import Settings, p2p_disabled_by

Iommu = Literal["off", "passes through", "translates"]

Pair = tuple[int, int]

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Gpu:
    """A GPU, as torch numbers them.

    Attributes:
        pci: its address, as /sys has it; empty when nvidia-smi does not list it.
    """

    index: int
    name: str
    memory_bytes: int
    capability: str
    pci: str


@dataclass(frozen=True)
class Link:
    """What lies between two GPUs.

    Attributes:
        path: as ``nvidia-smi topo -m`` has it: NV2, PIX, PHB, SYS, …; empty when unknown.
        p2p: as ``nvidia-smi topo -p2p r`` has it: OK, CNS (chipset not supported), …; empty when unknown.
        access: whether CUDA lets each of them read the other's memory.
    """

    first: int
    second: int
    path: str
    p2p: str
    access: bool


@dataclass(frozen=True)
class Machine:
    """What is known of one.

    Attributes:
        driver: of the GPUs; None when nvidia-smi does not answer.
        cuda: that torch is built for; None when for none.
        nccl: that torch has; None when it has none.
        settings: of NCCL and gloo, and which GPUs are visible; environment variables, or in NCCL's files.
        iommu: what it does with what GPUs send; None when the kernel does not tell.
        acs: addresses of PCI bridges that send all traffic to the root first; None when lspci does not tell.
        shm_bytes: of /dev/shm; None when there is none.
    """

    host: str
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    driver: str | None
    torch: str
    cuda: str | None
    nccl: str | None
    settings: Settings
    iommu: Iommu | None
    acs: tuple[str, ...] | None
    shm_bytes: int | None

    def setting(self, name: str) -> str | None:
        """The value of a variable, None when it is not set."""
        return dict(self.settings).get(name)

    @property
    def p2p_disabled_by(self) -> str | None:
        """The setting that keeps NCCL from copies between GPUs; None for none."""
        return p2p_disabled_by(self.settings)

    @property
    def uses_p2p(self) -> bool:
        """Whether NCCL may copy from GPU to GPU."""
        return self.p2p_disabled_by is None and any(link.access for link in self.links)


def matrix(text: str) -> dict[Pair, str]:
    """The cells of a table of GPUs by GPUs that ``nvidia-smi topo`` prints, by its numbers of them."""
    columns: list[int] = []
    cells: dict[Pair, str] = {}
    for line in _ESCAPES.sub("", text).splitlines():
        words = re.split(r"\t\s*|\s{2,}", line.strip())
        numbers = [int(match[1]) for word in words if (match := re.fullmatch(r"GPU(\d+)", word))]
        if not columns:
            columns = numbers
        elif numbers and words[0] == f"GPU{numbers[0]}":
            cells |= {(numbers[0], column): word for column, word in zip(columns, words[1:], strict=False)}
    return cells


def nvidia_gpus(text: str) -> dict[str, tuple[int, str, str]]:
    """By UUID, number, PCI address and driver, from ``--query-gpu=uuid,index,pci.bus_id,driver_version``."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 3]
    return {uuid.removeprefix("GPU-"): (int(index), pci.lower()[-12:], driver) for uuid, index, pci, driver in rows}


def iommu(system: Path, addresses: Sequence[str]) -> Iommu | None:
    """What the IOMMU does with what the GPUs at ``addresses`` send; ``system`` is /sys, or stands for it."""
    try:
        if not any((system / "class" / "iommu").iterdir()):
            return "off"
        groups = [system / "bus/pci/devices" / address / "iommu_group" / "type" for address in addresses if address]
        kinds = {group.read_text().strip() for group in groups}
    except OSError:
        return None
    if not kinds:
        return None
    return "passes through" if kinds == {"identity"} else "translates"


def acs(text: str) -> tuple[str, ...] | None:
    """Addresses of the PCI bridges with access control switched on, from ``lspci -vvv``."""
    devices = re.split(r"\n\s*\n", text)
    bridges = [device.strip() for device in devices if "PCI bridge" in device.strip().partition("\n")[0]]
    if not any("ACSCtl:" in bridge for bridge in bridges) and "<access denied>" in text:
        return None
    return tuple(bridge.split()[0] for bridge in bridges if re.search(r"ACSCtl:.*SrcValid\+", bridge))


def transports(log: str) -> tuple[str, ...]:
    """How NCCL says that its channels go, from what it logs with ``NCCL_DEBUG=INFO``."""
    return tuple(sorted(set(re.findall(r"Channel \S+ *: .* via (\S+)", log))))
