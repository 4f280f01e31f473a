"""What an estimate says that ranks hold is what they hold, to the byte where it says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import BertForMultipleChoice, BertForPreTraining, LlamaForCausalLM, PreTrainedModel

from oases_hf.convert import plain, stack_of
from oases_hf.costs import CostTable
from oases_hf.plan import Recompute
from oases_hf.planner import Memory, Problem, predict
from oases_hf.profiler import Architecture, Estimate
from oases_hf.profiler.dry import kept_as_on_gpus
from oases_hf.profiler.layer import Autocast, Running, loss_of
from oases_hf.profiler.profile import Workload, outside
from oases_hf.profiler.stopwatch import KeptBytes, PeakBytes, peak_bytes
from oases_hf.schedule import Backward, Forward, Instruction
from oases_hf.schedule import Recompute as Recomputing

from ..families import FAMILIES
from ..parallel import parallel
from ..ranks import Worlds

ROWS, SEQUENCE, LAYERS = 8, 16, 2
BOTH: tuple[Recompute, ...] = ("full", "none")
INPUTS = ("input_ids", "labels")
MIXED = ("qwen2", "gemma3")  # the first layer keeps a mask, the second needs none: all are taken to be like the first


class Graphs(KeptBytes):
    """Counts what blocks keep in forward, too."""

    @contextmanager
    def __call__(self, op: Instruction) -> Iterator[None]:
        with super().__call__(Recomputing(op.block, op.sub_batch) if isinstance(op, Forward) else op):
            yield


@dataclass(frozen=True)
class Counted:
    """On one rank: elements in all; bytes of each block's graph, of these those that sub-batches share, and of its
    temporaries; bytes of all hidden tensors kept.
    """

    parameters: int
    graphs: dict[int, int]
    shared: dict[int, int]
    temporaries: dict[int, int]
    hiddens: int


def counted(
    family: str, blocks: int, degree: int, recompute: Recompute, sub_batches: int, autocast: Autocast = nullcontext
) -> Counted:
    """On a rank: what a step of a converted model holds, if norms keep what they keep on GPUs."""
    with kept_as_on_gpus():
        return _counted(family, blocks, degree, recompute, sub_batches, autocast)


def _counted(
    family: str, blocks: int, degree: int, recompute: Recompute, sub_batches: int, autocast: Autocast
) -> Counted:
    model = FAMILIES[family].model(dtype=torch.float32).train()
    size = torch.distributed.get_world_size()
    state = parallel(model, size, sub_batches=sub_batches, degrees=(degree,) * blocks, recompute=(recompute,) * blocks)
    batch = FAMILIES[family].batch(ROWS, SEQUENCE)
    with autocast():
        loss = model(**batch).loss
    loss.backward()  # gradients are there from now on
    kept, peak = Graphs(model.parameters(), on_gpu=True), PeakBytes(torch.device("cpu"))
    state.stack.watch = kept
    with autocast():
        loss = model(**batch).loss
    (run,) = state.stack._live
    hiddens = run.kept_bytes
    loss.backward()
    state.stack.watch = peak
    with autocast():
        loss = model(**batch).loss
    loss.backward()
    temporaries = {
        block: max(peak.bytes[Backward, block], peak.bytes.get((Recomputing, block), 0) - kept.bytes[block])
        for block in range(blocks)
    }
    return Counted(
        sum(p.numel() for p in model.parameters()), dict(kept.bytes), dict(kept.shared), temporaries, hiddens
    )


def estimated(family: str, tmp_size: int, sub_batches: int, autocast: Autocast = nullcontext) -> CostTable:
    model = FAMILIES[family].model(dtype=torch.float32)
    return Estimate(Architecture.of(model), tmp_size, SEQUENCE, 8, autocast).table(ROWS, sub_batches)


def memory(table: CostTable, degree: int, recompute: Recompute, sub_batches: int) -> Memory:
    problem = Problem(table, LAYERS, 1.0)
    blocks = len(problem.blocks)
    return predict(problem, (degree,) * blocks, (recompute,) * blocks, sub_batches).memory


CASES: list[tuple[str, int, Recompute]] = [
    *((family, degree, recompute) for family in ("llama", "gpt2", "bert") for degree in (1, 2) for recompute in BOTH),
    *((family, 2, "full") for family in ("mistral", "qwen2", "gemma2", "gemma3", "phi3", "gpt2 tied", "neox")),
    *((family, 1, "none") for family in ("qwen3", "gemma3", "neox sequential", "roberta", "bert row")),
]
QUICK = ("llama", "bert", "gemma2", "phi3", "neox", "bert row")


@pytest.mark.parametrize(
    ("family", "degree", "recompute"),
    [pytest.param(*case, marks=[] if case[0] in QUICK else pytest.mark.slow) for case in CASES],
)
def test_it_is_what_ranks_hold(ranks: Worlds, family: str, degree: int, recompute: Recompute) -> None:
    table = estimated(family, 2, 2)
    kinds = len(table.kinds)
    found = ranks(2).run(counted, family, LAYERS * kinds, degree, recompute, 2)
    said = memory(table, degree, recompute, 2)
    assert said.parameters == said.gradients == 4 * max(rank.parameters for rank in found)
    assert said.optimizer == 2 * said.parameters
    hidden = ROWS // (2 // degree) * SEQUENCE * table.hidden * 4
    if recompute == "full":
        # Behind the last block BERT keeps what the norm was of: one hidden tensor in all, which is not charged.
        assert found[0].hiddens == said.saved + (hidden if family == "bert" else 0)
    for block in range(kinds if family in MIXED else LAYERS * kinds):
        timing = table.timing(table.kinds[block % kinds], degree, 2)
        assert timing.graph_bytes == max(rank.graphs[block] for rank in found)
        assert timing.shared_bytes == max(rank.shared[block] for rank in found)
        if recompute == "full":
            assert timing.runtime_bytes == max(rank.temporaries[block] for rank in found)
    if recompute == "none" and family not in MIXED:
        norms = sum(kind.norm_hiddens for kind in table.kinds) * LAYERS * hidden
        assert found[0].hiddens == norms
        assert said.saved == 2 * sum(found[0].graphs.values()) - sum(found[0].shared.values()) + norms


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gemma2"])
def test_casts_are_in_it(ranks: Worlds, family: str) -> None:
    """Of weights, the first sub-batch makes them, and all of their graphs have the same."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    table = estimated(family, 2, 2, autocast)
    kinds = len(table.kinds)
    found = ranks(2).run(counted, family, LAYERS * kinds, 2, "full", 2, autocast)
    for block in range(LAYERS * kinds):
        timing = table.timing(table.kinds[block % kinds], 2, 2)
        assert timing.graph_bytes == max(rank.graphs[block] for rank in found)
        assert timing.shared_bytes == max(rank.shared[block] for rank in found)
        assert timing.shared_bytes > table.parameters(table.kinds[block % kinds], 2), "two bytes for most of them"
        assert timing.runtime_bytes >= max(rank.temporaries[block] for rank in found)


