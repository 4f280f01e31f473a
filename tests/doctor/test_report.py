"""What is printed of what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oases_hf.doctor.diagnosis import Finding
from oases_hf.doctor.measurements import Joined, Prediction, Step
from oases_hf.doctor.report import lines_of, transports_line, verdict

from .examples import DISABLED, GOOD, all_reduce, copy

MACHINE = """box: torch 2.11, driver 550.54, CUDA 12.8, NCCL 2.21.5
GPU 0: RTX 3090, 24.0 GiB, capability 8.6, PCI 0000:00:00.0
GPU 1: RTX 3090, 24.0 GiB, capability 8.6, PCI 0000:01:00.0
GPUs 0 and 1: PHB, P2P OK, can read each other's memory
IOMMU off; ACS off; /dev/shm 16.00 GiB
set: NCCL_P2P_DISABLE=1"""


def test_a_machine() -> None:
    assert "\n".join(lines_of(DISABLED)) == MACHINE


def test_what_is_not_known() -> None:
    *_, state, nothing = lines_of(replace(GOOD, iommu=None, acs=None, shm_bytes=None))
    assert state == "IOMMU unknown; ACS unknown: run as root, with lspci; /dev/shm none"
    assert nothing == "set: nothing of NCCL or gloo"
    assert "on in 1 PCI bridges" in list(lines_of(replace(GOOD, acs=("00:01.0",))))[-2]


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (copy(), "copies from GPU 0 to GPU 1: right, 8.39 GB/s, direct"),
        (copy(direct=False, wrong=3), "copies from GPU 0 to GPU 1: 3 elements wrong, 8.39 GB/s, through the host"),
        (Joined(2, "cuda"), "2 ranks on cuda"),
        (all_reduce(2**24), "all-reduce of 2 ranks, 16384 KiB: right, 1.00 ms, bus 16.78 GB/s"),
        (all_reduce(wrong=(0, 9)), "all-reduce of 2 ranks, 64 KiB: wrong on rank 1, 1.00 ms, bus 0.07 GB/s"),
        (Step("costs: links", 9.0), "costs: links"),
        (
            Prediction("LlamaForCausalLM", 4, 150.0, 100.0),
            "LlamaForCausalLM at degree 4, simulated steps: megatron 150.0 ms, oases 100.0 ms, 1.50 times as fast",
        ),
    ],
)
def test_one_line(found: object, line: str) -> None:
    assert list(lines_of(found)) == [line]


def test_other_steps_are_not_printed() -> None:
    assert list(lines_of(Step("joining the other ranks", 9.0))) == []


@pytest.mark.parametrize(("oases_ms", "pays"), [(100.0, True), (104.0, False), (120.0, False)])
def test_overlap_that_does_not_pay(oases_ms: float, pays: bool) -> None:
    (line,) = lines_of(Prediction("M", 2, 106.0, oases_ms))
    assert line.endswith("; overlap does not pay here") != pays


def test_how_nccl_sends() -> None:
    assert transports_line(("P2P/IPC", "SHM/direct")) == "NCCL sends by: P2P/IPC, SHM/direct"
    assert transports_line(()).startswith("NCCL sends by: unknown")


def test_the_worst_comes_first() -> None:
    findings = [
        Finding("fine", "copies", "right"),
        Finding("warning", "ACS", "on", "switch it off"),
        Finding("wrong", "all-reduce", "not the sum", "do this"),
        Finding("failed", "joining", "rank 1 ended"),
    ]
    assert list(verdict(findings)) == [
        "wrong: all-reduce: not the sum; fix: do this",
        "failed: joining: rank 1 ended",
        "warning: ACS: on; fix: switch it off",
        "fine: copies: right",
        "WRONG: training would be wrong, or hang",
    ]
    assert list(verdict(findings[:1]))[-1] == "FINE: nothing found that makes training wrong, or hang"
    assert list(verdict(findings[:2]))[-1].startswith("FINE, with warnings")
    assert list(verdict([findings[-1]]))[-1] == "FAILED: not all could be checked"
