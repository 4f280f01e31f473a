"""What a step of each family costs: all-reduces by direction, and bytes kept from forward to backward."""

from __future__ import annotations

from typing import Any

import pytest

from oases_hf.plan import SCHEDULE_NAMES, ScheduleName

from .families import FAMILIES
from .parallel import parallel
from .ranks import Worlds

LAYERS, ROWS, SEQ = 3, 4, 6
# Per layer, and so many more for the whole stack: hidden-sized tensors kept from forward to backward.
Kept = tuple[int, int]
EVERY_LAYER: dict[ScheduleName, Kept] = dict.fromkeys(SCHEDULE_NAMES, (1, 0))

KEPT: dict[str, dict[ScheduleName, Kept]] = {
    # The input of each block, or of each layer.
    "gpt2": {**EVERY_LAYER, "oases": (2, 0)},
    "neox": EVERY_LAYER,
    "neox sequential": {**EVERY_LAYER, "oases": (2, 0)},
    # What each norm is of, from which the next block's input comes; before the first there is none. Schedules that
    # recompute whole layers recompute it, but for a layer's last block where cross_pass stops.
    "bert": {**EVERY_LAYER, "oases": (2, 1), "cross_pass": (1, 1)},
    # A norm of the output alone tells nothing of the stream, so both are kept.
    "gemma3": {**EVERY_LAYER, "oases": (4, 0), "cross_pass": (2, 0)},
}


MORE_LAYERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": LAYERS},
    "gemma3": {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS},
}


def tiny(name: str) -> Any:
    settings = MORE_LAYERS.get(name, {"num_hidden_layers": LAYERS})
    return FAMILIES[name].model(**settings).train()


def kept(name: str, schedule: ScheduleName, sub_batches: int) -> tuple[float, int]:
    """On a rank: hidden-sized tensors kept after forward, and bytes after backward."""
    model = tiny(name)
    state = parallel(model, 2, schedule, sub_batches)
    hidden = model.base_model(FAMILIES[name].batch(ROWS, SEQ)["input_ids"])[0]
    before = sum(run.kept_bytes for run in state.stack._live)
    runs = list(state.stack._live)
    hidden.sum().backward()
    return before / (hidden.numel() * hidden.element_size()), sum(run.kept_bytes for run in runs)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=[] if name == "gpt2" or schedule == "oases" else pytest.mark.slow)
        for name in KEPT
        for schedule in SCHEDULE_NAMES
    ],
)
def test_kept_bytes(ranks: Worlds, name: str, schedule: ScheduleName) -> None:
    per_layer, more = KEPT[name][schedule]
    for sub_batches in (1, 2):
        assert ranks(2).run(kept, name, schedule, sub_batches) == [(per_layer * LAYERS + more, 0)] * 2


def all_reduces(name: str, schedule: ScheduleName) -> tuple[int, int]:
    """On a rank: those of the stack, in forward and in backward; the embedding has one more."""
    model = tiny(name)
    state = parallel(model, 2, schedule, 1)
    ids = FAMILIES[name].batch(ROWS, SEQ)["input_ids"]
    traffic, embedding = state.mesh.tmp.traffic, 1
    traffic.calls = 0
    hidden = model.base_model(ids)[0]
    forward = traffic.calls - embedding
    hidden.sum().backward()
    return forward, traffic.calls - embedding - forward


# With oases recompute communicates nothing; with megatron as much as forward does.
@pytest.mark.parametrize(("schedule", "backward"), [("oases", 1), ("megatron", 2)])
@pytest.mark.parametrize(("name", "blocks"), [("neox", 1), ("neox sequential", 2), ("bert", 2), ("gemma3", 2)])
def test_all_reduces_per_layer_and_direction(
    ranks: Worlds, name: str, blocks: int, schedule: ScheduleName, backward: int
) -> None:
    """Side by side, attention and MLP share one."""
    expected = (blocks * LAYERS, backward * blocks * LAYERS)
    assert ranks(2).run(all_reduces, name, schedule) == [expected] * 2
