"""Reading what tools print and the kernel tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oases_hf.doctor import facts

from .examples import APART, DISABLED, GOOD

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tSYS\tPHB\t0-15\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tPIX\tSYS\t0-15\t0\t\tN/A\n"
    "GPU2\tSYS\tPIX\t X \tSYS\t16-31\t1\t\tN/A\n"
    "NIC0\tPHB\tSYS\tSYS\t X \t\t\t\t\n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)
P2P = " \tGPU0\tGPU1\t\n GPU0\tX\tCNS\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"


def test_the_topology() -> None:
    cells = facts.matrix(TOPOLOGY)
    assert (cells[0, 1], cells[0, 2], cells[1, 2], cells[2, 1]) == ("NV4", "SYS", "PIX", "PIX")
    assert len(cells) == 9


def test_the_state_of_p2p() -> None:
    assert facts.matrix(P2P) == {(0, 0): "X", (0, 1): "CNS", (1, 0): "OK", (1, 1): "X"}


def test_no_table() -> None:
    assert facts.matrix("") == {}
    assert facts.nvidia_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == {}


def test_what_nvidia_smi_lists() -> None:
    listed = facts.nvidia_gpus("GPU-aa-1, 1, 00000000:3B:00.0, 550.54\nGPU-bb-2, 0, 00000000:01:00.0, 550.54\n")
    assert listed == {"aa-1": (1, "0000:3b:00.0", "550.54"), "bb-2": (0, "0000:01:00.0", "550.54")}


@pytest.mark.parametrize(("name", "value"), [("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "loc")])
def test_what_switches_p2p_off(name: str, value: str) -> None:
    off = replace(GOOD, settings=((name, value),))
    assert (off.p2p_disabled_by, off.uses_p2p) == (f"{name}={value}", False)


def test_what_does_not() -> None:
    harmless = replace(GOOD, settings=(("NCCL_P2P_DISABLE", "0"), ("NCCL_P2P_LEVEL", "SYS")))
    assert harmless.uses_p2p
    assert GOOD.uses_p2p
    assert not APART.uses_p2p
    assert not DISABLED.uses_p2p


def system(folder: Path, units: int, *kinds: str) -> list[str]:
    """Stands for /sys, with GPUs in groups of ``kinds``; their addresses."""
    for unit in range(units):
        (folder / "class/iommu" / f"dmar{unit}").mkdir(parents=True)
    (folder / "class/iommu").mkdir(parents=True, exist_ok=True)
    for number, kind in enumerate(kinds):
        group = folder / "bus/pci/devices" / f"0000:0{number}:00.0/iommu_group"
        group.mkdir(parents=True)
        (group / "type").write_text(f"{kind}\n")
    return [f"0000:0{number}:00.0" for number in range(len(kinds))]


@pytest.mark.parametrize(
    ("units", "kinds", "state"),
    [
        (0, (), "off"),
        (1, ("identity", "identity"), "passes through"),
        (1, ("identity", "DMA-FQ"), "translates"),
        (2, ("DMA",), "translates"),
        (1, (), None),
    ],
)
def test_the_iommu(tmp_path: Path, units: int, kinds: tuple[str, ...], state: str | None) -> None:
    assert facts.iommu(tmp_path, system(tmp_path, units, *kinds)) == state


def test_a_kernel_that_tells_nothing_of_the_iommu(tmp_path: Path) -> None:
    assert facts.iommu(tmp_path, []) is None
    system(tmp_path, 1)
    assert facts.iommu(tmp_path, ["0000:07:00.0"]) is None


BRIDGE = """{} PCI bridge: Intel Corporation Root Port
	Control: I/O+ Mem+
	Capabilities: [220 v1] Access Control Services
		ACSCap:	SrcValid+ TransBlk+ ReqRedir+
		ACSCtl:	SrcValid{} TransBlk- ReqRedir{}
"""
ENDPOINT = "01:00.0 VGA compatible controller: NVIDIA\n\tACSCtl:\tSrcValid+ TransBlk-\n"


def test_acs() -> None:
    devices = [BRIDGE.format("00:01.0", "+", "+"), BRIDGE.format("00:02.0", "-", "-"), ENDPOINT]
    assert facts.acs("\n".join(devices)) == ("00:01.0",)
    assert facts.acs("\n".join(devices[1:])) == ()
    assert facts.acs(ENDPOINT) == ()
    assert facts.acs("00:01.0 PCI bridge: Intel\n\tCapabilities: <access denied>\n") is None


def test_how_nccl_sends() -> None:
    log = (
        "box:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n"
        "box:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct\n"
        "box:1:2 [0] NCCL INFO Channel 00 : 1[b000] -> 2[c000] via P2P/IPC\n"
        "box:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 4[0] [send] via NET/Socket/0\n"
        "box:1:2 [0] NCCL INFO Connected all rings\n"
    )
    assert facts.transports(log) == ("NET/Socket/0", "P2P/IPC", "SHM/direct/direct")
    assert facts.transports("") == ()
