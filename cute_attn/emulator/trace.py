"""A timeline of a launch, in the trace event format that Perfetto and chrome://tracing open.

Time is counted in warp-instructions of the whole machine, because the emulator knows no clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KINDS = ("wait", "async", "mma", "instant")


@dataclass(frozen=True)
class TraceEvent:
    """One interval.

    Attributes:
        kind: "wait", "async", "mma" or "instant".
        name: the label of the interval.
        cta, warp: the row of the timeline.
        start, end: times in warp-instructions.
        detail: text shown when the interval is selected.
    """

    kind: str
    name: str
    cta: int
    warp: int
    start: int
    end: int
    detail: dict[str, Any]


def write(
    path: str | os.PathLike[str], events: Iterable[TraceEvent], roles: dict[int, str]
) -> None:
    """Write `events` as JSON. CTAs are processes, warps threads, copies and MMAs async slices."""
    rows: set[tuple[int, int]] = set()
    out: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        rows.add((event.cta, event.warp))
        common = {"name": event.name, "cat": event.kind, "pid": event.cta, "tid": event.warp}
        if event.kind in ("async", "mma"):
            out.append({**common, "ph": "b", "id": number, "ts": event.start, "args": event.detail})
            out.append({**common, "ph": "e", "id": number, "ts": event.end})
        else:
            duration = event.end - event.start
            out.append(
                {**common, "ph": "X", "ts": event.start, "dur": duration, "args": event.detail}
            )
    for cta, warp in sorted(rows):
        role = roles.get(warp)
        name = f"warp {warp}" + (f": {role}" if role else "")
        out.append(_metadata("thread_name", cta, warp, name))
        out.append(_metadata("process_name", cta, warp, f"CTA {cta}"))
    Path(path).write_text(json.dumps({"traceEvents": out, "displayTimeUnit": "ns"}))


def _metadata(what: str, cta: int, warp: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": cta, "tid": warp, "args": {"name": name}}
