"""The instructions a training step is made of, and their one-line text form.

A *block* is a run of computation that ends in one all-reduce in forward and one in backward; a
*sub-batch* is one of the parts a batch is split into. The instructions are those of Algorithm 1 of
the Oases paper, with the two halves of a backward told apart (as in zero-bubble pipelines), the
row-parallel projection cut into pieces (as Wang et al. do), and rows that move where neighbours
differ in degree (section V of the paper).

Text forms, for block 3 and sub-batch 1::

    F3.1     Forward, input kept for recompute    B3.1   Backward
    f3.1     Forward, input let go                I3.1   BackwardInput
    G3.1     Forward, graph kept for backward     W3.1   BackwardWeight
    R3.1     Recompute                            D3     ReduceGrads
    R3.1/2   Recompute, output in two pieces
    =o3.1:0/2  Project      >o3.1  StartAsync     .o3.1  Sync      /h3.1  Slice

The letter of a collective is ``o`` (a block's output), ``r`` (the same output, recomputed) or ``g``
(the gradient of a block's input), which are all-reduces over the block's ranks; ``h`` (what a block
reads), ``i`` (the same, recomputed) or ``d`` (the gradient of what a block reads), whose rows move
between the block and the one before. Behind the last block, one more is counted for what reads the output.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ScheduleError

Reduced = Literal["output", "recomputed", "input_grad"]
Moved = Literal["hidden", "input", "grad"]
Tensor = Reduced | Moved
Kept = Literal["input", "graph", "nothing"]
_LETTERS: dict[Tensor, str] = {
    "output": "o",
    "recomputed": "r",
    "input_grad": "g",
    "hidden": "h",
    "input": "i",
    "grad": "d",
}
_TENSORS = {letter: tensor for tensor, letter in _LETTERS.items()}


@dataclass(frozen=True, slots=True)
class Collective:
    """One tensor on its way between ranks; the key that pairs a StartAsync with its Sync."""

    block: int
    sub_batch: int
    tensor: Tensor
    piece: int = 0
    pieces: int = 1

    def __str__(self) -> str:
        part = f":{self.piece}/{self.pieces}" if self.pieces > 1 else ""
        return f"{_LETTERS[self.tensor]}{self.block}.{self.sub_batch}{part}"

    @property
    def moves_rows(self) -> bool:
        """Whether rows move between blocks of different degrees; else a sum goes over the block's ranks."""
        return self.tensor in get_args(Moved)

    def siblings(self) -> tuple[Collective, ...]:
        """All pieces of the tensor that this is a piece of, itself included."""
        return pieces_of(self.block, self.sub_batch, self.tensor, self.pieces)


