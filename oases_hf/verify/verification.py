"""A verification as the ranks run it: one process on rank 0, then all of them together, then the comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..models.converted import converted
from .alone import Expected, Plain, run_alone
from .distances import gradients, parameters, shard_distances
from .outcome import GRADIENT_FLOOR, LEAST, Row, compare, compare_losses, least_update, relative
from .report import Report
from .settings import Settings
from .subject import Subject
from .training import parallel, train

Say = Callable[[str], None]


def verify(subject: Subject, device: torch.device, say: Say) -> Report:
    """Compare the ranks of the default process group with one process; all of them call it, and get the same report.

    Args:
        subject: what to compare; without a process group, this process is the only rank.
        device: of this rank.
        say: given each line of the report as soon as it is known; on rank 0 only.

    Raises:
        ConfigError: settings, ranks and model do not go together.
        UnsupportedModelError: the model cannot be sharded.
    """
    settings = subject.settings
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != settings.tmp_size:
        raise ConfigError(f"--tmp-size {settings.tmp_size}, and {size} ranks were started; start as many as that")
    first = size == 1 or dist.get_rank() == 0
    report = Report(settings, subject.seq, device.type, say if first else lambda line: None)
    plain, expected = run_alone(subject, device) if first else (None, None)
    expected = _from_first_rank(expected, settings)
    report.begin(expected)
    run = _Parallel(subject, device, plain, expected)
    report.end(run.rows(), run.model, run.seconds)
    return report


def _from_first_rank(expected: Expected | None, settings: Settings) -> Expected:
    """What rank 0 found, on every rank; the others wait for it here, at most the time limit."""
    holder = [expected]
    if settings.tmp_size > 1:
        # On a CPU backend: a GPU would spin, and its collectives have a time limit of their own.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.time_limit_s))
        dist.broadcast_object_list(holder, src=0, group=group)
        dist.destroy_process_group(group)
    assert holder[0] is not None
    return holder[0]


class _Parallel:
    """The run on all ranks, compared with that of one process; each of its steps starts from the weights of that."""

    def __init__(self, subject: Subject, device: torch.device, plain: Plain | None, expected: Expected) -> None:
        began = time.perf_counter()
        self._plain = plain
        self._expected = expected
        self._least = LEAST[subject.settings.dtype]
        self._rows: list[Row] = []
        self.model: PreTrainedModel
        self.model, optimizer, backward = parallel(subject, device)
        train(optimizer, subject.batches(device), backward, self)
        self.seconds = time.perf_counter() - began

    def rows(self) -> list[Row]:
        """All comparisons: losses first, then gradients, then updates."""
        kinds = ("loss", "gradients", "update")
        return sorted(self._rows, key=lambda row: (kinds.index(row.what), row.step))

    def backward_done(self, step: int, loss: float) -> None:
        """Compare loss and gradients."""
        expected, least = self._expected, self._least
        self._rows.append(compare_losses(step + 1, expected.losses[step], loss, expected.loss_noise, least))
        whole = None if self._plain is None else self._plain.gradients[step]
        distances = shard_distances(converted(self.model), gradients(self.model), whole)
        differences = relative(distances, expected.gradients[step], GRADIENT_FLOOR)
        same = dict.fromkeys(distances, least)
        self._rows.append(compare("gradients", step + 1, differences, expected.gradient_noise, same))

    def step_done(self, step: int) -> None:
        """Compare the weights, then take those of one process."""
        state, expected = converted(self.model), self._expected
        whole = None if self._plain is None else self._plain.weights[step + 1]
        distances = shard_distances(state, parameters(self.model), whole, overwrite=True)
        differences = relative(distances, expected.updates[step])
        least = {name: least_update(state.layouts[name].numel) for name in distances}
        self._rows.append(compare("update", step + 1, differences, expected.update_noise, least))
