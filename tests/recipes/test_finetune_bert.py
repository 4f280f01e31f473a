"""The classification recipe: on a model and data small enough to be made here, and on real ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from recipes.demo_data import write_bert, write_topics

from ..families import FAMILIES
from .launching import TWO_RANKS, run_recipe

LAST_LINE = r"accuracy (\S+)%, (\d+) of (\d+); reloaded in one process (\d+) the same"


def read(line: str) -> tuple[int, int, int]:
    """Return how many topics were found, of how many, and how many the export finds likewise."""
    numbers = re.fullmatch(LAST_LINE, line)
    assert numbers, line
    percent, right, rows, same = numbers.groups()
    assert float(percent) == pytest.approx(100 * int(right) / int(rows), abs=0.05)
    return int(right), int(rows), int(same)


@pytest.mark.dist
def test_learns_and_exports_what_one_process_reloads(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    model = FAMILIES["bert pooler"].model(dtype=torch.float32, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"text": f"{i} {('cats', 'dogs')[i % 2]}", "label": ("cat", "dog")[i % 2]} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    files = [f"--model={tmp_path}/model", f"--dataset={tmp_path}/rows.jsonl", f"--output={tmp_path}/tuned"]
    sizes = ["--max_steps", "20", "--batch_size", "4", "--held_out", "11", "--learning_rate", "1e-2"]
    right, of, same = read(run_recipe("finetune_bert.py", [*files, *sizes], tmp_path)[-1])

    assert (of, same) == (11, 11)
    assert right > 8
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["id2label"] == {"0": "cat", "1": "dog"}


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.dist
def test_real_weights_learn_the_same_on_one_and_two_ranks(tmp_path: Path) -> None:
    """To the last sample after 30 steps, without dropout."""
    write_bert(tmp_path / "model")
    write_topics(tmp_path / "topics.jsonl")
    printed = {}
    for ranks, launcher in ((1, None), (2, TWO_RANKS)):
        files = [f"--model={tmp_path}/model", f"--dataset={tmp_path}/topics.jsonl", f"--output={tmp_path}/{ranks}"]
        options = [*files, "--max_steps", "30", "--batch_size", "16", "--dropout", "0"]
        printed[ranks] = run_recipe("finetune_bert.py", options, tmp_path, launcher, timeout_s=280)[-1]
    assert printed[1] == printed[2]
    right, of, same = read(printed[1])
    assert same == of == 128
    assert right > 50, "more than have the most frequent topic"
    alone, shared = (logits_of(tmp_path / str(ranks), tmp_path / "topics.jsonl") for ranks in (1, 2))
    assert alone.argmax(-1).equal(shared.argmax(-1))
    torch.testing.assert_close(alone, shared, rtol=0, atol=2e-5)  # of logits up to 2.8 in float32; 2.4e-6 was seen


@torch.no_grad()
def logits_of(folder: Path, topics: Path) -> Tensor:
    """Return what an export makes of all questions."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in topics.read_text().splitlines()]
    batches = [texts[start : start + 64] for start in range(0, len(texts), 64)]
    made: list[Tensor] = [model(**tokenizer(batch, padding=True, return_tensors="pt")).logits for batch in batches]
    return torch.cat(made)
