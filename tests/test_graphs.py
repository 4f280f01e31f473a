"""Recorded passes compute what passes of single kernels do, whatever a training loop does around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch

from oases_hf import convert as converting
from oases_hf.models.converted import Converted
from oases_hf.plan import SCHEDULE_NAMES, ScheduleName
from oases_hf.runtime import splitting
from oases_hf.runtime.graphs import WARM

from .families import FAMILIES
from .pairwise import covering, values_first
from .parallel import full_gradients, one_step, parallel
from .parity import assert_gradients, float64_math
from .ranks import Worlds
from .reference import gradients, loss_of
from .replaying import Recorder
from .test_sent_messages import MESSAGE_BYTES
from .tiny import batch, tiny_llama

ROWS, SEQ = 4, 6
KEPT = 3
few_are_kept = mock.patch("oases_hf.runtime.graphs.KEPT", KEPT)


def recorded(tmp_size: int, schedule: ScheduleName = "oases", **options: Any) -> tuple[Any, Converted, Recorder]:
    """A converted model whose passes are recorded."""
    recorder = Recorder()
    with mock.patch.object(converting, "cuda_recorder", return_value=recorder):
        model: Any = tiny_llama(layers=2).train()
        return model, parallel(model, tmp_size, schedule, **options), recorder


def expected(*seeds: int, seq: int = SEQ) -> dict[str, torch.Tensor]:
    """The gradients of one process, summed over batches."""
    model: Any = tiny_llama(layers=2).train()
    with float64_math():
        for seed in seeds:
            model(**batch(ROWS, seq, padded=True, seed=seed)).loss.backward()
    return gradients(model)


def backward(model: Any, seed: int, seq: int = SEQ) -> None:
    with float64_math():
        model(**batch(ROWS, seq, padded=True, seed=seed)).loss.backward()


def step(model: Any, state: Converted, *seeds: int, set_to_none: bool = True, seq: int = SEQ) -> None:
    """Gradients of batches, made whole."""
    model.zero_grad(set_to_none)
    for seed in seeds:
        state.gradients.reopen()
        backward(model, seed, seq)
    with float64_math():
        state.gradients.finish()


def warmed(tmp_size: int, schedule: ScheduleName = "oases", **options: Any) -> tuple[Any, Converted, Recorder]:
    """The same, with a recording."""
    model, state, recorder = recorded(tmp_size, schedule, **options)
    for seed in range(WARM + 1):
        step(model, state, seed)
    assert (recorder.recordings, recorder.replays) == (2, 2)
    return model, state, recorder


def steps_as_in_one_process(
    schedule: ScheduleName, sub_batches: int, defer: bool, mixed: bool, message_bytes: int | None = None
) -> None:
    degrees = [1, 2, 2, 1] if mixed else None
    options: dict[str, Any] = {"sub_batches": sub_batches, "defer_weight_grads": defer, "degrees": degrees}
    options["message_bytes"] = message_bytes
    model, state, recorder = warmed(2, schedule, **options)
    for seeds, set_to_none in (((3,), True), ((4, 5), False), ((6, 7, 8), True)):
        step(model, state, *seeds, set_to_none=set_to_none)
        assert_gradients(full_gradients(model), expected(*seeds))
    assert (recorder.recordings, recorder.replays) == (2, 2 * (1 + 1 + 2 + 3))


SETTINGS = covering(SCHEDULE_NAMES, (1, 2), (False, True), (False, True))


@pytest.mark.parametrize(("schedule", "sub_batches", "defer", "mixed"), SETTINGS)
def test_gradients(ranks: Worlds, schedule: ScheduleName, sub_batches: int, defer: bool, mixed: bool) -> None:
    """Zeroed or set to None between steps, one micro-batch or several."""
    ranks(2).run(steps_as_in_one_process, schedule, sub_batches, defer, mixed)


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name in ("wang", "oases") else pytest.mark.slow) for name in SCHEDULE_NAMES],
)
def test_messages(ranks: Worlds, schedule: ScheduleName) -> None:
    """A sum that is sent in several messages, none of which a recording keeps."""
    ranks(2).run(steps_as_in_one_process, schedule, 2, False, True, MESSAGE_BYTES)


def new_batches_each_step(name: str, degrees: tuple[int, ...]) -> None:
    """What is made of masks and positions before blocks run, such as rows that are filled up, is of each batch anew."""
    recorder, family = Recorder(), FAMILIES[name]
    model, whole = (cast(Any, family.model()).train() for _ in range(2))
    with mock.patch.object(converting, "cuda_recorder", return_value=recorder):
        parallel(model, 2, degrees=degrees)
    for seed in range(WARM + 3):
        data = family.batch(5, SEQ, padding="right" if name == "bert" else "left", seed=seed)
        one_step(model, [data])
        whole.zero_grad()
        with float64_math():
            loss_of(whole, data).backward()
        assert_gradients(full_gradients(model), gradients(whole))
    assert recorder.replays == 2 * 3


@pytest.mark.parametrize(
    ("degrees", "name"), values_first([(1, 2, 1, 2), (1, 1, 1, 1), (2, 2, 2, 2)], ["bert", "llama"])
)
def test_inputs_are_of_the_batch(ranks: Worlds, degrees: tuple[int, ...], name: str) -> None:
    ranks(2).run(new_batches_each_step, name, degrees)


def parts_made(layers: int) -> list[int]:
    """How often arguments are split in each step."""
    model: Any = tiny_llama(layers=layers).train()
    made = []
    with mock.patch.object(converting, "cuda_recorder", return_value=Recorder()):
        parallel(model, 2, degrees=[1, 2] * layers)
    for seed in range(WARM + 2):
        with mock.patch.object(splitting, "_part", wraps=splitting._part) as part:
            one_step(model, [batch(5, SEQ, padded=True, seed=seed)])
        made.append(part.call_count)
    return made


def test_arguments_that_layers_share_are_split_once(ranks: Worlds) -> None:
    """Also in what is recorded, which does it at every replay."""
    ((few, _), (many, _)) = (ranks(2).run(parts_made, layers) for layers in (2, 4))
    assert few == many
    assert few == [few[0]] * (WARM + 1) + [0]


def counted() -> list[tuple[int, int]]:
    model, state, _ = recorded(2)
    traffic, counts = state.mesh.tmp.traffic, []
    for seed in range(WARM + 3):
        traffic.calls = traffic.bytes = 0
        step(model, state, seed)
        counts.append((traffic.calls, traffic.bytes))
    return counts


def test_collectives_are_counted_alike(ranks: Worlds) -> None:
    for counts in ranks(2).run(counted):
        assert len(set(counts)) == 1


def interruptions(tmp_size: int) -> int:
    return warmed(tmp_size)[2].outsides


def test_graphs_end_only_where_others_take_part(ranks: Worlds) -> None:
    """One rank's passes are a graph each; two begin and await an all-reduce for each block, sub-batch and pass."""
    assert ranks(1).run(interruptions, 1) == [0]
    assert ranks(2).run(interruptions, 2) == [2 * (4 * 2 * 2)] * 2


