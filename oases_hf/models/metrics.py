"""How well a model trains: tokens, operations, waits and memory of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..parallel.sharding import Layout
from ..runtime.meter import Meter
from .reading import head_width


@dataclass(frozen=True)
class ModelOperations:
    """Floating point operations of forward and backward, those of recompute not counted.

    Per token 6 for each weight of a linear layer, the output head included and the embedding not, and 12 × layers ×
    (heads × their width) × tokens of the row for attention, masked or not (Chowdhery et al., PaLM, appendix B). Of a
    frozen weight no gradient is computed: it counts 4. Output layers that see one token of a row count as if they saw
    all.

    Attributes:
        per_token: of linear layers.
        per_pair: of attention, for each token with each of its row.
    """

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, model: PreTrainedModel, layouts: Mapping[str, Layout]) -> ModelOperations:
        """Those of the whole model, of which this rank has a part; ``layouts`` are by the names of parameters."""
        linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
        per_token = sum(
            layouts[f"{name}.weight"].numel * (6 if module.weight.requires_grad else 4) for name, module in linears
        )
        config: Any = model.config
        width = config.num_attention_heads * head_width(config)
        return cls(per_token, 12 * config.num_hidden_layers * width)

    def total(self, tokens: int, pairs: int) -> float:
        """Of so many tokens, and pairs of tokens of one row."""
        return self.per_token * tokens + self.per_pair * pairs


@dataclass
class Metrics:
    """Figures for logs; each rank reads its own, when it likes.

    Attributes:
        meter: counts.
        operations: of the model as it is trained now.
        ranks: that share a batch, and its tokens and operations.
        peak_tflops: of the device in what is computed in; None where that is not known.
        peak_memory: reads the most bytes that were held since it was called last; None where nobody counts.
    """

    meter: Meter
    operations: Callable[[], ModelOperations]
    ranks: int
    peak_tflops: float | None = None
    peak_memory: Callable[[], int] | None = None

    def read(self) -> dict[str, float]:
        """The means since the last reading, of which there are none when nothing was trained; waits for the device.

        * ``tokens_per_second_per_gpu``: each token once, padding included, divided by the ranks that share it.
        * ``tflops_per_gpu``: likewise of the model's operations, in 1e12 per second.
        * ``mfu_percent``: of the device's peak; left out where that is not known.
        * ``exposed_communication_percent``: of the first step since, the time in which computation waited for
          collectives of blocks; left out when none was waited for.
        * ``peak_memory_gib``: the most that torch held of this rank's GPU.

        Time of evaluation and of saving does not count.
        """
        peak_bytes = self.peak_memory() if self.peak_memory else None
        reading = self.meter.read()
        if not reading.ms:
            return {}
        operations = self.operations().total(reading.tokens, reading.pairs)
        tflops = operations / self.ranks / reading.ms / 1e9
        figures = {
            "tokens_per_second_per_gpu": reading.tokens / self.ranks / reading.ms * 1e3,
            "tflops_per_gpu": tflops,
            "mfu_percent": tflops / self.peak_tflops * 100 if self.peak_tflops else None,
            "exposed_communication_percent": None if reading.exposed is None else reading.exposed * 100,
            "peak_memory_gib": None if peak_bytes is None else peak_bytes / 2**30,
        }
        return {name: figure for name, figure in figures.items() if figure is not None}

    def restart(self) -> None:
        """Forget what was counted, and count from the next forward in training on."""
        self.meter.stop()
        self.read()


def peak_memory_of(device: torch.device) -> Callable[[], int] | None:
    """What reads the most bytes that torch held of ``device`` since the last time; None on a CPU."""
    if device.type != "cuda":
        return None

    def read() -> int:
        peak = torch.cuda.max_memory_reserved(device)  # what recordings use is not allocated again at each replay
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    return read
