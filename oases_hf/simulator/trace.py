"""Spans as a Chrome trace, which ``chrome://tracing`` and Perfetto open: simulated and measured ones side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..schedule import to_text
from .lanes import Lane, Span

_LANES: dict[Lane, int] = {"compute": 0, "comm": 1}


def name_of(span: Span) -> str:
    """What a span is called: an instruction in its text form."""
    return span.what if isinstance(span.what, str) else to_text(span.what)


def chrome_trace(
    steps: Mapping[str, Sequence[Span]], memory: Mapping[str, Sequence[tuple[float, int]]] | None = None
) -> str:
    """A trace as JSON text.

    Args:
        steps: process names, such as ``simulated`` or ``rank 0``, and their spans.
        memory: of some of these, (ms, bytes) whenever that changes.
    """
    events: list[dict[str, Any]] = []
    for pid, (process, spans) in enumerate(steps.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
        events += [
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}
            for lane, tid in _LANES.items()
        ]
        for span in spans:
            times = {"ts": 1e3 * span.begin_ms, "dur": 1e3 * (span.end_ms - span.begin_ms)}
            events.append({"ph": "X", "pid": pid, "tid": _LANES[span.lane], "name": name_of(span), **times})
        for ms, size in (memory or {}).get(process, ()):
            events.append({"ph": "C", "pid": pid, "name": "memory", "ts": 1e3 * ms, "args": {"MiB": size / 2**20}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def write_trace(
    path: Path, steps: Mapping[str, Sequence[Span]], memory: Mapping[str, Sequence[tuple[float, int]]] | None = None
) -> None:
    """Write :func:`chrome_trace` to a file."""
    path.write_text(chrome_trace(steps, memory))
