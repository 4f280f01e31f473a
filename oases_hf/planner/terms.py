"""The cost terms: what one block, and two neighbours, add to a step's time and to a rank's memory.

The objective is a sum over blocks and over pairs of neighbours; the search and :func:`predict` read the same terms
here. They are equations 3 and 4 of the paper, made exact where the runtime is known better:

* ``K`` sub-batches: in each direction a block has one slot behind its neighbour (in the pair's term) and ``K - 1``
  behind its own sub-batches. With ``K = 1`` nothing hides the all-reduce in forward.
* The ``max`` of a slot takes the neighbour's own degree; equation 3 as published code has it assumes equal ones.
* A gather happens once per sub-batch, and stops the overlap of the slot behind it. In backward recompute needs no
  gradient and goes before the gather, so it still hides the neighbour's all-reduce: only backward itself waits.
* The ends: embedding and head are a neighbour of degree ``T`` that neither computes nor communicates.
* Gradients of a block with several holders are reduced while the next block runs backward: exposed is what does not
  fit into the time its lane is idle. Left-overs are not carried on to further blocks, so this is an upper bound.
* To sum gradients on their owners, or to send what these made of parameters, is an exchange in which each of n holders
  sends and receives (n - 1) / n of the bytes; an all-reduce does so twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from ..allocator import allocated_bytes
from ..costs import KindCosts
from ..plan import ShardOptimizer
from .problem import Choice, Mode, Problem

COPIES = 2
"""Of the hidden tensor of a micro-batch: what a recording reads, and the gradient of its output."""


@dataclass(frozen=True)
class BlockTerms:
    """One block with one choice: ms of one sub-batch, or of one optimizer step where it says so; bytes of a rank."""

    degree: int
    forward_ms: float = 0.0
    recompute_ms: float = 0.0
    backward_ms: float = 0.0
    forward_comm_ms: float = 0.0
    backward_comm_ms: float = 0.0
    reduce_ms: float = 0.0  # all sub-batches' gradients at once, over the block's holders
    update_ms: float = 0.0  # per step: the optimizer, and the exchange of what owners updated
    sync_bytes: int = 0  # per step: gradients reduced over the holders, and what owners updated; not the unowned few
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved_bytes: int = 0
    runtime_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """What adds up over the blocks (m_s and m_t of equation 6)."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.saved_bytes


