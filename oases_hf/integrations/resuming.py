"""Training state through Trainer: what it would save and load wrongly on shards."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ..checkpoint import Checkpoint, Saving, load_export, load_plain_optimizer
from ..checkpoint.agreement import FREE_SPACE, noting, together
from ..checkpoint.manifest import check_whole, is_export
from ..checkpoint.state import numbered, unfinished
from ..config import OasesConfig
from ..errors import CheckpointError
from ..models.converted import Converted
from .optimizers import plain
from .overrides import override, replaced
from .stopping import StopOnSignal

log = logging.getLogger(__name__)

Export = Callable[..., None]


class FinishSaving(TrainerCallback):
    """Has checkpoints that are written while training goes on finished at the end of a step.

    Args:
        checkpoints: whose they are.
    """

    def __init__(self, checkpoints: TrainerCheckpoints) -> None:
        self._checkpoints = checkpoints

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """If all ranks have written theirs; errors are raised here."""
        self._checkpoints.finish_saving(wait=False)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """In any case."""
        self._checkpoints.finish_saving()


class TrainerCheckpoints:
    """Saves and loads the training state of one Trainer.

    Args:
        trainer: whose model is converted.
        model: that model.
        state: of the conversion.
        export: ``save_model``, which writes the model as Hugging Face does.
        save_processor: writes what is saved beside a model.
        stopping: whether training ends for a signal.
        config: whether to save while training goes on, and to go on without a checkpoint that cannot be written.
    """

    def __init__(
        self,
        trainer: Trainer,
        model: PreTrainedModel,
        state: Converted,
        export: Export,
        save_processor: Callable[[Path], None],
        stopping: StopOnSignal,
        config: OasesConfig,
    ) -> None:
        self._trainer, self._model, self._state = trainer, model, state
        self._export, self._save_processor = export, save_processor
        self._stopping, self._config = stopping, config
        self._saving: tuple[Saving, Path, str | None] | None = None  # where, and which is the best if it fails
        self._failures: list[Exception] = []  # of what Trainer writes between its collectives
        self._beside: Path | None = None  # where a checkpoint is being written
        self._opened: tuple[Path, Checkpoint] | None = None
        self._plain_randomness: Callable[[str], None] = trainer._load_rng_state
        override(
            trainer,
            train=functools.partial(self._train, trainer.train),
            save_model=self._save_model,
            _save_checkpoint=functools.partial(self._save, trainer._save_checkpoint),
            _save_optimizer_and_scheduler=self._save_scheduler,
            _save_rng_state=_nothing,
            _load_from_checkpoint=self._load_parameters,
            _load_optimizer_and_scheduler=self._load_optimizer,
            _load_rng_state=self._load_randomness,
            _load_best_model=self._load_best,
        )
        trainer.add_callback(FinishSaving(self))

    def _train(self, own: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.finish_saving(ignore=True)  # of a run that failed
        if resume_from_checkpoint is True:
            folder = Path(self._trainer.args.output_dir or ".")
            found = self._state.mesh.from_first(lambda: last_checkpoint(folder))
            resume_from_checkpoint = found or True  # Trainer says that there is none
        return own(resume_from_checkpoint, *args, **kwargs)

    def _save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._beside is None or self._trainer.args.push_to_hub:
            self._export(output_dir, _internal_call)
        elif self._trainer.args.should_save:
            with noting(self._failures):
                self._save_processor(self._beside)

    def finish_saving(self, wait: bool = True, ignore: bool = False) -> None:
        """Give the checkpoint that is being written its name, once all ranks have written it; older ones go then.

        Args:
            wait: until they have; else leave it if they have not.
            ignore: that it could not be written.
        """
        if self._saving is None:
            return
        saving, folder, best = self._saving
        done = torch.tensor([wait or saving.done], dtype=torch.int64)
        if not int(self._state.mesh.control.all_reduce(done, dist.ReduceOp.MIN)):
            return
        self._saving = None
        trainer, args = self._trainer, self._trainer.args
        with self._ignoring(best, ignore):
            saving.finish()
            if args.push_to_hub:
                trainer._push_from_checkpoint(str(folder))
            if args.should_save:
                kept = trainer.state.best_model_checkpoint
                rotate_checkpoints(str(folder.parent), args.save_total_limit, kept, use_mtime=True)

    @contextmanager
    def _ignoring(self, best: str | None, ignore: bool) -> Iterator[None]:
        """Go on after a save that failed on all ranks, if that is asked for; the best checkpoint is ``best`` again."""
        try:
            yield
        except CheckpointError as error:
            self._trainer.state.best_model_checkpoint = best
            if not (ignore or (self._config.ignore_failed_saves and not self._stopping.agreed)):
                raise
            log.error("going on without that checkpoint: %s", error)

    def _save(self, own: Callable[..., None], model: Any, trial: Any) -> None:
        self.finish_saving(ignore=bool(self._stopping.agreed))
        best = self._trainer.state.best_model_checkpoint  # Trainer notes a new one before it is there
        with self._ignoring(best, ignore=False):
            self._save_checkpoint(own, model, trial, best)
        if not self._config.async_save or self._stopping.agreed or self._trainer.control.should_training_stop:
            self.finish_saving()

    def _save_checkpoint(self, own: Callable[..., None], model: Any, trial: Any, best: str | None) -> None:
        """Begin to write one; what Trainer saves goes to where the rest does, and is part of it."""
        trainer, args = self._trainer, self._trainer.args
        if args.save_only_model:
            with together(self._state.mesh, "the checkpoint could not be written", FREE_SPACE):
                own(model, trial)
            return
        runs = Path(trainer._get_output_dir(trial=trial) or ".")
        folder = runs / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        if args.should_save:
            shutil.rmtree(unfinished(folder).parent, ignore_errors=True)  # of a run that crashed
        self._opened = None

        def beside(there: Path) -> None:
            self._beside = there
            with replaced(
                trainer, _get_output_dir=lambda trial=None: str(there.parent), _push_from_checkpoint=_nothing
            ):
                own(model, trial)
            self._note_best(runs, folder, there)
            if self._failures:
                raise self._failures[0]

        try:
            optimizers, behind = [plain(trainer.optimizer)], bool(self._config.async_save)
            saving = Saving(self._model, optimizers, folder, beside, self._rows_per_step(), behind=behind)
            self._saving = saving, folder, best
        finally:
            self._beside = None
            self._failures.clear()

    def _note_best(self, runs: Path, folder: Path, there: Path) -> None:
        """Say where the best checkpoint will be, which Trainer looks for where this one is being written."""
        state = self._trainer.state
        if state.best_global_step:
            best = runs / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best == folder or best.exists():
                state.best_model_checkpoint = str(best)
            if self._trainer.args.should_save:
                state.save_to_json(str(there / TRAINER_STATE_NAME))

    def _save_scheduler(self, output_dir: str) -> None:
        with noting(self._failures):
            if self._trainer.args.should_save and self._trainer.lr_scheduler is not None:
                torch.save(self._trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _rows_per_step(self) -> int:
        """Sequences of an optimizer step, in all TMP worlds together."""
        trainer = self._trainer
        return int(trainer._train_batch_size * trainer.args.gradient_accumulation_steps * self._state.mesh.data.size)

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
        opened, optimizer, folder = self._checkpoint(checkpoint), plain(self._trainer.optimizer), Path(checkpoint)
        if opened is not None:
            opened.load_optimizer(optimizer)
        elif (folder / OPTIMIZER_NAME).exists():
            load_plain_optimizer(self._model, optimizer, folder / OPTIMIZER_NAME)
        else:
            log.warning("%s has no optimizer state: weights go on, moments begin anew", folder)
        scheduler = folder / SCHEDULER_NAME
        with together(self._state.mesh, f"{scheduler} cannot be loaded"):
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
        self.finish_saving()
        folder = Path(checkpoint)
        if is_export(folder):
            return None
        if self._opened is None or self._opened[0] != folder:
            self._opened = folder, Checkpoint(folder, self._model)
        return self._opened[1]

    def _warn(self, opened: Checkpoint) -> None:
        mesh, saved, rows = self._state.mesh, opened.manifest, self._rows_per_step()
        if mesh.world.rank:
            return
        if saved.rows_per_step not in (None, rows):
            log.warning("a step has %s rows from here on, and had %s before", rows, saved.rows_per_step)
        if saved.world_size != mesh.world.size or tuple(saved.plan["degrees"]) != self._state.plan.degrees:
            log.warning(
                "going on with another plan, or other ranks (%s now, %s before): random numbers, as of dropout, differ "
                "from those of an uninterrupted run",
                *(mesh.world.size, saved.world_size),
            )


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of a run that is whole; None if there is none of any kind.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    found = numbered(folder, f"{PREFIX_CHECKPOINT_DIR}-")
    for path in reversed(found):
        try:
            check_whole(path)
        except CheckpointError as error:
            log.warning("passed over: %s", error)
        else:
            return str(path)
    if found:
        raise CheckpointError(f"no checkpoint in {folder} is whole; start anew, or resume from another folder")
    return None


def _nothing(*_: Any) -> None:
    """Leave undone what ``save_state`` does."""
