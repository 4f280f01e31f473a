"""What a verification finds: rows of differences, each against what is allowed. Pure arithmetic on floats.

The measure is the parity criterion. With ``g`` the gradient of a parameter in one process, ``G`` the norm of all
gradients together, ``u`` what a step changes of a parameter ``p``, and ε the relative rounding error of its dtype,
relative differences are

    loss      |Δloss| / |loss|
    gradient  ‖Δg‖ / (‖g‖ + 1e-3 G)
    update    ‖Δu‖ / (‖u‖ + ε ‖p‖)

where the floor under ``‖g‖`` serves parameters whose exact gradient is zero, as that of BERT's key biases: rounding
noise is all they have.

Each step of the ranks starts from the weights of one process, else differences would add up: AdamW divides a gradient
by its own size, so where one is hardly more than rounding noise, two right runs soon have other weights.

Noise is the same measure between two runs of one process that differ in kernels only, the most of all steps. Allowed
is :data:`MULTIPLE` times the noise, but at least :data:`LEAST` of losses and gradients, and :func:`least_update` of
updates. The noise of a parameter is what was measured of it, or the median over all parameters when that is more:
single ones are sometimes small by luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from .settings import Precision

GRADIENT_FLOOR = 1e-3

MULTIPLE: Mapping[str, float] = {"loss": 8.0, "gradients": 8.0, "update": 4.0}
"""Measured noise is multiplied by this.

Right runs, of all precisions, differed by up to 3.8, 3.2 and 1.9 times the noise on two CPU ranks, by up to 2.7, 1.5
and 1.6 times on two H200 GPUs; ``tests/verify/noise.py`` measures it.
"""

LEAST: Mapping[Precision, float] = {"float64": 1e-6, "float32": 5e-6, "bfloat16": 1.6e-2, "mixed": 2e-3}
"""Allowed of losses and gradients however small the noise.

In float64 Hugging Face itself computes norms, softmaxes and losses in float32, so two right runs agree to about 2e-7
only. 1.6e-2 is two steps between bfloat16 numbers, in which some models return their loss.
"""

ELEMENTS = 4
"""So many elements of a parameter may move the other way."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        what: ``loss``, ``gradients`` or ``update``.
        step: counted from 1.
        difference: relative, of the parameter that is worst for what is allowed of it.
        noise: relative, of the same parameter.
        allowed: relative.
        parameter: its name; None for a loss.
        values: losses of one process and of the ranks.
    """

    what: str
    step: int
    difference: float
    noise: float
    allowed: float
    parameter: str | None = None
    values: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        """Whether the difference is allowed; one that is no number is not."""
        return self.difference <= self.allowed


def least_update(elements: int) -> float:
    """Allowed of the update of a parameter of so many elements, however small the noise.

    AdamW moves every element by about the learning rate, also one whose gradient is rounding noise: such elements
    move either way, and there may be some of them by chance.
    """
    return 2 * math.sqrt(ELEMENTS / elements)


def relative(distances: Mapping[str, float], norms: Mapping[str, float], floor: float = 0.0) -> dict[str, float]:
    """``‖Δ‖ / (norm + floor × the norm of all)`` by parameter, from each ``‖Δ‖`` and the norms in one process."""
    least = floor * math.hypot(*norms.values())
    return {name: _ratio(distance, norms[name] + least) for name, distance in distances.items()}


def compare(
    what: str, step: int, differences: Mapping[str, float], noise: Mapping[str, float], least: Mapping[str, float]
) -> Row:
    """The row of the parameter whose difference is worst for what is allowed of it, all by parameter name.

    Where as much as a whole gradient or update is allowed, all being noise, a parameter is last among those that pass.
    """
    usual = median(noise.values())
    allowed = {name: max(least[name], MULTIPLE[what] * max(noise[name], usual)) for name in differences}

    def badness(name: str) -> tuple[bool, bool, float]:
        ratio = _ratio(differences[name], allowed[name])
        return ratio > 1, allowed[name] < 1, ratio

    worst = max(differences, key=badness)
    return Row(what, step, differences[worst], noise[worst], allowed[worst], worst)


def compare_losses(step: int, plain: float, ours: float, noise: float, least: float) -> Row:
    """The row of a step's losses, of one process and of the ranks."""
    allowed = max(least, MULTIPLE["loss"] * noise)
    return Row("loss", step, relative_loss(ours, plain), noise, allowed, values=(plain, ours))


def relative_loss(loss: float, plain: float) -> float:
    """How far a loss is from that of one process."""
    return _ratio(abs(loss - plain), abs(plain))


def larger(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """By name, the larger of two."""
    return {name: max(value, left.get(name, 0.0)) for name, value in right.items()}


def _ratio(part: float, whole: float) -> float:
    if math.isnan(part) or math.isnan(whole):
        return math.inf
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf
