"""All-reduces on real ranks, some of which answer wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from oases_hf.doctor import links
from oases_hf.doctor.links import check_links
from oases_hf.doctor.measurements import AllReduce, Step
from oases_hf.parallel.mesh import DONE, Axis, Mesh

from ..ranks import Worlds
from .examples import Heard

OWN = Axis.start_all_reduce
SIZES = (64, 2**16)


def one_off(axis: Axis, tensor: torch.Tensor, *rest: Any) -> Any:
    """One element of large messages is a little off on the last rank of an axis."""
    OWN(axis, tensor, *rest).wait()
    if tensor.numel() == 2**14 and axis.rank == axis.size - 1:
        tensor[11] += 1
    return DONE


def not_summed(axis: Axis, tensor: torch.Tensor, *rest: Any) -> Any:
    """In groups of four, every rank keeps what it has."""
    return DONE if axis.size == 4 and tensor.numel() > 1 else OWN(axis, tensor, *rest)


def last_time(axis: Axis, tensor: torch.Tensor, *rest: Any) -> Any:
    """The result of the turn before is there again."""
    OWN(axis, tensor, *rest).wait()
    if tensor.numel() == 16 and axis.size == 2:
        before = getattr(axis, "before", None)
        axis.before = tensor.clone()  # type: ignore[attr-defined]
        if before is not None:
            tensor.copy_(before)
    return DONE


FAULTS = {"none": OWN, "one off": one_off, "not summed": not_summed, "last time": last_time}


def checked(fault: str) -> tuple[bool, list[object]]:
    heard = Heard()
    with mock.patch.object(Axis, "start_all_reduce", FAULTS[fault]), mock.patch.object(links, "SIZES", SIZES):
        return check_links(Mesh.build(), torch.device("cpu"), heard, 60.0), heard.told


def wrong(told: list[object]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(each.ranks, each.size_bytes): each.wrong for each in told if isinstance(each, AllReduce)}


RIGHT = dict.fromkeys([(2, 64), (2, 2**16), (4, 64), (4, 2**16)], (0, 0, 0, 0))
EACH = links.ROUNDS

CASES = {
    "none": {},
    "one off": {(2, 2**16): (0, EACH, 0, EACH), (4, 2**16): (0, 0, 0, EACH)},
    "not summed": {(4, 64): (16 * EACH,) * 4, (4, 2**16): (2**14 * EACH,) * 4},
    "last time": {(2, 64): (16 * (EACH - 1),) * 4},
}


@pytest.mark.parametrize("fault", CASES)
def test_every_rank_knows_which_sums_are_wrong_on_which_ranks(ranks: Worlds, fault: str) -> None:
    for right, told in ranks(4).run(checked, fault):
        assert right == (fault == "none")
        assert wrong(told) == RIGHT | CASES[fault]


def test_every_step_is_told_before_it_is_taken(ranks: Worlds) -> None:
    _, told = ranks(2).run(checked, "none")[0]
    names = [each.name if isinstance(each, Step) else "found" for each in told]
    steps = ["all-reduce of 2 ranks, 0.0625 KiB", "found", "all-reduce of 2 ranks, 64 KiB", "found"]
    assert names == ["making groups of 2 ranks", *steps]
    assert {each.limit_s for each in told if isinstance(each, Step)} == {60.0}


def test_one_rank_has_nothing_to_sum() -> None:
    heard = Heard()
    assert check_links(Mesh.build(), torch.device("cpu"), heard, 60.0)
    assert heard.told == []


def test_bus_rate() -> None:
    assert AllReduce(4, 10**9, 1000.0, (0,) * 4).bus_gb_per_s == pytest.approx(1.5)
