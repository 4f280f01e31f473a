"""Casts under autocast: of a weight one for all sub-batches of a pass, of what layers share one for all of them;
gradients as if each call had its own.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from oases_hf import convert as converting
from oases_hf.models.converted import Converted
from oases_hf.parallel.casts import Casts
from oases_hf.parallel.linear import ColumnParallel, RowParallel
from oases_hf.plan import SCHEDULE_NAMES, Recompute, ScheduleName
from oases_hf.runtime.executor import Run
from oases_hf.runtime.graphs import WARM
from oases_hf.schedule import Backward, Forward, Instruction
from oases_hf.schedule import Recompute as Recomputing

from .families import FAMILIES
from .pairwise import covering
from .parallel import parallel
from .ranks import Worlds
from .replaying import Recorder

ROWS, SEQ, BLOCKS = 5, 8, 4
LINEARS = {"llama": 7, "gpt2": 4}
"""Of a layer."""
SHARING = {"llama": 3, "gpt2": 0}
"""Of these, those that are given what another is given, too: keys, values, up."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
Gradients = dict[str, Tensor]


def model_of(family: str) -> Any:
    return FAMILIES[family].model(dtype=torch.float32).train()


def parallel_weights(model: nn.Module) -> list[nn.Parameter]:
    return [module.weight for module in model.modules() if isinstance(module, ColumnParallel | RowParallel)]


