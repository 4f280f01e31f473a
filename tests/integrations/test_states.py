"""accelerator.save_state and load_state: the training state of a loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oases_hf.errors import CheckpointError

from ..parallel import full_moments, full_parameters
from ..parity import assert_updates, float64_math
from ..ranks import Worlds
from ..tiny import batch
from .looping import set_up
from .test_saving import assert_equal

Settings = Mapping[str, Any]


class Loop:
    """A model, an optimizer and a scheduler, prepared."""

    def __init__(self, settings: Settings) -> None:
        self.accelerator, model = set_up(settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def step(self, number: int) -> None:
        with float64_math():
            self.accelerator.backward(self.model(**batch(4, 8, seed=number)).loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        return full_parameters(self.model), full_moments(self.model, self.optimizer.optimizer)


def saved(settings: Settings, folder: Path) -> tuple[Any, Any]:
    """On a rank: two steps, a save, and two more."""
    loop = Loop(settings)
    loop.step(0)
    loop.step(1)
    assert loop.accelerator.save_state(str(folder)) == str(folder)
    there = loop.tensors()
    loop.step(2)
    loop.step(3)
    return there, loop.tensors()


def loaded(settings: Settings, folder: Path) -> tuple[Any, Any]:
    """On a rank: other weights and two steps, of which loading leaves nothing; then as before."""
    loop = Loop(settings)
    for number in range(5):
        loop.step(number)
    loop.accelerator.load_state(str(folder))
    there = loop.tensors()
    loop.step(2)
    loop.step(3)
    return there, loop.tensors()


OWNED = {"tmp_size": 4, "degree": 2, "shard_optimizer": "keep"}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, {}), (2, {})),
        ((4, OWNED), (4, OWNED)),
        ((4, OWNED), (2, {})),
        pytest.param((1, {}), (4, {}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states(ranks: Worlds, tmp_path: Path, first: tuple[int, Settings], then: tuple[int, Settings]) -> None:
    (before, end), *_ = ranks(first[0]).run(saved, first[1], tmp_path / "state")
    for there, ended in ranks(then[0]).run(loaded, then[1], tmp_path / "state"):
        assert_equal(there[0], before[0])
        for key, each in before[1].items():
            assert_equal(there[1][key], each)
        if first == then:
            assert_equal(ended[0], end[0])
        assert_updates(ended[0], end[0], before[0])


def half_written() -> str:
    """On a rank: load a state whose manifest was never written."""
    loop = Loop({})
    loop.step(0)
    loop.accelerator.save_state("state")
    if dist.get_rank() == 0:
        os.unlink("state/oases_checkpoint.json")
    dist.barrier()
    with pytest.raises(CheckpointError) as raised:
        loop.accelerator.load_state("state")
    return str(raised.value)


def test_a_half_written_state_is_refused(ranks: Worlds) -> None:
    for said in ranks(2).run(half_written):
        assert said.startswith("state cannot be loaded: state is not a whole training checkpoint")


def of_its_own() -> tuple[float, list[str]]:
    """On a rank: an optimizer of something else, names that Accelerate gives, and a limit of two."""
    loop = Loop({})
    accelerator = loop.accelerator
    accelerator.project_configuration.set_directories("run")
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.project_configuration.total_limit = 2
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = accelerator.prepare(torch.optim.SGD([other], lr=0.1, momentum=0.9))
    for number in range(3):
        loop.step(number)
        other.grad = torch.ones(3)
        optimizer.step()
        accelerator.save_state()
    dist.barrier()
    momentum = optimizer.optimizer.state[other]["momentum_buffer"]
    kept = momentum.clone()
    momentum.zero_()
    accelerator.load_state()
    off = optimizer.optimizer.state[other]["momentum_buffer"] - kept
    return float(off.abs().max()), sorted(os.listdir("run/checkpoints"))


def test_other_optimizers_and_names_given_by_accelerate(ranks: Worlds) -> None:
    for off, folders in ranks(2).run(of_its_own):
        assert off == 0
        assert folders == ["checkpoint_1", "checkpoint_2"]
