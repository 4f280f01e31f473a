"""What every instruction needs and makes, and the check that refuses a schedule which computes wrongly.

The state of a step is a set of facts. :func:`requires` states each dependency once; :func:`check`
plays a schedule against it. The runtime keeps tensors where this module keeps facts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, assert_never

from ..errors import ScheduleError
from .instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    Instruction,
    Moved,
    Project,
    Recompute,
    Reduced,
    ReduceGrads,
    Schedule,
    Slice,
    StartAsync,
    Sync,
    to_text,
)
from .passes import Move, gathers

Name = Literal[
    "hidden",  # the input of a block, in forward
    "input",  # the input of a block, to recompute from
    "inner",  # what a projection is applied to
    "projected",  # a piece whose projection is done
    "partial",  # a tensor ready for its all-reduce
    "to_gather",  # rows that the ranks of the next block each have a part of
    "to_slice",  # rows of which a replica of the next block wants a part
    "flying",  # a collective that runs: its buffer is nobody's
    "arrived",  # an all-reduce that is done
    "recording",  # a forward in pieces that keeps its graph
    "graph",  # a block ready for backward
    "grad",  # the whole gradient of a block's output
    "queued",  # weight gradients put off
    "weight_grad",  # a sub-batch's share of a block's weight gradients, in place
]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that holds at a point of a step: for a block and sub-batch, or for a collective."""

    name: Name
    of: Collective | tuple[int, int]

    def __str__(self) -> str:
        what = ".".join(map(str, self.of)) if isinstance(self.of, tuple) else str(self.of)
        return f"{self.name} {what}"


def requires(op: Instruction, sub_batches: int) -> list[Fact]:
    """The facts that must hold before ``op`` may run."""
    match op:
        case Forward(block, k):
            return [Fact("hidden", (block, k))]
        case Recompute(block, k):
            return [Fact("input", (block, k))]
        case Project(collective):
            return [Fact("inner", collective.siblings()[0])]
        case StartAsync(collective):
            return [Fact("to_gather" if collective.moves_rows else "partial", collective)]
        case Slice(collective):
            return [Fact("to_slice", collective)]
        case Sync(collective):
            return [Fact("flying", collective)]
        case Backward(block, k) | BackwardInput(block, k):
            return [Fact("graph", (block, k)), Fact("grad", (block, k))]
        case BackwardWeight(block, k):
            return [Fact("queued", (block, k))]
        case ReduceGrads(block):
            return [Fact("weight_grad", (block, k)) for k in range(sub_batches)]
        case _:
            assert_never(op)


def _outputs(tensor: Reduced, op: Forward | Recompute) -> Fact:
    first = Collective(op.block, op.sub_batch, tensor, 0, op.pieces)
    return Fact("partial" if op.pieces == 1 else "inner", first)


def _there(tensor: Moved, block: int, k: int) -> Fact:
    """The stream, or its gradient, is there in the rows of whoever reads it next."""
    return Fact("grad", (block - 1, k)) if tensor == "grad" else Fact(tensor, (block, k))


def _reaches(tensor: Moved, block: int, k: int, changes: Mapping[int, Move]) -> Fact:
    """What holds when the stream gets from the block before to ``block``, or its gradient the other way."""
    if block not in changes:
        return _there(tensor, block, k)
    collective = Collective(block, k, tensor)
    return Fact("to_gather" if gathers(changes[block], tensor) else "to_slice", collective)


def _joined(collective: Collective, changes: Mapping[int, Move]) -> Fact:
    """What the last piece of a collective brings about."""
    block, k = collective.block, collective.sub_batch
    match collective.tensor:
        case "output":
            return _reaches("hidden", block + 1, k, changes)
        case "recomputed":
            return _reaches("input", block + 1, k, changes)
        case "input_grad":
            return _reaches("grad", block, k, changes)
        case "hidden" | "input" | "grad":
            return _there(collective.tensor, block, k)
        case _:
            assert_never(collective.tensor)


