"""What is said of made-up machines, and the exit code of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oases_hf.doctor.diagnosis import Examination, Finding, diagnose, exit_code
from oases_hf.doctor.measurements import Failure, Hang, Joined

from .examples import APART, DISABLED, GOOD, all_reduce, copy, examined

HANG = Hang("all-reduce of 2 ranks, 64 KiB", (0,), 60.0, (("making groups of 2 ranks", (1,)),))
COPY_HANG = Hang("copies from GPU 0 to GPU 1", (0,), 60.0)
NO_GPU = replace(GOOD, gpus=(), links=(), driver=None)
ON_CPU = {"copies": (), "joined": Joined(2, "cpu"), "transports": ()}
UNTIL_THEN = "until then train with NCCL_P2P_DISABLE=1, and check that with it set here, too"


def worst(found: Examination) -> tuple[int, list[Finding]]:
    """The exit code, and what is not fine."""
    findings = diagnose(found)
    return exit_code(findings), [finding for finding in findings if finding.level != "fine"]


def the_one(found: Examination, level: str, code: int) -> Finding:
    """The only finding that is not fine."""
    exit_with, (finding,) = worst(found)
    assert (exit_with, finding.level) == (code, level)
    return finding


@pytest.mark.parametrize("found", [examined(), examined(APART), examined(NO_GPU, **ON_CPU)])
def test_all_is_well(found: Examination) -> None:
    assert worst(found) == (0, [])
    told = {(finding.where, finding.what) for finding in diagnose(found)}
    assert ("all-reduce of 2 ranks", "right in all 2 sizes, on every rank") in told


def test_a_hang_says_where_every_rank_is() -> None:
    finding = the_one(examined(on_ranks=HANG, all_reduces=()), "wrong", 1)
    assert finding.where == "all-reduce of 2 ranks, 64 KiB"
    assert finding.what == "hangs on rank 0: not done after 60 s; meanwhile rank 1 in: making groups of 2 ranks"


def test_the_fix_is_that_of_the_machine() -> None:
    def fix_on(**changes: object) -> str:
        return worst(examined(replace(GOOD, **changes), on_ranks=HANG))[1][0].fix  # type: ignore[arg-type]

    assert fix_on() == f"look for the IOMMU and ACS in the BIOS, and for a newer driver; {UNTIL_THEN}"
    iommu, acs = fix_on(iommu="translates"), fix_on(acs=("00:01.0",))
    assert iommu == f"switch the IOMMU off (BIOS: VT-d or AMD-Vi), or boot with iommu=pt; {UNTIL_THEN}"
    assert acs.startswith("switch ACS off, in the BIOS or by `setpci -s ADDRESS ECAP_ACS+0x6.w=0000` for 00:01.0")
    assert "NCCL_SHM_DISABLE=1" in fix_on(settings=DISABLED.settings)
    assert "GLOO_SOCKET_IFNAME" in worst(examined(NO_GPU, **ON_CPU, on_ranks=HANG))[1][0].fix


def test_wrong_sums() -> None:
    sums = (all_reduce(), all_reduce(2**20, (0, 3)), all_reduce(2**26, (1, 0)))
    finding = the_one(examined(all_reduces=sums), "wrong", 1)
    assert finding.where == "all-reduce of 2 ranks"
    assert finding.what == "not the sum on ranks 0, 1, with messages of 1024 KiB, 65536 KiB"


def test_wrong_copies() -> None:
    finding = the_one(examined(copies=(copy(), copy(1, 0, wrong=5))), "wrong", 1)
    assert (finding.where, finding.what) == ("copies from GPU 1 to GPU 0", "5 elements arrive wrong")
    assert finding.fix.endswith(UNTIL_THEN)


def test_copies_that_nccl_does_not_do_are_no_harm() -> None:
    wrong = the_one(examined(DISABLED, copies=(copy(wrong=5),)), "warning", 0)
    hang = the_one(examined(DISABLED, copies=(), on_machine=COPY_HANG), "warning", 0)
    assert wrong.fix == hang.fix == "keep NCCL_P2P_DISABLE=1, with which NCCL does not copy so"
    through_host = examined(DISABLED, copies=(copy(direct=False, wrong=5),))
    assert worst(through_host)[0] == 1


def test_copies_that_hang() -> None:
    finding = the_one(examined(copies=(), on_machine=COPY_HANG), "wrong", 1)
    assert (finding.where, finding.fix.endswith(UNTIL_THEN)) == ("copies from GPU 0 to GPU 1", True)


def test_a_machine_that_cannot_be_looked_at() -> None:
    hang = Examination(None, None, 2, on_machine=Hang("looking at the machine", (0,), 120.0))
    assert the_one(hang, "wrong", 1).fix.startswith("the driver hangs")
    failure = Examination(None, None, 2, on_machine=Failure("looking at the machine", 0, 1, "no libcuda"))
    finding = the_one(failure, "failed", 3)
    assert finding.what == "rank 0 ended with exit code 1; it wrote last:\nno libcuda"


def test_a_rank_that_ends() -> None:
    failed = examined(on_ranks=Failure("joining", 1, -9, ""))
    assert the_one(failed, "failed", 3).what == "rank 1 ended with exit code -9; it wrote last:"
    assert exit_code(diagnose(replace(failed, all_reduces=(all_reduce(wrong=(1, 0)),)))) == 1


def test_one_process_per_gpu() -> None:
    launch = "start one process per GPU: accelerate launch --multi_gpu --num_processes 2"
    few, many = examined(ranks_here=1), examined(ranks_here=4, joined=Joined(4, "cpu"))
    assert the_one(few, "warning", 0).fix == launch
    assert the_one(many, "wrong", 1) == Finding(
        "wrong", "processes", "4 ranks on 2 GPUs; NCCL takes one per GPU", launch
    )
    assert worst(replace(many, asked="cpu")) == (0, [])
    log = "ncclInvalidUsage\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"
    assert "several ranks use one GPU" in the_one(examined(on_ranks=Failure("", 1, 1, log)), "wrong", 1).what


def test_gpus_that_torch_does_not_see() -> None:
    finding = the_one(examined(replace(NO_GPU, driver="550.54"), **ON_CPU), "warning", 0)
    assert finding.what == "nvidia-smi knows GPUs, but torch 2.11 sees none"


def test_p2p_that_is_switched_off_for_nothing() -> None:
    assert the_one(examined(DISABLED), "warning", 0).what == "NCCL_P2P_DISABLE=1 is set, though copies arrive right"
    assert worst(examined(replace(APART, settings=DISABLED.settings), copies=(copy(direct=False),)))[1] == []


def test_what_slows_links_down() -> None:
    small = {"shm_bytes": 2**26}
    assert worst(examined(replace(GOOD, **small)))[1] == []  # type: ignore[arg-type]
    assert the_one(examined(replace(APART, **small)), "warning", 0).where == "/dev/shm"  # type: ignore[arg-type]
    assert the_one(examined(replace(GOOD, acs=("00:01.0",))), "warning", 0).where == "ACS"
    assert "NET/Socket/0" in the_one(examined(transports=("NET/Socket/0",)), "warning", 0).what
    assert worst(examined(joined=Joined(4, "cuda"), transports=("NET/Socket/0",)))[1] == []


def test_an_iommu_matters_until_copies_are_right() -> None:
    translating = replace(GOOD, iommu="translates")
    assert worst(examined(translating))[1] == []
    assert the_one(examined(translating, copies=()), "warning", 0).where == "IOMMU"
