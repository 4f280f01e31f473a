"""How long the blocks of one real layer take, and what they keep, at one degree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import CommDtype
from ..convert import block_count, convert, describe
from ..costs import Slowdown, Timing
from ..models.converted import Converted
from ..parallel.mesh import Axis, Mesh
from ..plan import Plan
from ..runtime.watch import Clock, Watch, unwatched
from ..schedule import Backward, BackwardWeight, Forward, Recompute, StartAsync, Sync
from .link import LinkProfile
from .stopwatch import KeptBytes, Lead, PeakBytes, Stopwatch

BUDGET_S = 3.0
"""Steps of one number of sub-batches are timed until this is spent, at least three and at most ten."""

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Running:
    """How training runs blocks, as far as their costs depend on it.

    Attributes:
        device: of this rank.
        autocast: makes the context that training computes in.
        compile: blocks are compiled, where they can be.
        comm_dtype: of all-reduces of blocks, where these would be wider.
    """

    device: torch.device
    autocast: Autocast = nullcontext
    compile: bool = False
    comm_dtype: CommDtype | None = None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What autocast casts to; None without it."""
        device = self.device.type
        with self.autocast():
            return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """What the matmuls of a model of ``dtype`` compute in."""
        return self.autocast_dtype or dtype


@dataclass
class DegreeProfile:
    """What was measured at one degree.

    Attributes:
        parameters: elements that the fullest rank holds, by block of a layer.
        unowned: of these, those that have no owner.
        timings: by block of a layer, then by number of sub-batches.
        outside_ms: forward and backward of a micro-batch without its blocks.
        optimizer_ms: of AdamW, per million elements.
    """

    parameters: list[int] = field(default_factory=list)
    unowned: list[int] = field(default_factory=list)
    timings: list[dict[int, Timing]] = field(default_factory=list)
    outside_ms: float = 0.0
    optimizer_ms: float = 0.0


