"""Copies between devices, of which a CPU is two."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from oases_hf.doctor import copies
from oases_hf.doctor.copies import check_copies

CPU = torch.device("cpu", 0)
OWN = Tensor.copy_


def test_right_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []

    def recording(received: Tensor, what: Tensor) -> Tensor:
        sent.append(what.clone())
        return OWN(received, what)

    monkeypatch.setattr(Tensor, "copy_", recording)
    monkeypatch.setattr(copies, "SIZE_BYTES", 2**20)
    found = check_copies(CPU, CPU, direct=False)
    assert (found.wrong, found.direct, found.size_bytes) == (0, False, 2**20)
    assert found.ms > 0
    assert len(sent) == copies.ROUNDS
    assert all((one != other).float().mean() > 0.99 for one, other in pairwise(sent))


def test_a_bit_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(received: Tensor, what: Tensor) -> Tensor:
        OWN(received, what)
        received[3] ^= 1 << 7
        return received

    monkeypatch.setattr(Tensor, "copy_", lossy)
    monkeypatch.setattr(copies, "SIZE_BYTES", 2**20)
    assert check_copies(CPU, CPU, direct=True).wrong == copies.ROUNDS


def test_copies_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "SIZE_BYTES", 2**20)
    monkeypatch.setattr(Tensor, "copy_", lambda received, what: received)
    assert check_copies(CPU, CPU, direct=True).wrong >= copies.ROUNDS * 2**18 - 2
