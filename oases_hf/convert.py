"""Rewrites a Hugging Face model into its parallel form, in place.

The model object, its class and its ``state_dict`` keys stay; each rank keeps its part of the
parameters. Parameters are replaced, not resized: autograd may still hold on to the old ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .config import CommDtype
from .errors import UnsupportedModelError
from .models import Block, Family, family_of
from .models.converted import Converted, converted
from .models.reading import described
from .models.shard import Placement, Sharder, check_layer, fuse_norms, shard_layer
from .models.vocabulary import Vocabulary
from .parallel.equal import make_batch_equal, make_equal
from .parallel.gradients import GradientSync
from .parallel.layers import adopt
from .parallel.linear import SharedDropout
from .parallel.link import Dropout, Link
from .parallel.mesh import Mesh
from .parallel.rng import DropoutSeeds
from .parallel.sharding import Layout
from .plan import Plan
from .runtime.compiled import Compiled
from .runtime.graphs import Graphs
from .runtime.loop import StackList, one_by_one
from .runtime.recorder import cuda_recorder
from .runtime.stack import LayerBlock, Stack


def describe(model: PreTrainedModel) -> str:
    """What a plan for ``model`` is for: its type, hidden size and layers."""
    return described(model.config)


def block_count(model: PreTrainedModel) -> int:
    """The number of blocks of ``model``'s stack."""
    family = family_of(model.config)
    return len(stack_of(model, family)) * len(family.blocks)


def convert(
    model: PreTrainedModel,
    mesh: Mesh,
    plan: Plan,
    *,
    gather_logits: bool = False,
    defer_weight_grads: bool = False,
    cuda_graphs: bool = True,
    compile: bool = False,
    comm_dtype: CommDtype | None = None,
    unread: bool = False,
) -> Converted:
    """Shard ``model`` over the TMP world of ``mesh`` as ``plan`` says, in place; all ranks call it.

    Args:
        model: the whole model, on every rank. Ranks whose weights differ get those of rank 0.
        mesh: the ranks.
        plan: made for this model and the size of its TMP world.
        gather_logits: return whole logits in training when labels are given.
        defer_weight_grads: compute weight gradients while input gradients are reduced.
        cuda_graphs: on GPUs, record what forward and backward launch, and replay it.
        compile: compile what blocks compute.
        comm_dtype: what is wider is sent in this type by all-reduces of blocks, in training.
        unread: parameters are meta tensors, still or in part: the caller reads this rank's parts of them afterwards.

    Raises:
        UnsupportedModelError: the model has no family, is converted already, or is not plain.
        ConfigError: the plan is for another model or mesh, or a degree is too high.
    """
    check_plain(model, unread)
    family = family_of(model.config)
    plan.check(describe(model), block_count(model), mesh.tmp.size)
    vocabulary = Vocabulary.of(model, Link(mesh.tmp), gather_logits)
    placements = _placements(model, mesh, plan, family, comm_dtype)
    layers = stack_of(model, family)
    for layer in layers:
        check_layer(layer, family)
    of_layers = [placements[i : i + len(family.blocks)] for i in range(0, len(placements), len(family.blocks))]
    sharder = _shard(model, mesh, family, of_layers, vocabulary)
    layouts = _layouts(model, layers, family, of_layers, sharder)
    links = tuple(placement.link for placement in placements)
    sync = GradientSync(mesh, layouts, plan.shard_optimizer)
    stack = _install_stack(model, family, plan, links, sync, defer_weight_grads)
    if cuda_graphs:
        stack.graphs = graphs_of(stack)
    if compile:
        stack.compiled = compiler(model.config)
    _share_dropouts(model, layers, family, of_layers, vocabulary.link)
    dropout = _dropout(mesh, links, vocabulary.link, stack)
    model.register_forward_pre_hook(partial(_share_batch, mesh), with_kwargs=True)
    vocabulary.install(model)
    names = {name: layouts[p] for name, p in model.named_parameters(remove_duplicate=False)}
    use_cache = getattr(model.config, "use_cache", None)
    model.config.use_cache = False  # a cache keeps the executor from running; generate() asks for one by itself
    state = Converted(
        mesh, sharder.replaced, plan, family, names, use_cache, stack, stack.gradients, vocabulary, dropout
    )
    object.__setattr__(model, "oases", state)
    return state


