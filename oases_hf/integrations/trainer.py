"""The Trainer callback: ``Trainer(..., callbacks=[OasesCallback()])`` and nothing else."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from ..checkpoint import save_pretrained
from ..checkpoint.agreement import FREE_SPACE, together
from ..config import OasesConfig
from ..errors import ConfigError, UnsupportedModelError
from ..models.converted import Converted, converted, loaded
from ..models.vocabulary import ignores_num_items
from ..parallel.equal import make_batch_equal
from .accelerate import OasesPlugin
from .evaluation import own_losses
from .measuring import measure_trainer
from .overrides import override
from .resuming import TrainerCheckpoints
from .stopping import StopOnSignal
from .training_arguments import concerning, refuse

log = logging.getLogger(__name__)


class OasesCallback(TrainerCallback):
    """Trains the Trainer's model with overlapped tensor model parallelism.

    The model is converted in place when the Trainer is built. Loss, gradient norm, steps per epoch,
    metrics and exports are those of one process.

    Args:
        config: the settings; read from the environment when None.

    Raises:
        ConfigError: when the Trainer is built, for ranks or arguments that cannot work.
        UnsupportedModelError: likewise, for a model that cannot be sharded.
    """

    def __init__(self, config: OasesConfig | None = None) -> None:
        self.config = config or OasesConfig()
        self._trainer: Callable[[], Trainer | None] = lambda: None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert the model; the optimizer is made later."""
        trainer = _trainer_being_built()
        if self._trainer() is not trainer:
            self.attach(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to train what was never converted."""
        if not hasattr(kwargs.get("model"), "oases"):
            raise ConfigError(
                "OasesCallback was added to a Trainer that exists already, so its model is not converted; pass it as "
                "Trainer(callbacks=[OasesCallback()]), or call OasesCallback().attach(trainer) before train()"
            )

    def attach(self, trainer: Trainer) -> None:
        """Convert the model of ``trainer``, before it trains. Called by itself when given as a callback."""
        _check_trainer(trainer)
        model = trainer.model
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModelError(
                f"the Trainer's model is a {type(model).__name__}, not a transformers PreTrainedModel"
            )
        before = loaded(model)
        config = self.config.over(before.loaded_with) if before and before.loaded_with else self.config
        settings = {setting.name: getattr(self.config, setting.name) for setting in fields(self.config)}
        if self.config.degree == "auto":
            settings["batch_size"] = settings["batch_size"] or trainer.args.train_batch_size
            settings["sequence_length"] = settings["sequence_length"] or _sequence_length(trainer)
        OasesPlugin(**settings).install(trainer.accelerator, model)
        _take_over(trainer, model, converted(model), config)
        self._trainer = weakref.ref(trainer)


def _sequence_length(trainer: Trainer) -> int:
    """The tokens of the longest of the first samples, as many as a batch has; raises ConfigError if it has none."""
    dataset: Any = trainer.train_dataset
    try:
        count = min(trainer.args.train_batch_size, len(dataset))
        return max(len(dataset[i]["input_ids"]) for i in range(count))
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"degree='auto' looks for the length of input_ids in the train dataset, and finds none ({error!r}); "
            f"set sequence_length"
        ) from error


def _trainer_being_built() -> Trainer:
    """The Trainer whose constructor is running: callbacks are not handed it."""
    frame = sys._getframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    raise ConfigError("no Trainer is being built here; call OasesCallback().attach(trainer)")


def _check_trainer(trainer: Trainer) -> None:
    """Refuse what would undo the conversion, before weights move; raises ConfigError."""
    refuse(trainer.args)
    if trainer.args.process_index == 0:
        for row in concerning(trainer.args, "neutralised"):
            log.warning("no effect: %s", row.message(trainer.args))
    if trainer.model_init is not None:
        raise ConfigError("model_init builds the model anew in train(), unsharded; pass model= instead")
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ConfigError("the optimizer holds on to unsharded parameters; pass optimizer_cls_and_kwargs instead")
    if trainer.model_wrapped is not trainer.model or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigError("the Trainer has wrapped the model (DeepSpeed, FSDP or DataParallel); run without that")


def _take_over(trainer: Trainer, model: PreTrainedModel, state: Converted, config: OasesConfig) -> None:
    """Replace the methods of this Trainer that would be wrong on shards."""
    gather: Callable[..., Any] = trainer.accelerator.gather_for_metrics
    trainer.gather_function = functools.partial(gather, use_gather_object=trainer.args.eval_use_gather_object)
    if trainer.label_smoother is not None and trainer.compute_loss_func is None and state.vocabulary.loss is not None:
        state.vocabulary.smoothing = trainer.label_smoother.epsilon
        trainer.label_smoother = None
    if ignores_num_items(model):
        # Trainer takes its loss for one divided by the tokens of the whole step, and would scale it accordingly.
        trainer.model_accepts_loss_kwargs = False
    override(
        trainer,
        get_batch_samples=_sharing_batches(trainer, state),
        prediction_step=own_losses(trainer, state),
        _track_num_input_tokens=_counting_once(trainer, state.mesh.tmp.size),
    )
    assert state.metrics is not None, "an Accelerator trains the model"
    measure_trainer(trainer, state.metrics)
    export, processor = functools.partial(_save_model, trainer, model), functools.partial(_save_processor, trainer)
    stopping = StopOnSignal(state.mesh.control)
    TrainerCheckpoints(trainer, model, state, export, processor, stopping, config)
    trainer.add_callback(stopping)


def _save_model(
    trainer: Trainer, model: PreTrainedModel, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Export the model, tokenizer and arguments; all ranks call it."""
    folder = Path(output_dir or trainer.args.output_dir or ".")
    save_pretrained(model, folder)
    with together(converted(model).mesh, f"{folder} could not be written", FREE_SPACE):
        if trainer.args.should_save:
            _save_processor(trainer, folder)
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def _save_processor(trainer: Trainer, folder: Path) -> None:
    """Write what makes the model's inputs, and the arguments."""
    processor = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processor is not None:
        processor.save_pretrained(folder)
    torch.save(trainer.args, folder / TRAINING_ARGS_NAME)


def _sharing_batches(trainer: Trainer, state: Converted) -> Callable[..., Any]:
    """Take each batch from the first rank of a TMP world, before its tokens are counted.

    Collators that mask at random in worker processes give every rank another batch.
    """
    own = trainer.get_batch_samples

    def share(batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            return batch
        tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        return {**batch, **make_batch_equal(tensors, state.mesh.tmp, state.mesh.tmp_control)}

    def get_batch_samples(epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        return own(map(share, epoch_iterator), num_batches, device)

    return get_batch_samples


def _counting_once(trainer: Trainer, tmp_size: int) -> Callable[[Any], None]:
    """Count the tokens of a batch once, though all ranks of a TMP world see it."""
    own: Callable[[Any], None] = trainer._track_num_input_tokens

    def track(inputs: Any) -> None:
        before = trainer.state.num_input_tokens_seen
        own(inputs)
        trainer.state.num_input_tokens_seen = before + (trainer.state.num_input_tokens_seen - before) // tmp_size

    return track
