"""Pre-train a GPT-2 on text files, in a plain Accelerate loop, with overlapped tensor model parallelism.

    accelerate launch --multi_gpu --num_processes 2 --mixed_precision no --dynamo_backend no
        recipes/pretrain_gpt2.py --texts <files> --output <folder>

The same line works without GPUs: the ranks then compute on the CPU. `recipes/demo_data.py` makes a text file.
Of the whole script, `OasesPlugin(...).install(accelerator, model)` is what spreads the model over the ranks.
"""

import argparse
import time
from itertools import islice

import torch
from accelerate import Accelerator
from datasets import IterableDataset, load_dataset
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from oases_hf import OasesPlugin


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Pre-train a GPT-2 with oases_hf.")
    add = parser.add_argument
    add("--texts", required=True, nargs="+", help="text files")
    add("--output", required=True, help="folder for the model, in Hugging Face's own layout")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4, help="of each layer, 64 wide")
    add("--vocabulary", type=int, default=2048, help="tokens, learned from the texts")
    add("--length", type=int, default=128, help="tokens per row")
    add("--batch_size", type=int, default=16, help="rows per step, of each group of ranks that shares a batch")
    add("--max_steps", type=int, default=200, help="optimizer steps")
    add("--learning_rate", type=float, default=1e-3, help="peak learning rate of AdamW")
    add("--tmp_size", type=int, help="ranks that share a batch; all of them if not given")
    return parser.parse_args()


def learn_tokens(files: list[str], size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-2's, learned from the files; all ranks learn the same."""
    end, tokens = "<|endoftext|>", ByteLevelBPETokenizer()
    tokens.train(files, vocab_size=size, special_tokens=[end], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokens._tokenizer, bos_token=end, eos_token=end)


def cut(lines: dict[str, list[str]], tokenizer: PreTrainedTokenizerFast, length: int) -> dict[str, list[list[int]]]:
    """Return the tokens of some lines as rows of equal length, without the rest."""
    ids = tokenizer("\n".join(lines["text"]))["input_ids"]
    return {"input_ids": [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]}


def stream(files: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> IterableDataset:
    """Return rows of tokens without end, shuffled, read and encoded as they are needed."""
    lines = load_dataset("text", data_files=files, split="train", streaming=True)
    rows = lines.map(cut, batched=True, remove_columns="text", fn_kwargs={"tokenizer": tokenizer, "length": length})
    return rows.shuffle(seed=0, buffer_size=1000).repeat(None).with_format("torch")


def main() -> None:
    """Train, export, and check the export."""
    options = parse_options()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # its launcher cannot ask for several CPU ranks
    tokenizer = learn_tokens(options.texts, options.vocabulary)
    end = tokenizer.eos_token_id
    words = {"vocab_size": len(tokenizer), "n_positions": options.length, "bos_token_id": end, "eos_token_id": end}
    sizes = {"n_layer": options.layers, "n_head": options.heads, "n_embd": 64 * options.heads}
    model = GPT2LMHeadModel(GPT2Config(**words, **sizes))
    OasesPlugin(tmp_size=options.tmp_size).install(accelerator, model)  # before there is an optimizer
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, options.max_steps // 10, options.max_steps)
    loader = DataLoader(stream(options.texts, tokenizer, options.length), options.batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    every, begun = max(1, options.max_steps // 10), time.perf_counter()
    for step, batch in enumerate(islice(loader, options.max_steps), start=1):
        loss = model(**batch, labels=batch["input_ids"]).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % every == 0:
            losses = accelerator.gather_for_metrics(loss.detach())  # one of each group of ranks that shares a batch
            tokens = every * batch["input_ids"].numel() * len(losses)
            rate, begun = tokens / (time.perf_counter() - begun), time.perf_counter()
            accelerator.print(f"step {step}: loss {losses.mean():.4f}, {rate:.0f} tokens/s", flush=True)
    accelerator.unwrap_model(model).save_pretrained(options.output)  # on all ranks: each holds a part of the model
    with torch.no_grad(), accelerator.autocast():
        loss = model.eval()(**batch, labels=batch["input_ids"]).loss
        if accelerator.is_main_process:
            tokenizer.save_pretrained(options.output)
            reloaded = GPT2LMHeadModel.from_pretrained(options.output).to(accelerator.device).eval()
            alone = reloaded(**batch, labels=batch["input_ids"]).loss
            print(f"loss of the last batch: {loss:.6f}, reloaded in one process {alone:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
