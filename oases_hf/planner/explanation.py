"""Say in plain sentences why a plan is what it is."""

from __future__ import annotations

import math
from itertools import groupby

from .prediction import Prediction, predict_uniform
from .problem import GIB, Choice
from .solver import Solution


def explain(solution: Solution) -> str:
    """Sentences, one a line: the plan, its time, what memory bound, and how the uniform plans compare."""
    return "\n".join([_plan(solution), _time(solution), _memory(solution), *_uniform(solution), _proof(solution)])


def _plan(solution: Solution) -> str:
    choices = zip(solution.degrees, solution.recompute, strict=True)
    runs = [(choice, len(list(run))) for choice, run in groupby(choices)]
    text = ", ".join(f"{count} × degree {degree} (recompute {recompute})" for (degree, recompute), count in runs)
    size = solution.message_bytes
    messages = "" if size is None else f", all-reduces in messages of {size / 2**20:g} MiB"
    return (
        f"Blocks in order: {text}; {solution.sub_batches} sub-batches, shard_optimizer "
        f"{solution.shard_optimizer}{messages}."
    )


def _time(solution: Solution) -> str:
    step = solution.prediction
    comm_ms, exposed_ms = sum(block.comm_ms for block in step.blocks), _exposed_ms(step)
    return (
        f"A step takes {step.step_ms:.1f} ms: {sum(block.compute_ms for block in step.blocks):.1f} computing blocks, "
        f"{exposed_ms:.1f} waiting for {comm_ms:.1f} of all-reduces, {step.reshard_ms:.1f} resharding, "
        f"{step.gradient_sync_ms:.1f} for gradients of replicas beyond what backward hides, {step.update_ms:.1f} for "
        f"the optimizer and {step.outside_ms:.1f} outside the blocks."
    )


def _memory(solution: Solution) -> str:
    memory, limit_gib = solution.prediction.memory, solution.problem.memory_limit_gib
    parts = {
        "states": memory.parameters + memory.gradients + memory.optimizer,
        "kept activations": memory.saved,
        "temporaries": memory.runtime,
    }
    text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    of_limit = f" of {limit_gib:g}" if math.isfinite(limit_gib) else ""
    return f"It needs {memory.total / GIB:.2f}{of_limit} GiB ({text})."


def _uniform(solution: Solution) -> list[str]:
    """One sentence per uniform plan in the same mode, the plan itself left out."""
    problem, lines = solution.problem, []
    chosen = set(map(Choice, solution.degrees, solution.recompute))
    for choice in problem.choices(problem.choosable_degrees):
        if chosen != {choice}:
            other = predict_uniform(
                problem, choice, solution.sub_batches, solution.shard_optimizer, solution.message_bytes
            )
            lines.append(_compared(solution, choice, other))
    return lines


def _compared(solution: Solution, choice: Choice, other: Prediction) -> str:
    name = f"Degree {choice.degree} everywhere (recompute {choice.recompute})"
    chosen = solution.prediction
    over_gib = other.memory.total / GIB - solution.problem.memory_limit_gib
    if over_gib > 0:
        speed = f"would take {other.step_ms:.1f} ms" if other.step_ms < chosen.step_ms else "would not be faster either"
        return f"{name} does not fit, by {over_gib:.2f} GiB; it {speed}."
    reasons = {
        "computation": sum(b.compute_ms for b in other.blocks) - sum(b.compute_ms for b in chosen.blocks),
        "exposed all-reduces": _exposed_ms(other) - _exposed_ms(chosen),
        "resharding": other.reshard_ms - chosen.reshard_ms,
        "gradients and optimizer": other.gradient_sync_ms
        + other.update_ms
        - chosen.gradient_sync_ms
        - chosen.update_ms,
    }
    text = ", ".join(f"{name} {ms:+.1f}" for name, ms in reasons.items() if abs(ms) >= 0.05)
    return f"{name} fits and takes {other.step_ms:.1f} ms, {other.step_ms - chosen.step_ms:+.1f} ({text})."


def _proof(solution: Solution) -> str:
    proof = {
        "optimal": "No plan that fits is faster",
        "within_gap": f"No plan that fits is faster by more than {100 * solution.gap:.2f} %",
        "time_limit": f"Time ran out: a plan up to {100 * solution.gap:.2f} % faster may exist",
    }[solution.status]
    return f"{proof} ({solution.solver}, {solution.seconds:.2f} s)."


def _exposed_ms(step: Prediction) -> float:
    return step.tail_ms + sum(block.exposed_ms for block in step.blocks)
