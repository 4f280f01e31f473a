"""What is around the layers as a rank would hold and run it, made of tensors without data: embedding, head and loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from transformers import PreTrainedModel

from ..convert import stack_of
from ..costs import Outside
from ..models import family_of
from ..models.shard import Sharder, fuse_norms
from ..models.vocabulary import Vocabulary
from ..parallel.link import Link
from ..parallel.mesh import Axis
from .dry import kept_as_on_gpus
from .layer import Autocast, loss_of
from .stopwatch import peak_bytes


@contextmanager
def _as_accelerate_has_it(model: nn.Module) -> Iterator[None]:
    """Under autocast, let what ``model``'s forward returns be float32; its hooks see no other."""
    own = vars(model).get("forward")
    if torch.is_autocast_enabled("cpu"):
        model.forward = convert_outputs_to_fp32(model.forward)
    try:
        yield
    finally:
        vars(model).pop("forward", None)
        if own is not None:
            model.forward = own


class DryEnds:
    """A model without layers, its words split over a group that is not there.

    Args:
        model: of one layer, of fake tensors; changed.
        tmp_size: ranks of the group.

    """

    def __init__(self, model: PreTrainedModel, tmp_size: int) -> None:
        family, self._model = family_of(model.config), model.train()
        layers, sharder = stack_of(model, family), Sharder(0)
        fuse_norms(model, layers[0], family)
        del layers[:]
        self._vocabulary = Vocabulary.of(model, Link(Axis(tuple(range(tmp_size)), 0)), gather_logits=False)
        self._vocabulary.shard(sharder)
        sharder.retie(model)
        self._vocabulary.install(model)
        self._split = set(sharder.layouts)

    def outside(self, rows: int, sequence: int, autocast: Autocast) -> Outside:
        """What the first rank holds, which has the most words, with ``rows`` of so many tokens; its time is 0."""
        held = set(self._model.parameters())
        unowned = sum(p.numel() for p in held - self._split)
        return Outside(0.0, sum(p.numel() for p in held), self._peak_bytes(rows, sequence, autocast), unowned)

    def _peak_bytes(self, rows: int, sequence: int, autocast: Autocast) -> int:
        """The most that operators of a forward and backward return at once.

        Of a model that predicts no words without its head, which may want other inputs. With a cache: else the loop
        would have to read the positions to do without a mask.
        """
        run = self._model if self._vocabulary.head is not None else self._model.base_model
        self._model.config.use_cache = True
        tokens = torch.zeros(rows, sequence, dtype=torch.long)
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        labels = {"labels": tokens} if self._vocabulary.loss is not None else {}
        with kept_as_on_gpus(), peak_bytes(tokens.device) as peak:
            with autocast(), _as_accelerate_has_it(self._model):
                output = run(input_ids=tokens, **labels)
            loss_of(output).backward()
        return peak()
