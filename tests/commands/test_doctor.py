"""`oases-hf doctor`: real ranks, of which some hang, die or answer wrong; what it prints, and its exit codes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oases_hf import cli
from oases_hf.doctor.examining import examine

from ..environment import SHARED
from ..families import FAMILIES
from ..launch import launch, run_launcher

CPU = ("--device", "cpu")
DOCTOR = ["-m", "oases_hf.cli", "doctor", *CPU]

MACHINE = r"""\S+: torch \S+, driver .*
(GPU.*\n)*IOMMU .*
set: .*
"""
SUMS = "".join(rf"all-reduce of 2 ranks, {kib} KiB: right, \d+\.\d\d ms, bus \d+\.\d\d GB/s\n" for kib in (64, 1024))
SUMS += "".join(
    rf"all-reduce of 2 ranks, {kib} KiB: right, \d+\.\d\d ms, bus \d+\.\d\d GB/s\n" for kib in (16384, 65536)
)
FINE = """fine: all-reduce of 2 ranks: right in all 4 sizes, on every rank
FINE: nothing found that makes training wrong, or hang
"""
COSTS = r"(costs: .*\n)+"
PREDICTION = (
    r"GPT2LMHeadModel at degree 2, simulated steps: megatron \d+\.\d ms, oases \d+\.\d ms, \d+\.\d\d times .*\n"
)

FAULTY = """
import os, sys, time
import torch.distributed as dist
from oases_hf import cli
from oases_hf.commands import diagnosed
from oases_hf.doctor import watching
from oases_hf.parallel.mesh import Axis

own, last = Axis.start_all_reduce, os.environ.get("RANK") == "1"
MIB = 2**18  # elements
FAULT
sys.exit(cli.main(sys.argv[1:]))
"""

HANGS = """
def hang(axis, tensor, *rest):
    if last and tensor.numel() == MIB:
        time.sleep(1000)
    return own(axis, tensor, *rest)
Axis.start_all_reduce = hang
"""
WRONG = """
def wrong(axis, tensor, *rest):
    pending = own(axis, tensor, *rest)
    pending.wait()
    if last and tensor.numel() == MIB:
        tensor[5] += 1
    return pending
Axis.start_all_reduce = wrong
"""
DIES = """
def die(axis, tensor, *rest):
    if last and tensor.numel() == MIB:
        os.kill(os.getpid(), 9)
    return own(axis, tensor, *rest)
Axis.start_all_reduce = die
"""
NEVER_JOINS = """
diagnosed.START_LIMIT_S = 1.0
if last:
    dist.init_process_group = lambda *arguments, **others: time.sleep(1000)
"""
LOOKING_HANGS = """
if "machine" in sys.argv:
    from oases_hf.doctor import machine
    machine.START_LIMIT_S = 1.0
    machine.machine_here = lambda: time.sleep(1000)
"""

Examine = Callable[..., int]


@pytest.fixture
def examine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines two ranks with a fault planted into their program; returns the exit code."""
    for name, value in (SHARED | {"PYTHONPATH": str(Path(__file__).parents[2])}).items():
        monkeypatch.setenv(name, value)

    def run(fault: str, limit_s: float = 60.0) -> int:
        program = tmp_path / "faulty.py"
        program.write_text(FAULTY.replace("FAULT", fault))
        arguments = ["doctor", *CPU, "--time-limit-s", str(limit_s)]
        return examine([sys.executable, str(program), *arguments], 2, "cpu")

    return run


@pytest.mark.dist
def test_a_machine_that_is_well() -> None:
    done = run_launcher(DOCTOR)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(f"{MACHINE}2 ranks on cpu\n{SUMS}{FINE}", done.stdout), done.stdout


@pytest.mark.dist
def test_a_hang_is_said_and_ended(examine_with: Examine, capfd: pytest.CaptureFixture[str]) -> None:
    assert examine_with(HANGS, limit_s=4.0) == 1
    said = capfd.readouterr().out
    assert "all-reduce of 2 ranks, 64 KiB: right" in said
    assert (
        "wrong: all-reduce of 2 ranks, 1024 KiB: hangs on ranks 0, 1: not done after 4 s; "
        "fix: see that GLOO_SOCKET_IFNAME names the network" in said
    )
    assert said.endswith("\nWRONG: training would be wrong, or hang\n")


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_never_joins(examine_with: Examine, capfd: pytest.CaptureFixture[str]) -> None:
    assert examine_with(NEVER_JOINS, limit_s=3.0) == 1
    assert "wrong: joining the other ranks: hangs on rank" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.dist