def pieces_of(block: int, sub_batch: int, tensor: Tensor, pieces: int) -> tuple[Collective, ...]:
    """The collectives that together reduce one tensor of one block and sub-batch."""
    return tuple(Collective(block, sub_batch, tensor, i, pieces) for i in range(pieces))


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a block's partial output, and keep what backward needs; up to the projection when in pieces."""

    block: int
    sub_batch: int
    pieces: int = 1
    keep: Kept = "input"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Compute a block's partial output again, from its input, with a graph."""

    block: int
    sub_batch: int
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Project:
    """Apply the row-parallel projection to one piece of a sub-batch's tokens."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a block's backward: the gradients of its input (this rank's share) and of its weights."""

    block: int
    sub_batch: int


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """The half of a backward that the all-reduce waits for: the gradient of the input."""

    block: int
    sub_batch: int


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The other half, which may run while the all-reduce does: the gradients of the weights."""

    block: int
    sub_batch: int


@dataclass(frozen=True, slots=True)
class StartAsync:
    """Start an all-reduce, whose buffer is nobody's until the Sync, or a gathering of rows."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Sync:
    """Wait for a collective; join what was reduced to the residual stream."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Slice:
    """Keep this replica's rows of what all ranks have: the other way of what is gathered in the other pass."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """Start the reduction of a block's weight gradients over its replicas, data-parallel ones included."""

    block: int


Compute = Forward | Recompute | Backward | BackwardInput | BackwardWeight
Communicate = Project | StartAsync | Sync | Slice
Instruction = Compute | Communicate | ReduceGrads

_COMPUTE: dict[type[Compute], str] = {
    Recompute: "R",
    Backward: "B",
    BackwardInput: "I",
    BackwardWeight: "W",
}
_COMMUNICATE: dict[type[Communicate], str] = {Project: "=", StartAsync: ">", Sync: ".", Slice: "/"}
_KEEP: dict[Kept, str] = {"input": "F", "graph": "G", "nothing": "f"}
_COMPUTE_OF = {letter: kind for kind, letter in _COMPUTE.items()}
_COMMUNICATE_OF = {sign: kind for kind, sign in _COMMUNICATE.items()}
_KEEP_OF = {letter: keep for keep, letter in _KEEP.items()}
_PATTERN = re.compile(
    r"([FGfRBIW])(\d+)\.(\d+)(?:/([1-9]\d*))?|([=>./])([orghid])(\d+)\.(\d+)(?::(\d+)/([1-9]\d*))?|D(\d+)"
)


def block_of(op: Instruction) -> int:
    """The block that an instruction works on, or whose tensor travels."""
    return op.collective.block if isinstance(op, Communicate) else op.block


def to_text(op: Instruction) -> str:
    """Write one instruction in its text form."""
    match op:
        case Project() | StartAsync() | Sync() | Slice():
            return f"{_COMMUNICATE[type(op)]}{op.collective}"
        case ReduceGrads():
            return f"D{op.block}"
        case Forward() | Recompute():
            letter = _KEEP[op.keep] if isinstance(op, Forward) else _COMPUTE[type(op)]
            return f"{letter}{op.block}.{op.sub_batch}" + (f"/{op.pieces}" if op.pieces > 1 else "")
        case _:
            return f"{_COMPUTE[type(op)]}{op.block}.{op.sub_batch}"


def from_text(text: str) -> Instruction:
    """Read one instruction from its text form.

    Raises:
        ScheduleError: the text is not the form of any instruction.
    """
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise ScheduleError(f"{text!r} is no instruction; write for example F0.1, >o0.1, .g3.0 or D2")
    letter, block, sub, pieces, sign, tensor, cblock, csub, piece, of, reduce = found.groups()
    if reduce is not None:
        return ReduceGrads(int(reduce))
    if sign is not None:
        collective = Collective(int(cblock), int(csub), _TENSORS[tensor], int(piece or 0), int(of or 1))
        if collective.piece >= collective.pieces:
            raise ScheduleError(f"{text!r}: pieces count from 0; the last of {of} is {collective.pieces - 1}")
        return _COMMUNICATE_OF[sign](collective)
    if letter in _KEEP_OF:
        return Forward(int(block), int(sub), int(pieces or 1), _KEEP_OF[letter])
    if letter == "R":
        return Recompute(int(block), int(sub), int(pieces or 1))
    if pieces is not None:
        raise ScheduleError(f"{text!r}: only F, G, f and R come in pieces")
    return _COMPUTE_OF[letter](int(block), int(sub))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The instructions of one step: those before the loss, and those after it.

    ``str()`` and :meth:`parse` convert to and from one line of text, ``|`` standing for the loss.
    """

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read a schedule from its text form; raises ScheduleError when it is not one."""
        halves = text.split("|")
        if len(halves) != 2:
            raise ScheduleError("a schedule's text has one '|', which stands for the loss")
        forward, backward = (tuple(from_text(word) for word in half.split()) for half in halves)
        return cls(forward, backward)

    def __str__(self) -> str:
        return " ".join([*map(to_text, self.forward), "|", *map(to_text, self.backward)])

    @property
    def blocks(self) -> int:
        """The number of blocks that the forward half runs."""
        return 1 + max((op.block for op in self.forward if isinstance(op, Forward)), default=-1)

    @property
    def sub_batches(self) -> int:
        """The number of sub-batches that the forward half runs."""
        return 1 + max((op.sub_batch for op in self.forward if isinstance(op, Forward)), default=-1)

    @property
    def kept_inputs(self) -> int:
        """How many block inputs, each of one sub-batch, the forward half keeps for recompute."""
        return sum(isinstance(op, Forward) and op.keep == "input" for op in self.forward)
