"""What models are trained on here: batches of random tokens, with labels that fit a head.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from .settings import Head

Batch = dict[str, Tensor]

IGNORE = -100


@dataclass(frozen=True)
class Task:
    """How to train a head.

    Attributes:
        auto_class: the class of transformers that makes a model with it.
        architectures: how the names of such models end.
        labels: makes labels, from ``(config, input_ids [B, S], attention_mask [B, S], generator)``.
        count: of a batch, over how many items its loss is the mean.
    """

    auto_class: str
    architectures: tuple[str, ...]
    labels: Callable[[PretrainedConfig, Tensor, Tensor, Generator], Batch]
    count: Callable[[Batch], int]


def _some(values: Tensor, mask: Tensor, generator: Generator) -> Tensor:
    """``values`` at four of five positions that are not padding, always at position 1; the rest is ignored."""
    chosen = torch.rand(values.shape, generator=generator) > 0.2
    chosen[:, 1] = True
    return values.masked_fill(~(chosen & mask.bool()), IGNORE)


def _classes(config: PretrainedConfig) -> int:
    return config.num_labels or 2  # typed as optional, though it never is


def _word_labels(config: PretrainedConfig, ids: Tensor, mask: Tensor, generator: Generator) -> Batch:
    return {"labels": _some(ids, mask, generator)}


def _token_labels(config: PretrainedConfig, ids: Tensor, mask: Tensor, generator: Generator) -> Batch:
    classes = torch.randint(_classes(config), ids.shape, generator=generator)
    return {"labels": _some(classes, mask, generator)}


def _row_labels(config: PretrainedConfig, ids: Tensor, mask: Tensor, generator: Generator) -> Batch:
    rows, classes = len(ids), _classes(config)
    if config.problem_type == "multi_label_classification":
        return {"labels": torch.randint(2, (rows, classes), generator=generator).float()}
    if config.problem_type == "regression" or classes == 1:
        return {"labels": torch.randn((rows, classes), generator=generator).squeeze(-1)}
    return {"labels": torch.randint(classes, (rows,), generator=generator)}


def _answer_labels(config: PretrainedConfig, ids: Tensor, mask: Tensor, generator: Generator) -> Batch:
    lengths = mask.sum(-1)
    places = [(torch.rand(len(ids), generator=generator) * lengths).long() for _ in range(2)]
    start, end = torch.stack(places).sort(0).values
    return {"start_positions": start, "end_positions": end}


def _rows(batch: Batch) -> int:
    return len(batch["input_ids"])


def _labelled(batch: Batch) -> int:
    return int((batch["labels"] != IGNORE).sum())


def _shifted(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != IGNORE).sum())


TASKS: Mapping[Head, Task] = {
    "causal": Task("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel"), _word_labels, _shifted),
    "masked": Task("AutoModelForMaskedLM", ("ForMaskedLM",), _word_labels, _labelled),
    "sequence": Task("AutoModelForSequenceClassification", ("ForSequenceClassification",), _row_labels, _rows),
    "token": Task("AutoModelForTokenClassification", ("ForTokenClassification",), _token_labels, _labelled),
    "qa": Task("AutoModelForQuestionAnswering", ("ForQuestionAnswering",), _answer_labels, _rows),
}


def task_of(config: PretrainedConfig, head: Head | None) -> Task:
    """The task of ``head``, or of the config's architecture; models without a known head predict words."""
    if head is not None:
        return TASKS[head]
    for architecture in config.architectures or ():
        for task in TASKS.values():
            if architecture.endswith(task.architectures):
                return task
    return TASKS["masked" if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "causal"]


def make_batch(config: PretrainedConfig, task: Task, rows: int, seq: int, seed: int) -> Batch:
    """A batch of ``rows`` rows, padded on the right to ``seq`` tokens.

    The first row is full, the others are of random lengths, so that sub-batches differ in masks and labels.
    """
    generator = torch.Generator().manual_seed(seed)
    pad = config.pad_token_id or 0
    ids = torch.randint(config.vocab_size - 1, (rows, seq), generator=generator)
    ids += ids >= pad  # every word but the padding
    lengths = torch.randint(max(2, seq // 2), seq + 1, (rows,), generator=generator)
    lengths[0] = seq
    mask = (torch.arange(seq) < lengths[:, None]).long()
    batch = {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}
    if kinds := getattr(config, "type_vocab_size", 0):
        batch["token_type_ids"] = torch.randint(kinds, ids.shape, generator=generator)
    return {**batch, **task.labels(config, ids, mask, generator)}


def split(batch: Batch, parts: int) -> list[Batch]:
    """``batch`` in at most ``parts`` parts by rows, none empty."""
    pieces = {name: tensor.tensor_split(parts) for name, tensor in batch.items()}
    return [{name: piece[i] for name, piece in pieces.items()} for i in range(parts) if len(pieces["input_ids"][i])]
