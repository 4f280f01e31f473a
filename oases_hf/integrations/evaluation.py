"""Evaluation as in one process: every row once, and the loss of each batch by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from ..models.converted import Converted


def gathering(accelerator: Accelerator, state: Converted) -> Callable[..., Any]:
    """A ``gather_for_metrics`` over data-parallel ranks, each TMP world once, without what filled the last batch."""
    data = state.mesh.data

    def gather(tensor: Tensor) -> Tensor:
        return torch.cat(data.all_gather(tensor[None] if tensor.dim() == 0 else tensor.contiguous()))

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        # Of objects, only lists can be joined; one process would hand back anything else as it is.
        tensors = _holds_tensors(input_data) and not (use_gather_object and isinstance(input_data, list))
        if tensors:
            gathered = recursively_apply(gather, input_data, error_on_other_type=True)
        else:
            gathered = [item for part in _gather_objects(input_data, state) for item in part]
        position = accelerator.gradient_state
        if position.end_of_dataloader and position.remainder > 0:
            keep = position.remainder
            return recursively_apply(lambda t: t[:keep], gathered) if tensors else gathered[:keep]
        return gathered

    return gather_for_metrics


def _holds_tensors(data: Any) -> bool:
    if isinstance(data, dict):
        data = tuple(data.values())
    if isinstance(data, tuple | list):
        return bool(data) and all(_holds_tensors(item) for item in data)
    return torch.is_tensor(data)


def _gather_objects(data: Any, state: Converted) -> list[Any]:
    axis = state.mesh.data
    if axis.group is None:
        return [data]
    parts: list[Any] = [None] * axis.size
    dist.all_gather_object(parts, data, group=axis.group)
    return parts


def own_losses(trainer: Trainer, state: Converted) -> Callable[..., Any]:
    """A ``prediction_step`` whose loss is the mean over the labels of this rank's real rows.

    Trainer's divides by the labels of all data-parallel ranks, and sees the rows that only fill up the last batch.
    """
    predict, count = trainer.prediction_step, trainer._get_num_items_in_batch
    data, world = state.mesh.data, state.mesh.world.size

    def count_own(batches: list[Any], device: torch.device) -> Any:
        """What, divided by the ranks that it is multiplied by later, is the number of labels here."""
        trainer.args.average_tokens_across_devices = False
        try:
            items = count(batches, device)
        finally:
            trainer.args.average_tokens_across_devices = True
        return None if items is None else items * world

    def prediction_step(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = find_batch_size(inputs) or 0
        real = _real_rows(rows)
        object.__setattr__(trainer, "_get_num_items_in_batch", count_own)
        try:
            loss, logits, labels = predict(model, _resized(dict(inputs), rows, real), *args, **kwargs)
        finally:
            object.__setattr__(trainer, "_get_num_items_in_batch", count)
        return loss, _resized(logits, real, rows), _resized(labels, real, rows)

    def _real_rows(rows: int) -> int:
        """How many rows of a batch count; all when none would, since gathering drops what comes of them."""
        position = trainer.accelerator.gradient_state
        ends = position.end_of_dataloader and position.remainder > 0
        real = position.remainder - data.rank * rows if ends else rows
        return min(real, rows) if real > 0 else rows

    return predict if data.size == 1 else prediction_step


def _resized(tensors: Any, rows: int, wanted: int) -> Any:
    """``tensors``, however nested, with ``wanted`` rows instead of ``rows``: the first ones, and the last one again."""

    def resize(tensor: Tensor) -> Tensor:
        return tensor[torch.arange(wanted, device=tensor.device).clamp(max=rows - 1)]

    def of_rows(value: Any) -> bool:
        return torch.is_tensor(value) and value.dim() > 0 and len(value) == rows

    return tensors if wanted == rows else recursively_apply(resize, tensors, test_type=of_rows)
