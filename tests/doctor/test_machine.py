"""A machine with two GPUs, which torch numbers otherwise than nvidia-smi."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from oases_hf.doctor import machine
from oases_hf.doctor.facts import Gpu, Link, Machine
from oases_hf.doctor.machine import look, machine_here
from oases_hf.doctor.measurements import Copy, Step

from .examples import Heard

SMI = r"""#!/bin/sh
case "$*" in
  --query*) printf 'GPU-aa, 1, 00000000:3B:00.0, 550.54\nGPU-bb, 0, 00000000:01:00.0, 550.54\n' ;;
  "topo -m") printf '\tGPU0\tGPU1\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n' ;;
  "topo -p2p r") printf ' \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tCNS\tX\t\n' ;;
esac
"""


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "nvidia-smi", SMI)
    tool(tmp_path, "lspci", "#!/bin/sh\nprintf '00:01.0 PCI bridge: Intel\\n\\tACSCtl: SrcValid+\\n'\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    about = [SimpleNamespace(name="RTX", total_memory=5, major=8, minor=6, uuid=uuid) for uuid in ("aa", "bb")]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: about[index])
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda *pair: pair == (0, 1))


@pytest.mark.usefixtures("two_gpus")
def test_what_is_known_of_it() -> None:
    found = machine_here()
    assert found.gpus == (Gpu(0, "RTX", 5, "8.6", "0000:3b:00.0"), Gpu(1, "RTX", 5, "8.6", "0000:01:00.0"))
    assert found.links == (Link(0, 1, "PHB", "CNS", access=False),)
    assert (found.driver, found.acs, found.setting("NCCL_ALGO")) == ("550.54", ("00:01.0",), "Ring")


def test_a_machine_without_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = machine_here()
    assert (found.gpus, found.links, found.driver, found.acs) == ((), (), None, None)


def test_a_tool_that_hangs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TOOL_LIMIT_S", 0.5)
    assert machine._output("sleep", "60") is None
    assert machine._output("sh", "-c", "echo no; exit 9") is None
    assert machine._output("sh", "-c", "echo yes") == "yes\n"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("copies", [True, False])
def test_every_gpu_copies_to_every_other(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(source: SimpleNamespace, target: SimpleNamespace, direct: bool) -> Copy:
        return Copy(source.index, target.index, 1, 1.0, direct, 0)

    monkeypatch.setattr(machine, "check_copies", check)
    heard = Heard()
    look(heard, copies, 7.0)
    first, found, *rest = heard.told
    assert isinstance(first, Step)
    assert isinstance(found, Machine)
    expected: list[object] = [
        Step("copies from GPU 0 to GPU 1", 7.0),
        Copy(0, 1, 1, 1.0, True, 0),
        Step("copies from GPU 1 to GPU 0", 7.0),
        Copy(1, 0, 1, 1.0, False, 0),
    ]
    assert rest == (expected if copies else [])
