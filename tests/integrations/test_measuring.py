"""Metrics in logs: what they say is counted, by a clock that training sets forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.utils.import_utils import enable_tf32

from oases_hf.integrations.measuring import _computed_in, _peak_tflops
from oases_hf.models.converted import converted
from oases_hf.parallel.mesh import Axis, Pending

from ..ranks import Worlds
from ..tiny import batch
from .collectives import recorded
from .fitting import Task, build, rows
from .looping import set_up

ROWS, SEQ, ACCUMULATION = 2, 12, 2
STEP_TOKENS = ROWS * SEQ * ACCUMULATION
"""Of a TMP world."""
TRAINING_S, EVALUATION_S, SAVING_S, BETWEEN_S = 2.0, 100.0, 1000.0, 10000.0
"""What takes time: a micro-batch, a batch of evaluation, a checkpoint, and what is between two runs."""
OPERATIONS = 6 * (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 99 * 32) + 12 * 2 * 32 * SEQ
"""Of the tiny model, for a token."""
SCHEDULED = 16 * ACCUMULATION
"""The all-reduces of blocks in a step: 2 layers of 2 blocks, 2 sub-batches, forward and backward."""
PIECE = ROWS // 2 * SEQ * 32
"""The elements of each."""

RATE, TFLOPS, MFU = "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu_percent"
EXPOSED, PEAK = "exposed_communication_percent", "peak_memory_gib"

Logs = list[dict[str, float]]


@dataclass
class HandSet:
    """Stands in for the module ``time``."""

    seconds: float = 0.0
    waits: dict[int, float] = field(default_factory=dict)
    """By number of the step, what the wait for each all-reduce of a block takes."""
    step: int = 0

    def perf_counter(self) -> float:
        return self.seconds

    @contextmanager
    def set(self) -> Iterator[None]:
        """Let metrics go by it."""
        own = Axis.start_all_reduce

        def start_all_reduce(axis: Axis, tensor: Tensor, *args: Any) -> Pending:
            wait_s = self.waits.get(self.step, 0.0) if tensor.numel() == PIECE else 0.0
            return _Slow(own(axis, tensor, *args), self, wait_s)

        with ExitStack() as stack:
            stack.enter_context(mock.patch("oases_hf.runtime.watch.time", self))
            stack.enter_context(mock.patch.object(Axis, "start_all_reduce", start_all_reduce))
            yield

    def takes(self, target: Any, name: str, seconds: float) -> None:
        """Let a method of an object take time."""
        own = getattr(target, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self.seconds += seconds
            self.step = target.state.global_step
            return own(*args, **kwargs)

        setattr(target, name, method)


@dataclass
class _Slow:
    work: Pending
    clock: HandSet
    seconds: float

    def wait(self) -> object:
        self.clock.seconds += self.seconds
        return self.work.wait()


class Tracker(TrainerCallback):
    """Notes what trackers are handed."""

    def __init__(self) -> None:
        self.logs: Logs = []

    def on_log(self, *_: Any, **given: Any) -> None:
        self.logs.append(dict(given["logs"]))


def logged(
    arguments: Mapping[str, Any], oases: Mapping[str, Any], waits: dict[int, float] | None = None, runs: int = 1
) -> tuple[Logs, Logs]:
    """On a rank: what Trainer logged, and handed to trackers."""
    clock, tracker = HandSet(waits=waits or {}), Tracker()
    task = Task({"gradient_accumulation_steps": ACCUMULATION, **arguments}, rows=rows(16, SEQ, padded=True))
    with clock.set():
        trainer = build(Task(task.arguments, rows=task.rows, options={"eval_dataset": rows(4, SEQ)}), oases)
        trainer.add_callback(tracker)
        clock.takes(trainer, "prediction_step", EVALUATION_S)
        clock.takes(trainer, "_save_checkpoint", SAVING_S)
        take_after_forward(trainer, clock)
        for _ in range(runs):
            trainer.train()
            clock.seconds += BETWEEN_S
    return trainer.state.log_history, tracker.logs


def take_after_forward(trainer: Trainer, clock: HandSet) -> None:
    """Let a micro-batch take time while it is under way."""
    clock.takes(trainer, "training_step", 0.0)
    own = trainer.compute_loss

    def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = own(model, *args, **kwargs)
        clock.seconds += TRAINING_S * model.training
        return loss

    trainer.compute_loss = compute_loss  # type: ignore[method-assign]


def of_training(logs: Logs) -> Logs:
    return [entry for entry in logs if "loss" in entry]


@pytest.mark.parametrize(("world", "tmp_size"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_each_token_once(ranks: Worlds, world: int, tmp_size: int) -> None:
    rate = STEP_TOKENS / tmp_size / (ACCUMULATION * TRAINING_S)
    for history, tracked in ranks(world).run(logged, {}, {"tmp_size": tmp_size, "peak_tflops": 1e-3}):
        assert len(of_training(history)) == 3
        assert of_training(tracked) == [{k: v for k, v in e.items() if k != "step"} for e in of_training(history)]
        for entry in of_training(history):
            assert entry[RATE] == pytest.approx(rate)
            assert entry[TFLOPS] == pytest.approx(rate * OPERATIONS / 1e12)
            assert entry[MFU] == pytest.approx(rate * OPERATIONS / 1e9 * 100)
            assert PEAK not in entry
        assert not any(RATE in entry for entry in history if "loss" not in entry)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_evaluation_and_saving_do_not_count(ranks: Worlds, strategy: str) -> None:
    often = {"eval_strategy": strategy, "save_strategy": strategy, "eval_steps": 1, "save_steps": 1}
    for history, _ in ranks(2).run(logged, {"max_steps": 8, "logging_steps": 2, **often}, {}, timeout_s=80):
        assert sum("eval_loss" in entry for entry in history) == (8 if strategy == "steps" else 2)
        assert [entry[RATE] for entry in of_training(history)] == [pytest.approx(6.0)] * 4
        assert not any(RATE in entry for entry in history if "eval_loss" in entry)


def test_what_is_between_two_runs_does_not_count(ranks: Worlds) -> None:
    """Nor do the last steps of the first one, which were not logged."""
    for history, tracked in ranks(2).run(logged, {"logging_steps": 2}, {}, runs=2):
        assert [entry[RATE] for entry in of_training(history)] == [pytest.approx(6.0)]
        assert [entry[RATE] for entry in of_training(tracked)] == [pytest.approx(6.0)] * 2


@pytest.mark.parametrize("oases", [{}, {"trace": "out", "trace_steps": (1, 3)}], ids=["", "traced"])
def test_waits_are_those_of_the_first_step_after_a_log(ranks: Worlds, oases: dict[str, Any]) -> None:
    """While rates are means of all steps."""
    waits = {0: 1.0, 1: 2.0, 2: 0.25, 3: 4.0}
    exposed = [SCHEDULED * s / (SCHEDULED * s + ACCUMULATION * TRAINING_S) * 100 for s in (1.0, 0.25)]
    seconds = [SCHEDULED * s + 2 * ACCUMULATION * TRAINING_S for s in (3.0, 4.25)]
    for history, _ in ranks(2).run(logged, {"max_steps": 4, "logging_steps": 2}, oases, waits):
        assert [entry[EXPOSED] for entry in of_training(history)] == [pytest.approx(percent) for percent in exposed]
        assert [entry[RATE] for entry in of_training(history)] == [pytest.approx(STEP_TOKENS / s) for s in seconds]
    assert ranks(2).run(traced, oases) == [2 * bool(oases)] * 2


def traced(oases: dict[str, Any]) -> int:
    """On a rank: how many of its steps were traced."""
    logged({"max_steps": 4}, oases)
    return len(list(Path("out").glob(f"step*-rank{torch.distributed.get_rank()}.json")))


def figures_of_peak(arguments: Mapping[str, Any]) -> list[float | None]:
    """On a rank where allocations are counted: what is logged of them."""
    peaks = iter(range(100))
    with mock.patch("oases_hf.integrations.measuring.peak_memory_of", return_value=lambda: next(peaks) * 2**30):
        history, _ = logged(arguments, {})
    return [entry.get(PEAK) for entry in of_training(history)]


def test_peaks_are_counted_anew_at_each_log_unless_trainer_counts_them(ranks: Worlds) -> None:
    """The first two are of loading, and of what was before training."""
    assert ranks(2).run(figures_of_peak, {}) == [[2, 3, 4]] * 2
    assert ranks(2).run(figures_of_peak, {"skip_memory_metrics": False}) == [[None] * 3] * 2


def looped() -> list[dict[str, float]]:
    """On a rank: readings in a loop of one's own, with evaluation and saving between, and once more at once."""
    accelerator, model = set_up({"tmp_size": 2})
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    metrics, traffic, clock = converted(model).metrics, converted(model).mesh.tmp.traffic, HandSet()
    assert metrics is not None
    metrics.meter._clock = cast(Any, clock_of(clock))
    readings = []
    saves: list[Callable[[], object]] = [
        lambda: accelerator.save_state("out"),
        lambda: accelerator.save_model(model, "out/model"),
    ]
    for number, save in enumerate(saves):
        loss = model.train()(**batch(4, SEQ, seed=number)).loss
        clock.seconds += 3
        accelerator.backward(loss)
        optimizer.step()
        save()
        clock.seconds += SAVING_S
        with torch.no_grad():
            model.eval()(**batch(4, SEQ))
        clock.seconds += EVALUATION_S
        with recorded() as calls:
            before = traffic.calls
            readings.append(metrics.read())
            assert not calls
            assert traffic.calls == before
    return [*readings, metrics.read()]


