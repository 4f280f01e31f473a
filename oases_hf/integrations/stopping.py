"""SIGTERM and SIGINT end training behind the step that runs, with a checkpoint."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..parallel.mesh import Axis

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(TrainerCallback):
    """Stops all ranks behind the same step when one of them gets a signal, and ends them with 128 + its number.

    A second signal does what it would have done.

    Args:
        control: the ranks.
    """

    def __init__(self, control: Axis) -> None:
        self._control = control
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listen; Python lets only the main thread."""
        self._received = 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree on whether to stop."""
        received = torch.tensor([self._received], dtype=torch.int64)
        self._received = int(self._control.all_reduce(received, dist.ReduceOp.MAX))
        if self._received:
            if args.process_index == 0:
                name = signal.Signals(self._received).name
                print(f"oases: {name}: saving step {state.global_step}, then ending", file=sys.stderr, flush=True)
            control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the process, if a signal asked for that."""
        self._listen_no_more()
        if self._received:
            sys.exit(128 + self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
