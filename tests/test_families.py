"""Every family and head computes what one plain HF process does: on all schedules, degrees, splits and paddings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from oases_hf.plan import SCHEDULE_NAMES, ScheduleName

from .families import FAMILIES, PADDINGS, Padding, most_different
from .pairwise import covering, pairs_of
from .parallel import full_gradients, one_step, parallel
from .parity import GRADIENT_FLOAT32, assert_gradients, assert_loss
from .ranks import Worlds
from .reference import Run, cached, reference
from .tiny import Attention, Batch
from .training import assert_trains_as, with_gradient

DEGREES = (1, 2, 4)
ROWS, SEQ = 5, 12


class Setting(NamedTuple):
    """One way to run a step; ``plain`` is HF's own loop, whose layers communicate by themselves."""

    schedule: ScheduleName | Literal["plain"]
    degree: int
    sub_batches: int
    attention: Attention
    padding: Padding
    defer: bool


def choices(name: str) -> tuple[Sequence[object], ...]:
    """What there is to choose from, in the order of a Setting's fields."""
    return (*SCHEDULE_NAMES, "plain"), DEGREES, (1, 2, 3), FAMILIES[name].attentions, PADDINGS, (False, True)


def pairwise(name: str) -> list[Setting]:
    return [Setting(*cast(Any, row)) for row in covering(*choices(name))]


def product(name: str) -> list[Setting]:
    """Every setting; HF's own loop splits nothing, and weight gradients are put off with two sub-batches."""
    settings = [Setting(*row) for row in itertools.product(*cast(Any, choices(name)))]
    overlapped = [s for s in settings if s.schedule != "plain" and s.defer == (s.sub_batches == 2)]
    return overlapped + [s for s in settings if s.schedule == "plain" and s.sub_batches == 1 and not s.defer]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_array_covers_every_two_settings(name: str) -> None:
    rows = pairwise(name)
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, itertools.product(*choices(name))))
    assert rows == pairwise(name)
    assert len(rows) <= 20


def batches(name: str, padding: Padding, worlds: int, step: int = 0) -> list[Batch]:
    """The batch of each TMP world."""
    return [FAMILIES[name].batch(ROWS, SEQ, padding=padding, seed=10 * step + world) for world in range(worlds)]


Expected = tuple[float, dict[str, Tensor]]


def expected(name: str, attention: Attention, padding: Padding, worlds: int) -> Expected:
    """Loss and gradients of one process, on the batches of all worlds."""
    data = batches(name, padding, worlds)
    run = cached(
        (name, attention, padding, worlds),
        lambda: reference(FAMILIES[name].model(attn=attention), data, steps=1, accumulate=worlds),
    )
    return run.losses[0], run.gradients


def compare(name: str, degree: int, settings: list[Setting], wanted: dict[tuple[Attention, Padding], Expected]) -> None:
    """On a rank: one step in each setting; models are converted once per implementation of attention."""
    for attention, group in itertools.groupby(sorted(settings, key=lambda s: s.attention), lambda s: s.attention):
        model = FAMILIES[name].model(attn=attention).train()
        state = parallel(model, degree)
        stack, data = state.stack, {padding: batches(name, padding, state.mesh.data.size) for padding in PADDINGS}
        for setting in group:
            stack.plain = setting.schedule == "plain"
            if not stack.plain:
                stack.schedule = setting.schedule
            stack.sub_batches, stack.defer = setting.sub_batches, setting.defer
            loss, gradients = wanted[attention, setting.padding]
            try:
                assert_loss(one_step(model, data[setting.padding]), loss)
                assert_gradients(full_gradients(model), gradients)
            except Exception as error:
                error.add_note(f"in {setting}")
                raise


def check(ranks: Worlds, name: str, degree: int, settings: list[Setting]) -> None:
    """Degree 1 on two ranks, which are data parallel then."""
    world = max(2, degree)
    mine = [setting for setting in settings if setting.degree == degree]
    keys = {(setting.attention, setting.padding) for setting in mine}
    wanted = {key: expected(name, *key, world // degree) for key in keys}
    ranks(world).run(compare, name, degree, mine, wanted, timeout_s=240)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_step(ranks: Worlds, name: str, degree: int) -> None:
    check(ranks, name, degree, pairwise(name))


@pytest.mark.parametrize("name", most_different(FAMILIES))
def test_one_step_of_data_parallel_ranks(ranks: Worlds, name: str) -> None:
    check(ranks, name, 1, pairwise(name))


@pytest.mark.slow
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_step_in_every_setting(ranks: Worlds, name: str, degree: int) -> None:
    check(ranks, name, degree, product(name))


STEPS, LIMIT = 5, 0.5


def train(name: str, tmp_size: int, wanted: Run) -> None:
    """On a rank: five AdamW steps, clipped, against one process."""
    model = FAMILIES[name].model().train()
    worlds = parallel(model, tmp_size, defer_weight_grads=True).mesh.data.size
    assert_trains_as(wanted, model, name, LIMIT, lambda step: one_step(model, batches(name, "right", worlds, step)))


def assert_noise(name: str, gradients: dict[str, Tensor], relative: float) -> None:
    """Fail unless exactly the gradients that ought to be zero are next to nothing."""
    whole = math.hypot(*(float(gradient.norm()) for gradient in gradients.values()))
    for parameter, gradient in gradients.items():
        assert (float(gradient.norm()) > relative * whole) == FAMILIES[name].has_gradient(parameter), parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_five_steps_of_two_worlds(ranks: Worlds, name: str) -> None:
    data = [rows for step in range(STEPS) for rows in batches(name, "right", 2, step)]
    wanted = reference(FAMILIES[name].model(), data, steps=STEPS, accumulate=2, max_grad_norm=LIMIT)
    assert_noise(name, wanted.gradients, 1e-12)
    ranks(4).run(train, name, 2, wanted)


def gradients_in_float32(name: str, wanted: dict[str, Tensor]) -> None:
    model = FAMILIES[name].model(dtype=torch.float32).train()
    parallel(model, 2)
    one_step(model, batches(name, "right", 1))
    gradients = full_gradients(model)
    assert_noise(name, gradients, 1e-6)
    assert_gradients(with_gradient(name, gradients), with_gradient(name, wanted), relative=GRADIENT_FLOAT32)


@pytest.mark.parametrize("name", most_different(FAMILIES))
def test_gradients_in_float32(ranks: Worlds, name: str) -> None:
    model = FAMILIES[name].model(dtype=torch.float32)
    wanted = reference(model, batches(name, "right", 1), steps=1).gradients
    ranks(2).run(gradients_in_float32, name, wanted)