def clock_of(time: HandSet) -> SimpleNamespace:
    """A clock that goes by ``time``."""
    return SimpleNamespace(
        now=time.perf_counter, ms=lambda start, end: (end - start) * 1e3, stands=False, reuse=lambda points: None
    )


def test_readings_in_a_loop_of_ones_own(ranks: Worlds) -> None:
    for *readings, again in ranks(2).run(looped):
        for reading in readings:
            assert reading[RATE] == pytest.approx(4 * SEQ / 2 / 3)
            assert reading.keys() == {RATE, TFLOPS, EXPOSED}
        assert again == {}


@pytest.mark.parametrize(
    ("name", "computed_in", "peak"),
    [
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
        ("NVIDIA GeForce RTX 4090", "float16", 165.2),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H200", "float32", 67),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", None),
    ],
)
def test_peaks_of_data_sheets(name: str, computed_in: str, peak: float | None) -> None:
    with mock.patch("torch.cuda.get_device_name", return_value=name):
        assert _peak_tflops(torch.device("cuda"), computed_in) == peak
        assert _peak_tflops(torch.device("cpu"), computed_in) is None


@pytest.mark.parametrize(
    ("mixed", "dtype", "expected"),
    [
        ("no", torch.float32, "float32"),
        ("no", torch.bfloat16, "bfloat16"),
        ("bf16", torch.float32, "bfloat16"),
        ("fp16", torch.float32, "float16"),
        ("fp8", torch.float32, "fp8"),
    ],
)
def test_what_is_computed_in(mixed: str, dtype: torch.dtype, expected: str) -> None:
    accelerator, model = cast(Any, SimpleNamespace(mixed_precision=mixed)), cast(Any, SimpleNamespace(dtype=dtype))
    assert _computed_in(accelerator, model) == expected
    before = torch.backends.cuda.matmul.fp32_precision
    enable_tf32(True)  # as TrainingArguments do
    try:
        assert _computed_in(accelerator, model) == ("tf32" if expected == "float32" else expected)
    finally:
        torch.backends.fp32_precision = before  # type: ignore[attr-defined]
    assert torch.backends.cuda.matmul.fp32_precision == before