def test_a_wrong_sum(examine_with: Examine, capfd: pytest.CaptureFixture[str]) -> None:
    assert examine_with(WRONG) == 1
    said = capfd.readouterr().out
    assert "all-reduce of 2 ranks, 1024 KiB: wrong on rank 1, " in said
    assert "wrong: all-reduce of 2 ranks: not the sum on rank 1, with messages of 1024 KiB; fix: " in said


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_dies(examine_with: Examine, capfd: pytest.CaptureFixture[str]) -> None:
    assert examine_with(DIES) == 3
    said = capfd.readouterr().out
    assert "failed: all-reduce of 2 ranks, 1024 KiB: rank " in said
    assert said.endswith("\nFAILED: not all could be checked\n")


@pytest.mark.dist
def test_a_driver_that_hangs(examine_with: Examine, capfd: pytest.CaptureFixture[str]) -> None:
    assert examine_with(LOOKING_HANGS) == 1
    assert capfd.readouterr().out == (
        "wrong: looking at the machine: hangs on rank 0: not done after 1 s; "
        "fix: the driver hangs: restart the machine, then look into `dmesg`\n"
        "WRONG: training would be wrong, or hang\n"
    )


@pytest.mark.dist
@pytest.mark.slow
def test_under_a_launcher_the_first_speaks() -> None:
    first, second = launch(2, DOCTOR)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert re.fullmatch(f"{MACHINE}2 ranks on cpu\n{SUMS}{FINE}", first.stdout), first.stdout
    assert (second.stdout, second.stderr) == ("", "")


@pytest.mark.dist
@pytest.mark.slow
def test_under_torchrun() -> None:
    elastic: list[str | Path] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_launcher([*elastic, *DOCTOR])
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(f"{MACHINE}2 ranks on cpu\n{SUMS}{FINE}", done.stdout), done.stdout


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with 5 heads."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    FAMILIES["gpt2"].model().save_pretrained(folder)
    return folder


WORK = ("--batch", "4", "--seq", "16")


@pytest.mark.dist
@pytest.mark.slow
def test_the_gain_for_a_model(gpt2: Path, tmp_path: Path) -> None:
    done = run_launcher([*DOCTOR, gpt2, *WORK], env={"XDG_CACHE_HOME": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"{MACHINE}2 ranks on cpu\n{SUMS}{COSTS}{PREDICTION}{FINE}"
    assert re.fullmatch(expected, done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.dist
def test_a_model_that_cannot_be_read() -> None:
    done = run_launcher([*DOCTOR, "/nowhere/model", *WORK])
    expected = "oases-hf doctor: error: there is no folder /nowhere/model; give that of a model, or a hub id\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.slow
@pytest.mark.dist
def test_gpus_that_are_not_there() -> None:
    done = run_launcher(["-m", "oases_hf.cli", "doctor", "--device", "cuda"], env={"CUDA_VISIBLE_DEVICES": ""})
    expected = "oases-hf doctor: error: --device cuda: 2 ranks on 0 GPUs, each needs one; choose --device cpu\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.gpu
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus(gpt2: Path, tmp_path: Path) -> None:
    environment = {"ACCELERATE_USE_CPU": "false", "XDG_CACHE_HOME": str(tmp_path)}
    command: list[str | Path] = ["-m", "oases_hf.cli", "doctor", gpt2, *WORK, "--tmp-size", "2"]
    done = run_launcher([*command, "--device", "cuda"], env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    for said in (r"copies from GPU 0 to GPU 1: right", r"NCCL sends by: (P2P|SHM|NET)", PREDICTION.strip("\n")):
        assert re.search(said, done.stdout), done.stdout


SENSELESS = {
    "no model": (["--batch", "4"], "--batch: give the model, too"),
    "no batch": (["model", "--seq", "4"], "give --batch, too"),
    "neither": (["--config", "file"], "give --batch and --seq, too"),
    "one row": (["model", "--batch", "1", "--seq", "4"], "--batch 1: overlap needs two rows"),
}


@pytest.mark.parametrize("case", SENSELESS)
def test_senseless_options(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = SENSELESS[case]
    assert cli.main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"oases-hf doctor: error: {message}")
