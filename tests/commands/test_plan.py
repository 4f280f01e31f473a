"""`oases-hf plan`: what it prints and writes, its exit codes, and that it needs no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oases_hf import OasesConfig, Plan, cli
from oases_hf.costs import CostTable, Curve
from oases_hf.planner import Problem, explain, plan_of, predict, solve
from oases_hf.planner.problem import GIB

from ..planner.examples import by_hand, random_table

MIB = 2**20
MODEL = "llama, hidden 8, 6 layers"


def write(table: CostTable, folder: Path) -> str:
    path = folder / "costs.json"
    replace(table, fingerprint={"model": MODEL, "layers": "6"}).save(path)
    return str(path)


@pytest.fixture
def costs(tmp_path: Path) -> str:
    """Of attention and MLP at degrees 1, 2 and 4."""
    return write(random_table(3, tmp_size=4, kinds=2), tmp_path)


TABLE = r"""layers   block      degree  recompute  compute ms   comm ms  exposed ms  memory MiB
1–6      attention       4       none        62\.3      24\.1         0\.0         0\.2
         mlp             4       none        46\.9      24\.1         0\.0         0\.2
last all-reduces of each direction                                  1\.0
optimizer                                                           3\.7
embedding, head and loss                                            4\.6         0\.0
temporaries, at the peak                                                        0\.0
step                                                              118\.4         0\.4

