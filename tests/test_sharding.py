"""Every way to split heads over ranks gives back one layer: by arithmetic, forward and gradients."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from oases_hf.errors import ConfigError
from oases_hf.models.llama import LLAMA
from oases_hf.models.shard import Placement, Sharder, shard_layer
from oases_hf.parallel.link import Link
from oases_hf.parallel.mesh import Axis
from oases_hf.parallel.sharding import Layout, Slice, Span, bounds, head_share

from .parity import assert_gradients, float64_math
from .tiny import tiny_llama

MOST = 12
SHAPES = [(q, kv) for q in range(1, MOST + 1) for kv in range(1, q + 1) if q % kv == 0]


def test_bounds_cover_everything_evenly() -> None:
    for n in range(50):
        for parts in range(1, 9):
            spans = [bounds(n, parts, i) for i in range(parts)]
            assert [x for s in spans for x in range(s.lo, s.hi)] == list(range(n))
            assert max(s.size for s in spans) - min(s.size for s in spans) <= 1


@pytest.mark.parametrize(("query", "key_value"), SHAPES)
def test_no_query_head_is_apart_from_its_key(query: int, key_value: int) -> None:
    group = query // key_value
    for degree in range(1, query + 1):
        shares = [head_share(query, key_value, degree, rank) for rank in range(degree)]
        assert [h for s in shares for h in range(s.query.lo, s.query.hi)] == list(range(query))
        for share in shares:
            assert share.query.size % share.key_value.size == 0, "repeat_kv needs uniform groups"
            repeat = share.query.size // share.key_value.size
            for local in range(share.query.size):
                assert (share.query.lo + local) // group == share.key_value.lo + local // repeat
        holders = [sum(s.key_value.lo <= h < s.key_value.hi for s in shares) for h in range(key_value)]
        assert max(holders) - min(holders) <= 1


def test_more_ranks_than_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="9 heads cannot be split over 16 ranks; choose a degree up to 9"):
        head_share(9, 3, 16, 0)


def test_slices_of_several_spans() -> None:
    full = torch.arange(24).reshape(12, 2)
    part = Slice(0, (Span(1, 3), Span(8, 11)))
    assert part.of(full)[:, 0].tolist() == [2, 4, 16, 18, 20]
    back = torch.zeros_like(full)
    part.put(back, part.of(full))
    assert torch.equal(back[[1, 2, 8, 9, 10]], full[[1, 2, 8, 9, 10]])
    assert back[[0, 3, 7, 11]].eq(0).all()


def test_holders_and_local_shape() -> None:
    halves = (Slice(0, (Span(0, 2),)), Slice(0, (Span(0, 2),)), Slice(0, (Span(2, 4),)))
    layout = Layout((4, 3), halves, partial_grad=True)
    assert [layout.holders(rank, 3) for rank in range(3)] == [2, 2, 1]
    assert Layout((4, 3)).holders(0, 3) == 3
    assert layout.local_shape(2) == (2, 3)


@pytest.mark.parametrize(
    "query", [pytest.param(n, marks=pytest.mark.slow if n in (7, 10, 11) else []) for n in range(1, MOST + 1)]
)
def test_layer_of_every_degree(query: int) -> None:
    """All ranks of a group in one process: their shares are summed here, where ranks would all-reduce."""
    for key_value in (kv for q, kv in SHAPES if q == query):
        model = cast(Any, tiny_llama(heads=query, kv_heads=key_value, hidden=4 * query, layers=1, ffn=13, vocab=11))
        hidden = torch.randn(2, 3, 4 * query, dtype=torch.float64, generator=torch.Generator().manual_seed(query))
        context = {"position_embeddings": model.model.rotary_emb(hidden, torch.arange(3)[None]), "attention_mask": None}
        layer = model.model.layers[0]
        with float64_math():
            whole = layer(hidden, **context)
            whole.pow(2).sum().backward()
            for degree in range(1, query + 1):
                found, gradients = _sum_of_shares(layer, model.config, degree, hidden, context)
                torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
                assert_gradients(gradients, {name: p.grad for name, p in layer.named_parameters()})


def _sum_of_shares(
    layer: Any, config: Any, degree: int, hidden: Tensor, context: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    units = [LLAMA.units(config, degree, rank) for rank in range(degree)]
    ranks, layouts = [], []
    for rank in range(degree):
        mine, sharder = copy.deepcopy(layer), Sharder(rank)
        mine.zero_grad()
        link = Link(Axis(tuple(range(degree)), rank), managed=True)
        shard_layer(mine, LLAMA, [Placement(link, units)] * 2, sharder)
        ranks.append(mine)
        layouts.append(sharder.layouts)
    for block in LLAMA.blocks:
        hidden = hidden + torch.stack([block.run(mine, hidden, **context) for mine in ranks]).sum(0)
    hidden.pow(2).sum().backward()
    total = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    for rank, mine in enumerate(ranks):
        for name, parameter in mine.named_parameters():
            if parameter.grad is not None:  # the bias of a row-parallel linear is the first rank's
                layout = layouts[rank].get(parameter)
                share = torch.zeros_like(total[name])
                if layout is None:
                    share = parameter.grad
                else:
                    layout.slices[rank].put(share, parameter.grad)
                total[name] += share
    return hidden.detach(), total