class LayerProfile:
    """A model of one layer, converted at one degree, on its batch; its blocks compute without all-reduces.

    Args:
        model: of one layer, whole.
        mesh: the ranks.
        degree: of all its blocks.
        shape: rows of a micro-batch, and tokens of a row.
        running: blocks are compiled for each number of sub-batches anew, so for its shapes alone, as in training; what
            is wider than ``comm_dtype`` is brought into that type, as if it were sent, and back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        degree: int,
        shape: tuple[int, int],
        running: Running,
    ) -> None:
        plan = Plan(describe(model), mesh.tmp.size, (degree,) * block_count(model), "oases", 1)
        self.state: Converted = convert(model, mesh, plan, compile=running.compile, comm_dtype=running.comm_dtype)
        self.state.stack.schedule = "oases_blocking"
        for link in self.state.stack.links:  # sums are left out, what comes before and after them is not
            link.axis = Axis(link.axis.ranks, link.axis.rank)
        self._running, self._device = running, running.device
        self.model = cast(Any, model).to(self._device).train()
        self.link, self._clock = LinkProfile(mesh, self._device), Clock(self._device)
        self._batch = _batch(model, shape, self._device, self.state.vocabulary.loss is not None)

    def measure(self, sub_batches: Sequence[int]) -> DegreeProfile:
        """Measure everything; every rank must call it."""
        found, stack = DegreeProfile(), self.state.stack
        blocks = range(len(stack.blocks))
        found.parameters = self._most_elements(ownable=(True, False))
        found.unowned = self._most_elements(ownable=(False,))
        found.timings = [{} for _ in blocks]
        outside: list[float] = []
        for number in sub_batches:
            stack.sub_batches = number
            stack.compiled = stack.compiled and stack.compiled.afresh()
            for block, timing in enumerate(self._timings(blocks, outside)):
                found.timings[block][number] = timing
        found.outside_ms = statistics.median(self.link.slowest(outside))
        found.optimizer_ms = self._optimizer_ms()
        return found

    def _most_elements(self, ownable: tuple[bool, ...]) -> list[int]:
        """Elements of each block, of what has an owner, or has none, or both, on the rank that holds most."""
        layouts = self.state.gradients.layouts
        counts = [
            sum(p.numel() for p in held if layouts[p].ownable in ownable) for held in self.state.stack.block_parameters
        ]
        return [int(count) for count in self.link.slowest(counts)]

    def slowdown(self) -> Slowdown:
        """What this layer's matmuls and an all-reduce of a sub-batch of its hidden tensor cost each other."""
        hidden = int(self.model.config.hidden_size)
        rows, sequence = self._batch["input_ids"].shape
        dtype = self._running.computed(self.model.dtype)
        x = torch.ones(max(1, rows // 2) * sequence, hidden, device=self._device, dtype=dtype)
        weight = torch.ones(hidden, hidden, device=self._device, dtype=dtype)
        size = x.numel() * x.element_size()
        return self.link.slowdown(lambda: x @ weight, self.state.mesh.tmp, size)

    def _timings(self, blocks: range, outside: list[float]) -> list[Timing]:
        watch = Stopwatch(self._device)
        steps = self._steps(watch, outside)
        deferred = Stopwatch(self._device)
        self.state.stack.defer = True
        self._steps(deferred, [])
        self.state.stack.defer = False
        kept, peak = KeptBytes(self.model.parameters(), on_gpu=self._device.type == "cuda"), PeakBytes(self._device)
        for each in cast(list[Watch], [kept, peak]):
            self._step(each)
        found = []
        for block in blocks:
            graph = kept.bytes[block]
            temporary = max(peak.bytes[Backward, block], peak.bytes[Recompute, block] - graph)
            shared = kept.shared[block]
            graph, temporary, shared = map(int, self.link.slowest([graph, max(0, temporary), shared]))
            # Whoever is last is waited for, every time: not the slowest rank counts, but who is slowest each time.
            forward, recompute, backward, weight = (
                self.link.slowest(times)
                for times in (
                    watch.together(block, (Forward, ""), (StartAsync, "output"), (Sync, "output")),
                    watch.together(block, (Recompute, "")),
                    watch.together(block, (Backward, ""), (StartAsync, "input_grad"), (Sync, "input_grad")),
                    deferred.together(block, (BackwardWeight, "")) or [0.0],
                )
            )
            forward, recompute = (_means(times, steps) for times in (forward, recompute))
            found.append(
                Timing(
                    statistics.median(forward),
                    statistics.median(recompute),
                    statistics.median(backward),
                    statistics.median(weight),
                    graph,
                    temporary,
                    _spread(forward),
                    shared,
                )
            )
        return found

    def _steps(self, watch: Stopwatch, outside: list[float]) -> int:
        """Time a few steps, after two that are not, of which the first may compile; returns how many.

        What is not the blocks' goes to ``outside``.
        """
        self._step(watch)
        launching = time.monotonic()
        self._step(watch)
        (longest_s,) = self.link.slowest([time.monotonic() - launching])  # else ranks wait for each other
        lead = Lead(watch, self._clock, 2 * longest_s)
        watch.read()
        watch.times.clear()
        deadline = time.monotonic() + BUDGET_S
        done = 0
        while done < 10:
            (late,) = self.link.slowest([float(time.monotonic() > deadline)])
            if late and done >= 3:
                break
            self.link.together()
            start = self._clock.now()
            self._step(lead)
            whole = self._clock.ms(start, self._clock.now())
            outside.append(whole - watch.read() - lead.read())
            done += 1
        return done

    def _step(self, watch: Watch = unwatched) -> None:
        self.state.stack.watch = watch
        self.state.gradients.reopen()
        with self._running.autocast():
            output = self.model(**self._batch)
        loss_of(output).backward()
        self.state.stack.watch = unwatched

    def _optimizer_ms(self) -> float:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        optimizer = torch.optim.AdamW(parameters, fused=self._device.type == "cuda")
        optimizer.step()
        times = []
        for _ in range(3):
            self.link.together()
            start = self._clock.now()
            optimizer.step()
            times.append(self._clock.ms(start, self._clock.now()))
        elements = sum(p.numel() for p in parameters)
        return self.link.slowest([statistics.median(times) / elements * 1e6])[0]


def loss_of(output: Any) -> Any:
    """What a model returned as its loss, or a sum of all else."""
    loss = output.get("loss")
    if loss is None:
        return sum(value.float().sum() for value in output.to_tuple() if torch.is_tensor(value))
    return loss


def _means(times: Sequence[float], steps: int) -> list[float]:
    """Of the sub-batches of each step: the first of them casts weights for all."""
    size = len(times) // steps
    return [statistics.fmean(times[start : start + size]) for start in range(0, len(times), size)]


def _spread(times: Sequence[float]) -> float:
    """Interquartile range over median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle if middle else 0.0


def _batch(model: PreTrainedModel, shape: tuple[int, int], device: torch.device, words: bool) -> dict[str, Tensor]:
    """Random tokens, and as labels the same where the loss is that of words."""
    generator = torch.Generator().manual_seed(0)
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    vocabulary = int(getattr(model.config, "vocab_size", embedding.num_embeddings))
    tokens = torch.randint(vocabulary, shape, generator=generator).to(device)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return {**batch, "labels": tokens} if words else batch
