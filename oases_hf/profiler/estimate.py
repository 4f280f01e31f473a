"""A cost table without times, of tensors without data: what ranks would hold, before there are ranks.

One layer is sharded as each degree shards it, for ranks that are not there, and its blocks run on torch's fake tensors.
They are said to be on a CPU, where attention takes the fused kernel that it takes on GPUs (on torch's meta device it
would take the one that keeps all scores); RMSNorms, which CPUs have no one kernel for, keep what they keep on GPUs.

Exact, to what ranks hold: parameters, gradients, optimizer state, the hidden tensors kept for recompute (but for one
in all that BERT keeps besides), and what is kept of a block that is not recomputed. Bounds from above:

* Temporaries are what operators return, at the peak of the block, or of the loss, that needs most.
* Dropout masks have the element size of what they mask; on GPUs that is a byte.

Tensors of blocks count as the share of a segment that torch's allocator gives them. Not counted are the workspaces of
kernels (cuBLAS takes 32 MiB for each thread and stream on Hopper, 8 elsewhere), and the masks of padded rows. Attention
dropout keeps nothing unless attention is eager: fused kernels draw the mask again. All layers are taken to be like the
first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config import CommDtype
from ..costs import CostTable, Curve, Outside, Slowdown, Timing
from ..models import family_of
from ..models.reading import described
from ..simulator.cluster import ClusterSpec, Work
from .dry import DryLayer, Held
from .ends import DryEnds
from .layer import Autocast, Running
from .profile import Architecture, Workload, element_bytes, feasible_degrees, kind_costs


class Estimate:
    """Cost tables of a model, for any number of rows.

    Args:
        model: of a served family.
        tmp_size: ranks that share a batch.
        sequence: tokens per row.
        optimizer_state: bytes per parameter.
        autocast: makes the context that training computes in.
        data_size: TMP worlds that run data parallel.
        comm_dtype: of all-reduces of blocks, where these would be wider.

    Attributes:
        degrees: over which a layer can be split.

    Raises:
        UnsupportedModelError: no family serves the model.
    """

    def __init__(
        self,
        model: Architecture,
        tmp_size: int,
        sequence: int,
        optimizer_state: int,
        autocast: Autocast,
        data_size: int = 1,
        comm_dtype: CommDtype | None = None,
    ) -> None:
        self._family, config = family_of(model.config), copy.deepcopy(model.config)
        if config._attn_implementation != "eager":
            setattr(config, self._family.attention_dropout, 0.0)
        self._model = replace(model, config=config)
        self._tmp_size, self._data_size = tmp_size, data_size
        self._sequence, self._optimizer_state = sequence, optimizer_state
        self._running = Running(torch.device("cpu"), autocast, comm_dtype=comm_dtype)
        self._fake = FakeTensorMode()
        with self._fake:
            self._ends = DryEnds(self._model.of_one_layer(), tmp_size)
        self._layer, self._held = cache(self._make_layer), cache(self._run)
        self._outside = cache(self._run_ends)
        self.degrees = feasible_degrees(config, self._family, tmp_size)

    def table(self, rows: int, sub_batches: int) -> CostTable:
        """What a micro-batch of ``rows``, in so many sub-batches, costs where it is recorded; all times are 0."""
        config, dtype = self._model.config, self._model.dtype
        workload = Workload(rows, self._sequence, (sub_batches,), self._optimizer_state)
        most = -(-rows // sub_batches)
        groups = range(2, self._tmp_size * self._data_size + 1)
        kinds = []
        for i, block in enumerate(self._family.blocks):
            parameters, timings, unowned = {}, {}, {}
            for degree in self.degrees:
                parameters[degree], rank = self._fullest(i, degree)
                unowned[degree] = max(self._layer(degree, 0).unowned(i, each) for each in range(degree))
                held = self._held(degree, rank, -(-most // (self._tmp_size // degree)))[i]
                shared = held.shared if sub_batches > 1 else 0
                timing = Timing(0.0, 0.0, 0.0, 0.0, held.graph, held.temporary, shared_bytes=shared)
                timings[degree] = {sub_batches: timing}
            kinds.append(kind_costs(block, parameters, timings, unowned))
        return CostTable(
            fingerprint={"model": described(config), "layers": str(config.num_hidden_layers)},
            tmp_size=self._tmp_size,
            data_size=self._data_size,
            rows=rows,
            sequence=self._sequence,
            hidden=config.hidden_size,
            element_bytes=element_bytes(dtype, workload, self._running),
            kinds=tuple(kinds),
            all_reduce=dict.fromkeys(groups, Curve(((1, 0.0),))),
            all_gather=dict.fromkeys(groups, Curve(((1, 0.0),))),
            exchange=dict.fromkeys(groups, Curve(((1, 0.0),))),
            slowdown=Slowdown(),
            outside=self._outside(rows),
            optimizer_ms=0.0,
            recorded=True,
        )

    def on(self, cluster: ClusterSpec, rows: int, sub_batches: Sequence[int], dtype: str) -> CostTable:
        """What a micro-batch of ``rows`` costs on a cluster, in any of some numbers of sub-batches.

        Args:
            cluster: with at least so many GPUs as there are ranks.
            rows: sequences.
            sub_batches: those above ``rows`` are left out.
            dtype: what ``cluster`` calls the type that is computed in.

        Raises:
            ConfigError: the cluster is too small, or does not know ``dtype``.
        """
        first, *others = (self.table(rows, number) for number in sub_batches if number <= rows)
        kinds = []
        for i, kind in enumerate(first.kinds):
            timings = {degree: dict(row) for degree, row in kind.timings.items()}
            for other in others:
                for degree, row in other.kinds[i].timings.items():
                    timings[degree] |= row
            kinds.append(replace(kind, timings=timings))
        return cluster.timed(replace(first, kinds=tuple(kinds)), self.work(dtype))

    def work(self, dtype: str) -> Work:
        """What the blocks compute; ``dtype`` is what a :class:`ClusterSpec` calls the type that they compute in."""
        names = [block.name for block in self._family.blocks]
        found: dict[str, dict[str, dict[int, float]]] = {
            what: {name: {} for name in names} for what in ("all", "linear", "last")
        }
        for degree in self.degrees:
            for i, name in enumerate(names):
                _, rank = self._fullest(i, degree)
                with self._fake:
                    operations = self._layer(degree, rank).operations(self._sequence, self._running.autocast)[i]
                for what, by_kind in found.items():
                    by_kind[name][degree] = float(getattr(operations, what))
        config = self._model.config
        words = int(getattr(config, "vocab_size", 0)) / self._tmp_size
        head = 6.0 * self._sequence * config.hidden_size * words  # of one row: forward, and two in backward
        return Work(dtype, found["all"], found["linear"], found["last"], head)

    def _fullest(self, block: int, degree: int) -> tuple[int, int]:
        """The most elements of a block that a rank holds, and which rank does."""
        counts = [self._layer(degree, 0).parameters(block, rank) for rank in range(degree)]
        return max(counts), counts.index(max(counts))

    def _make_layer(self, degree: int, rank: int) -> DryLayer:
        with self._fake:
            return DryLayer(self._model.of_one_layer(), degree, rank, self._tmp_size // degree)

    def _run(self, degree: int, rank: int, rows: int) -> tuple[Held, ...]:
        with self._fake:
            return self._layer(degree, rank).run(rows, self._sequence, self._running.autocast)

    def _run_ends(self, rows: int) -> Outside:
        with self._fake:
            return self._ends.outside(rows, self._sequence, self._running.autocast)
