"""The pre-training recipe, on a text that is easy to learn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from recipes.pretrain_gpt2 import cut, learn_tokens

from .launching import LAUNCHERS, run_recipe

STEP = r"step (\d+): loss (\S+), (\d+) tokens/s"
LAST_LINE = r"loss of the last batch: (\S+), reloaded in one process (\S+)"
LINES = [f"It was the {i}th of a {word} month," for i in range(40) for word in ("cold", "warm", "wet")]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Files that the lines are spread over."""
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("\n".join(LINES[number::2]))
    return [str(tmp_path / f"{number}.txt") for number in range(2)]


def test_rows_are_cut_out_of_the_running_text(texts: list[str]) -> None:
    tokenizer = learn_tokens(texts, 300)
    rows = cut({"text": LINES}, tokenizer, 16)["input_ids"]
    assert {len(row) for row in rows} == {16}
    read = str(tokenizer.decode([token for row in rows for token in row]))
    assert "\n".join(LINES).startswith(read)
    assert len(read) > len("\n".join(LINES)) - 200


@pytest.mark.dist
@pytest.mark.parametrize(
    ("launcher", "options"),
    [LAUNCHERS[0], pytest.param(*LAUNCHERS[-1].values, id=LAUNCHERS[-1].id, marks=pytest.mark.slow)],
)
def test_learns_and_exports_what_one_process_reloads(
    launcher: Sequence[str], options: Sequence[str], texts: list[str], tmp_path: Path
) -> None:
    sizes = ["--layers", "2", "--heads", "3", "--vocabulary", "299", "--length", "16", "--batch_size", "4"]
    steps = ["--max_steps", "20", "--learning_rate", "1e-2"]
    files = ["--texts", *texts, f"--output={tmp_path}/made"]
    printed = run_recipe("pretrain_gpt2.py", [*files, *sizes, *steps, *options], tmp_path, launcher)

    found = [done.groups() for line in printed if (done := re.fullmatch(STEP, line))]
    assert [int(step) for step, _, _ in found] == list(range(2, 21, 2))
    assert float(found[-1][1]) < float(found[0][1]) - 1
    assert all(int(rate) > 0 for _, _, rate in found)
    numbers = re.fullmatch(LAST_LINE, printed[-1])
    assert numbers, printed
    loss, reloaded = map(float, numbers.groups())
    assert reloaded == pytest.approx(loss, abs=1e-4)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "made")) == 299
