"""Reading NCCL's settings."""

from __future__ import annotations

from oases_hf import nccl


def test_settings_of_the_environment_override_files() -> None:
    environment = {"NCCL_ALGO": "Ring", "HOME": "/", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "0"}
    files = ["# NCCL_DEBUG=INFO\nNCCL_ALGO=Tree\n NCCL_P2P_DISABLE = 0\n", "NCCL_P2P_DISABLE=1"]
    assert nccl.settings(environment, files) == (
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("NCCL_ALGO", "Ring"),
        ("NCCL_P2P_DISABLE", "1"),
    )