def _shard(
    model: PreTrainedModel,
    mesh: Mesh,
    family: Family,
    of_layers: Sequence[Sequence[Placement]],
    vocabulary: Vocabulary,
) -> Sharder:
    """Replace the parameters of ``model`` by this rank's parts; returns what knows which those are."""
    make_equal(model, mesh)
    sharder, layers = Sharder(mesh.tmp.rank), stack_of(model, family)
    fuse_norms(model, layers[0], family)
    for layer, of_layer in zip(layers, of_layers, strict=True):
        shard_layer(layer, family, of_layer, sharder)
    vocabulary.shard(sharder)
    sharder.retie(model)
    return sharder


def _dropout(mesh: Mesh, links: tuple[Link, ...], outside: Link, stack: Stack) -> Dropout:
    """What masks are drawn from. By rank 0's seed: ranks that are seeded apart must draw some masks alike."""
    base = int(mesh.control.broadcast(torch.tensor([torch.initial_seed() % 2**63])))
    dropout = Dropout(base, mesh.data.rank, links, outside, stack.seeds)
    dropout.seed(base)
    return dropout


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Run ``model`` by HF's own loop inside, without overlap: each layer communicates by itself."""
    with one_by_one(converted(model).stack):
        yield


def _share_batch(mesh: Mesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the model: every rank of a TMP world sees the batch of its first rank."""
    named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    tensors = {name: value for name, value in named.items() if torch.is_tensor(value)}
    shared = {**named, **make_batch_equal(tensors, mesh.tmp, mesh.tmp_control)}
    return tuple(shared.pop(str(i)) for i in range(len(args))), shared


def _placements(
    model: PreTrainedModel, mesh: Mesh, plan: Plan, family: Family, comm_dtype: CommDtype | None
) -> tuple[Placement, ...]:
    """Where each block of the stack is; blocks of one degree share their place."""
    of_degree = {}
    for degree in sorted(set(plan.degrees)):
        replicas, replica = mesh.tmp.size // degree, mesh.tmp.rank // degree
        rounded = comm_dtype if degree > 1 else None  # where nothing is sent, nothing is
        axis = mesh.axis(degree)
        link = Link(axis, replicas, replica, message_bytes=plan.message_bytes, comm_dtype=rounded)
        of_degree[degree] = Placement(link, [family.units(model.config, degree, rank) for rank in range(degree)])
    return tuple(of_degree[degree] for degree in plan.degrees)


def _layouts(
    model: nn.Module,
    layers: nn.ModuleList,
    family: Family,
    placements: Sequence[Sequence[Placement]],
    sharder: Sharder,
) -> dict[nn.Parameter, Layout]:
    """Every parameter's layout: those not sharded are whole on every rank, inside blocks with partial gradients.

    Norms behind a block see whole outputs, so their gradients are whole but for the rows of other replicas.
    """
    layouts = dict(sharder.layouts)
    for layer, of_layer in zip(layers, placements, strict=True):
        for block, placement in zip(family.blocks, of_layer, strict=True):
            behind = layer.get_submodule(block.join.norm).parameters() if block.join else ()
            for parameter in behind:
                layouts[parameter] = Layout(tuple(parameter.shape), replicas=placement.link.replicas)
    inside = set(layers.parameters())
    for parameter in model.parameters():
        layouts.setdefault(parameter, Layout(tuple(parameter.shape), partial_grad=parameter in inside))
    return layouts


def _install_stack(
    model: PreTrainedModel, family: Family, plan: Plan, links: tuple[Link, ...], gradients: GradientSync, defer: bool
) -> Stack:
    layers, mesh = stack_of(model, family), gradients.mesh
    base = model.base_model
    stack = Stack(
        path=f"{model.base_model_prefix}.{family.stack}" if base is not model else family.stack,
        layers=lambda: list(nn.ModuleList.__iter__(layers)),
        blocks=tuple(_layer_block(block) for block in family.blocks),
        block_parameters=tuple(block_parameters(layer, block) for layer in layers for block in family.blocks),
        per_sample=family.per_sample,
        cache=family.cache,
        positional=family.positional,
        links=links,
        mesh=mesh,
        gradients=gradients,
        schedule=plan.schedule,
        sub_batches=plan.sub_batches,
        graphs_kept=plan.graphs_kept,
        defer=defer,
        seeds=_dropout_seeds(model, layers, family, mesh),
    )
    layers.__class__ = StackList
    object.__setattr__(layers, "stack", stack)
    base.register_forward_pre_hook(stack.enter, with_kwargs=True)
    base.register_forward_hook(stack.leave, always_call=True)
    return stack


def graphs_of(stack: Stack) -> Graphs:
    """What records the passes of ``stack``; it has recorded none."""
    return Graphs(cuda_recorder, list(dict.fromkeys(itertools.chain.from_iterable(stack.block_parameters))))


def compiler(config: PretrainedConfig) -> Compiled:
    """What compiles the blocks of a model."""
    return Compiled(masked=bool(getattr(config, family_of(config).attention_dropout, 0.0)))


def _layer_block(block: Block) -> LayerBlock:
    norm, of_sum = (block.join.norm, block.join.of == "sum") if block.join else (None, False)
    return LayerBlock(block.name, block.run, norm, of_sum)


def _dropout_seeds(model: PreTrainedModel, layers: nn.ModuleList, family: Family, mesh: Mesh) -> DropoutSeeds | None:
    """The seeds of the layers' dropout, if there is any."""
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in layers.modules())
    if not modules and not getattr(model.config, family.attention_dropout, 0.0):
        return None
    return DropoutSeeds(mesh.world.rank, mesh.data.rank)


