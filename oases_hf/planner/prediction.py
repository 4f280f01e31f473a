"""Time and memory of any plan, made of the very terms that the planner's objective is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ConfigError
from ..plan import Recompute, ShardOptimizer
from .problem import GIB, Choice, Problem, is_chain
from .terms import BlockTerms, Terms


@dataclass(frozen=True)
class BlockPrediction:
    """One block in one optimizer step, in ms, and what it adds to a rank's memory.

    Attributes:
        compute_ms: forward, recompute and backward of all sub-batches and micro-batches.
        comm_ms: its all-reduces, hidden or not.
        exposed_ms: what the compute lane waits for all-reduces, or loses to them, in this block.
        kept_bytes: its parameters, gradients and optimizer state, and what is kept for backward.
    """

    compute_ms: float
    comm_ms: float
    exposed_ms: float
    kept_bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of the most loaded rank at its peak, by what they hold (equation 6)."""

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    runtime: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.saved + self.runtime

    def fits(self, problem: Problem) -> bool:
        """Whether it is within the limit."""
        return self.total <= problem.memory_limit_gib * GIB


@dataclass(frozen=True)
class Prediction:
    """One optimizer step, in ms, and a rank's memory.

    Attributes:
        step_ms: the sum of everything below, all micro-batches of the step.
        blocks: in order.
        tail_ms: the all-reduces behind the last block in forward, and behind the first in backward.
        reshard_ms: gathers between blocks of different degree.
        gradient_sync_ms: the part of gradient reductions that nothing hides.
        update_ms: the optimizer, and the exchange of what owners updated.
        outside_ms: embedding, head and loss.
        memory: at the peak.
        sync_bytes: that a rank gives to collectives over the holders of parameters: gradients, and what owners updated.
    """

    step_ms: float
    blocks: tuple[BlockPrediction, ...]
    tail_ms: float
    reshard_ms: float
    gradient_sync_ms: float
    update_ms: float
    outside_ms: float
    memory: Memory
    sync_bytes: int


def predict(
    problem: Problem,
    degrees: Sequence[int],
    recompute: Sequence[Recompute],
    sub_batches: int,
    shard_optimizer: ShardOptimizer = "off",
    message_bytes: int | None = None,
) -> Prediction:
    """Predict any plan, also one that the problem does not allow, or that does not fit into its memory.

    Args:
        problem: supplies costs, layers, accumulation and objective.
        degrees: of each block.
        recompute: of each block.
        sub_batches: that the batch is split into.
        shard_optimizer: who keeps optimizer state.
        message_bytes: of the messages that all-reduces of blocks are sent in; None: as a whole.

    Raises:
        ConfigError: the number of blocks or the chain of degrees is wrong, or a cost was not measured.
    """
    if not len(degrees) == len(recompute) == len(problem.blocks):
        raise ConfigError(
            f"predict: {len(degrees)} degrees and {len(recompute)} recompute choices for {len(problem.blocks)} blocks; "
            f"give one of each per block"
        )
    if not is_chain((*sorted(set(degrees)), problem.costs.tmp_size)):
        raise ConfigError(
            f"predict: degrees {sorted(set(degrees))} of tmp_size={problem.costs.tmp_size} are no chain; "
            f"choose degrees of which each divides the next, and the last divides tmp_size"
        )
    terms = Terms.of_plan(problem, degrees, sub_batches, shard_optimizer, message_bytes)
    choices = map(Choice, degrees, recompute)
    return _predicted(terms, [terms.block(kind, choice) for kind, choice in zip(problem.blocks, choices, strict=True)])


def predict_uniform(
    problem: Problem,
    choice: Choice,
    sub_batches: int,
    shard_optimizer: ShardOptimizer = "off",
    message_bytes: int | None = None,
) -> Prediction:
    """Predict the plan with one choice for all blocks; raises as :func:`predict` does."""
    blocks = len(problem.blocks)
    degrees, recompute = (choice.degree,) * blocks, (choice.recompute,) * blocks
    return predict(problem, degrees, recompute, sub_batches, shard_optimizer, message_bytes)


def _predicted(terms: Terms, blocks: list[BlockTerms]) -> Prediction:
    chain = [terms.ends, *blocks, terms.ends]
    forward = [terms.forward_entry(before, block) for before, block in pairwise(chain)]
    backward = [terms.backward_entry(behind, block) for block, behind in pairwise(chain)]
    entries = forward + backward
    times = tuple(
        BlockPrediction(
            compute_ms=terms.compute_ms(block),
            comm_ms=terms.comm_ms(block),
            exposed_ms=terms.inner(block).exposed_ms + into.exposed_ms + back.exposed_ms,
            kept_bytes=block.kept_bytes,
        )
        for block, into, back in zip(blocks, forward, backward[1:], strict=False)
    )
    tail_ms = forward[-1].exposed_ms + backward[0].exposed_ms
    reshard_ms = sum(entry.reshard_ms for entry in entries)
    sync_ms = sum(entry.sync_ms for entry in entries) + terms.outside_sync_ms()
    update_ms = sum(block.update_ms for block in blocks) + terms.outside_update_ms()
    outside_ms = terms.problem.accumulation * terms.costs.outside.ms
    blocks_ms = sum(time.compute_ms + time.exposed_ms for time in times)
    return Prediction(
        step_ms=blocks_ms + tail_ms + reshard_ms + sync_ms + update_ms + outside_ms,
        blocks=times,
        tail_ms=tail_ms,
        reshard_ms=reshard_ms,
        gradient_sync_ms=sync_ms,
        update_ms=update_ms,
        outside_ms=outside_ms,
        memory=_memory(terms, blocks),
        sync_bytes=sum(block.sync_bytes for block in blocks) + terms.outside_sync_bytes(),
    )


def _memory(terms: Terms, blocks: list[BlockTerms]) -> Memory:
    outside = terms.outside_bytes()
    return Memory(
        parameters=outside.parameters + sum(block.parameter_bytes for block in blocks),
        gradients=outside.gradients + sum(block.gradient_bytes for block in blocks),
        optimizer=outside.optimizer + sum(block.optimizer_bytes for block in blocks),
        saved=sum(block.saved_bytes for block in blocks),
        runtime=terms.beside_bytes + max(terms.least_runtime_bytes, *(block.runtime_bytes for block in blocks)),
    )