def _apply(op: Instruction, facts: set[Fact], changes: Mapping[int, Move]) -> None:
    """Change ``facts`` to what holds after ``op``."""
    match op:
        case Forward(block, k, pieces, keep):
            facts.add(_outputs("output", op))
            if keep == "input":
                facts.add(Fact("input", (block, k)))
            elif keep == "graph":
                facts.add(Fact("graph" if pieces == 1 else "recording", (block, k)))
        case Recompute(block, k, pieces):
            facts.add(_outputs("recomputed", op))
            if pieces == 1:
                facts.add(Fact("graph", (block, k)))
        case Project(collective):
            facts |= {Fact("partial", collective), Fact("projected", collective)}
            whole = all(Fact("projected", piece) in facts for piece in collective.siblings())
            at = (collective.block, collective.sub_batch)
            if whole and (collective.tensor == "recomputed" or Fact("recording", at) in facts):
                facts.add(Fact("graph", at))
        case StartAsync(collective):
            facts.remove(Fact("to_gather" if collective.moves_rows else "partial", collective))
            facts.add(Fact("flying", collective))
        case Slice(collective):
            facts.remove(Fact("to_slice", collective))
            facts.add(_joined(collective, changes))
        case Sync(collective):
            facts.remove(Fact("flying", collective))
            facts.add(Fact("arrived", collective))
            if all(Fact("arrived", piece) in facts for piece in collective.siblings()):
                facts.add(_joined(collective, changes))
        case Backward(block, k) | BackwardInput(block, k):
            facts.remove(Fact("graph", (block, k)))
            facts.discard(Fact("input", (block, k)))  # let go
            facts.add(Fact("partial", Collective(block, k, "input_grad")))
            facts.add(Fact("weight_grad" if isinstance(op, Backward) else "queued", (block, k)))
        case BackwardWeight(block, k):
            facts.remove(Fact("queued", (block, k)))
            facts.add(Fact("weight_grad", (block, k)))
        case ReduceGrads():
            pass
        case _:
            assert_never(op)


def around(ops: Sequence[Instruction], position: int, reach: int = 8) -> str:
    """The text of the instructions around ``position``, that one in brackets."""
    first = max(0, position - reach)
    words = [to_text(op) for op in ops[first : position + reach + 1]]
    words[position - first] = f"[{words[position - first]}]"
    return " ".join(words)


def _work(op: Instruction) -> Hashable:
    """What may happen once in a step, however the instruction is written."""
    match op:
        case Forward(block, k) | Recompute(block, k):
            return type(op), block, k
        case Backward(block, k) | BackwardInput(block, k):
            return Backward, block, k
        case _:
            return op


def _play(
    half: str,
    ops: Sequence[Instruction],
    facts: set[Fact],
    done: set[Hashable],
    sub_batches: int,
    changes: Mapping[int, Move],
) -> None:
    for position, op in enumerate(ops):
        work = _work(op)
        if work in done:
            # Gradients add up, and facts are only "made": they do not tell twice from once.
            raise ScheduleError(
                f"{half} step {position}, {to_text(op)}: that is done already; delete one: {around(ops, position)}"
            )
        done.add(work)
        missing = [fact for fact in requires(op, sub_batches) if fact not in facts]
        if missing:
            raise ScheduleError(
                f"{half} step {position}, {to_text(op)}: {missing[0]} does not hold yet; "
                f"move it behind what makes that: {around(ops, position)}"
            )
        _apply(op, facts, changes)
    flying = sorted(str(fact.of) for fact in facts if fact.name == "flying")
    if flying:
        raise ScheduleError(f"{half}: {', '.join(flying)} started and never awaited; add the Sync")


def _demand(half: str, facts: set[Fact], wanted: list[Fact]) -> None:
    for fact in wanted:
        if fact not in facts:
            raise ScheduleError(f"{half} ends, and {fact} was never made")


def check(
    schedule: Schedule,
    blocks: int,
    sub_batches: int,
    first_block: int = 0,
    changes: Mapping[int, Move] = MappingProxyType({}),
) -> Schedule:
    """Return ``schedule`` if it computes a right step; refuse it otherwise.

    Args:
        schedule: the instructions to play.
        blocks: the number of blocks that the step must run forward.
        sub_batches: the number of sub-batches that each block must run.
        first_block: the first block that needs a backward.
        changes: before which blocks rows must move, as ``moves`` returns them.

    Raises:
        ScheduleError: an instruction runs before what it needs, or twice, or something is missing at the end.
    """
    subs = range(sub_batches)
    facts = {_reaches("hidden", 0, k, changes) for k in subs}
    done: set[Hashable] = set()
    _play("forward", schedule.forward, facts, done, sub_batches, changes)
    _demand("forward", facts, [Fact("hidden", (blocks, k)) for k in subs])
    facts |= {_reaches("grad", blocks, k, changes) for k in subs}
    _play("backward", schedule.backward, facts, done, sub_batches, changes)
    _demand("backward", facts, [Fact("weight_grad", (b, k)) for b in range(first_block, blocks) for k in subs])
    if first_block < blocks:
        _demand("backward", facts, [Fact("grad", (first_block - 1, k)) for k in subs])
    return schedule
