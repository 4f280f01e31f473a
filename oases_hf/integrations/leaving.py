"""The end of a rank's process, and of the others' when it ends out of order."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..parallel.mesh import ended

GRACE_S = 3.0
"""For the error that a rank finds by itself when another is gone: it has a traceback, and says less."""

POLL_S = 0.2

SOON_S = 1.0
"""In which a rank that fails since another is gone learns of that."""

_FIRST = "oases/first_failure"


@dataclass
class Progress:
    """Where a process is.

    Attributes:
        step: the optimizer step that runs, counted from 1.
        told: somebody sets it, who knows how many went before; else it is counted.
        completed: the last backward of that step is done.
    """

    step: int = 1
    told: bool = False
    completed: bool = False

    def restart(self) -> None:
        """Note that another model is to be trained."""
        self.step, self.told, self.completed = 1, False, False

    def forward(self) -> None:
        """Note that a forward begins; behind the last backward of a step that of the next one."""
        if self.completed and not self.told and torch.is_grad_enabled():
            self.step += 1
            self.completed = False


@cache
def end_together() -> Progress:
    """Leave the process group in order when this process ends; end it soon when another rank fails or is killed.

    A rank that is gone leaves the others in collectives that last for minutes, or for ever. So each watches those on
    its machine; launchers watch the other machines, and who starts ranks by multiprocessing watches them all: these end
    without a word. Returns what the caller is to keep up to date.
    """
    progress = Progress()
    if not dist.is_initialized():
        return progress
    if multiprocessing.parent_process() is not None:
        atexit.register(_leave)
        return progress
    own_hook, rank, store = sys.excepthook, dist.get_rank(), distributed_c10d._get_default_store()
    failed, own_pid = False, os.getpid()
    verdict = _Verdict(rank, dist.get_world_size(), store, progress)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        own_hook(kind, error, trace)
        if os.getpid() != own_pid:
            return
        said = f"failed in step {progress.step}: {kind.__name__}: {error}"
        print(f"oases: rank {rank} {said}", file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # who keeps it is gone
            store.set(_failed(rank), said)
            verdict.of_failure(said)
        verdict.judged.wait(SOON_S)  # if it is for another's end, say so

    def leave() -> None:
        if failed or os.getpid() != own_pid:
            return
        with suppress(RuntimeError):
            store.set(ended(rank), "")
        _leave()

    sys.excepthook = hook
    atexit.register(leave)
    if hasattr(os, "pidfd_open"):  # on Linux
        store.set(_process(rank), f"{own_pid} {_machine()}")
        threading.Thread(target=_watch, args=(verdict,), daemon=True, name="oases-watch").start()
    return progress


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class _Verdict:
    """What a rank says of the end of another.

    Attributes:
        rank: which one it is.
        size: how many there are.
        store: where they tell each other how they end.
        progress: of this one.
        judged: the end of another was no good one.
    """

    rank: int
    size: int
    store: Any
    progress: Progress
    judged: threading.Event = field(default_factory=threading.Event)
    _said: set[str] = field(default_factory=set)

    def of_failure(self, said: str) -> None:
        """Say who failed first, if not this rank, which now has: that one may take its time to end."""
        if self.store.add(f"{_FIRST}/count", 1) == 1:
            self.store.set(_FIRST, f"rank {self.rank} {said}")
        elif self.store.check([_FIRST]):
            self._say(self.store.get(_FIRST).decode())

    def of_end(self, other: int) -> None:
        """Say how a rank has ended, and end with it; nothing if in order, or if that is not known."""
        try:
            if self.store.check([ended(other)]):
                return
            failed = self.store.check([_failed(other)])
            how = self.store.get(_failed(other)).decode() if failed else f"was killed in step {self.progress.step}"
        except RuntimeError:  # it kept the store, which would tell
            return
        self._say(f"rank {other} {how}")
        self.judged.set()
        time.sleep(GRACE_S)
        sys.stdout.flush()
        os._exit(1)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            print(f"oases: {what}; rank {self.rank} ends with it", file=sys.stderr, flush=True)


def _watch(verdict: _Verdict) -> None:
    """Wait for the end of the other processes on this machine."""
    store = verdict.store
    ends, others = select.poll(), dict[int, int]()
    with suppress(RuntimeError):  # the store went with whoever kept it
        for other in range(verdict.size):
            while not store.check([_process(other)]):  # to wait in the store would keep others from it
                time.sleep(POLL_S)
            pid, machine = store.get(_process(other)).decode().split(maxsplit=1)
            if other == verdict.rank or machine != _machine():
                continue
            try:
                others[descriptor := os.pidfd_open(int(pid))] = other
                ends.register(descriptor, select.POLLIN)
            except ProcessLookupError:
                verdict.of_end(other)
    while others:
        for descriptor, _ in ends.poll():
            ends.unregister(descriptor)
            os.close(descriptor)
            verdict.of_end(others.pop(descriptor))


def _machine() -> str:
    """What processes have in common that see each other's ids: a running kernel, and a namespace of ids."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').stat().st_ino}"


def _process(rank: int) -> str:
    return f"oases/process/{rank}"


def _failed(rank: int) -> str:
    return f"oases/failed/{rank}"
