"""Fresh ranks: environment, exit codes, output, bounded waits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .launch import LaunchTimeout, launch, run_launcher

pytestmark = pytest.mark.dist

REPORT = """
import os, sys
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ["EXTRA"])
print("warning", file=sys.stderr)
sys.exit(rank)
"""

REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"{int(total)}\\n")
dist.destroy_process_group()
"""

HANG = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(child.pid, flush=True)

def stuck():
    time.sleep(1000 * (os.environ["RANK"] == "1"))

stuck()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_output_and_exit_codes_come_in_rank_order(tmp_path: Path) -> None:
    done = launch(3, [script(tmp_path, REPORT)], env={"EXTRA": "more"})
    assert [process.returncode for process in done] == [0, 1, 2]
    assert [process.stdout for process in done] == [f"rank {rank} of 3 more\n" for rank in range(3)]
    assert [process.stderr for process in done] == ["warning\n"] * 3


def test_ranks_find_each_other(tmp_path: Path) -> None:
    done = launch(2, [script(tmp_path, REDUCE)])
    assert [process.stdout for process in done] == ["2\n", "2\n"], done


def test_a_hanging_process_is_ended_with_its_children(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchTimeout, match=r"in stuck") as error:
        launch(2, [script(tmp_path, HANG)], timeout_s=4.0)  # two interpreters start in it, one after the other
    assert time.monotonic() - start < 10
    children = [int(line) for line in str(error.value).splitlines() if line.isdecimal()]
    assert len(children) == 2
    assert not any(is_running(pid) for pid in children)


def test_a_launcher_starts_its_own_ranks(tmp_path: Path) -> None:
    argv: list[str | Path] = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script(tmp_path, REDUCE),
    ]
    done = run_launcher(argv)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie that awaits its reaper."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