def two_forwards_before_a_backward() -> int:
    model, state, recorder = warmed(2)
    model.zero_grad()
    with float64_math():
        losses = [model(**batch(ROWS, SEQ, padded=True, seed=seed)).loss for seed in (3, 4)]
        for loss in losses:
            loss.backward()
        state.gradients.finish()
    assert_gradients(full_gradients(model), expected(3, 4))
    return recorder.replays


def forward_without_backward() -> int:
    model, state, recorder = warmed(2)
    with float64_math():
        model(**batch(ROWS, SEQ, padded=True, seed=9))
        loss = model(**batch(ROWS, SEQ, padded=True, seed=8)).loss
    del loss
    step(model, state, 3)
    assert_gradients(full_gradients(model), expected(3))
    return recorder.replays


def evaluation_between() -> int:
    model, state, recorder = warmed(2)
    model.zero_grad()
    with float64_math():
        loss = model(**batch(ROWS, SEQ, padded=True, seed=3)).loss
        with torch.no_grad():
            model.eval()(**batch(ROWS, SEQ, padded=True, seed=7))
        model.train()
        loss.backward()
        state.gradients.finish()
    assert_gradients(full_gradients(model), expected(3))
    return recorder.replays


@pytest.mark.parametrize(
    ("odd", "replays"), [(two_forwards_before_a_backward, 4), (forward_without_backward, 6), (evaluation_between, 4)]
)
def test_odd_orders(ranks: Worlds, odd: Callable[[], int], replays: int) -> None:
    """What one recording keeps for its backward is not overwritten by another forward."""
    assert ranks(2).run(odd) == [replays] * 2


