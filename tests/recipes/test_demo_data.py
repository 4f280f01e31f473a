"""The data that the demo and the recipes run on."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig

from recipes.demo_data import write_bert, write_questions, write_shakespeare, write_topics


def rows_of(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_no_question_has_two_topics(tmp_path: Path) -> None:
    write_topics(tmp_path / "topics.jsonl")
    rows = rows_of(tmp_path / "topics.jsonl")
    assert len({row["text"] for row in rows}) == len(rows) > 700
    assert len({row["label"] for row in rows}) == 21


def test_no_pair_of_question_and_answer_comes_twice(tmp_path: Path) -> None:
    write_questions(tmp_path / "questions.jsonl")
    rows = rows_of(tmp_path / "questions.jsonl")
    assert len({(row["question"], row["answer"]) for row in rows}) == len(rows) > 800


def test_the_bert_is_small_and_real(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert")
    config = AutoConfig.from_pretrained(tmp_path / "bert")
    assert (config.model_type, config.num_hidden_layers, config.num_attention_heads) == ("bert", 6, 12)


def test_all_of_shakespeare_is_there(tmp_path: Path) -> None:
    write_shakespeare(tmp_path / "text.txt")
    text = (tmp_path / "text.txt").read_text()
    assert len(text) > 5_000_000
    assert "To be, or not to be" in text
