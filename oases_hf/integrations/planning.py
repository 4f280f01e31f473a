"""What conversion is to do: the plan that was given, a uniform one, or the planner's for measured costs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from transformers import PreTrainedModel

from ..config import OasesConfig
from ..convert import block_count, convert, describe, stack_of
from ..errors import ConfigError, UnsupportedModelError
from ..models import family_of
from ..models.converted import Converted
from ..parallel.mesh import Mesh
from ..plan import Plan, Recompute, ShardOptimizer, check_schedule_name
from ..planner import Problem, explain, message_choices, plan_of, solve
from ..profiler import Architecture, Running, Workload, profile
from ..runtime.signature import hooks_inside
from ..schedule import kind
from ..simulator import simulate

WORTH = 0.01
"""The part of a step by which deferred weight gradients must make it shorter."""

SPARE = 0.92
"""The part of a device's memory that a plan may use: contexts, libraries and fragmentation take the rest."""


def mesh_of(config: OasesConfig) -> Mesh:
    """The mesh of the ranks that ``config`` asks for; every rank must call it."""
    given = config.load_plan()
    degree = config.degree if isinstance(config.degree, int) else None
    return Mesh.build(config.tmp_size or degree or (given.tmp_size if given else None))


def device_of(state: Accelerator | PartialState) -> torch.device:
    """Its device. Accelerate numbers the CPU too, and moving to ``cpu:0`` what is on the CPU copies it."""
    device: torch.device = state.device
    return torch.device("cpu") if device.type == "cpu" else device


def convert_as(
    config: OasesConfig, model: PreTrainedModel, mesh: Mesh, accelerator: Accelerator | None, *, unread: bool = False
) -> Converted:
    """Convert ``model`` as ``config`` asks for; every rank must call it.

    Args:
        config: the settings.
        model: whole, or without weights when ``unread``.
        mesh: of :func:`mesh_of`.
        accelerator: that trains it: ``degree="auto"``, which alone needs it, measures in its precision.
        unread: the parameters are meta tensors.

    Raises:
        ConfigError: no plan fits into memory, or ranks, settings and model do not go together.
        UnsupportedModelError: the model cannot be sharded.
    """
    chosen = choose(model, accelerator, mesh, config)
    state = convert(
        model,
        mesh,
        chosen.plan,
        gather_logits=bool(config.gather_logits),
        defer_weight_grads=chosen.defer if config.defer_weight_grads is None else config.defer_weight_grads,
        cuda_graphs=config.cuda_graphs is not False,
        compile=bool(config.compile),
        comm_dtype=config.comm_dtype,
        unread=unread,
    )
    if mesh.tmp.size > 1 and state.sharded_fraction == 0.0:
        raise UnsupportedModelError(f"nothing of {type(model).__name__} was sharded; its declaration matches no layer")
    return state


@dataclass(frozen=True)
class Chosen:
    """What a model is converted by.

    Attributes:
        plan: a degree and more for each block.
        defer: to put weight gradients off pays.
    """

    plan: Plan
    defer: bool = False


def choose(model: PreTrainedModel, accelerator: Accelerator | None, mesh: Mesh, config: OasesConfig) -> Chosen:
    """The plan that ``config`` asks for, and what goes with it; every rank must call it, and gets the same.

    Raises:
        ConfigError: no plan fits into memory, or what it depends on is not known.
    """
    given = config.load_plan()
    if given is not None:
        return Chosen(given)
    if config.degree == "auto":
        return _planned(model, accelerator, mesh, config)
    return Chosen(_uniform(model, mesh, config))


def _uniform(model: PreTrainedModel, mesh: Mesh, config: OasesConfig) -> Plan:
    schedule = check_schedule_name(config.schedule or "oases")
    sub_batches = config.sub_batches or kind(schedule).sub_batches
    degree = config.degree if isinstance(config.degree, int) else mesh.tmp.size
    blocks = block_count(model)
    recompute = cast(Recompute, config.recompute or "full")
    return Plan(
        describe(model),
        mesh.tmp.size,
        (degree,) * blocks,
        schedule,
        sub_batches,
        (recompute,) * blocks,
        cast(ShardOptimizer, config.shard_optimizer or "off"),
        config.message_bytes,
    )


def _planned(model: PreTrainedModel, accelerator: Accelerator, mesh: Mesh, config: OasesConfig) -> Chosen:
    if config.batch_size is None or config.sequence_length is None:
        raise ConfigError(
            "degree='auto' measures at the real shape: set batch_size (rows of a micro-batch) and sequence_length "
            "(tokens of a row); OasesCallback finds them in the Trainer's arguments and the first sample"
        )
    workload = Workload(config.batch_size, config.sequence_length, optimizer_state=2 * model.dtype.itemsize)

    def say(line: str) -> None:
        if mesh.world.rank == 0:
            print(f"oases: {line}", flush=True)

    device = accelerator.device
    # With hooks it runs as it is, which is said when it does.
    compile = bool(config.compile) and not hooks_inside([*stack_of(model, family_of(model.config))])
    running = Running(device, accelerator.autocast, compile, config.comm_dtype)
    costs = profile(Architecture.of(model), mesh, workload, running, say=say)
    costs = replace(costs, recorded=costs.recorded and config.cuda_graphs is not False)
    numbers = (config.sub_batches,) if config.sub_batches else workload.sub_batches
    problem = Problem(
        costs,
        block_count(model) // len(costs.kinds),
        config.memory_gib or _memory_gib(mesh, device),
        accelerator.gradient_accumulation_steps,
        tuple(n for n in numbers if n <= workload.rows),
        cast(Literal["auto"] | Recompute, config.recompute or "auto"),
        (cast(ShardOptimizer, config.shard_optimizer),) if config.shard_optimizer else get_args(ShardOptimizer),
        message_bytes=(config.message_bytes,) if config.message_bytes else message_choices(costs),
    )
    answer = mesh.from_first(lambda: _Answer.of(problem, describe(model)))
    if answer.chosen is None:
        raise ConfigError(answer.reason)
    for line in answer.reason.splitlines():
        say(line)
    return answer.chosen


@dataclass(frozen=True)
class _Answer:
    """What the first rank found: a plan and why, or why there is none."""

    chosen: Chosen | None = None
    reason: str = ""

    @classmethod
    def of(cls, problem: Problem, model: str) -> _Answer:
        try:
            return cls(*decide(problem, model))
        except ConfigError as error:
            return cls(None, str(error))


def decide(problem: Problem, model: str) -> tuple[Chosen, str]:
    """What the planner chooses for a model, and whether deferring then pays, which simulation says; and why.

    Raises:
        ConfigError: no plan fits into memory.
    """
    solution = solve(problem)
    plan, reason = plan_of(solution, model), explain(solution)
    at_once, deferred = (simulate(problem, plan, defer_weight_grads=defer).step_ms for defer in (False, True))
    defer = deferred < (1 - WORTH) * at_once
    if defer:
        reason += f"\nweight gradients are deferred, which makes a step {1 - deferred / at_once:.1%} shorter"
    if plan.sub_batches == 1:
        reason += "\nto overlap sub-batches does not pay here: there is one"
    return Chosen(plan, defer), reason


def _memory_gib(mesh: Mesh, device: torch.device) -> float:
    """What a rank of the smallest device may use."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    least = torch.tensor([total], dtype=torch.int64)
    return float(mesh.control.all_reduce(least, dist.ReduceOp.MIN)) / 2**30 * SPARE