class Bytes(NamedTuple):
    """What a rank keeps of parameters for training."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Parts:
    """Milliseconds of one optimizer step, by what they are spent on."""

    exposed_ms: float = 0.0
    reshard_ms: float = 0.0
    sync_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.exposed_ms + self.reshard_ms + self.sync_ms


class Terms:
    """The terms of one problem in one mode."""

    def __init__(self, problem: Problem, mode: Mode) -> None:
        self.problem = problem
        self.mode = mode
        self.costs = problem.costs
        self.ends = BlockTerms(degree=self.costs.tmp_size)
        self.reductions = problem.accumulation if mode.shard_optimizer == "reduce" else 1

    @classmethod
    def of_plan(
        cls,
        problem: Problem,
        degrees: Collection[int],
        sub_batches: int,
        shard_optimizer: ShardOptimizer,
        message_bytes: int | None,
    ) -> Terms:
        """Those of plans with these degrees."""
        rows = problem.costs.sub_batch_rows(min(degrees), sub_batches)
        return cls(problem, Mode(sub_batches, shard_optimizer, rows, message_bytes))

    def block(self, kind: KindCosts, choice: Choice) -> BlockTerms:
        """Times and bytes of one block; raises ConfigError where the costs were not measured."""
        costs, degree, sub_batches = self.costs, choice.degree, self.mode.sub_batches
        size, timing = costs.element_bytes, costs.timing(kind, degree, sub_batches, self.mode.rows)
        elements = costs.hidden_elements(degree, self.mode.rows)
        holders = costs.tmp_size // degree * costs.data_size
        held = costs.parameters(kind, degree)
        owners = 1 if self.mode.shard_optimizer == "off" else holders
        keepers = holders if self.mode.shard_optimizer == "reduce" else 1
        unowned = kind.unowned.get(degree, 0)
        owned = held - unowned
        stepped = unowned + -(-owned // owners)
        gradients = unowned + -(-owned // keepers)  # that are kept from one micro-batch to the next
        summing = costs.exchange_ms if owners > 1 else costs.all_reduce_ms
        updated_ms = costs.exchange_ms(owners, owned * size.parameter)
        others = owned - -(-owned // owners)  # that other ranks own
        # Of what others own, when an exchange starts while the last one runs: two parts come in, one is being packed;
        # and where gradients are kept by owners alone, what is packed and what is on its way comes on top of them.
        buffers = 5 if self.mode.shard_optimizer == "reduce" else 3
        full = choice.recompute == "full"
        hidden_bytes = self.hidden_bytes(degree, size.forward)
        saved_bytes = sub_batches * kind.saved_hiddens * hidden_bytes
        if not full:
            saved_bytes = timing.graphs_bytes(sub_batches) + sub_batches * kind.norm_hiddens * hidden_bytes
        return BlockTerms(
            degree=degree,
            forward_ms=timing.forward_ms,
            recompute_ms=timing.recompute_ms if full else 0.0,
            backward_ms=timing.backward_ms,
            forward_comm_ms=self.all_reduce_ms(degree, elements * size.sent_partial),
            backward_comm_ms=self.all_reduce_ms(degree, elements * size.sent_gradient),
            reduce_ms=summing(holders, owned * size.parameter_gradient),
            update_ms=stepped * costs.optimizer_ms / 1e6 + updated_ms,
            parameter_bytes=held * size.parameter,
            gradient_bytes=gradients * size.parameter_gradient,
            optimizer_bytes=stepped * size.optimizer_state,
            sync_bytes=self._sync_bytes(owned, holders),
            saved_bytes=saved_bytes,
            runtime_bytes=timing.runtime_bytes
            + (timing.graph_bytes if full else 0)
            + sub_batches * self.hidden_bytes(degree, size.gradient)
            + (self._moved_bytes() if degree < costs.tmp_size else 0)
            + buffers * others * size.parameter_gradient,
        )

    def all_reduce_ms(self, degree: int, size_bytes: float) -> float:
        """Time of a block's all-reduce, as it is sent; raises ConfigError if that group size was not measured."""
        return self.costs.all_reduce_ms(degree, size_bytes, self.mode.message_bytes)

    def slot(self, compute_ms: float, comm_ms: float) -> float:
        """Time of a computation beside a collective: their maximum, and more where one slows the other down."""
        if self.problem.objective == "no_overlap":
            return compute_ms + comm_ms
        slow = self.costs.slowdown
        if compute_ms * slow.compute <= comm_ms * slow.collective:
            return comm_ms + compute_ms * slow.compute * (1 - 1 / slow.collective)
        return compute_ms + comm_ms * slow.collective * (1 - 1 / slow.compute)

    def compute_ms(self, block: BlockTerms) -> float:
        """What the block computes in a step when it waits for nothing."""
        once = block.forward_ms + block.recompute_ms + block.backward_ms
        return self.problem.accumulation * self.mode.sub_batches * once

    def comm_ms(self, block: BlockTerms) -> float:
        """How long the block's all-reduces take in a step, hidden or not."""
        return self.problem.accumulation * self.mode.sub_batches * (block.forward_comm_ms + block.backward_comm_ms)

    def inner(self, block: BlockTerms) -> Parts:
        """Exposed among the block's own sub-batches: K - 1 slots in each direction (equation 3)."""
        compute_ms = block.recompute_ms + block.backward_ms
        waits = self.slot(block.forward_ms, block.forward_comm_ms) - block.forward_ms
        waits += self.slot(compute_ms, block.backward_comm_ms) - compute_ms
        return Parts(exposed_ms=self.problem.accumulation * (self.mode.sub_batches - 1) * waits)

    def forward_entry(self, before: BlockTerms, block: BlockTerms) -> Parts:
        """Exposed when forward goes on from ``before`` to ``block`` (equations 3 and 4)."""
        gathered = before.degree < block.degree
        if gathered or self.mode.sub_batches == 1:
            exposed_ms = before.forward_comm_ms
        else:
            exposed_ms = self.slot(block.forward_ms, before.forward_comm_ms) - block.forward_ms
        return Parts(
            exposed_ms=self.problem.accumulation * exposed_ms,
            reshard_ms=self._gather_ms(before, block, self.costs.element_bytes.forward) if gathered else 0.0,
        )

    def backward_entry(self, behind: BlockTerms, block: BlockTerms) -> Parts:
        """Exposed when backward goes on from ``behind`` to ``block``, the gradient reduction of ``behind`` included."""
        gathered = behind.degree < block.degree
        hiding_ms = block.recompute_ms
        if not gathered and self.mode.sub_batches > 1:
            hiding_ms += block.backward_ms
        exposed_ms = self.slot(hiding_ms, behind.backward_comm_ms) - hiding_ms
        idle_ms = self._idle_ms(behind, block, exposed_ms)
        return Parts(
            exposed_ms=self.problem.accumulation * exposed_ms,
            reshard_ms=self._gather_ms(behind, block, self.costs.element_bytes.gradient) if gathered else 0.0,
            sync_ms=self.reductions * max(0.0, behind.reduce_ms - idle_ms),
        )

    def pair_ms(self, before: BlockTerms, block: BlockTerms) -> float:
        """What two neighbours, in the order of forward, add to a step beside their inner terms."""
        return self.forward_entry(before, block).total_ms + self.backward_entry(block, before).total_ms

    def node_ms(self, block: BlockTerms) -> float:
        """What a block adds to a step whatever its neighbours are."""
        return self.compute_ms(block) + self.inner(block).total_ms + block.update_ms

    def outside_sync_ms(self) -> float:
        """Per step: the reduction of embedding's and head's gradients over the data parallel worlds."""
        outside, size = self.costs.outside, self.costs.element_bytes.parameter_gradient
        if self.mode.shard_optimizer == "off":
            return self.costs.all_reduce_ms(self.costs.data_size, outside.parameters * size)
        owned_bytes = (outside.parameters - outside.unowned) * size
        return self.reductions * self.costs.exchange_ms(self.costs.data_size, owned_bytes)

    def outside_update_ms(self) -> float:
        """Per step: the optimizer of embedding and head, and the exchange of what it updated."""
        shared, outside = self.mode.shard_optimizer != "off", self.costs.outside
        updated_bytes = (outside.parameters - outside.unowned) * self.costs.element_bytes.parameter
        updated_ms = self.costs.exchange_ms(self.costs.data_size, updated_bytes) if shared else 0.0
        return self.outside_stepped(shared) * self.costs.optimizer_ms / 1e6 + updated_ms

    def outside_stepped(self, owned: bool) -> int:
        """Elements of embedding and head that a rank keeps for itself, where data parallel worlds share them out."""
        outside = self.costs.outside
        sharers = self.costs.data_size if owned else 1
        return outside.unowned + -(-(outside.parameters - outside.unowned) // sharers)

    def outside_sync_bytes(self) -> int:
        """Per step, of embedding and head: what :attr:`BlockTerms.sync_bytes` is of a block."""
        return self._sync_bytes(self.costs.outside.parameters - self.costs.outside.unowned, self.costs.data_size)

    def outside_bytes(self) -> Bytes:
        """Parameters, gradients and optimizer state of embedding and head."""
        size, way = self.costs.element_bytes, self.mode.shard_optimizer
        return Bytes(
            self.costs.outside.parameters * size.parameter,
            self.outside_stepped(way == "reduce") * size.parameter_gradient,
            self.outside_stepped(way != "off") * size.optimizer_state,
        )

    def constant_ms(self) -> float:
        """Per step: what no choice for a block changes."""
        return self.problem.accumulation * self.costs.outside.ms + self.outside_sync_ms() + self.outside_update_ms()

    def constant_bytes(self) -> int:
        """What is kept whatever is chosen for blocks."""
        return sum(self.outside_bytes()) + self.beside_bytes

    def _moved_bytes(self) -> int:
        """What gathers between degrees make at the highest one, which is there at the ends: a tensor each way."""
        highest, size = self.costs.tmp_size, self.costs.element_bytes
        return self.hidden_bytes(highest, size.forward) + self.hidden_bytes(highest, size.gradient)

    def hidden_bytes(self, degree: int, element_bytes: int) -> int:
        """What the hidden tensor of a sub-batch takes on a rank; the pools of recordings hold whole segments."""
        size_bytes = self.costs.hidden_elements(degree, self.mode.rows) * element_bytes
        return allocated_bytes(size_bytes) if self.recorded else size_bytes

    @property
    def recorded(self) -> bool:
        """Whether blocks run as recordings; those that free gradients early do not."""
        return self.costs.recorded and self.mode.shard_optimizer != "reduce"

    @property
    def beside_bytes(self) -> int:
        """Of what embedding, head and loss need, what is there beside all that blocks need.

        With recordings all of it, and COPIES hidden tensors of a micro-batch more, in which these take and give theirs.
        """
        costs = self.costs
        copied = COPIES * costs.rows * costs.sequence * costs.hidden * costs.element_bytes.forward
        return costs.outside.bytes + copied if self.recorded else 0

    @property
    def least_runtime_bytes(self) -> int:
        """What embedding, head and loss need when blocks need nothing."""
        return 0 if self.recorded else self.costs.outside.bytes

    def _sync_bytes(self, owned: int, holders: int) -> int:
        """Per step: gradients reduced over ``holders``, and what owners updated; all-reduces count what they sum."""
        size, shared = self.costs.element_bytes, self.mode.shard_optimizer != "off"
        others = owned - -(-owned // holders)  # elements that other ranks own
        if not shared:
            return owned * size.parameter_gradient if holders > 1 else 0
        return others * (self.reductions * size.parameter_gradient + size.parameter)

    def _gather_ms(self, low: BlockTerms, high: BlockTerms, element_bytes: int) -> float:
        gathered_bytes = self.costs.hidden_elements(high.degree, self.mode.rows) * element_bytes
        gather_ms = self.costs.all_gather_ms(high.degree // low.degree, gathered_bytes)
        return self.problem.accumulation * self.mode.sub_batches * gather_ms

    def _idle_ms(self, behind: BlockTerms, block: BlockTerms, exposed_ms: float) -> float:
        """For how long of one backward of ``block`` no collective of a block runs."""
        if self.problem.objective == "no_overlap":
            return 0.0
        others = self.mode.sub_batches - 1
        compute_ms = block.recompute_ms + block.backward_ms
        lasts_ms = compute_ms + exposed_ms + others * self.slot(compute_ms, block.backward_comm_ms)
        return max(0.0, lasts_ms - behind.backward_comm_ms - others * block.backward_comm_ms)
