"""Finds out what a machine is, and how its GPUs copy, as a process that may hang at it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from itertools import combinations, permutations
from pathlib import Path

import torch

from ..nccl import settings_here
from . import facts
from .copies import check_copies
from .facts import Gpu, Link, Machine
from .watching import START_LIMIT_S, Teller

TOOL_LIMIT_S = 30.0


def look(teller: Teller, copies: bool, limit_s: float) -> None:
    """Tell of this machine, and, where asked, of copies from each GPU to each other, which may take ``limit_s``."""
    teller.step("looking at the machine", START_LIMIT_S)
    machine = machine_here()
    teller.found(machine)
    pairs = list(permutations(range(len(machine.gpus)), 2)) if copies else []
    for source, target in pairs:
        teller.step(f"copies from GPU {source} to GPU {target}", limit_s)
        direct = torch.cuda.can_device_access_peer(source, target)  # the source writes
        teller.found(check_copies(torch.device("cuda", source), torch.device("cuda", target), direct))


def machine_here() -> Machine:
    """What is known of this machine."""
    told = _output("nvidia-smi", "--query-gpu=uuid,index,pci.bus_id,driver_version", "--format=csv,noheader") or ""
    listed = facts.nvidia_gpus(told)
    gpus, numbers = [], []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        number, pci, _ = listed.get(str(about.uuid), (None, "", ""))
        gpus.append(Gpu(index, about.name, about.total_memory, f"{about.major}.{about.minor}", pci))
        numbers.append(number)
    shm = Path("/dev/shm")
    return Machine(
        host=platform.node(),
        gpus=tuple(gpus),
        links=_links(numbers),
        driver=next((driver for *_, driver in listed.values()), None),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        settings=settings_here(os.environ),
        iommu=facts.iommu(Path("/sys"), [gpu.pci for gpu in gpus]),
        acs=facts.acs(_output("lspci", "-vvv") or "<access denied>"),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
    )


def _links(numbers: list[int | None]) -> tuple[Link, ...]:
    """Of all pairs of GPUs; ``numbers`` are nvidia-smi's."""
    if len(numbers) < 2:
        return ()
    paths, states = (facts.matrix(_output("nvidia-smi", "topo", *what) or "") for what in (["-m"], ["-p2p", "r"]))
    links = []
    for first, second in combinations(range(len(numbers)), 2):
        access = all(torch.cuda.can_device_access_peer(*pair) for pair in ((first, second), (second, first)))
        pair = numbers[first], numbers[second]
        known = (pair[0], pair[1]) if pair[0] is not None and pair[1] is not None else (-1, -1)
        links.append(Link(first, second, paths.get(known, ""), states.get(known, ""), access))
    return tuple(links)


def _output(*command: str) -> str | None:
    """What a tool prints; None when there is none, or it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TOOL_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
