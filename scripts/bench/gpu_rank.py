"""A rank of the benchmark on GPUs: does the tasks of a job one after the other, each alone in memory.

When a contender runs out of memory, or fails, all ranks end, since they may be anywhere; gpu.py starts them again for
the tasks that are left.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from transformers import LlamaModel

from oases_hf.convert import convert
from oases_hf.errors import ConfigError
from oases_hf.integrations.planning import SPARE, Chosen, decide
from oases_hf.joining import silence_libraries
from oases_hf.launching import FAIL, PASS, Seat, as_rank
from oases_hf.models.reading import described
from oases_hf.parallel.mesh import Mesh
from oases_hf.plan import Recompute
from oases_hf.planner import Problem, message_choices
from oases_hf.profiler import Architecture, Running, Workload, profile
from scripts.bench import whole_models
from scripts.bench.contenders import KINDS, PEERS, Planned, Training, Work, uniform
from scripts.bench.rivals import RIVALS
from scripts.bench.rows import Row, in_a_word
from scripts.bench.schedules import DTYPES, TOLERANCES, Observed, compared, measure
from scripts.bench.tasks import AUTO, OUT_OF_MEMORY, Job, Task
from scripts.bench.timing import World, memory_limit, release

COMPARED = 2**22
"""Elements of the largest gradients that are compared: they go through the host."""

Built = tuple[object, Training]


class Layers:
    """Builds contenders on layers alone, and measures them."""

    def __init__(self, job: Job, world: World) -> None:
        self._job, self._world, self._mesh = job, world, Mesh.build()
        self._held: Built | None = None

    def row(self, task: Task) -> Row:
        """Measure one."""
        config = task.shape.config("layers", self._job.seq, self._job.vocab)
        work = Work(config, DTYPES[self._job.dtype], task.shape.rows, self._job.seq, self._world.device)
        contender = self._contender(task, work)
        with memory_limit(self._world.device, self._job.memory_gib):
            if not task.entry.variant:
                self._compare(task, contender, work)
            (row,) = measure([contender], self._job.rounds, self._world)
        return row

    def _contender(self, task: Task, work: Work) -> Training:
        """That of a task; its model is kept for the next one, if that is of the same."""
        entry, world = task.entry, self._world
        kind = entry if entry.name == AUTO else entry.name if entry.name in (*PEERS, *RIVALS) else "schedules"
        if self._held is None or self._held[0] != (task.shape, kind):
            self._held = None
            release(world.device)
            self._held = (task.shape, kind), self._built(task, work)
        built = self._held[1]
        recompute: Recompute = "full" if entry.recompute == "full" else "none"
        if not isinstance(built, Planned):
            built.recompute = recompute
        if entry.name == AUTO or not isinstance(built, Planned):
            return built
        of = KINDS[entry.variant]
        return of(entry.name, None, built.model, built.state, work, world, recompute, entry.defer)

    def _built(self, task: Task, work: Work) -> Training:
        entry, world = task.entry, self._world
        if entry.name in PEERS:
            return PEERS[entry.name](work, world, world.size)
        if entry.name in RIVALS:
            return RIVALS[entry.name](work, world)
        if entry.name != AUTO:
            model = work.model()
            return Planned(entry.name, "", model, convert(model, self._mesh, uniform(model, world.size)), work, world)
        chosen = self._chosen(task, work)
        what = chosen.plan.summary() + ", weight gradients deferred" * chosen.defer
        model = work.model()
        state = convert(model, self._mesh, chosen.plan, defer_weight_grads=chosen.defer)
        planned = Planned(entry.name, what, model, state, work, world)
        planned.recompute = in_a_word(chosen.plan.recompute)
        return planned

    def _chosen(self, task: Task, work: Work) -> Chosen:
        """Measure, and plan for what a rank may use. There is no optimizer here."""
        job, mesh = self._job, self._mesh
        architecture = Architecture(LlamaModel, work.config, work.dtype)
        workload = Workload(work.batch, job.seq, optimizer_state=0)
        costs = profile(architecture, mesh, workload, Running(self._world.device), cache=job.folder)
        numbers = tuple(n for n in workload.sub_batches if n <= work.batch)
        limit_gib = job.memory_gib * SPARE
        problem = Problem(
            costs,
            task.shape.layers,
            limit_gib,
            sub_batches=numbers,
            recompute=task.entry.recompute,
            message_bytes=message_choices(costs),
        )
        chosen, _ = mesh.from_first(lambda: decide(problem, described(work.config)))
        return chosen

    def _compare(self, task: Task, contender: Training, work: Work) -> None:
        """The first contender of a setting is kept; ArithmeticError when another differs."""
        found = Observed.of(contender, compared(work.shapes(), COMPARED))
        file = self._job.folder / f"{self._job.setting(task)}.first"
        if self._world.rank == 0 and file.exists():
            found.difference(torch.load(file, weights_only=False), TOLERANCES[work.dtype])
        elif self._world.rank == 0:
            found.difference(found, 0.0)  # it is finite
            torch.save(found, file)


def why(error: Exception) -> str:
    """In a few words."""
    lines = str(error).splitlines() or [""]
    return OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {lines[0]}"


def end_with_traceback() -> None:
    """On a thread of its own, which stops the others: faulthandler's own timer crashes now and then as they work on."""
    faulthandler.dump_traceback()
    os._exit(FAIL)


def run(job: Job, seat: Seat) -> int:
    """Do what is left of the job."""
    silence_libraries()
    world = World.join(seat.rendezvous)
    layers = Layers(job, world)
    for task in job.tasks[len(job.rows) :]:
        job.begin()
        late = threading.Timer(job.time_limit_s, end_with_traceback)
        late.daemon = True
        late.start()
        try:
            row = layers.row(task) if task.part == "layers" else whole_models.row(job, task, world)
        except ConfigError as error:  # on all ranks, before they do anything
            row = job.failed(task, str(error))
        except Exception as error:
            job.say_why(why(error))
            raise
        release(world.device)
        world.meet()
        if world.rank == 0:
            job.add(row := replace(row, name=task.entry.title, setting=job.setting(task)))
            print(
                f"{row.setting}: {row.name}, recompute {row.recompute}: {row.failure or f'{row.ms:.1f} ms'}", flush=True
            )
        late.cancel()
    if dist.is_initialized():
        dist.destroy_process_group()
    return PASS


def main() -> int:
    """Be a rank; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--rendezvous")
    options = parser.parse_args()
    return as_rank("gpu", options.rendezvous, partial(run, Job.load(options.job)))


if __name__ == "__main__":
    sys.exit(main())
