"""The parts of ``oases-hf doctor`` that may hang: a look at the machine, and one of the ranks."""

from __future__ import annotations

import argparse
import math
from datetime import timedelta

import torch

from ..doctor.links import check_links
from ..doctor.machine import look as look_at_machine
from ..doctor.measurements import Joined, Prediction
from ..doctor.watching import START_LIMIT_S, Teller
from ..joining import device_of_rank, process_group, silence_libraries
from ..launching import PASS, Seat, under_launcher
from ..parallel.mesh import Mesh
from ..plan import ScheduleName
from ..planner import Problem, uniform_plan
from ..profiler import Architecture, Running, Workload, profile
from ..schedule import kind
from ..simulator import simulate
from .subject import architecture_of, autocast_of

PROFILE_LIMIT_S = 1800.0
"""For each step of profiling: large layers on slow devices take minutes."""

COMPARED: tuple[ScheduleName, ScheduleName] = ("megatron", "oases")


def look(options: argparse.Namespace) -> None:
    """Tell of this machine, and of copies between its GPUs if this is the only process that makes them."""
    copies = options.device != "cpu" and not under_launcher()
    look_at_machine(Teller(options.told, 0), copies, options.time_limit_s)


def run_rank(options: argparse.Namespace, seat: Seat) -> int:
    """Check all-reduces as one of the ranks, and predict steps of the model if there is one.

    Returns:
        The exit code, which does not say whether sums are right: that is told.

    Raises:
        ConfigError: options, ranks and model do not go together.
        UnsupportedModelError: no family serves the model.
    """
    silence_libraries()
    teller = Teller(options.told, seat.rank)
    model = architecture_of(options) if options.model or options.config else None
    device = device_of_rank(options.device)
    teller.step("joining the other ranks", max(START_LIMIT_S, options.time_limit_s))
    # Its own limit is beyond all of ours, so that a hang is seen as one.
    with process_group(device, timedelta(seconds=2 * max(PROFILE_LIMIT_S, options.time_limit_s)), seat):
        mesh = Mesh.build(options.tmp_size)
        teller.found(Joined(seat.size, "cuda" if device.type == "cuda" else "cpu"))
        right = check_links(mesh, device, teller, options.time_limit_s)
        if model and right:
            teller.found(_predict(options, model, mesh, device, teller))
        teller.step("leaving the other ranks", options.time_limit_s)
    return PASS


def _predict(
    options: argparse.Namespace, model: Architecture, mesh: Mesh, device: torch.device, teller: Teller
) -> Prediction:
    """Profile ``model`` on the ranks, and simulate steps of it at the highest degree."""
    numbers = tuple(kind(name).sub_batches for name in COMPARED)
    workload = Workload(options.batch, options.seq, numbers, 2 * model.dtype.itemsize)

    def say(line: str) -> None:
        teller.step(line, PROFILE_LIMIT_S)

    costs = profile(model, mesh, workload, Running(device, autocast_of(options, device)), say=say)
    problem = Problem(costs, model.config.num_hidden_layers, math.inf)
    degree = max(costs.degrees())
    plans = (uniform_plan(problem, name, degree) for name in COMPARED)
    return Prediction(model.model_class.__name__, degree, *(simulate(problem, plan).step_ms for plan in plans))