def test_temporaries_are_of_the_sub_batch_that_needs_most() -> None:
    peak = PeakBytes(torch.device("cpu"))
    for k, size_bytes in enumerate((100, 40)):
        with peak(Recomputing(0, k)):
            torch.ones(size_bytes, dtype=torch.uint8)
    assert peak.bytes == {(Recomputing, 0): 100}


def around_layers(family: str, autocast: Autocast = nullcontext) -> int:
    """On a rank: the most that a converted model without layers holds in a step, beside its batch."""
    model = FAMILIES[family].model(dtype=torch.float32).train()
    state = parallel(model, torch.distributed.get_world_size())
    with kept_as_on_gpus(), plain(model):
        del stack_of(model, state.family)[:]
        inputs = {name: tensor for name, tensor in FAMILIES[family].batch(ROWS, SEQUENCE).items() if name in INPUTS}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        as_given = mock.patch("oases_hf.convert.make_batch_equal", lambda tensors, *_: tensors)
        if autocast is not nullcontext:
            model.forward = convert_outputs_to_fp32(model.forward)  # as Accelerate does
        with as_given, peak_bytes(torch.device("cpu")) as peak:
            with autocast():
                loss = loss_of(model(**inputs))
            loss.backward()
    return peak()


@pytest.mark.parametrize("autocast", [nullcontext, partial(torch.autocast, "cpu", torch.bfloat16)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gemma2", "neox"])
def test_what_is_around_layers_is_what_ranks_hold(ranks: Worlds, family: str, autocast: Autocast) -> None:
    """But for numbers of a row or of all."""
    said = estimated(family, 2, 2, autocast).outside.bytes
    assert max(ranks(2).run(around_layers, family, autocast)) == pytest.approx(said, rel=0.005)


class OwnForward(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, **others)


@pytest.mark.parametrize("other", [OwnForward, BertForPreTraining, BertForMultipleChoice])
def test_heads_whose_loss_is_their_own(other: type[PreTrainedModel]) -> None:
    """Whole logits are there, where there are logits of words."""
    family = "llama" if other is OwnForward else "bert"
    like = Architecture.of(FAMILIES[family].model(dtype=torch.float32))
    models = (replace(like, model_class=other), like)
    own, hugging_face = (Estimate(model, 2, SEQUENCE, 8, nullcontext).table(ROWS, 2) for model in models)
    words = ROWS * SEQUENCE * like.config.vocab_size * 4
    if other is BertForMultipleChoice:
        assert own.outside.bytes < hugging_face.outside.bytes
    else:
        assert own.outside.bytes >= 2 * words


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_profile_counts_what_is_around_layers_as_an_estimate_does(weights: torch.dtype) -> None:
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    model = Architecture.of(FAMILIES["llama"].model(dtype=weights))
    measured = outside(model, 2, Workload(ROWS, SEQUENCE), Running(torch.device("cpu"), autocast), 1.0)
    table = Estimate(model, 2, SEQUENCE, 8, autocast).table(ROWS, 2)
    assert measured == replace(table.outside, ms=1.0)
    bare = Estimate(model, 2, SEQUENCE, 8, nullcontext).table(ROWS, 2)
    assert measured.bytes != bare.outside.bytes
