"""What training is measured by: operations by hand, time by a clock that tests set, waits by what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from oases_hf.models.metrics import Metrics, ModelOperations
from oases_hf.runtime.meter import Meter
from oases_hf.runtime.watch import Clock

from .families import FAMILIES
from .parallel import parallel
from .ranks import Worlds
from .tiny import batch, tiny_llama

ROWS, SEQ, HIDDEN = 2, 12, 32


@dataclass
class HandSet:
    """A clock that tests set; one that stands is taken for one whose device records a graph."""

    seconds: float = 0.0
    stands: bool = False

    def now(self) -> float:
        return self.seconds

    def ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def reuse(self, points: Iterator[float]) -> None:
        assert all(point <= self.seconds for point in points)


@dataclass
class Training:
    """Forwards of a base model that only count, and waits of so many seconds."""

    clock: HandSet = field(default_factory=HandSet)
    base: nn.Module = field(default_factory=nn.Identity)

    def __post_init__(self) -> None:
        self.meter = Meter(self.clock)  # type: ignore[arg-type]
        self.base.register_forward_pre_hook(self.meter.enter)
        self.base.register_forward_hook(self.meter.leave)

    def forward(self, *, train: bool = True) -> None:
        self.base.train(train)((torch.zeros(ROWS, SEQ, HIDDEN),))

    def step(self, computing_s: float, waits_s: float = 0.0) -> None:
        self.forward()
        self.clock.seconds += computing_s
        if waits_s:
            self.meter.wait(_Wait(self.clock, waits_s))
        self.meter.complete()


@dataclass
class _Wait:
    clock: HandSet
    seconds: float

    def wait(self) -> None:
        self.clock.seconds += self.seconds


def test_what_is_counted_is_what_happened_since_the_last_reading() -> None:
    training = Training()
    assert training.meter.read().ms == 0
    training.step(2)
    training.step(3)
    first = training.meter.read()
    assert (first.ms, first.tokens, first.pairs) == (5e3, 2 * ROWS * SEQ, 2 * ROWS * SEQ**2)
    training.clock.seconds += 0.5  # as for data
    training.step(1)
    second = training.meter.read()
    assert (second.ms, second.tokens) == (1.5e3, ROWS * SEQ)


def test_neither_evaluation_nor_what_stops_the_meter_counts() -> None:
    training = Training()
    endings: list[Callable[[], None]] = [evaluating(training), training.meter.stop, no_gradients(training)]
    for ending in endings:
        training.step(2)
        ending()
        training.clock.seconds += 100
        training.forward(train=False)
        training.clock.seconds += 100
    reading = training.meter.read()
    assert (reading.ms, reading.tokens) == (6e3, 3 * ROWS * SEQ)
    training.clock.seconds += 100
    training.step(1)
    assert training.meter.read().ms == 1e3


def evaluating(training: Training) -> Callable[[], None]:
    return lambda: training.forward(train=False)


def no_gradients(training: Training) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            training.forward()

    return forward


def test_waits_are_those_of_the_first_step() -> None:
    training = Training()
    for _ in range(2):
        training.step(3, waits_s=1)
        training.step(1, waits_s=5)
        assert training.meter.read().exposed == 0.25
    training.step(3, waits_s=1)
    training.meter.stop()
    training.clock.seconds += 100
    training.step(1, waits_s=5)
    assert training.meter.read().exposed == 0.25


def test_no_figure_where_nothing_was_waited_for() -> None:
    training = Training()
    training.step(3)
    assert training.meter.read().exposed is None
    training.clock.stands = True
    training.step(3, waits_s=1)
    assert training.meter.read().exposed is None


class Event:
    """What takes the place of a CUDA event."""

    made = recorded = awaited = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1
        self.ms = 0.0

    def record(self) -> None:
        Event.recorded += 1
        self.ms = float(Event.recorded)

    def synchronize(self) -> None:
        Event.awaited += 1

    def elapsed_time(self, end: Event) -> float:
        return end.ms - self.ms


def test_events_are_used_again_and_awaited_by_readings_only() -> None:
    with (
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
    ):
        training = Training(Clock(torch.device("cuda")))  # type: ignore[arg-type]
        made = []
        for _ in range(3):
            before = Event.awaited
            for _ in range(2):
                training.forward()
                training.meter.wait(_Wait(HandSet(), 1))
                training.meter.complete()
            assert Event.awaited == before
            assert training.meter.read().ms > 0
            made.append(Event.made)
    assert made == [made[0]] * 3


def test_figures_by_hand() -> None:
    peaks = iter([2**30, 3 * 2**30])
    training = Training()
    metrics = Metrics(training.meter, lambda: ModelOperations(1e12, 1e11), 2, 100.0, lambda: next(peaks))
    metrics.restart()
    training.step(3, waits_s=1)
    tflops = (24 + 0.1 * ROWS * SEQ**2) / 2 / 4
    assert metrics.read() == {
        "tokens_per_second_per_gpu": 3.0,
        "tflops_per_gpu": pytest.approx(tflops),
        "mfu_percent": pytest.approx(tflops),
        "exposed_communication_percent": 25.0,
        "peak_memory_gib": 3.0,
    }
    metrics.peak_memory = metrics.peak_tflops = None
    training.step(1)
    assert metrics.read().keys() == {"tokens_per_second_per_gpu", "tflops_per_gpu"}
    training.meter.stop()
    training.clock.seconds += 1
    assert metrics.read() == {}


def counted(model: PreTrainedModel, tmp_size: int, frozen: tuple[str, ...] = ()) -> ModelOperations:
    state = parallel(model, tmp_size)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or ("nothing",)))
    return ModelOperations.of(model, state.layouts)


def of_llama(tmp_size: int, frozen: tuple[str, ...]) -> ModelOperations:
    """On a rank."""
    return counted(tiny_llama(), tmp_size, frozen)


LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
"""Weights: queries and output, grouped keys and values, MLP."""


@pytest.mark.parametrize("world", [1, 2])
def test_operations_of_a_llama(ranks: Worlds, world: int) -> None:
    expected = ModelOperations(6 * (2 * LAYER + 99 * 32), 12 * 2 * 32)
    assert ranks(world).run(of_llama, world, ()) == [expected] * world
    without = ModelOperations(6 * (LAYER + 99 * 32) + 4 * LAYER, 12 * 2 * 32)
    assert ranks(world).run(of_llama, world, ("model.embed_tokens", "model.layers.0")) == [without] * world


def beside_hugging_face(family: str) -> tuple[float, float, float]:
    """On a rank: of linear layers for a token, by us of a part and by transformers of the whole; and of attention."""
    model = FAMILIES[family].model()
    theirs = Trainer.floating_point_ops(cast(Any, SimpleNamespace(model=model)), batch(1, 2)) / 2
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    ours = counted(model, 2)
    return ours.per_token, theirs - 6 * vectors, ours.per_pair


@pytest.mark.parametrize(("family", "width"), [("mistral", 48), ("phi3", 40), ("gpt2", 40), ("neox", 40)])
def test_operations_are_those_of_hugging_face(ranks: Worlds, family: str, width: int) -> None:
    """Which counts biases and norms too, no attention, and a head only where it is not the embedding."""
    for ours, theirs, per_pair in ranks(2).run(beside_hugging_face, family):
        assert ours == theirs > 0
        assert per_pair == 12 * 2 * width


def test_a_head_that_is_the_embedding_counts_once(ranks: Worlds) -> None:
    (untied, _, _), (tied, _, _) = (ranks(2).run(beside_hugging_face, name)[0] for name in ("gpt2", "gpt2 tied"))
    assert untied == tied
