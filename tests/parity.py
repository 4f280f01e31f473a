"""The parity criterion: when a run counts as computing what plain Hugging Face computes.

Both sides run in float64 under `float64_math`, and then, per parameter with gradient ``g`` and update ``u``,
``G`` and ``U`` being the norms over all parameters together:

    ‖Δg‖ ≤ 1e-9 (‖g‖ + 1e-3 G)      ‖Δp‖ ≤ 1e-8 ‖u‖      |Δloss| ≤ 1e-10 |loss|

Only where a parameter's exact gradient is zero, as that of BERT's key biases (softmax ignores them), may a test add
a floor of ``1e-2 U``: rounding noise is all that moves them, and two right runs differ by as much as either moves.

Gradients of float32 runs: 5e-6 in place of 1e-9. Comparing float32 parameters after a few steps proves nothing:
Adam divides rounding noise by itself, and hides a gradient that is wrong by a factor.

Everything is compared by parameter name as full tensors in HF layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Tensors = Mapping[str, Tensor]

GRADIENT_FLOAT64 = 1e-9
GRADIENT_FLOAT32 = 5e-6
UPDATE = 1e-8
LOSS = 1e-10
GRADIENT_FLOOR = 1e-3
ZERO_GRADIENT_FLOOR = 1e-2


@contextmanager
def float64_math() -> Iterator[None]:
    """Let float64 tensors stay float64 where code asks for float32, as HF's norms, softmaxes and losses do.

    Holds for everything on this thread, backward passes of CPU tensors included.
    """
    mode = _KeepFloat64()
    run_backward = vars(torch.autograd)["_engine_run_backward"]

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        # torch takes a mode off while it runs what the mode intercepts, and that is also all of Tensor.backward.
        with mode:
            return run_backward(*args, **kwargs)

    with mode, mock.patch.object(torch.autograd, "_engine_run_backward", run_backward_in_mode):
        yield


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        subject = args[0] if args else kwargs.get("input")
        if not (isinstance(subject, Tensor) and subject.dtype is torch.float64):
            return func(*args, **kwargs)
        if func is Tensor.float:
            return subject
        return func(*map(_kept, args), **{name: _kept(value) for name, value in kwargs.items()})


def _kept(argument: object) -> object:
    return torch.float64 if argument is torch.float32 else argument


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one figure is from its reference, and how far it may be."""

    name: str
    measured: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Measured over allowed; at most 1 when all is well."""
        if math.isnan(self.measured) or math.isnan(self.allowed):
            return math.inf
        if self.measured == 0:
            return 0.0
        return self.measured / self.allowed if self.allowed else math.inf

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        return f"{self.name} deviates by {self.measured:.3g}, allowed is {self.allowed:.3g} ({self.ratio:.3g} times)"


def gradient_deviation(gradients: Tensors, reference: Tensors, *, relative: float = GRADIENT_FLOAT64) -> Deviation:
    """Return the worst gradient: measured is ``‖g - g_ref‖``, allowed ``relative (‖g_ref‖ + 1e-3 G)``."""
    _check_alike(gradients, reference)
    norms = {name: _norm(gradient) for name, gradient in reference.items()}
    floor = GRADIENT_FLOOR * math.hypot(*norms.values())
    return _worst(
        Deviation(f"gradient of {name}", _distance(gradients[name], reference[name]), relative * (norm + floor))
        for name, norm in norms.items()
    )


def update_deviation(
    after: Tensors, reference: Tensors, start: Tensors, *, relative: float = UPDATE, floor: float = 0.0
) -> Deviation:
    """Return the worst update: measured is ``‖p - p_ref‖``, allowed ``relative (‖u‖ + floor U)``, u = p_ref - start."""
    _check_alike(after, reference)
    _check_alike(start, reference)
    updates = {name: _distance(value, start[name]) for name, value in reference.items()}
    least = floor * math.hypot(*updates.values())
    return _worst(
        Deviation(f"update of {name}", _distance(after[name], reference[name]), relative * (update + least))
        for name, update in updates.items()
    )


def loss_deviation(loss: float | Tensor, reference: float | Tensor, *, relative: float = LOSS) -> Deviation:
    """Return how far the loss is off, relative to the reference."""
    return Deviation("loss", abs(float(loss) - float(reference)), relative * abs(float(reference)))


def assert_gradients(gradients: Tensors, reference: Tensors, *, relative: float = GRADIENT_FLOAT64) -> None:
    """Fail, naming the worst parameter and its figures, unless every gradient meets the criterion."""
    _assert_ok(gradient_deviation(gradients, reference, relative=relative))


def assert_updates(
    after: Tensors, reference: Tensors, start: Tensors, *, relative: float = UPDATE, floor: float = 0.0
) -> None:
    """Fail, naming the worst parameter and its figures, unless every update meets the criterion."""
    _assert_ok(update_deviation(after, reference, start, relative=relative, floor=floor))


def assert_loss(loss: float | Tensor, reference: float | Tensor, *, relative: float = LOSS) -> None:
    """Fail, with the figures, unless the loss meets the criterion."""
    _assert_ok(loss_deviation(loss, reference, relative=relative))


def _assert_ok(deviation: Deviation) -> None:
    if not deviation.ok:
        raise AssertionError(str(deviation))


def _check_alike(ours: Tensors, reference: Tensors) -> None:
    missing, extra = sorted(reference.keys() - ours.keys()), sorted(ours.keys() - reference.keys())
    if missing or extra:
        raise AssertionError(f"names differ: missing {missing}, not in the reference {extra}")
    for name, value in reference.items():
        if ours[name].shape != value.shape:
            raise AssertionError(f"{name} has shape {tuple(ours[name].shape)}, the reference {tuple(value.shape)}")


def _worst(deviations: Iterable[Deviation]) -> Deviation:
    return max(deviations, key=lambda deviation: deviation.ratio, default=Deviation("nothing", 0.0, 0.0))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double()))


def _distance(left: Tensor, right: Tensor) -> float:
    return _norm(left.detach().double() - right.detach().double())
