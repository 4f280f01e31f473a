"""Training state through Accelerate: ``save_state`` and ``load_state`` of a sharded model."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ..checkpoint import Checkpoint, Saving
from ..checkpoint.agreement import together
from ..checkpoint.manifest import is_whole
from ..checkpoint.state import numbered
from ..errors import CheckpointError
from ..models.converted import Converted
from .optimizers import plain
from .overrides import override, replaced

log = logging.getLogger(__name__)

AUTOMATIC = "checkpoint_"
"""What the names begin with that Accelerate gives by itself."""


def keep_state(accelerator: Accelerator, model: PreTrainedModel, state: Converted) -> None:
    """Have ``save_state`` and ``load_state`` write and read shards."""
    own_save, own_load, naming = accelerator.save_state, accelerator.load_state, accelerator.project_configuration

    def save(output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        automatic = naming.automatic_checkpoint_naming
        if automatic:
            folder = _named(accelerator) / f"{AUTOMATIC}{accelerator.save_iteration}"
        elif output_dir is None:
            raise CheckpointError("accelerator.save_state: give output_dir, or turn on automatic_checkpoint_naming")
        else:
            folder = Path(output_dir)

        def beside(there: Path) -> None:
            with _without(accelerator, model), replaced(naming, automatic_checkpoint_naming=False):
                own_save(str(there), *args, **kwargs)

        Saving(model, _optimizers(accelerator, model), folder, beside).finish()
        if automatic and naming.total_limit is not None and accelerator.is_main_process:
            for old in numbered(folder.parent, AUTOMATIC)[: -naming.total_limit]:
                shutil.rmtree(old, ignore_errors=True)
        return str(folder)

    def load(input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        if input_dir is None and naming.automatic_checkpoint_naming:
            found = state.mesh.from_first(lambda: list(filter(is_whole, numbered(_named(accelerator), AUTOMATIC))))
            if not found:
                raise CheckpointError(f"{_named(accelerator)} has no checkpoint that is whole")
            input_dir = str(found[-1])
        if input_dir is None:
            raise CheckpointError("accelerator.load_state: give input_dir, or turn on automatic_checkpoint_naming")
        checkpoint = Checkpoint(Path(input_dir), model)  # first: what is damaged leaves everything as it is
        worlds = checkpoint.manifest.world_size // int(checkpoint.manifest.plan["tmp_size"])
        if accelerator._schedulers and worlds != state.mesh.data.size and accelerator.is_main_process:
            log.warning(
                "%s data-parallel worlds go on from %s: schedulers step once for each of them, and so faster or slower "
                "than before",
                state.mesh.data.size,
                worlds,
            )
        with together(state.mesh, f"{input_dir} cannot be loaded"), _without(accelerator, model):
            own_load(input_dir, *args, **kwargs)
        checkpoint.load_parameters()
        for number, optimizer in enumerate(_optimizers(accelerator, model)):
            checkpoint.load_optimizer(optimizer, number)
        checkpoint.load_randomness()
        accelerator.step = state.mesh.from_first(lambda: accelerator.step)  # ranks that are new know of none

    override(accelerator, save_state=save, load_state=load)


def _named(accelerator: Accelerator) -> Path:
    """Where Accelerate puts the checkpoints that it names by itself."""
    return Path(accelerator.project_dir or ".") / "checkpoints"


@contextmanager
def _without(accelerator: Accelerator, model: PreTrainedModel) -> Iterator[None]:
    """Let Accelerate not know of the model and its optimizers."""
    models, optimizers = accelerator._models, accelerator._optimizers
    ours = [id(optimizer) for optimizer in optimizers if _trains(optimizer, model)]
    with replaced(
        accelerator,
        _models=[other for other in models if accelerator.unwrap_model(other) is not model],
        _optimizers=[optimizer for optimizer in optimizers if id(optimizer) not in ours],
    ):
        yield


def _trains(optimizer: Optimizer, model: PreTrainedModel) -> bool:
    parameters = set(model.parameters())
    return any(p in parameters for group in optimizer.param_groups for p in group["params"])


def _optimizers(accelerator: Accelerator, model: PreTrainedModel) -> list[Optimizer]:
    return [plain(optimizer) for optimizer in accelerator._optimizers if _trains(optimizer, model)]
