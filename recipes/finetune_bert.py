"""Fine-tune a BERT-type model to tell the topic of a text, with overlapped tensor model parallelism.

    accelerate launch --multi_gpu --num_processes 2 --mixed_precision no --dynamo_backend no
        recipes/finetune_bert.py --model <hub id or folder> --dataset <hub id, folder or jsonl> --output <folder>

The same line works without GPUs: the ranks then compute on the CPU. `recipes/demo_data.py` makes a model and data.
Of the whole script, `callbacks=[OasesCallback(...)]` is what spreads the model over the ranks.
"""

import argparse
from pathlib import Path

import torch
from datasets import ClassLabel, DatasetDict, load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
from transformers import PreTrainedTokenizerBase as Tokenizer

from oases_hf import OasesCallback, OasesConfig


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a BERT-type classifier with oases_hf.")
    add = parser.add_argument
    add("--model", required=True, help="hub id or folder")
    add("--dataset", required=True, help="hub id, folder or .jsonl with rows of text and label")
    add("--output", required=True, help="folder for the fine-tuned model, in Hugging Face's own layout")
    add("--max_steps", type=int, default=100, help="optimizer steps")
    add("--batch_size", type=int, default=32, help="rows per step, of each group of ranks that shares a batch")
    add("--max_length", type=int, default=64, help="tokens after which a text is cut off")
    add("--learning_rate", type=float, default=2e-4, help="peak learning rate of AdamW")
    add("--dropout", type=float, default=0.1, help="dropout of hidden states and attention")
    add("--held_out", type=int, default=128, help="rows kept out of training, to measure the accuracy on")
    add("--tmp_size", type=int, help="ranks that share a batch; all of them if not given")
    add("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    return parser.parse_args()


def load_rows(dataset: str, tokenizer: Tokenizer, max_length: int, held_out: int) -> DatasetDict:
    """Load, encode and split the rows; labels become numbers."""
    source = {"path": "json", "data_files": dataset} if Path(dataset).is_file() else {"path": dataset}
    rows = load_dataset(**source, split="train")
    if not isinstance(rows.features["label"], ClassLabel):
        rows = rows.class_encode_column("label")
    cut = {"truncation": True, "max_length": max_length}
    rows = rows.map(tokenizer, input_columns="text", fn_kwargs=cut, remove_columns="text")
    return rows.train_test_split(test_size=held_out, seed=0)


def main() -> None:
    """Train, export, and check the export."""
    options = parse_options()
    oases = OasesCallback(OasesConfig(tmp_size=options.tmp_size))
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),  # accelerate's launcher cannot ask for several CPU ranks, this can
        logging_steps=max(1, options.max_steps // 10),
        save_strategy="no",
        report_to="none",
    )
    torch.manual_seed(args.seed)  # for the classifier's new weights; from ranks with other seeds, those of rank 0 count
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with args.main_process_first():
        rows = load_rows(options.dataset, tokenizer, options.max_length, options.held_out)
    topics = rows["train"].features["label"].names
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model,
        id2label=dict(enumerate(topics)),
        label2id={topic: number for number, topic in enumerate(topics)},
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        processing_class=tokenizer,  # also makes the collator pad
        callbacks=[oases],
    )
    trainer.train()
    predicted = trainer.predict(rows["test"])
    found, right = torch.as_tensor(predicted.predictions).argmax(-1), torch.as_tensor(predicted.label_ids)
    trainer.save_model(options.output)  # on all ranks: each holds a part of the model
    if trainer.is_world_process_zero():
        reloaded = AutoModelForSequenceClassification.from_pretrained(options.output).to(args.device).eval()
        batches = DataLoader(rows["test"], options.batch_size, collate_fn=trainer.data_collator)
        with torch.no_grad(), torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            again = torch.cat([reloaded(**batch.to(args.device)).logits.argmax(-1) for batch in batches]).cpu()
        accuracy = f"accuracy {(found == right).float().mean():.1%}, {(found == right).sum()} of {len(found)}"
        print(f"{accuracy}; reloaded in one process {(found == again).sum()} the same")


if __name__ == "__main__":
    main()