class Counted(TorchDispatchMode):
    """Counts the casts of weights, and of whole hidden tensors, whoever makes them."""

    def __init__(self, weights: list[nn.Parameter], dtype: torch.dtype, hidden: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hidden, self.inputs = hidden, 0
        self._number = {weight.data_ptr(): number for number, weight in enumerate(weights)}
        self._dtype = dtype
        self.casts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == self._dtype:
            number = self._number.get(args[0].data_ptr())
            self.casts.update([] if number is None else [number])
            self.inputs += result.dim() == 3 and result.shape[-1] == self._hidden
        return result


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    """As Accelerate makes it, but without casts that torch keeps: for blocks, these are ours."""
    return torch.autocast("cpu", dtype, cache_enabled=False)


def step(model: Any, seed: int = 0, context: AbstractContextManager[Any] | None = None) -> float:
    """Add a batch's gradients; returns its loss."""
    with context or autocast():
        loss = model(**FAMILIES[model.config.model_type].batch(ROWS, SEQ, seed=seed)).loss
    loss.backward()
    return float(loss)


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def each_call_casts() -> Any:
    """Layers that know no casts: autocast makes them one by one."""
    return mock.patch.multiple(Casts, of=lambda casts, weight: None, of_input=lambda casts, x: x)


def assert_equal(found: Gradients, wanted: Gradients) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


SETTINGS = covering(list(LINEARS), SCHEDULE_NAMES, (1, 2, 3), ("full", "none"), (False, True), list(HALF))


def casts_of_a_step(
    family: str, schedule: ScheduleName, sub_batches: int, recompute: Recompute, defer: bool, dtype: torch.dtype
) -> tuple[int, Counter[int], int]:
    """On a rank: how many parallel linears there are, how many were cast how often, and how many fewer hiddens.

    Compares gradients, to the last bit, with those of a step each of whose calls casts for itself.
    """
    model = model_of(family)
    parallel(model, 2, schedule, sub_batches, recompute=(recompute,) * BLOCKS, defer_weight_grads=defer)
    weights, hidden = parallel_weights(model), model.config.hidden_size
    with each_call_casts(), Counted(weights, dtype, hidden) as each_call:
        loss = step(model, context=autocast(dtype))
    wanted = gradients(model)
    model.zero_grad()
    with Counted(weights, dtype, hidden) as counted:
        assert step(model, context=autocast(dtype)) == loss
    assert_equal(gradients(model), wanted)
    return len(weights), Counter(counted.casts.values()), each_call.inputs - counted.inputs


@pytest.mark.parametrize(("family", "schedule", "sub_batches", "recompute", "defer", "half"), SETTINGS)
def test_once_per_pass(
    ranks: Worlds,
    family: str,
    schedule: ScheduleName,
    sub_batches: int,
    recompute: Recompute,
    defer: bool,
    half: str,
) -> None:
    linears = LINEARS[family] * 2
    passes = 2 if recompute == "full" else 1
    hiddens = SHARING[family] * 2 * passes * sub_batches
    for found in ranks(2).run(casts_of_a_step, family, schedule, sub_batches, recompute, defer, HALF[half]):
        assert found == (linears, Counter({passes: linears}), hiddens)


def tie(model: Any) -> None:
    """Two linears of one block, and those of two blocks."""
    first, second = (layer.mlp for layer in model.model.layers)
    first.up_proj.weight = first.gate_proj.weight
    second.up_proj.weight = first.gate_proj.weight


def freeze(model: Any) -> None:
    """Some of a block's weights."""
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
            module.weight.requires_grad_(False)


def hook(model: Any) -> None:
    """Hooks that change gradients, once per sub-batch."""

    def halve(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad *= 0.5

    mlp = model.model.layers[1].mlp
    mlp.gate_proj.weight.register_hook(lambda grad: grad * 2)
    mlp.down_proj.weight.register_post_accumulate_grad_hook(halve)


def as_with_casts_of_its_own(change: Callable[[Any], None], defer: bool, schedule: ScheduleName) -> None:
    model = model_of("llama")
    if change is not hook:
        change(model)
    parallel(model, 2, schedule, recompute=("full", "none") * 2, defer_weight_grads=defer)
    if change is hook:  # parameters are others now
        change(model)
    with each_call_casts():
        loss = step(model)
    wanted = gradients(model)
    model.zero_grad()
    assert step(model) == loss
    assert_equal(gradients(model), wanted)


@pytest.mark.parametrize(
    ("change", "defer", "schedule"), covering((tie, freeze, hook), (False, True), ("oases", "cross_pass", "wang"))
)
def test_what_weights_may_be(ranks: Worlds, change: Callable[[Any], None], defer: bool, schedule: ScheduleName) -> None:
    ranks(2).run(as_with_casts_of_its_own, change, defer, schedule)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_autocast_leaves_as_it_is(dtype: torch.dtype) -> None:
    casts, weight = Casts(), nn.Parameter(torch.ones(2, 2))
    assert casts.of(weight) is None, "no autocast"
    with autocast():
        assert casts.of(nn.Parameter(weight.to(dtype))) is None
        made = casts.of(weight)
        assert made is not None
        assert made is casts.of(weight)
        assert (made.dtype, made.requires_grad) == (torch.bfloat16, False)


def test_layers_that_are_given_the_same_share_its_cast() -> None:
    casts, x = Casts(), torch.ones(2, 2, requires_grad=True)
    assert casts.of_input(x) is x, "no autocast"
    with autocast():
        one, two = casts.of_input(x), casts.of_input(x)
        assert one.dtype == torch.bfloat16
        assert one.data_ptr() == two.data_ptr()
        assert casts.of_input(x.detach()).data_ptr() != one.data_ptr()
        again = casts.of_input(x)
        with torch.no_grad():
            x.add_(1)
        assert casts.of_input(x).tolist() == [[2.0, 2.0]] * 2, "it changed in place"
        casts.forget_input()
        assert casts.of_input(half := x.bfloat16()) is half
    (one + 2 * two + 4 * again).sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [[7.0, 7.0]] * 2)


@contextmanager
def watched() -> Iterator[list[weakref.ref[Tensor]]]:
    """What casts are made inside."""
    seen: list[weakref.ref[Tensor]] = []
    own = Casts.of

    def of(casts: Casts, weight: nn.Parameter) -> Tensor | None:
        made = own(casts, weight)
        assert made is not None
        seen.append(weakref.ref(made))
        return made

    with mock.patch.object(Casts, "of", of):
        yield seen


def alive(seen: list[weakref.ref[Tensor]]) -> int:
    """How many casts there are."""
    return len({id(made()) for made in seen} - {id(None)})


class Alive:
    """Looks after every instruction how many casts there are: at most, by kind of instruction."""

    def __init__(self, seen: list[weakref.ref[Tensor]]) -> None:
        self._seen = seen
        self.most: dict[type[Instruction], int] = {}

    @contextmanager
    def __call__(self, op: Instruction) -> Iterator[None]:
        yield
        self.most[type(op)] = max(alive(self._seen), self.most.get(type(op), 0))


def held(schedule: ScheduleName) -> tuple[int, int, list[int]]:
    """On a rank: the most casts in forward and in backward; after each of two forwards, and then their backwards."""
    model = model_of("llama")
    state = parallel(model, 2, schedule)
    with watched() as seen:
        state.stack.watch = watch = Alive(seen)
        losses, left = [], []
        for seed in (0, 1):
            with autocast():
                losses.append(model(**FAMILIES["llama"].batch(ROWS, SEQ, seed=seed)).loss)
            left.append(alive(seen))
        for loss in losses:
            loss.backward()
            left.append(alive(seen))
    return watch.most[Forward], watch.most[Backward], left


@pytest.mark.parametrize(("schedule", "most"), [("oases", 4), ("cross_pass", 7), ("merak", 7)])
def test_none_is_held_longer_than_needed(ranks: Worlds, schedule: ScheduleName, most: int) -> None:
    """In forward those of one block; in backward those of the graphs there are, of a block or of a layer."""
    for found in ranks(2).run(held, schedule):
        assert found == (4, most, [0] * 4)


def failing(half: type[Instruction]) -> tuple[int, int]:
    """On a rank: the casts that were made before a block's first sub-batch failed, and those that are left."""
    model = model_of("llama")
    state = parallel(model, 2)
    own = Run._compute

    def compute(run: Run, op: Any, *args: Any) -> None:
        own(run, op, *args)
        if isinstance(op, half):
            raise RuntimeError("out of memory")

    with watched() as seen:
        with mock.patch.object(Run, "_compute", compute), pytest.raises(RuntimeError, match="out of memory"):
            step(model)
        assert state.stack.links[0].casts is None
        return len(seen), alive(seen)


@pytest.mark.parametrize("half", [Forward, Recomputing])
def test_a_failure_leaves_none(ranks: Worlds, half: type[Instruction]) -> None:
    for made, left in ranks(2).run(failing, half):
        assert made > 0
        assert left == 0


def trained(record: bool, schedule: ScheduleName, recompute: Recompute, defer: bool) -> tuple[list[float], Gradients]:
    """A few steps that change the weights: losses, and the last gradients."""
    model, recorder = model_of("llama"), Recorder()
    options: dict[str, Any] = {"recompute": (recompute,) * BLOCKS, "defer_weight_grads": defer}
    with mock.patch.object(converting, "cuda_recorder", return_value=recorder if record else None):
        state: Converted = parallel(model, 2, schedule, **options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for seed in range(WARM + 3):
        model.zero_grad()
        state.gradients.reopen()
        losses.append(step(model, seed))
        state.gradients.finish()
        optimizer.step()
    assert recorder.replays == (2 * 3 if record else 0)
    assert not state.stack._said
    return losses, gradients(model)


def as_without_recordings(schedule: ScheduleName, recompute: Recompute, defer: bool) -> None:
    with each_call_casts():
        wanted = trained(False, schedule, recompute, defer)
    found = trained(True, schedule, recompute, defer)
    assert found[0] == wanted[0]
    assert_equal(found[1], wanted[1])


@pytest.mark.parametrize(
    ("schedule", "recompute", "defer"), covering(("oases", "cross_pass", "wang"), ("full", "none"), (False, True))
)
def test_recordings_cast_anew(ranks: Worlds, schedule: ScheduleName, recompute: Recompute, defer: bool) -> None:
    """Of the weights as they are at each replay; to the last bit as without recordings, where each call casts."""
    ranks(2).run(as_without_recordings, schedule, recompute, defer)
