"""How the line about a model says by what its ranks are linked."""

from __future__ import annotations

import pytest

from oases_hf.integrations.banner import transport
from oases_hf.nccl import Settings

OFF: Settings = (("NCCL_DEBUG", "WARN"), ("NCCL_P2P_DISABLE", "1"))


@pytest.mark.parametrize(
    ("settings", "access", "several_machines", "said"),
    [
        ((), [True, True], False, "(P2P possible)"),
        (OFF, [True, True], False, "without P2P (NCCL_P2P_DISABLE=1)"),
        (OFF, [], False, "without P2P (NCCL_P2P_DISABLE=1)"),
        ((("NCCL_P2P_LEVEL", "LOC"),), [True], False, "without P2P (NCCL_P2P_LEVEL=LOC)"),
        ((("NCCL_P2P_DISABLE", "0"),), [True], False, "(P2P possible)"),
        ((), [False, False], False, "without P2P (no GPU can reach another's memory)"),
        ((), [True, False], False, "(P2P possible between some GPUs)"),
        ((), [], False, "(P2P unknown: one GPU is visible)"),
        ((), [True, True], True, "(P2P possible), and a network between machines"),
        (OFF, [False], True, "without P2P (NCCL_P2P_DISABLE=1), and a network between machines"),
    ],
)
def test_how_nccl_can_send(settings: Settings, access: list[bool], several_machines: bool, said: str) -> None:
    assert transport(settings, access, several_machines=several_machines) == said
