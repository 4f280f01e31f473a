"""Who competes on the same LLaMA layers: our schedules on one model, and Hugging Face's and torch's own ways."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModel, LlamaConfig, LlamaModel, PreTrainedModel
from transformers.utils import logging

from oases_hf.convert import block_count, convert, describe, graphs_of
from oases_hf.errors import ConfigError
from oases_hf.models.converted import Converted
from oases_hf.parallel.mesh import DONE, Axis, Mesh, Pending
from oases_hf.plan import Plan, Recompute
from oases_hf.schedule import kind
from scripts.bench.rows import Recomputed
from scripts.bench.timing import Wire, World

VOCAB = 1024


@dataclass(frozen=True)
class Sent:
    """What one rank handed to collectives in a step."""

    bytes: int
    calls: int
    layer_bytes: int | None = None


class Work:
    """A LlamaModel of random weights (no head), token ids ``[B, S]`` and an output gradient ``[B, S, H]``.

    All are the same on every rank and in every process.
    """

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, batch: int, seq: int, device: torch.device) -> None:
        self.config, self.dtype, self.batch, self.device = config, dtype, batch, device
        drawn = torch.Generator().manual_seed(1)
        self.ids = torch.randint(config.vocab_size, (batch, seq), generator=drawn).to(device)
        self.output_grad = (torch.randn(batch, seq, config.hidden_size, generator=drawn) * 1e-3).to(device, dtype)

    def model(self) -> PreTrainedModel:
        """The model, anew."""
        torch.manual_seed(0)
        with self.device:
            model = AutoModel.from_config(self.config, dtype=self.dtype)
        return cast(PreTrainedModel, model.train())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of every parameter."""
        with torch.device("meta"):
            return {name: tuple(p.shape) for name, p in LlamaModel(self.config).named_parameters()}

    def rows(self, part: int, parts: int) -> slice:
        """The samples of one of several ranks or TMP worlds that run data parallel."""
        if self.batch % parts:
            raise ConfigError(f"--batch {self.batch} does not divide evenly over {parts} data-parallel parts")
        size = self.batch // parts
        return slice(part * size, (part + 1) * size)


