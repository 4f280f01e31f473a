"""The paper's Table I from its authors' profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oases_hf.planner import Problem, predict, solve
from oases_hf.planner.problem import GIB
from scripts.bench.paper_plans import cost_table, main, runs


def test_the_paper_s_plan_of_llama_7b_is_the_best_of_its_memory() -> None:
    printed = (2,) * 20 + (4,) * 12  # 10 layers of degree 2 and 6 of degree 4
    problem = Problem(cost_table(4096, 32), 16, memory_limit_gib=1.0, accumulation=64, recompute="full")
    needed = predict(problem, printed, ["full" for _ in printed], 2).memory.total
    solution = solve(replace(problem, memory_limit_gib=needed / GIB))
    assert (solution.degrees, solution.status) == (printed, "optimal")


def test_the_script_prints_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if ", batch " in line] == ["BERT-1.3B", "GPT-8.3B", "LLaMA-7B"]
    assert runs((1, 2, 2, 2, 4, 4)) == "[1]×0.5+[2]×1.5+[4]×1"
