"""One rank of a world: the process that runs what ``tests.ranks`` sends it.

A task is a pickled ``(function, args, kwargs)``, its answer a pickled `Outcome`, an empty message the end.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.distributed import distributed_c10d

from .environment import rank_environment, restore_environment
from .pickling import dumps

STOP = b""
DUMP_SIGNAL = signal.SIGUSR1
# Only an orphan could wait this long: whoever runs a task bounds it much tighter.
_COLLECTIVE_LIMIT = timedelta(minutes=30)
_UNUSED_PORT = 29500  # the rendezvous is a file


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits: its number, its world, and the folder of the rendezvous and of the logs."""

    rank: int
    size: int
    folder: Path

    @property
    def log(self) -> Path:
        """The file that takes the rank's stdout and stderr."""
        return self.folder / f"rank{self.rank}.log"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a function returned on one rank, or how it failed, and how many collectives of the world it has seen."""

    value: object = None
    collectives: int = 0
    error: str | None = None
    traceback: str = ""


def serve(seat: Seat, connection: Connection[bytes, bytes]) -> None:
    """Join the world, say so, then run tasks until told to stop."""
    _redirect_output(seat.log)
    _die_with_parent()
    environment = dict(os.environ) | rank_environment(seat.rank, seat.size, _UNUSED_PORT)
    restore_environment(environment)
    torch.set_num_threads(1)
    rendezvous = f"file://{seat.folder / 'rendezvous'}"
    dist.init_process_group("gloo", rendezvous, _COLLECTIVE_LIMIT, seat.size, seat.rank)
    gc.freeze()  # else every collection walks all of torch and transformers
    connection.send_bytes(pickle.dumps(Outcome()))
    for number in itertools.count():
        if (task := connection.recv_bytes()) == STOP:
            break
        _reset(environment, seat.folder / f"run{number}")
        connection.send_bytes(_answer(task))
    dist.destroy_process_group()


def _redirect_output(log: Path) -> None:
    """Send everything written to stdout and stderr, from Python or below it, to the log."""
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)


def _die_with_parent() -> None:
    """Leave no rank behind in a collective when the test process goes, however it goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's to handle
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by a test process"
    multiprocessing.current_process().daemon = False  # a daemon may have no data loader workers
    threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _reset(environment: dict[str, str], folder: Path) -> None:
    """Make the rank as good as new, in a folder of its run, but keep the default process group."""
    restore_environment(environment)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # All ranks have answered the task before, so no collective is under way in any group.
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    gc.collect()


def _collectives() -> int:
    return int(cast(Any, dist.group.WORLD)._get_sequence_number_for_group())


def _answer(task: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(task)
        # Tensors are copied; multiprocessing's pickle would share memory that dies with the rank.
        return dumps(Outcome(function(*args, **kwargs), _collectives()))
    except BaseException as error:
        summary = traceback.format_exception_only(error)[-1].strip()
        return pickle.dumps(Outcome(error=summary, traceback=traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
