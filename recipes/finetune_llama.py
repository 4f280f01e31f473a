"""Fine-tune a LLaMA-type model over several GPUs (or CPU ranks) with overlapped tensor model parallelism.

    accelerate launch --multi_gpu --num_processes 2 --mixed_precision no --dynamo_backend no
        recipes/finetune_llama.py --model <hub id or folder> --dataset <hub id, folder or jsonl> --output <folder>

The same line works without GPUs: the ranks then compute on the CPU. `recipes/accelerate/` has it as config files.
Of the whole script, `load_pretrained`, in the place of `from_pretrained`, spreads the model over the ranks, and
`callbacks=[OasesCallback(...)]` trains it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from oases_hf import OasesCallback, OasesConfig, load_pretrained

# For tokenizers without a chat template: question, newline, answer.
PLAIN_CHAT = """{{ bos_token }}{% for message in messages %}{{ message.content }}
{%- if message.role == "assistant" %}{{ eos_token }}{% else %}{{ "\\n" }}{% endif %}{% endfor %}"""


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a LLaMA-type model with oases_hf.")
    add = parser.add_argument
    add("--model", required=True, help="hub id or folder")
    add("--dataset", required=True, help="hub id, folder or .jsonl with rows of messages, question/answer, or text")
    add("--output", required=True, help="folder for the fine-tuned model, in Hugging Face's own layout")
    add("--max_steps", type=int, default=100, help="optimizer steps")
    add("--batch_size", type=int, default=4, help="rows per step, of each group of ranks that shares a batch")
    add("--max_length", type=int, default=128, help="tokens after which a row is cut off")
    add("--learning_rate", type=float, default=2e-5, help="peak learning rate of AdamW")
    add("--held_out", type=int, default=64, help="rows kept out of training, to measure the loss on")
    add("--tmp_size", type=int, help="ranks that share a batch; all of them if not given")
    add("--schedule", help="oases if not given, or a baseline: megatron, wang, merak or cross_pass")
    add("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    return parser.parse_args()


def chat_pieces(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Return a conversation as the chat template writes it, cut where the assistant starts and stops speaking."""
    messages = row.get("messages") or [
        {"role": "user", "content": row.get("question") or row["prompt"]},
        {"role": "assistant", "content": row.get("answer") or row["completion"]},
    ]
    pieces, done = list[tuple[str, bool]](), ""
    for end, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            asked = str(tokenizer.apply_chat_template(messages[: end - 1], tokenize=False, add_generation_prompt=True))
            answered = str(tokenizer.apply_chat_template(messages[:end], tokenize=False))
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise ValueError("the tokenizer's chat template rewrites earlier turns; give rows of `text` instead")
            pieces += (asked[len(done) :], False), (answered[len(asked) :], True)
            done = answered
    return pieces


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[int]]:
    """Return a row's token ids, and its labels: -100 (no loss) on all that the model is asked or told."""
    plain = bool(row.get("text"))
    pieces = [(row["text"] + tokenizer.eos_token, True)] if plain else chat_pieces(row, tokenizer)
    input_ids, labels = list[int](), list[int]()
    for text, learn in pieces:
        ids = tokenizer(text, add_special_tokens=plain)["input_ids"]
        input_ids += ids
        labels += ids if learn else [-100] * len(ids)
    return {"input_ids": input_ids[:max_length], "labels": labels[:max_length]}


def load_rows(dataset: str, tokenizer: PreTrainedTokenizerBase, max_length: int, held_out: int) -> DatasetDict:
    """Load, encode and split the rows; those with nothing left to learn are dropped."""
    source = {"path": "json", "data_files": dataset} if Path(dataset).is_file() else {"path": dataset}
    rows = load_dataset(**source, split="train")
    how = {"tokenizer": tokenizer, "max_length": max_length}
    rows = rows.map(encode, fn_kwargs=how, remove_columns=rows.column_names)
    rows = rows.filter(lambda row: any(label != -100 for label in row["labels"]))
    return rows.train_test_split(test_size=held_out, seed=0)


@torch.no_grad()
def held_out_loss(
    model: torch.nn.Module, rows: Dataset, collate: DataCollatorForSeq2Seq, args: TrainingArguments
) -> float:
    """Return the mean loss over all answer tokens; the model is spread over the ranks, or whole in one process."""
    model.to(args.device).eval()
    total, tokens = 0.0, 0
    for batch in DataLoader(rows, args.per_device_train_batch_size, collate_fn=collate):
        batch = batch.to(args.device)
        learned = int((batch["labels"][:, 1:] != -100).sum())
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            total += model(**batch).loss.item() * learned
        tokens += learned
    return total / tokens


def main() -> None:
    """Train, export, and check the export."""
    options = parse_options()
    oases = OasesCallback(OasesConfig(tmp_size=options.tmp_size, schedule=options.schedule))
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),  # accelerate's launcher cannot ask for several CPU ranks, this can
        logging_steps=max(1, options.max_steps // 25),
        include_num_input_tokens_seen="non_padding",  # adds tokens/s to the log
        save_strategy="no",
        report_to="none",
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_CHAT
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    with args.main_process_first():
        rows = load_rows(options.dataset, tokenizer, options.max_length, options.held_out)
    model = load_pretrained(AutoModelForCausalLM, options.model, oases.config, dtype=torch.float32)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        processing_class=tokenizer,
        data_collator=collate,
        callbacks=[oases],
    )
    before = held_out_loss(model, rows["test"], collate, args)
    trainer.train()
    after = held_out_loss(model, rows["test"], collate, args)
    trainer.save_model(options.output)  # on all ranks: each holds a part of the model
    if trainer.is_world_process_zero():
        reloaded = AutoModelForCausalLM.from_pretrained(options.output, dtype=torch.float32)
        alone = held_out_loss(reloaded, rows["test"], collate, args)
        print(f"held-out loss: before {before:.6f}, after {after:.6f}, reloaded in one process {alone:.6f}")


if __name__ == "__main__":
    main()
