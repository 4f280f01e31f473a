"""Embedding, output head and loss of a converted model, split by words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import ConfigError, UnsupportedModelError
from ..parallel.autograd import apply
from ..parallel.layers import VocabParallelEmbedding, VocabParallelHead, adopt
from ..parallel.link import GatherFromGroup, Link
from ..parallel.loss import IGNORE_INDEX, cross_entropy, shifted_labels
from ..parallel.sharding import Layout, Slice, Span, bounds

Shard = Callable[[nn.Module, str, Layout], None]


@dataclass
class Vocabulary:
    """The owner of what is split by words.

    Attributes:
        head: the output head; None for models that predict no words.
        gather_logits: return whole logits in training too.
        smoothing: the label smoothing factor of the loss.
        loss: which loss is computed here, on local logits; None where the model computes its own, on whole ones.
    """

    embedding: nn.Embedding
    head: nn.Linear | None
    link: Link
    spans: tuple[Span, ...]
    gather_logits: bool
    smoothing: float = 0.0
    loss: Literal["causal", "masked"] | None = None
    _local: bool = False
    _labels: Tensor | None = None
    _num_items: Tensor | int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, link: Link, gather_logits: bool) -> Vocabulary:
        """Find the embedding and head of ``model``.

        Raises:
            UnsupportedModelError: they are not of the plain kind.
            ConfigError: there are fewer words than ranks.
        """
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or embedding.max_norm or embedding.sparse:
            raise UnsupportedModelError(f"the input embedding of {type(model).__name__} is not a plain nn.Embedding")
        if head is not None and type(head) is not nn.Linear:
            raise UnsupportedModelError(
                f"the output head of {type(model).__name__} is a {type(head).__name__}, not nn.Linear"
            )
        words = embedding.num_embeddings
        if head is not None and head.out_features != words:
            raise UnsupportedModelError(f"{head.out_features} output words and {words} input words; they must be equal")
        if words < link.axis.size:
            raise ConfigError(f"{words} words cannot be split over {link.axis.size} ranks; choose a lower degree")
        spans = tuple(bounds(words, link.axis.size, rank) for rank in range(link.axis.size))
        return cls(embedding, head, link, spans, gather_logits)

    def shard(self, shard: Shard) -> None:
        """Keep this rank's words of the embedding and the head."""
        span = self.spans[self.link.axis.rank]
        slices = tuple(Slice(0, (s,)) for s in self.spans)
        embedding, head = self.embedding, self.head
        shard(embedding, "weight", Layout(tuple(embedding.weight.shape), slices))
        embedding.num_embeddings = span.size
        padding = embedding.padding_idx
        embedding.padding_idx = padding - span.lo if padding is not None and span.lo <= padding < span.hi else None
        adopt(embedding, VocabParallelEmbedding, link=self.link, span=span)
        if head is not None:
            shard(head, "weight", Layout(tuple(head.weight.shape), slices))
            if head.bias is not None:
                shard(head, "bias", Layout(tuple(head.bias.shape), slices))
            head.out_features = span.size
            adopt(head, VocabParallelHead, link=self.link, finish=self.logits)

    def install(self, model: PreTrainedModel) -> None:
        """Give ``model`` the loss on local logits, and hooks that decide what its ``logits`` are."""
        if self.head is None:
            return
        self.loss = _loss_of(model)
        if self.loss == "causal":
            model.loss_function = self.causal_loss
        signature = inspect.signature(type(model).forward)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            given = signature.bind_partial(module, *args, **kwargs).arguments
            labels = given.get("labels")
            own = self.loss == "masked" or (self.loss == "causal" and module.loss_function == self.causal_loss)
            self._local = own and labels is not None
            if not self._local or self.loss == "causal":
                return None
            # HF's masked models compute their loss in forward, from whole logits: they get no labels.
            self._labels, self._num_items = labels, kwargs.get("num_items_in_batch")
            given.pop("self")
            return (), {**given.pop("kwargs", {}), **given, "labels": None}

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            (local, labels), self._local, self._labels = (self._local, self._labels), False, None
            if not local or output is None:  # None: the forward failed
                return output
            change = self.gathered if self.gather_logits or not module.training else None
            if labels is not None:
                logits = output[0] if isinstance(output, tuple) else output["logits"]
                output = _with_loss(output, self._masked_loss(logits, labels))
            return _with_logits(output, change)

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, always_call=True)

    def _masked_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cross entropy of each labelled token, on local logits ``[B, S, x_V]``; labels ``[B, S]``."""
        return cross_entropy(logits, labels, self.link.axis, self.spans, self._num_items, smoothing=self.smoothing)

    def logits(self, local: Tensor) -> Tensor:
        """What the head returns: local logits for the loss, or whole ones when nobody gave labels."""
        return local if self._local else self.gathered(local)

    def gathered(self, local: Tensor) -> Tensor:
        """Whole logits ``[..., V]`` from local ones; the backward takes this rank's slice."""
        return apply(GatherFromGroup, local, self.link.axis, self.spans)

    def causal_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """What HF's ``ForCausalLMLoss`` computes, on local logits ``[B, S, x_V]``; labels ``[B, S]``."""
        shifted = shifted_labels(labels, ignore_index) if shift_labels is None else shift_labels
        return cross_entropy(
            logits, shifted, self.link.axis, self.spans, num_items_in_batch, ignore_index, self.smoothing
        )


def ignores_num_items(model: PreTrainedModel) -> bool:
    """Whether ``model`` takes ``num_items_in_batch`` and returns the mean over its batch all the same.

    So do HF's forwards without a language modelling head: they take any argument, and do not hand it to their loss.
    """
    head = _hf_head(model)
    return head is not None and not head.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))


def _loss_of(model: PreTrainedModel) -> Literal["causal", "masked"] | None:
    """The loss of a model whose forward is HF's own; None for any other."""
    head = _hf_head(model) or ""
    if head.endswith("ForMaskedLM"):
        return "masked"
    causal = head.endswith(("ForCausalLM", "LMHeadModel"))
    return "causal" if causal and model.loss_function is ForCausalLMLoss else None


def _hf_head(model: PreTrainedModel) -> str | None:
    """The name of the class whose forward ``model`` has; None when it is not one of HF's."""
    owner = next(c for c in type(model).__mro__ if "forward" in vars(c))
    return owner.__name__ if owner.__module__.startswith("transformers.") else None


def _with_loss(output: Any, loss: Tensor) -> Any:
    """``output``, a ModelOutput or a tuple ``(logits, …)``, with a loss before its logits."""
    return (loss, *output) if isinstance(output, tuple) else type(output)(**{**output, "loss": loss})


def _with_logits(output: Any, change: Callable[[Tensor], Tensor] | None) -> Any:
    """``output``, a ModelOutput or a tuple ``(loss, logits, …)``, with its logits changed or taken out."""
    if isinstance(output, tuple):
        loss, logits, *rest = output
        return (loss, *([change(logits)] if change else []), *rest)
    return type(output)(**{**output, "logits": change(output["logits"]) if change else None})
