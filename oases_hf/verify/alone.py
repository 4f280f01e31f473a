"""What one plain process computes, and how far it is from itself with other kernels. Rank 0 does this."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .distances import Tensors, distance, gradients, norm, on_cpu, parameters
from .outcome import GRADIENT_FLOOR, larger, relative, relative_loss
from .subject import Subject
from .training import MICRO_BATCHES, adamw, plain_backward, train, use_other_attention


class Plain:
    """A run of one process. Tensors are in host memory, by parameter name.

    Attributes:
        model: while it runs.
        losses: of each step.
        gradients: of each step.
        weights: before the first step, and after each.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: PreTrainedModel | None = model
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.weights = [on_cpu(parameters(model))]

    def backward_done(self, step: int, loss: float) -> None:
        """Keep loss and gradients."""
        assert self.model is not None
        self.losses.append(loss)
        self.gradients.append(on_cpu(gradients(self.model)))

    def step_done(self, step: int) -> None:
        """Keep the weights."""
        assert self.model is not None
        self.weights.append(on_cpu(parameters(self.model)))

    def updates(self) -> list[dict[str, float]]:
        """The norm of what each step changed of each parameter, and of what its dtype cannot hold of a change."""
        return [
            {name: distance(after[name], value) + _unit(value) * norm(value) for name, value in before.items()}
            for before, after in zip(self.weights, self.weights[1:], strict=False)
        ]


def _unit(tensor: Tensor) -> float:
    """How far rounding to the dtype moves a number, relative to it."""
    return torch.finfo(tensor.dtype).eps / 2


@dataclass
class Noise:
    """How far a run with other kernels is from ``plain``, at worst; its steps start from the weights of that one.

    Attributes:
        kernels: what is different, in words.
        loss: relative.
        gradients: relative, by parameter name.
        updates: likewise.
    """

    plain: Plain
    model: PreTrainedModel
    kernels: str
    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)

    def backward_done(self, step: int, loss: float) -> None:
        """Compare loss and gradients."""
        wanted = self.plain.gradients[step]
        self.loss = max(self.loss, relative_loss(loss, self.plain.losses[step]))
        found = relative(_distances(gradients(self.model), wanted), norms(wanted), GRADIENT_FLOOR)
        self.gradients = larger(self.gradients, found)

    def step_done(self, step: int) -> None:
        """Compare the weights, then take those of the other run."""
        ours, wanted = parameters(self.model), self.plain.weights[step + 1]
        self.updates = larger(self.updates, relative(_distances(ours, wanted), self.plain.updates()[step]))
        for name, tensor in ours.items():
            tensor.copy_(wanted[name])


@dataclass(frozen=True)
class Expected:
    """What every rank has to know of the runs of one process. Lists are by step, dicts by parameter name.

    Attributes:
        model: the class of the model.
        parameters: how many numbers they are.
        attention: the implementation that all runs but the noisy one use.
        losses: of each step.
        gradients: norms.
        updates: norms, and what is lost in them to rounding.
        kernels: what was different in the noisy run, in words.
        loss_noise: relative, at worst.
        gradient_noise: likewise.
        update_noise: likewise.
        seconds: what the two runs took.
    """

    model: str
    parameters: int
    attention: str
    losses: list[float]
    gradients: list[dict[str, float]]
    updates: list[dict[str, float]]
    kernels: str
    loss_noise: float
    gradient_noise: dict[str, float]
    update_noise: dict[str, float]
    seconds: tuple[float, float]


def run_alone(subject: Subject, device: torch.device) -> tuple[Plain, Expected]:
    """Train one process, then train it again with other kernels to measure the noise."""
    began = time.perf_counter()
    model = subject.make(device)
    name, count, attention = type(model).__name__, model.num_parameters(), model.config._attn_implementation
    plain = Plain(model)
    train(adamw(model, subject.settings), subject.batches(device), plain_backward(model, subject), plain)
    del model
    plain.model = None  # gives the memory of a GPU back
    halfway = time.perf_counter()
    noise = _run_with_other_kernels(subject, device, plain)
    return plain, Expected(
        model=name,
        parameters=count,
        attention=attention,
        losses=plain.losses,
        gradients=[norms(step) for step in plain.gradients],
        updates=plain.updates(),
        kernels=noise.kernels,
        loss_noise=noise.loss,
        gradient_noise=noise.gradients,
        update_noise=noise.updates,
        seconds=(halfway - began, time.perf_counter() - halfway),
    )


def _run_with_other_kernels(subject: Subject, device: torch.device, plain: Plain) -> Noise:
    model = subject.make(device)
    noise = Noise(plain, model, _switch_kernels(model, subject))
    backward = plain_backward(model, subject, MICRO_BATCHES)
    train(adamw(model, subject.settings), subject.batches(device), backward, noise)
    return noise


def _switch_kernels(model: PreTrainedModel, subject: Subject) -> str:
    """Let ``model`` use other kernels; returns which the noisy run uses, in words."""
    parts = min(MICRO_BATCHES, subject.settings.batch)
    changed = []
    if use_other_attention(model):
        changed.append(f"{model.config._attn_implementation} attention")
    if parts > 1:
        changed.append(f"batch in {parts} micro-batches")
    return ", ".join(changed) or "the same kernels again"


def norms(tensors: Tensors) -> dict[str, float]:
    """The norm of each."""
    return {name: norm(tensor) for name, tensor in tensors.items()}


def _distances(ours: Tensors, wanted: Tensors) -> dict[str, float]:
    return {name: distance(ours[name], value) for name, value in wanted.items()}
