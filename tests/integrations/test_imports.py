"""What the package offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oases_hf

LOADED = "print(sorted({'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)))"


def test_few_public_names() -> None:
    assert set(oases_hf.__all__) == {
        "OasesCallback",
        "OasesConfig",
        "OasesPlugin",
        "Plan",
        "load_pretrained",
        "save_pretrained",
    }
    assert len(oases_hf.__all__) <= 10
    assert all(getattr(oases_hf, name).__name__ == name for name in oases_hf.__all__)


def test_other_names_are_missed_as_usual() -> None:
    with pytest.raises(AttributeError, match="module 'oases_hf' has no attribute 'OasesTrainer'"):
        _ = oases_hf.OasesTrainer


@pytest.mark.parametrize(
    "statement",
    [
        "import oases_hf",
        "import oases_hf.schedule",
        "import oases_hf.plan",
        "import oases_hf.config, oases_hf.errors",
        "from oases_hf import OasesConfig, Plan; OasesConfig(degree=2); Plan('m', 2, (2, 2))",
    ],
)
def test_what_decides_imports_neither_torch_nor_transformers(statement: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import sys; {statement}; {LOADED}"], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_check_above_can_fail() -> None:
    done = subprocess.run([sys.executable, "-c", f"import sys, numpy; {LOADED}"], capture_output=True, text=True)
    assert done.stdout == "['numpy']\n"
