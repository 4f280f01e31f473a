"""A rank's two lanes: one computes, the other communicates, and each may slow the other down."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from ..costs import Slowdown
from ..schedule import Instruction

Lane = Literal["compute", "comm"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that occupies a lane.

    Attributes:
        what: an instruction, or words for what is none.
        lane: that it is on; communication that is waited for is on its own lane, and the compute lane has no span.
        begin_ms: from the start of the step.
        end_ms: likewise.
    """

    what: Instruction | str
    lane: Lane
    begin_ms: float
    end_ms: float


class Lanes:
    """The lanes while time goes on; the compute lane is where it goes on from.

    Collectives run one after the other, as on a link; those behind, reductions of gradients, run when no other does.

    Args:
        slowdown: factors on times while the other lane is busy.

    Attributes:
        now_ms: the time.
        idle_ms: for how long the compute lane has waited for collectives.
        spans: what has ended, in the order of its end.
    """

    def __init__(self, slowdown: Slowdown) -> None:
        self.now_ms = self.idle_ms = 0.0
        self.spans: list[Span] = []
        self._slow = slowdown
        self._queues: tuple[deque[_Collective], ...] = (deque(), deque())
        self._flying: dict[Hashable, _Collective] = {}

    def compute(self, what: Instruction | str, work_ms: float) -> None:
        """Do ``work_ms`` of computation."""
        begin_ms, slow = self.now_ms, self._slow
        while work_ms > 0.0 and (head := self._head()) is not None:
            comm_ms, compute_ms = head.left_ms * slow.collective, work_ms * slow.compute
            if comm_ms <= compute_ms:
                self.now_ms += comm_ms
                work_ms -= comm_ms / slow.compute
                self._end(head)
            else:
                self.now_ms += compute_ms
                head.left_ms -= compute_ms / slow.collective
                work_ms = 0.0
        self.now_ms += max(work_ms, 0.0)
        self.spans.append(Span(what, "compute", begin_ms, self.now_ms))

    def start(self, key: Hashable, what: Instruction | str, work_ms: float, *, behind: bool = False) -> None:
        """Begin a collective that takes ``work_ms`` alone."""
        collective = self._flying[key] = _Collective(key, what, work_ms, behind)
        self._queues[behind].append(collective)

    def wait(self, key: Hashable) -> None:
        """Let time go on until a collective has ended."""
        begin_ms = self.now_ms
        while key in self._flying:
            head = self._head()
            assert head is not None, "what flies is in a queue"
            self.now_ms += head.left_ms
            self._end(head)
        self.idle_ms += self.now_ms - begin_ms

    def wait_all(self) -> None:
        """Let time go on until every collective has ended."""
        for key in list(self._flying):
            self.wait(key)

    def _head(self) -> _Collective | None:
        """What the link works on."""
        for queue in self._queues:
            if queue:
                head = queue[0]
                if head.begin_ms is None:
                    head.begin_ms = self.now_ms
                return head
        return None

    def _end(self, head: _Collective) -> None:
        self._queues[head.behind].popleft()
        del self._flying[head.key]
        assert head.begin_ms is not None
        self.spans.append(Span(head.what, "comm", head.begin_ms, self.now_ms))


@dataclass(slots=True)
class _Collective:
    key: Hashable
    what: Instruction | str
    left_ms: float
    behind: bool
    begin_ms: float | None = None
