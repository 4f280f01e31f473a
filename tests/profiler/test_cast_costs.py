"""Casts that sub-batches share are paid for once, by the first of them, and so they are in costs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from oases_hf.costs import Timing
from oases_hf.parallel.casts import Casts
from oases_hf.parallel.mesh import Mesh
from oases_hf.profiler import Architecture, Running
from oases_hf.profiler.layer import LayerProfile
from oases_hf.runtime.watch import Clock

from ..families import FAMILIES
from ..integrations.test_planned import in_a_hurry
from ..ranks import Worlds

NUMBERS = (1, 2, 4)
LINEARS = (4, 3)
"""Of attention, and of the MLP."""


def measured(cache: Path) -> list[dict[int, Timing]]:
    """On a rank: times of blocks whose milliseconds are casts, by a clock that counts these."""
    in_a_hurry(cache)
    made, own = 0, Casts.of

    def of(casts: Casts, weight: nn.Parameter) -> Tensor | None:
        nonlocal made
        made += weight not in casts._made
        return own(casts, weight)

    def ms(clock: Clock, start: int, end: int) -> float:
        return float(end - start)

    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    one = Architecture.of(FAMILIES["llama"].model(dtype=torch.float32)).of_one_layer()
    with mock.patch.object(Casts, "of", of), mock.patch.multiple(Clock, now=lambda _: made, ms=ms):
        layer = LayerProfile(one, Mesh.build(2), 2, (8, 8), Running(torch.device("cpu"), autocast))
        return layer.measure(NUMBERS).timings


def test_a_pass_of_all_sub_batches_casts_once(ranks: Worlds, tmp_path: Path) -> None:
    for timings in ranks(2).run(measured, tmp_path):
        for of_block, linears in zip(timings, LINEARS, strict=True):
            for number, timing in of_block.items():
                assert number * timing.forward_ms == number * timing.recompute_ms == linears, number
                assert timing.backward_ms == 0