def a_loss_of_ones_own() -> None:
    """A gradient that is there before the backward, in a tensor that is not the recordings'."""
    model, state, _ = warmed(2)
    model.zero_grad()
    norm = model.model.layers[0].input_layernorm.weight
    norm.grad = torch.full_like(norm, 0.5)
    backward(model, 3)
    with float64_math():
        state.gradients.finish()
    wanted = expected(3)
    wanted["model.layers.0.input_layernorm.weight"] += 0.5 * 2  # both ranks' shares
    assert_gradients(full_gradients(model), wanted)


def loaded_weights() -> None:
    """Weights that are overwritten in place, and parameters that are others."""
    model, state, recorder = warmed(2)
    other: Any = tiny_llama(layers=2).train()
    for weight in (p for m in (model, other) for name, p in m.named_parameters() if "norm" in name):
        weight.data.mul_(1.5)
    for replays in (4, 4):
        step(model, state, 3)
        with float64_math():
            other.zero_grad()
            other(**batch(ROWS, SEQ, padded=True, seed=3)).loss.backward()
        assert_gradients(full_gradients(model), gradients(other))
        assert recorder.replays == replays
        for parameter in model.parameters():  # elsewhere in memory: the recording does not count any more
            parameter.data = parameter.data.clone()


def frozen_later() -> None:
    model, state, recorder = warmed(2)
    model.model.layers[1].mlp.requires_grad_(False)
    for seed in range(WARM + 1):
        step(model, state, seed)
        assert {name for name, p in model.named_parameters() if p.grad is None} == {
            name for name, _ in model.named_parameters() if "layers.1.mlp" in name
        }
    assert recorder.recordings == 4


def gradients_moved() -> None:
    """The memory of a gradient is exchanged under its tensor, in the middle of a step."""
    model, state, _ = warmed(2)
    model.zero_grad()
    state.gradients.reopen()
    backward(model, 3)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data.clone()
    state.gradients.reopen()
    backward(model, 4)
    with float64_math():
        state.gradients.finish()
    assert_gradients(full_gradients(model), expected(3, 4))


def attentions_asked_for() -> None:
    """HF's hooks that capture stay on the layers, and are no reason to stop."""
    model, state, recorder = warmed(2)
    with torch.no_grad():
        model(**batch(ROWS, SEQ, padded=True), output_hidden_states=True)
    step(model, state, 3)
    assert_gradients(full_gradients(model), expected(3))
    assert recorder.replays == 4


def a_number_that_changes() -> None:
    """What is of the loss does not make calls differ."""
    model, _, recorder = recorded(2)
    for number in range(WARM + 2):
        model.zero_grad()
        with float64_math():
            model(**batch(ROWS, SEQ, padded=True), num_items_in_batch=10 + number).loss.backward()
    assert recorder.replays == 4


def nothing_is_held() -> None:
    """No step's graph hangs on those before."""
    model, state, _ = warmed(2)
    graphs = state.stack.graphs
    assert graphs is not None
    (recording,) = graphs._recordings.values()
    step(model, state, 3)
    assert all(tensor.grad_fn is None for tensor in recording.inputs)


@pytest.mark.parametrize(
    "change",
    [
        a_loss_of_ones_own,
        loaded_weights,
        frozen_later,
        gradients_moved,
        attentions_asked_for,
        a_number_that_changes,
        nothing_is_held,
    ],
)
def test_changes_between_steps(ranks: Worlds, change: Callable[[], None]) -> None:
    ranks(2).run(change)


def masks_as_without_recordings(name: str, attn: str, schedule: ScheduleName) -> None:
    """Gradients with dropout, of the same forwards, recorded and not; whoever else draws is not disturbed."""
    family, found, recorder = FAMILIES[name], [], Recorder()
    for recording in (True, False):
        torch.manual_seed(7)
        model: Any = family.model(attn=attn, dropout=0.3).train()
        with mock.patch.object(converting, "cuda_recorder", return_value=recorder if recording else None):
            state = parallel(model, 2, schedule)
        steps = []
        for seed in range(WARM + 3):
            before = torch.get_rng_state()
            one_step(model, [family.batch(ROWS, SEQ, padding="right", seed=seed)])
            assert torch.equal(torch.get_rng_state(), before)
            steps.append(full_gradients(model))
        assert not state.stack._said
        found.append(steps)
    assert recorder.replays == 2 * 3
    for ours, wanted in zip(*found, strict=True):
        assert_gradients(ours, wanted, relative=1e-12)
    assert any(not torch.equal(found[0][-1][name], found[0][-2][name]) for name in found[0][-1])


