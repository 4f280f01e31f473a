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
from .leaving import end_together

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(TrainerCallback):
    """Ends all ranks behind the same step when one of them gets a signal, with 128 + its number, once that is saved.

    SIGINT a second time does what it would have done.

    Args:
        control: the ranks.

    Attributes:
        agreed: the signal that all end for; 0 as long as there is none.
    """

    def __init__(self, control: Axis) -> None:
        self._control = control
        self._noted = 0  # written by the handler, at any time
        self.agreed = 0
        self._before: dict[signal.Signals, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listen; Python lets only the main thread."""
        self._listen_no_more()  # after a run that failed
        self._noted = self.agreed = 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let messages say which step it is; resumed training does not begin with the first."""
        progress = end_together()
        progress.step, progress.told = state.global_step + 1, True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree on whether to stop; then save, and evaluate no more."""
        noted = torch.tensor([self._noted], dtype=torch.int64)
        self.agreed = int(self._control.all_reduce(noted, dist.ReduceOp.MAX))
        if self.agreed:
            if args.process_index == 0:
                name = signal.Signals(self.agreed).name
                print(f"oases: {name}: saving step {state.global_step}, then ending", file=sys.stderr, flush=True)
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the process, if that was for a signal: what Trainer does at its end may take long, and delete this."""
        if self.agreed:
            sys.exit(128 + self.agreed)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let signals do again what they did before."""
        self._listen_no_more()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted and number == signal.SIGINT:
            self._listen_no_more()
            raise KeyboardInterrupt
        self._noted = number

    def _listen_no_more(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
