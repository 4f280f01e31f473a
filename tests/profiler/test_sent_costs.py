"""With ``comm_dtype="bf16"``, costs are measured with what rounds sums, and kept apart."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from oases_hf import OasesPlugin
from oases_hf.config import CommDtype
from oases_hf.costs import CostTable, ElementBytes
from oases_hf.parallel.link import Link
from oases_hf.parallel.mesh import Mesh, Pending
from oases_hf.profiler import Architecture, Running, Workload, profile
from oases_hf.profiler.profile import element_bytes

from ..integrations.test_planned import in_a_hurry
from ..ranks import Worlds
from ..tiny import tiny_llama
from .asking import asked_for, profiled

MIXED = partial(torch.autocast, "cpu", torch.bfloat16)


def measured(cache: Path, comm_dtype: CommDtype | None) -> tuple[CostTable, set[tuple[int, torch.dtype]]]:
    """On a rank: a table, and in which types shares were handed over to be summed, at degrees above 1."""
    in_a_hurry(cache)
    model, own = tiny_llama(dtype=torch.float32), Link.start_all_reduce
    what = (Architecture.of(model), Mesh.build(2), Workload(4, 8, (1,)))
    handed = set[tuple[int, torch.dtype]]()

    def start_all_reduce(link: Link, share: Tensor) -> Pending:
        handed.add((link.replicas, share.dtype))
        return own(link, share)

    with mock.patch.object(Link, "start_all_reduce", start_all_reduce):
        return profile(*what, Running(torch.device("cpu"), MIXED, comm_dtype=comm_dtype)), handed


def both(cache: Path) -> list[tuple[CostTable, set[tuple[int, torch.dtype]]]]:
    """On a rank: exact, rounded, and the same again."""
    return [measured(cache, comm_dtype) for comm_dtype in (None, "bf16", "bf16")]


def test_rounding_is_measured(ranks: Worlds, tmp_path: Path) -> None:
    """Under autocast, shares of outputs are in bf16 anyway; nothing is sent, nor rounded, where each rank has all."""
    for (exact, as_it_is), (table, narrow), (again, nothing) in ranks(2).run(both, tmp_path):
        assert as_it_is == {(1, torch.bfloat16), (1, torch.float32)}
        assert narrow == {(1, torch.bfloat16)}
        assert (again, nothing) == (table, set())
        assert [each.fingerprint["sent"] for each in (exact, table)] == ["as computed", "bf16"]
        assert exact.element_bytes == ElementBytes(4, 2, 4, 4, 4, 8)
        assert table.element_bytes == ElementBytes(4, 2, 4, 4, 4, 8, comm=2)
    assert len(list(tmp_path.glob("oases_hf/costs/*.json"))) == 2


@pytest.mark.parametrize(
    ("dtype", "mixed", "comm_dtype", "sent"),
    [
        (torch.float64, False, "bf16", (2, 2)),
        (torch.float32, False, None, (4, 4)),
        (torch.float32, True, None, (2, 4)),
        (torch.float32, True, "bf16", (2, 2)),
        (torch.bfloat16, False, "bf16", (2, 2)),
    ],
)
def test_bytes_that_are_sent(
    dtype: torch.dtype, mixed: bool, comm_dtype: CommDtype | None, sent: tuple[int, int]
) -> None:
    autocast: Any = MIXED if mixed else nullcontext
    size = element_bytes(dtype, Workload(4, 8), Running(torch.device("cpu"), autocast, comm_dtype=comm_dtype))
    assert (size.sent_partial, size.sent_gradient) == sent
    assert (size.forward, size.gradient) == (dtype.itemsize,) * 2


@pytest.mark.parametrize("comm_dtype", [None, "bf16"])
def test_a_plan_is_for_sums_as_they_will_be_sent(comm_dtype: CommDtype | None) -> None:
    plugin = OasesPlugin(degree="auto", comm_dtype=comm_dtype, batch_size=4, sequence_length=8)
    assert asked_for(plugin, tiny_llama()).comm_dtype == comm_dtype


def test_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    costs = profiled(tmp_path, monkeypatch, "--comm-dtype", "bf16")
    assert "batch 2 × 8 tokens, float32 on cpu, comm_dtype=bf16" in capsys.readouterr().out
    assert costs.element_bytes.comm == 2