class Training:
    """A model that runs forward and backward on its share of the work.

    Args:
        averaged: over how many data-parallel parts its gradients are averaged.

    Attributes:
        recompute: of its layers, in a word.
    """

    recompute: Recomputed = "full"

    def __init__(
        self, name: str, what: str, model: PreTrainedModel, work: Work, world: World, rows: slice, averaged: int = 1
    ) -> None:
        self.name, self.what, self.model, self.rows, self.averaged = name, what, model, rows, averaged
        self._world = world
        self._ids, self._output_grad = work.ids[rows], work.output_grad[rows]

    def prepare(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Free what earlier steps left, beside the weights."""
        self.prepare()

    def step(self) -> Tensor:
        """Forward and backward; returns the output of this rank's rows."""
        output: Tensor = self.model(input_ids=self._ids).last_hidden_state
        output.backward(self._output_grad)
        return output.detach()

    def sent(self) -> Sent:
        """What this rank communicates in a step."""
        self.prepare()
        with Wire() as wire:
            self.step()
        return Sent(wire.bytes, wire.calls)

    def whole_output(self, output: Tensor) -> Tensor:
        """The output of all samples, from this rank's; at least in fp32."""
        parts = dict(self._world.gather((self.rows.start, output.cpu())))
        return precise(torch.cat([parts[start] for start in sorted(parts)]))

    def whole_grad(self, name: str, shape: Sequence[int]) -> Tensor:
        """The gradient of a parameter of that whole shape, whole and summed over all samples; at least in fp32."""
        grad = cast(Tensor, self.model.get_parameter(name).grad)
        if hasattr(grad, "full_tensor"):
            return precise(grad.full_tensor().cpu()) * self.averaged
        parts = self._world.gather(grad.cpu())
        split = [dim for dim, size in enumerate(shape) if size != grad.shape[dim]]
        return precise(torch.cat(parts, split[0]) if split else parts[0]) * self.averaged

    def parameter_bytes(self) -> int:
        """The bytes of the parameters that this rank holds."""
        held = [cast(Tensor, getattr(p, "_local_tensor", p)) for p in self.model.parameters()]
        return sum(p.numel() * p.element_size() for p in held)


class Planned(Training):
    """A converted model, as its plan says."""

    def __init__(self, name: str, what: str, model: PreTrainedModel, state: Converted, work: Work, world: World):
        self.state = state
        data = state.mesh.data
        super().__init__(name, what, model, work, world, work.rows(data.rank, data.size), averaged=data.size)

    def prepare(self) -> None:
        self.state.stack.reduce_now = True
        super().prepare()

    def forget(self) -> None:
        stack = self.state.stack
        if stack.graphs is not None:
            stack.graphs = graphs_of(stack)
        super().forget()

    def step(self) -> Tensor:
        output = super().step()
        self.state.gradients.finish()
        return output

    def sent(self) -> Sent:
        mesh = self.state.mesh
        axes = [axis.traffic for axis in (mesh.world, mesh.tmp, mesh.data, mesh.control, mesh.tmp_control)]
        marks: list[int] = []
        hook = self.model.get_input_embeddings().register_forward_hook(lambda *_: marks.append(mesh.tmp.traffic.bytes))
        self.prepare()
        before = sum(t.bytes for t in axes), sum(t.calls for t in axes)
        super().step()
        marks.append(mesh.tmp.traffic.bytes)
        self.state.gradients.finish()
        hook.remove()
        return Sent(sum(t.bytes for t in axes) - before[0], sum(t.calls for t in axes) - before[1], marks[1] - marks[0])

    def whole_grad(self, name: str, shape: Sequence[int]) -> Tensor:
        layout, tmp = self.state.layouts[name], self.state.mesh.tmp
        parts = self._world.gather(cast(Tensor, self.model.get_parameter(name).grad).cpu())
        if not layout.sharded:
            return precise(parts[0]) * self.averaged
        whole = parts[0].new_zeros(layout.shape)
        for rank, part in zip(range(tmp.size), parts, strict=False):  # those of the first TMP world
            layout.slices[rank].put(whole, part)
        return precise(whole) * self.averaged


class Scheduled(Planned):
    """A converted model under one schedule; several share the model.

    Args:
        schedule: its name.
        sub_batches: in which the batch is parted, if the schedule is made for several (default: as many as that).
        recompute: of all blocks.
        defer: weight gradients wait for the input gradient's all-reduce to start.
    """

    def __init__(
        self,
        schedule: str,
        sub_batches: int | None,
        model: PreTrainedModel,
        state: Converted,
        work: Work,
        world: World,
        recompute: Recompute = "full",
        defer: bool = False,
    ):
        own = kind(schedule).sub_batches
        self._schedule, self._defer, self.recompute = schedule, defer, recompute
        self._sub_batches = (sub_batches or own) if own > 1 else own
        what = f"{self._sub_batches} sub-batches" if self._sub_batches > 1 else "one batch"
        super().__init__(schedule, what, model, state, work, world)

    def prepare(self) -> None:
        stack = self.state.stack
        stack.schedule, stack.sub_batches, stack.defer = self._schedule, self._sub_batches, self._defer
        stack.graphs_kept = frozenset(range(len(stack.links))) if self.recompute == "none" else frozenset()
        super().prepare()


def scheduled(
    names: Sequence[str],
    sub_batches: int | None,
    degree: int,
    defer: bool,
    work: Work,
    world: World,
    recompute: Recompute = "full",
) -> list[Training]:
    """Our schedules, all on one model; ``sub_batches`` is for those made for more than one."""
    model = work.model()
    state = convert(model, Mesh.build(degree), uniform(model, degree))
    return [Scheduled(name, sub_batches, model, state, work, world, recompute, defer) for name in names]


def uniform(model: PreTrainedModel, degree: int) -> Plan:
    """All blocks split over as many ranks, which are the TMP world."""
    return Plan(describe(model), degree, (degree,) * block_count(model))


class Computing(Scheduled):
    """A schedule whose all-reduces send nothing: what it computes is wrong, and takes as long as what is right."""

    def sent(self) -> Sent:
        return Sent(0, 0)

    def step(self) -> Tensor:
        with mock.patch.object(Axis, "start_all_reduce", return_value=DONE):
            return super().step()


class Communicating(Scheduled):
    """The all-reduces of a schedule's step, one behind the other, and nothing else."""

    _sent: Sequence[tuple[Axis, Tensor]] = ()

    def sent(self) -> Sent:
        self.prepare()
        return Sent(sum(tensor.nbytes for _, tensor in self._sent), len(self._sent))

    def prepare(self) -> None:
        super().prepare()
        if not self._sent:
            self._sent = self._watched()

    def step(self) -> Tensor:
        works = [axis.start_all_reduce(tensor) for axis, tensor in self._sent]
        for work in works:
            work.wait()
        return self._output_grad

    def _watched(self) -> Sequence[tuple[Axis, Tensor]]:
        """Like tensors that a step hands to all-reduces."""
        own, found = Axis.start_all_reduce, []

        def start_all_reduce(axis: Axis, tensor: Tensor, *args: Any) -> Pending:
            found.append((axis, torch.zeros_like(tensor)))
            return own(axis, tensor, *args)

        with mock.patch.object(Axis, "start_all_reduce", start_all_reduce):
            super().step()
        super().prepare()
        return found


KINDS: dict[str, type[Scheduled]] = {
    "": Scheduled,
    "computing only": Computing,
    "all-reduces only": Communicating,
}
"""Of a schedule: all of it, or what no schedule can do without, by itself."""


class Peer(Training):
    """A model that Hugging Face's own loop runs, with or without gradient checkpointing."""

    recompute: Recompute = "full"

    def prepare(self) -> None:
        if self.recompute == "full":
            _checkpoint_activations(self.model)
        else:
            _keep_activations(self.model)
        super().prepare()


def hugging_face(work: Work, world: World, degree: int) -> Peer:
    """The model in one process, or under transformers' own tensor parallelism."""
    if degree != world.size:
        raise ConfigError(f"peer hf: tensor parallelism only, over all {world.size} ranks; --degree is {degree}")
    model = work.model()
    if world.size > 1:
        model = loaded_in_parallel(model, world)
    how = "transformers' tensor parallelism" if world.size > 1 else "transformers in one process"
    return Peer("hf", how, model, work, world, slice(0, work.batch))


def fully_sharded(work: Work, world: World, degree: int) -> Peer:
    """The model under torch's FSDP2, a layer at a time."""
    from torch.distributed.fsdp import fully_shard

    if world.size == 1:
        raise ConfigError("peer fsdp: needs several ranks; start this with a launcher")
    rows = work.rows(world.rank, world.size)
    model = cast(LlamaModel, work.model())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return Peer("fsdp", "torch fully_shard", model, work, world, rows, averaged=world.size)


PEERS = {"hf": hugging_face, "fsdp": fully_sharded}


def precise(tensor: Tensor) -> Tensor:
    """At least in fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _checkpoint_activations(model: PreTrainedModel) -> None:
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _keep_activations(model: PreTrainedModel) -> None:
    disable: Any = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()


def loaded_in_parallel(model: PreTrainedModel, world: World) -> PreTrainedModel:
    """The same model, loaded from a temporary folder (one on each host) as transformers shards it."""
    from transformers.distributed.configuration_utils import DistributedConfig

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(tempfile.gettempdir()) / world.gather(f"oases-bench-{uuid.uuid4()}")[0]
    writes = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        if writes:
            model.save_pretrained(folder)
        world.meet()
        sharding = DistributedConfig(tp_size=world.size)
        loaded = type(model).from_pretrained(folder, dtype=model.dtype, distributed_config=sharding)
        world.meet()
    finally:
        if writes:
            shutil.rmtree(folder, ignore_errors=True)
    return cast(PreTrainedModel, loaded.train())
