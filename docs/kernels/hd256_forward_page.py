"""Writes what hd256_forward.md shows of the kernel's own tables, and its pipeline.

    python -m docs.kernels.hd256_forward_page

writes both anew: the tables between the page's markers, and hd256_forward.svg, drawn from a
timeline of the emulator.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

import cute_attn.kernels.attention.sm100.forward_hd256 as kernel
from cute_attn import cache
from cute_attn.emulator import Emulator, Names
from cute_attn.ops.attention import plan_attention

from .page_tables import budgets, filled

PAGE = Path(__file__).with_name("hd256_forward.md")
DIAGRAM = PAGE.with_suffix(".svg")

SHARED_BASE = 1024  # where a CTA's shared memory starts, behind the system's first KiB
RANK_SHIFT = 24  # a cluster address: the CTA's rank, then the address in it

# -- tables


def tables(spec: Any) -> dict[str, str]:
    """Marker -> Markdown."""
    chosen = kernel.Sm100Hd256Forward(spec)
    registers = {
        "softmax": kernel.SOFTMAX_REGISTERS,
        "correction": kernel.CORRECTION_REGISTERS,
        "load, mma, store, scheduler": kernel.OTHER_REGISTERS,
    }
    return {
        "edges": chosen.pipeline.table(),
        "budgets": budgets(chosen.smem, kernel.TMEM, registers),
    }


# -- the timeline

COMPLETING = ("mbarrier.arrive", "tcgen05.commit", "cp.async.bulk.tensor")


@dataclass(frozen=True)
class Event:
    """An event of CTA 0: a warp waits for a barrier, completes a barrier, or issues MMAs."""

    kind: str  # "wait", "arrive" or "mma"
    warp: int
    start: int
    end: int
    name: str


def plain_spec() -> Any:
    ((_, spec),) = plan_attention("sm_100a", scheduler="static", short=False)
    return spec


def timeline(key_tiles: int = 12) -> list[Event]:
    """One tile of queries, on a cluster of its own, under the fair schedule."""
    ((definition, spec),) = plan_attention("sm_100a", scheduler="static", short=False)
    names = kernel.Sm100Hd256Forward(spec).names(SHARED_BASE)
    emulator = Emulator(num_sms=2, traced=True)
    run = emulator.load(cache.compile(definition, spec, arch="sm_100a"), Names(**names))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, rows, 1, kernel.HEAD_DIM, generator=generator).to(torch.bfloat16)
        for rows in (kernel.TILE_M, key_tiles * kernel.TILE_N, key_tiles * kernel.TILE_N)
    )
    o = torch.empty_like(q)
    run(q, k, v, o, *[None] * 7, kernel.HEAD_DIM**-0.5, 1.0, 0, 0, 1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "timeline.json")
        emulator.trace(path)
        return events(json.loads(path.read_text())["traceEvents"], names["shared"])


def events(trace: list[dict[str, Any]], shared: dict[str, tuple[int, int, int]]) -> list[Event]:
    barriers = {
        address + size * i: f"{name}[{i}]" if nbytes > size else name
        for name, (address, nbytes, size) in shared.items()
        for i in range(nbytes // size)
    }
    found = []
    for e in trace:
        if e.get("ph") not in ("X", "b") or e["pid"] != 0:
            continue
        start, end = e["ts"], e["ts"] + e.get("dur", 0)
        if e["cat"] == "mma":
            found.append(Event("mma", e["tid"], start, end, "mma"))
            continue
        barrier = barriers.get(e["args"]["object"] & ((1 << RANK_SHIFT) - 1))
        if e["cat"] == "instant" and e["name"].startswith(COMPLETING):
            # A commit tells both CTAs. A signal to the other CTA alone is in the other CTA's rows.
            if barrier and e["args"]["object"] >> RANK_SHIFT == 0:
                found.append(Event("arrive", e["tid"], start, end, barrier))
        elif e["cat"] == "wait" and barrier:
            found.append(Event("wait", e["tid"], start, end, barrier))
    return found


# -- the picture

ROLES = (
    ("load", kernel.LOAD.warps[-1]),
    ("mma", kernel.MMA.warps[-1]),
    ("softmax", kernel.SOFTMAX.warps[-1]),
    ("correction", kernel.CORRECTION.warps[-1]),
)
LEFT, WIDTH, ROW, BAR, TOP = 110, 1000, 74, 22, 30
BUSY, WAIT, ISSUE, MARK = "#9ecae9", "#eeeeee", "#f2cf5b", "#b3261e"


def steady_state(found: list[Event], tiles: int = 2) -> tuple[int, int]:
    """The times after a P V in the middle, and after the P V of `tiles` K/V tiles later."""
    ends = [e.start for e in found if e.kind == "arrive" and e.name.startswith("pv_done")]
    if len(ends) < tiles + 3:
        raise ValueError("too few K/V tiles for a steady state")
    middle = len(ends) // 2 - 1
    return ends[middle] + 1, ends[middle + tiles] + 1


def draw(found: list[Event]) -> str:
    first, last = steady_state(found)

    def x(time: int) -> float:
        return LEFT + WIDTH * (min(max(time, first), last) - first) / (last - first)

    height = TOP + ROW * len(ROLES) + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18">Two K/V tiles in the middle of a tile of queries, CTA 0 '
        "(blue: runs; yellow: issues MMAs; grey: waits for; red: completes)</text>",
    ]
    for row, (role, warp) in enumerate(ROLES):
        y = TOP + ROW * row + 20
        out.append(f'<text x="8" y="{y + 15}" font-weight="bold">{role}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{BAR}" fill="{BUSY}"/>')
        mine = [e for e in found if e.warp == warp and e.end >= first and e.start <= last]
        for e in (e for e in mine if e.kind == "wait"):
            width = x(e.end) - x(e.start)
            out.append(
                f'<rect x="{x(e.start):.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                f'fill="{WAIT}" stroke="#999" stroke-width="0.5"/>'
            )
            if width > 6 * len(e.name):
                out.append(f'<text x="{x(e.start) + 4:.1f}" y="{y + 15}">{escape(e.name)}</text>')
        issued: dict[str, list[int]] = {}
        for e in (e for e in mine if e.kind == "mma"):
            done = min(
                (
                    a
                    for a in mine
                    if a.kind == "arrive" and a.start >= e.start and a.name[0] in "sp"
                ),
                key=lambda a: a.start,
                default=None,
            )
            if done:
                issued.setdefault(f"{done.name} {done.start}", []).append(e.start)
        for name, times in issued.items():
            at, width = x(min(times)), max(x(max(times)) - x(min(times)), 2)
            label = "P V" if name.startswith("pv") else "S"
            out.append(
                f'<rect x="{at:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{ISSUE}"/>'
                f'<text x="{at + width / 2:.1f}" y="{y + 15}" text-anchor="middle">{label}</text>'
            )
        marks: dict[int, list[str]] = {}
        for e in (e for e in mine if e.kind == "arrive" and first <= e.start <= last):
            marks.setdefault(e.start, []).append(e.name)
        level = 0
        for time, names in sorted(marks.items()):
            at = x(time)
            out.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 3}" y2="{y + BAR + 3}" '
                f'stroke="{MARK}" stroke-width="1.5"/>'
            )
            anchor = "end" if at > LEFT + 0.8 * WIDTH else "start"
            for name in names:
                offset = y + BAR + 14 if level % 2 else y - 6
                shift = 3 if anchor == "start" else -3
                out.append(
                    f'<text x="{at + shift:.1f}" y="{offset}" fill="{MARK}" '
                    f'text-anchor="{anchor}">{escape(name)}</text>'
                )
                level += 1
    out.append(
        f'<text x="{LEFT}" y="{height - 8}" fill="#555">Order, not time: the emulator has no '
        "clock. The axis counts instructions of all warps; MMAs and copies take none.</text>"
    )
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), tables(plain_spec())))
    DIAGRAM.write_text(draw(timeline()))


if __name__ == "__main__":
    main()