@pytest.mark.parametrize(
    ("name", "attn", "schedule"),
    [
        ("gpt2", "sdpa", "oases"),
        pytest.param("bert", "eager", "oases", marks=pytest.mark.slow),
        ("llama", "sdpa", "wang"),
        pytest.param("gpt2", "sdpa", "megatron", marks=pytest.mark.slow),
    ],
)
def test_dropout(ranks: Worlds, name: str, attn: str, schedule: ScheduleName) -> None:
    ranks(2).run(masks_as_without_recordings, name, attn, schedule)


def a_failure_under_autocast() -> list[float]:
    """The step whose recording fails runs like any other: autocast has kept no cast that was never computed."""
    model, state, recorder = recorded(2)
    model.float()
    graphs, losses = state.stack.graphs, []
    assert graphs is not None
    own = graphs._record_both

    def failing(*args: Any) -> Any:
        own(*args)
        raise RuntimeError("out of memory")

    graphs._record_both = failing  # type: ignore[method-assign, assignment]
    for _ in range(WARM + 2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch(ROWS, SEQ, padded=True)).loss
        loss.backward()
        losses.append(float(loss))
    assert recorder.replays == 0
    return losses


def test_a_failed_recording_leaves_nothing_behind(ranks: Worlds) -> None:
    for losses in ranks(2).run(a_failure_under_autocast):
        assert len(set(losses)) == 1


@few_are_kept
def shapes_that_come_and_go() -> tuple[int, list[str]]:
    model, state, recorder = recorded(2)
    for seq in (*range(4, 4 + 2 * KEPT + 4), 5):
        for seed in range(WARM + 1):
            step(model, state, seed, seq=seq)
    assert_gradients(full_gradients(model), expected(WARM, seq=5))
    return recorder.recordings, sorted(state.stack._said)


def test_too_many_shapes_are_not_recorded(ranks: Worlds) -> None:
    for recordings, said in ranks(2).run(shapes_that_come_and_go):
        assert recordings == 2 * 2 * KEPT
        assert "pad_to_multiple_of" in said[0]


@few_are_kept
def many_lengths() -> tuple[int, int]:
    model, state, recorder = recorded(2)
    graphs = state.stack.graphs
    assert graphs is not None
    for seq in range(4, 4 + KEPT + 3):
        for seed in range(WARM + 1):
            step(model, state, seed, seq=seq)
        assert_gradients(full_gradients(model), expected(WARM, seq=seq))
    return recorder.recordings, len(graphs._recordings)


def test_recordings_are_bounded(ranks: Worlds) -> None:
    assert ranks(2).run(many_lengths) == [(2 * (KEPT + 3), KEPT)] * 2


def not_recorded(spoil: str) -> tuple[int, list[str]]:
    model, state, recorder = recorded(2)
    if spoil == "hook":
        model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
    elif spoil == "gradient hook":
        model.model.layers[0].mlp.gate_proj.weight.register_post_accumulate_grad_hook(lambda _: None)
    else:
        # On one rank alone: the other replays, and the two communicate all the same.
        graphs = state.stack.graphs
        assert graphs is not None
        failing = mock.Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
        if state.mesh.world.rank == 0:
            graphs._recorder = lambda device: failing  # type: ignore[assignment]
    for seed in range(WARM + 2):
        step(model, state, seed)
        assert_gradients(full_gradients(model), expected(seed))
    return recorder.replays, sorted(state.stack._said)


@pytest.mark.parametrize(
    ("spoil", "others_replay", "said"),
    [
        ("hook", 0, "hooks inside a layer: kernels are launched one by one, not as a CUDA graph"),
        ("gradient hook", 0, "hooks inside a layer: kernels are launched one by one, not as a CUDA graph"),
        ("failure", 4, "no CUDA graphs (RuntimeError: operation not permitted when stream is capturing): kernels are "),
    ],
)
def test_what_cannot_be_recorded_runs_kernel_by_kernel(
    ranks: Worlds, spoil: str, others_replay: int, said: str
) -> None:
    (replays, first), (others, _) = ranks(2).run(not_recorded, spoil)
    assert (replays, others) == (0, others_replay)
    assert len(first) == 1
    assert first[0].startswith(said)
