"""How processes end: after training, in order; when one rank fails, all, soon, with its cause shown."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from ..launch import Argument, launch, run_launcher
from ..ranks import Worlds
from .fitting import Task, fit
from .test_saving import assert_equal

pytestmark = pytest.mark.dist

CONFIG = Path(__file__).parents[2] / "recipes" / "accelerate" / "ranks_2.yaml"
LIMIT_S = 30.0

FAILING = """
import sys, time
from transformers import TrainerCallback
from tests.integrations.fitting import Task, build

class Fail(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and args.process_index == 1:
            print(f"raised at {time.time():.3f}", flush=True)
            raise ValueError("no luck in step 2")

trainer = build(Task({"max_steps": 1000}), {"tmp_size": int(sys.argv[1])})
trainer.add_callback(Fail())
trainer.train()
print("went on")
"""

ENDING = """
import atexit, sys
from pathlib import Path
import torch.distributed as dist

def report():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    sys.stdout.write(f"{dist.is_initialized()} {sorted({name for name in names if 'gloo' in name})}\\n")

atexit.register(report)  # before ours, so it is called after it

from tests.integrations.fitting import Task, build
build(Task({"max_steps": 2}), {"tmp_size": 2}).train()
"""

SAVING_ALONE = """
import sys, time
from oases_hf import save_pretrained
from tests.integrations.fitting import Task, build
trainer = build(Task({"max_steps": 1}), {"tmp_size": 2})
trainer.train()
if trainer.args.process_index == int(sys.argv[1]):
    print(f"raised at {time.time():.3f}", flush=True)
    save_pretrained(trainer.model, "export")
    print("went on")
"""

ALONE = """
from accelerate import Accelerator
from oases_hf import OasesPlugin
from tests.tiny import tiny_llama

OasesPlugin(degree=2).install(Accelerator(), tiny_llama())
print("went on")
"""


STOPPED = """
import os, signal, sys
from transformers import TrainerCallback
from tests.integrations.fitting import Task, build

number, out = int(sys.argv[1]), sys.argv[2]

class Signal(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), number)

arguments = {"max_steps": 6, "gradient_accumulation_steps": 2, "output_dir": out}
trainer = build(Task(arguments), {})
trainer.add_callback(Signal())
trainer.train()
print(trainer.state.global_step)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def seconds_since_it_raised(output: str) -> float:
    match = re.search(r"raised at (\d+\.\d+)", output)
    assert match, output
    return time.time() - float(match[1])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from /proc")
def test_no_thread_of_a_process_group_outlives_training(tmp_path: Path) -> None:
    """One that does aborts the process now and then, when it wants the interpreter as that ends."""
    for process in launch(2, [script(tmp_path, ENDING)]):
        assert process.returncode == 0, process.stderr
        assert process.stdout.splitlines()[-1] == "False []"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_saving_alone_ends_when_the_others_have(tmp_path: Path, rank: int) -> None:
    """Case 8, in a script: the other rank is through with it."""
    process = launch(2, [script(tmp_path, SAVING_ALONE), str(rank)])[rank]
    assert seconds_since_it_raised(process.stdout) < LIMIT_S
    assert process.returncode != 0
    assert "went on" not in process.stdout
    assert f"must be called on every rank; rank {1 - rank} ended without it" in process.stderr


def test_all_ranks_end_when_one_raises(tmp_path: Path) -> None:
    """Case 20, with two TMP worlds."""
    done = launch(2, [script(tmp_path, FAILING), "1"])
    assert seconds_since_it_raised(done[1].stdout) < LIMIT_S
    for process in done:
        assert process.returncode != 0
        assert "went on" not in process.stdout
        assert "oases: rank 1 failed in step 2: ValueError: no luck in step 2" in process.stderr
    assert "in on_step_begin" in done[1].stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_ends(ranks: Worlds, tmp_path: Path, number: signal.Signals) -> None:
    """To one rank, in the midst of a step; and training goes on from there as if nothing had been."""
    out = tmp_path / "out"
    for process in launch(2, [script(tmp_path, STOPPED), str(int(number)), out]):
        assert process.returncode == 128 + number, process.stderr
        assert "6" not in process.stdout.splitlines()
    assert [path.name for path in out.iterdir()] == ["checkpoint-3"]
    task = Task({"max_steps": 6, "gradient_accumulation_steps": 2, "output_dir": str(out)}, exact=False)
    for through, resumed in zip(ranks(2).run(fit, task, {}), ranks(2).run(fit, task, {}, True), strict=True):
        assert resumed.steps == 6
        assert_equal(resumed.end, through.end)


def accelerate(*arguments: Argument) -> list[Argument]:
    return ["-m", "accelerate.commands.launch", "--config_file", CONFIG, *arguments]


def test_accelerate_launch_ends_when_one_raises(tmp_path: Path) -> None:
    """Case 20."""
    done = run_launcher(accelerate(script(tmp_path, FAILING), "2"))
    assert seconds_since_it_raised(done.stdout) < LIMIT_S
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "oases: rank 1 failed in step 2: ValueError: no luck in step 2; rank 0 ends with it" in done.stderr


def test_unrelated_processes_are_refused(tmp_path: Path) -> None:
    """`accelerate launch`, with neither GPUs nor a word of CPUs, starts processes that know nothing of each other."""
    done = run_launcher(accelerate(script(tmp_path, ALONE)), env={"ACCELERATE_USE_CPU": "false"})
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "2 processes were started, and this Accelerator runs as a single one" in done.stderr


KILLED = """
import os, signal, sys, time
from transformers import TrainerCallback
from tests.integrations.fitting import Task, build

victim, stuck = int(sys.argv[1]), sys.argv[2] == "stuck"

class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            if args.process_index == victim:
                print(f"raised at {time.time():.3f}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if stuck:  # as in a collective of NCCL, which does not notice
                time.sleep(1000)

trainer = build(Task({"max_steps": 1000}), {})
trainer.add_callback(Kill())
trainer.train()
"""


@pytest.mark.parametrize("how", [pytest.param("waiting", marks=pytest.mark.slow), "stuck"])
def test_all_ranks_end_when_one_is_killed(tmp_path: Path, how: str) -> None:
    done = launch(3, [script(tmp_path, KILLED), "1", how])
    assert seconds_since_it_raised(done[1].stdout) < LIMIT_S
    for rank in (0, 2):
        assert done[rank].returncode not in (0, -signal.SIGKILL)
        assert f"oases: rank 1 was killed in step 3; rank {rank} ends with it" in done[rank].stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_accelerate_launch_ends_when_one_is_killed(tmp_path: Path, victim: int) -> None:
    done = run_launcher(accelerate(script(tmp_path, KILLED), str(victim), "stuck"))
    assert seconds_since_it_raised(done.stdout) < LIMIT_S
    assert done.returncode != 0
    assert f"oases: rank {victim} was killed in step 3; rank {1 - victim} ends with it" in done.stderr