def _share_dropouts(
    model: nn.Module,
    layers: nn.ModuleList,
    family: Family,
    placements: Sequence[Sequence[Placement]],
    outside: Link,
) -> None:
    """Give ranks that have rows in common the same masks for everything but what they split."""
    own = {layer.get_submodule(path) for layer in layers for path in family.own_dropouts}
    links = {
        module: placement.link
        for layer, of_layer in zip(layers, placements, strict=True)
        for block, placement in zip(family.blocks, of_layer, strict=True)
        for child in block.children
        for module in layer.get_submodule(child).modules()
    }
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module not in own:
            adopt(module, SharedDropout, link=links.get(module, outside))


def block_parameters(layer: nn.Module, block: Block) -> tuple[nn.Parameter, ...]:
    """The parameters a block uses."""
    return tuple(dict.fromkeys(p for child in block.children for p in layer.get_submodule(child).parameters()))


def stack_of(model: PreTrainedModel, family: Family) -> nn.ModuleList:
    """The list of layers of ``model``; raises UnsupportedModelError when there is none."""
    base = model.base_model
    stack = base.get_submodule(family.stack)
    if not isinstance(stack, nn.ModuleList) or len(stack) == 0:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {family.stack} of {type(base).__name__} is not a list of layers; nothing to shard"
        )
    return stack


def check_plain(model: nn.Module, unread: bool = False) -> None:
    """Raise UnsupportedModelError for models whose parameters are not the plain ones of a plain HF model.

    Meta tensors are let in when they are ``unread``.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{name} is not a transformers PreTrainedModel; hand over the model itself, before DDP, "
            f"FSDP, DeepSpeed, torch.compile or PEFT wrap it"
        )
    if hasattr(model, "oases"):
        raise UnsupportedModelError(f"{name} is converted already; convert a model once")
    if getattr(model, "quantization_method", None) or getattr(model, "is_quantized", False):
        raise UnsupportedModelError(f"{name} is quantised; load it without quantization_config")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(f"{name} carries PEFT adapters; merge them first (merge_and_unload)")
    for parameter_name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedModelError(
                f"{parameter_name} has a post-accumulate gradient hook, which would see one sub-batch on "
                f"one rank; remove it, and step the optimizer after accelerator.backward"
            )
        if type(parameter) is not nn.Parameter or (parameter.is_meta and not unread):
            raise UnsupportedModelError(
                f"{parameter_name} of {name} is a {'meta tensor' if parameter.is_meta else type(parameter).__name__}; "
                f"load the model whole, without device_map, tp_plan or fully_shard, or by oases_hf.load_pretrained"
            )
