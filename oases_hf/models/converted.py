"""What conversion leaves on a model: the ranks, the plan, and who owns what."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..config import OasesConfig
from ..errors import UnsupportedModelError
from ..parallel.gradients import GradientSync
from ..parallel.link import Dropout
from ..parallel.mesh import Mesh
from ..parallel.sharding import Layout
from ..plan import Plan
from ..runtime.stack import Stack
from .family import Family
from .metrics import Metrics
from .vocabulary import Vocabulary


@dataclass
class Converted:
    """The state of a converted model.

    Attributes:
        mesh: the ranks.
        replaced: the whole parameters that gave way to parts, while somebody still holds them.
        plan: what was done.
        family: the declaration that the model was converted by.
        stack: the layers, as they run.
        gradients: who completes gradients.
        vocabulary: what is split by words.
        dropout: where the model is in what its masks are drawn from.
        use_cache: what the config said before, to be written with an export.
        layouts: how each parameter, by its name in ``state_dict``, is spread over the TMP world.
        loaded_with: the settings of ``load_pretrained``, until an Accelerator trains the model.
        metrics: what is measured, once an Accelerator trains the model.
    """

    mesh: Mesh
    replaced: WeakIdKeyDictionary
    plan: Plan
    family: Family
    layouts: dict[str, Layout]
    use_cache: bool | None
    stack: Stack
    gradients: GradientSync
    vocabulary: Vocabulary
    dropout: Dropout
    loaded_with: OasesConfig | None = None
    metrics: Metrics | None = None

    @property
    def sharded_fraction(self) -> float:
        """The share of the model's parameters, by number, that ranks split among them."""
        sizes = [(layout.numel, len(set(layout.slices)) > 1) for layout in self.gradients.layouts.values()]
        return sum(n for n, sharded in sizes if sharded) / max(1, sum(n for n, _ in sizes))

    def pause(self) -> None:
        """Let the time from here to the next forward in training not count in metrics."""
        if self.metrics is not None:
            self.metrics.meter.stop()


def loaded(model: nn.Module) -> Converted | None:
    """What ``load_pretrained`` left on ``model``; None for other models, and once an Accelerator trains it."""
    found = getattr(model, "oases", None)
    return found if isinstance(found, Converted) and found.loaded_with is not None else None


def converted(model: nn.Module) -> Converted:
    """What conversion left on ``model``; raises UnsupportedModelError when it is not converted."""
    found = getattr(model, "oases", None)
    if not isinstance(found, Converted):
        raise UnsupportedModelError(f"{type(model).__name__} is not converted; call OasesPlugin().install first")
    return found
