"""The fine-tuning recipe, started as its users start it, on a model and data small enough to be made here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from recipes.finetune_llama import PLAIN_CHAT, encode

from ..tiny import tiny_llama
from .launching import LAUNCHERS, run_recipe

LAST_LINE = r"held-out loss: before (\S+), after (\S+), reloaded in one process (\S+)"
MARKED_CHAT = """{% for message in messages %}[{{ message.role }}]{{ message.content }};{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def learned(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int = 100) -> tuple[str, str]:
    """Return all of a row's text, and the part of it that has labels."""
    encoded = encode(row, tokenizer, max_length)
    labels = [label for label in encoded["labels"] if label != -100]
    return decode(encoded["input_ids"], tokenizer), decode(labels, tokenizer)


def decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("names", [("question", "answer"), ("prompt", "completion")])
def test_only_answers_are_learned(names: tuple[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    row = dict(zip(names, ("who?", "me"), strict=True))
    tokenizer.chat_template = MARKED_CHAT
    assert learned(row, tokenizer) == ("[user]who?;[assistant]me;", "me;")
    tokenizer.chat_template = PLAIN_CHAT
    assert learned(row, tokenizer) == ("who?\nme~end~", "me~end~")


def test_each_turn_of_the_assistant_is_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    spoken = [("system", "s"), ("user", "u"), ("assistant", "one"), ("user", "v"), ("assistant", "two")]
    row = {"messages": [{"role": role, "content": content} for role, content in spoken]}
    tokenizer.chat_template = MARKED_CHAT
    assert learned(row, tokenizer) == ("[system]s;[user]u;[assistant]one;[user]v;[assistant]two;", "one;two;")


def test_plain_text_is_learned_whole_and_long_rows_are_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    assert learned({"text": "a tale"}, tokenizer) == ("a tale~end~", "a tale~end~")
    assert learned({"text": "a tale"}, tokenizer, max_length=3) == ("a t", "a t")


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ messages | length }}" + MARKED_CHAT
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        encode({"question": "who?", "answer": "me"}, tokenizer, 100)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        pytest.param(*each.values, id=each.id, marks=[] if each.id == "ranks_2" else pytest.mark.slow)
        for each in LAUNCHERS
    ],
)
def test_trains_and_exports_what_one_process_reloads(
    launcher: Sequence[str], options: Sequence[str], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = tiny_llama(heads=9, kv_heads=3, hidden=36, vocab=len(tokenizer), tied=True, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"{i} + 1?", "answer": f"it is {i + 1}."} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    files = [f"--model={tmp_path}/model", f"--dataset={tmp_path}/rows.jsonl", f"--output={tmp_path}/tuned"]
    sizes = ["--max_steps", "4", "--batch_size", "4", "--held_out", "10", "--learning_rate", "1e-2"]
    printed = run_recipe("finetune_llama.py", [*files, *sizes, *options], tmp_path, launcher)

    assert any("train_tokens_per_second" in line for line in printed)
    numbers = re.fullmatch(LAST_LINE, printed[-1])
    assert numbers, printed
    before, after, reloaded = map(float, numbers.groups())
    assert after < before - 0.1
    assert reloaded == pytest.approx(after, abs=1e-4)