Blocks in order: 12 × degree 4 \(recompute none\); 4 sub-batches, shard_optimizer off\.
A step takes 118\.4 ms: .*
It needs 0\.00 GiB .*
(Degree .*\n){5}No plan that fits is faster \(search, \d+\.\d\d s\)\.
"""


def test_a_plan_as_a_table(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", costs]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(TABLE, said.out), said.out
    assert said.err == ""


def mixed(tmp_path: Path) -> tuple[Problem, list[str]]:
    """A problem whose blocks do not all fit without recompute, and the command line that asks it."""
    table = by_hand(4)
    least, most = (
        predict(Problem(table, 6, 1.0), (4,) * 6, (recompute,) * 6, 2).memory.total for recompute in ("full", "none")
    )
    problem = Problem(table, 6, (least + most) / 2 / GIB, 2, (2,))
    options = ["--memory-gib", repr(problem.memory_limit_gib), "--accumulation", "2", "--sub-batches", "2"]
    return problem, ["plan", write(table, tmp_path), *options]


def test_runs_of_layers_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are sums of the prediction's; together they are its step and memory."""
    problem, command = mixed(tmp_path)
    solution = solve(problem)
    assert len(set(zip(solution.degrees, solution.recompute, strict=True))) > 1
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^(\d+)(?:–(\d+))? +block +(\d) +(\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M)
    assert len(rows) > 1
    counts = [int(last or first) - int(first) + 1 for first, last, *_ in rows]
    assert sum(counts) == 6
    degrees = [int(row[2]) for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    assert tuple(degrees) == solution.degrees
    blocks = solution.prediction.blocks
    for column, name in enumerate(("compute_ms", "comm_ms", "exposed_ms"), start=4):
        total = sum(getattr(block, name) for block in blocks)
        assert sum(float(row[column]) for row in rows) == pytest.approx(total, abs=0.05 * len(rows))
    assert explain(solution).partition(", 0.0")[0] in printed


def test_bytes_of_blocks_ends_and_temporaries_are_the_whole_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = random_table(3, 4, 2)
    big = replace(table, kinds=tuple(replace(k, parameters={1: 2**22, 2: 2**21, 4: 2**20}) for k in table.kinds))
    assert cli.main(["plan", write(big, tmp_path)]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    *parts, whole = (float(line[71:] or 0) for line in lines)
    memory = solve(Problem(big, 6, 1.0, sub_batches=(1, 2, 4))).prediction.memory.total / 2**20
    assert whole == pytest.approx(memory, abs=0.05)
    assert sum(parts) == pytest.approx(whole, abs=0.05 * len(lines))


def test_the_plan_that_it_writes_is_one_that_trains(costs: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert cli.main(["plan", costs, "--json", str(file), "--recompute", "full"]) == 0
    plan = OasesConfig(plan=file).load_plan()
    problem = Problem(CostTable.load(costs), 6, 1.0, sub_batches=(1, 2, 4), recompute="full")
    assert plan == plan_of(solve(problem), MODEL)
    assert plan is not None
    plan.check(MODEL, 12, 4)


COMPARED = r"""
plan          recompute  sub-batches    step ms      GiB  fits   ratio
planned                            2( +\d+\.\d)( +0\.00)   yes   1\.000
(degree [124] +(full|none) +2( +\d+\.\d)( +0\.00) +(yes|no) +\d+\.\d{3}
){6}$"""


def test_uniform_plans_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, command = mixed(tmp_path)
    assert cli.main([*command, "--compare"]) == 0
    printed = capsys.readouterr().out
    assert re.search(COMPARED, printed), printed
    ratios = {
        fits: [float(r) for f, r in re.findall(r" (yes|no) +([\d.]+)$", printed, re.M) if f == fits]
        for fits in ("yes", "no")
    }
    assert ratios["no"], "some need too much memory"
    assert min(ratios["yes"]) == 1.0, "none that fits is faster"


def test_messages_of_the_size_that_was_measured_to_be_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch is 32 MiB in degree 2, and takes 16 ms as a whole, and 12 in two messages."""
    curve = Curve(((8 * MIB, 4.0), (16 * MIB, 6.0), (32 * MIB, 16.0)))
    table = by_hand(2, sequence=MIB, all_reduce={2: curve})
    (kind,) = table.kinds
    table = replace(table, kinds=(replace(kind, timings={2: kind.timings[2]}),))
    costs, file = write(table, tmp_path), tmp_path / "plan.json"
    assert cli.main(["plan", costs, "--sub-batches", "1", "--memory-gib", "1", "--json", str(file), "--compare"]) == 0
    printed = capsys.readouterr().out
    plan = Plan.load(file)
    assert (set(plan.degrees), plan.message_bytes) == ({2}, 16 * MIB)
    assert "1 sub-batches, shard_optimizer off, all-reduces in messages of 16 MiB." in printed
    planned = re.search(r"^planned +1 +([\d.]+) ", printed, re.M)
    uniform = re.search(r"^degree 2 +none +1 +([\d.]+) ", printed, re.M)
    assert planned is not None
    assert uniform is not None
    assert planned[1] == uniform[1], "they are sent alike"


def test_what_blocks_wait_for_without_overlap(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", costs, "--objective", "no_overlap", "--gap", "0.01"]) == 0
    steps = re.search(r"^step +([\d.]+)", capsys.readouterr().out, re.M)
    assert steps is not None
    assert float(steps[1]) > 118.4


def test_nothing_fits(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", costs, "--memory-gib", "1e-5"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"oases-hf plan: planner: the leanest .* needs 0\.00 GiB more than .*\n", said.err), said.err


REFUSED = {
    "no table": (["/nowhere/costs.json"], "cost table /nowhere/costs.json: "),
    "not measured": (["COSTS", "--sub-batches", "3,2"], "--sub-batches: 3 not measured, only 1, 2, 4; choose of these"),
    "another model": (
        ["COSTS", "--layers", "4", "--json", "FILE"],
        f"--json: a plan of 4 layers is not for the model of the cost table, {MODEL}; leave --layers out",
    ),
    "no layers": (["NAMELESS"], "cost table NAMELESS does not say how many layers the model has; give --layers"),
    "no model": (["NAMELESS", "--layers", "4", "--json", "FILE"], "--json: the cost table does not say what model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_usage(case: str, costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nameless = tmp_path / "nameless.json"
    random_table(3, 4, 2).save(nameless)
    words = {"COSTS": costs, "NAMELESS": str(nameless), "FILE": str(tmp_path / "plan.json")}
    arguments, message = REFUSED[case]
    assert cli.main(["plan", *(words.get(word, word) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"oases-hf plan: error: {message.replace('NAMELESS', str(nameless))}"), said
    assert not (tmp_path / "plan.json").exists()


ARGUMENTS = {
    "--layers": ("0", "0: choose 1 or more"),
    "--sub-batches": ("1,x", "invalid list of whole numbers value: '1,x'"),
    "--memory-gib": ("0", "0: choose a number above 0"),
    "--json": ("/nowhere/plan.json", "/nowhere/plan.json: there is no such folder; make it first"),
    "--gap": ("1", "1: choose a number from 0 to below 1"),
}


@pytest.mark.parametrize("option", ARGUMENTS)
def test_senseless_values(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, message = ARGUMENTS[option]
    with pytest.raises(SystemExit) as raised:
        cli.main(["plan", "costs.json", option, value])
    assert raised.value.code == 2
    assert f"oases-hf plan: error: argument {option}: {message}" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
from oases_hf.cli import main
main(sys.argv[1:])
print(sorted({"torch", "transformers", "pulp"} & set(sys.modules)))
"""


def test_it_needs_no_torch(costs: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "plan", costs], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stderr
