"""Training state through Trainer and Accelerate: what they would save and load wrongly on shards."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ..checkpoint import Checkpoint, load_export, load_plain_optimizer, save_state
from ..checkpoint.export import FREE_SPACE, agree, noting
from ..checkpoint.manifest import is_export, is_whole, withdraw
from ..errors import CheckpointError
from ..models.converted import Converted
from .overrides import override

log = logging.getLogger(__name__)

SCHEDULER_NAME, OPTIMIZER_NAME = "scheduler.pt", "optimizer.pt"

Export = Callable[..., None]


class TrainerCheckpoints:
    """Saves and loads the training state of one Trainer.

    Args:
        trainer: whose model is converted.
        model: that model.
        state: of the conversion.
        export: ``save_model``, which writes the model as Hugging Face does.
        save_processor: writes what is saved beside a model.
    """

    def __init__(
        self,
        trainer: Trainer,
        model: PreTrainedModel,
        state: Converted,
        export: Export,
        save_processor: Callable[[Path], None],
    ) -> None:
        self._trainer, self._model, self._state = trainer, model, state
        self._export, self._save_processor = export, save_processor
        self._failures: list[Exception] = []
        self._within_checkpoint = False
        self._opened: tuple[Path, Checkpoint] | None = None
        self._plain_randomness: Callable[[str], None] = trainer._load_rng_state
        override(
            trainer,
            train=functools.partial(self._train, trainer.train),
            save_model=self._save_model,
            _save_checkpoint=functools.partial(self._save_checkpoint, trainer._save_checkpoint),
            _save_optimizer_and_scheduler=self._save_scheduler,
            _save_rng_state=_nothing,
            _load_from_checkpoint=self._load_parameters,
            _load_optimizer_and_scheduler=self._load_optimizer,
            _load_rng_state=self._load_randomness,
            _load_best_model=self._load_best,
        )

    def _train(self, own: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            folder = Path(self._trainer.args.output_dir or ".")
            found = self._state.mesh.from_first(lambda: last_checkpoint(folder))
            resume_from_checkpoint = found or True  # Trainer says that there is none
        return own(resume_from_checkpoint, *args, **kwargs)

    def _save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self._within_checkpoint or self._trainer.args.push_to_hub:
            self._export(output_dir, _internal_call)
            return
        with noting(self._failures):
            if self._trainer.args.should_save and output_dir is not None:
                self._save_processor(Path(output_dir))

    def _save_checkpoint(self, own: Callable[..., None], model: Any, trial: Any) -> None:
        """Trainer's, then the tensors, then the manifest; and older checkpoints go only after that."""
        trainer, args = self._trainer, self._trainer.args
        if args.save_only_model:
            own(model, trial)
            return
        runs = Path(trainer._get_output_dir(trial=trial) or ".")
        folder = runs / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        self._failures.clear()
        self._opened = None
        with noting(self._failures):
            if args.should_save:
                withdraw(folder)
        limit, args.save_total_limit = args.save_total_limit, None
        self._within_checkpoint = True
        try:
            with noting(self._failures):
                own(model, trial)
        finally:
            args.save_total_limit, self._within_checkpoint = limit, False
        agree(self._state, self._failures, f"{folder} could not be written", FREE_SPACE)
        rows = trainer._train_batch_size * args.gradient_accumulation_steps * self._state.mesh.data.size
        save_state(self._model, [_plain(trainer.optimizer)], folder, rows)
        if args.should_save:
            rotate_checkpoints(str(runs), limit, trainer.state.best_model_checkpoint, use_mtime=True)

    def _save_scheduler(self, output_dir: str) -> None:
        with noting(self._failures):
            if self._trainer.args.should_save and self._trainer.lr_scheduler is not None:
                torch.save(self._trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_parameters(self, checkpoint: str, model: Any = None) -> None:
        opened = self._checkpoint(checkpoint)
        if opened is None:
            load_export(self._model, Path(checkpoint))
        else:
            self._warn(opened)
            opened.load_parameters()

    def _load_optimizer(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        opened, optimizer, folder = self._checkpoint(checkpoint), _plain(self._trainer.optimizer), Path(checkpoint)
        if opened is not None:
            opened.load_optimizer(optimizer)
        elif (folder / OPTIMIZER_NAME).exists():
            load_plain_optimizer(self._model, optimizer, folder / OPTIMIZER_NAME)
        scheduler = folder / SCHEDULER_NAME
        if scheduler.exists() and self._trainer.lr_scheduler is not None:
            self._trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_randomness(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        opened = self._checkpoint(checkpoint)
        if opened is None:
            self._plain_randomness(checkpoint)
        else:
            opened.load_randomness()

    def _load_best(self) -> None:
        best = self._trainer.state.best_model_checkpoint
        if best is not None:
            self._load_parameters(best)

    def _checkpoint(self, checkpoint: str) -> Checkpoint | None:
        """A checkpoint of ours; None for an export, or what a Trainer alone has written."""
        folder = Path(checkpoint)
        if is_export(folder):
            return None
        if self._opened is None or self._opened[0] != folder:
            self._opened = folder, Checkpoint(folder, self._model)
        return self._opened[1]

    def _warn(self, opened: Checkpoint) -> None:
        trainer, mesh, saved = self._trainer, self._state.mesh, opened.manifest
        if mesh.world.rank:
            return
        rows = trainer._train_batch_size * trainer.args.gradient_accumulation_steps * mesh.data.size
        if saved.rows_per_step not in (None, rows):
            log.warning("a step has %s rows from here on, and had %s before", rows, saved.rows_per_step)
        if saved.world_size != mesh.world.size:
            log.warning(
                "%s ranks go on from %s: random numbers, as of dropout, are others than without the interruption",
                mesh.world.size,
                saved.world_size,
            )


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of a run that is whole; None if there is none of any kind.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    found = {
        int(step): path
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and (step := path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")).isdigit()
    }
    for _, path in sorted(found.items(), reverse=True):
        if is_whole(path):
            return str(path)
        log.warning("%s was not written to its end, or is damaged; passed over", path)
    if found:
        raise CheckpointError(f"no checkpoint in {folder} is whole; start anew, or resume from another folder")
    return None


def keep_state(accelerator: Accelerator, model: PreTrainedModel, state: Converted) -> None:
    """Have ``save_state`` and ``load_state`` write and read shards."""
    own_save, own_load = accelerator.save_state, accelerator.load_state

    def save(output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        failures: list[Exception] = []
        with noting(failures), _without(accelerator, model) as seen:
            handle = accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(folder))
            try:
                if output_dir is not None and accelerator.is_main_process:
                    withdraw(Path(output_dir))
                own_save(output_dir, *args, **kwargs)
            finally:
                handle.remove()
        agree(state, failures, "accelerator.save_state failed")
        save_state(model, _optimizers(accelerator), Path(seen[0]))
        return str(seen[0])

    def load(input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        failures: list[Exception] = []
        with noting(failures), _without(accelerator, model) as seen:
            handle = accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
            try:
                own_load(input_dir, *args, **kwargs)
            finally:
                handle.remove()
        agree(state, failures, "accelerator.load_state failed")
        checkpoint = Checkpoint(Path(seen[0]), model)
        checkpoint.load_parameters()
        for number, optimizer in enumerate(_optimizers(accelerator)):
            checkpoint.load_optimizer(optimizer, number)
        checkpoint.load_randomness()

    override(accelerator, save_state=save, load_state=load)


@contextmanager
def _without(accelerator: Accelerator, model: PreTrainedModel) -> Iterator[list[str]]:
    """Let Accelerate not know of the model and its optimizers; yields where to put the folder that it works on."""
    models, optimizers = accelerator._models, accelerator._optimizers
    accelerator._models = [other for other in models if accelerator.unwrap_model(other) is not model]
    accelerator._optimizers = []
    try:
        yield []
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


def _optimizers(accelerator: Accelerator) -> list[Optimizer]:
    return [_plain(optimizer) for optimizer in accelerator._optimizers]


def _plain(optimizer: Optimizer | None) -> Optimizer:
    """The optimizer itself, which Accelerate wraps."""
    if optimizer is None:
        raise CheckpointError("there is no optimizer yet; training state is saved and loaded while training")
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _nothing(*_: Any) -> None:
    """Leave undone what ``save_state`` does."""
