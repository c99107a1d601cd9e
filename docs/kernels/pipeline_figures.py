"""Draws the pipelines of the kernels' pages from the edges that the kernels declare.

    python -m docs.kernels.pipeline_figures

writes docs/kernels/figures/*.svg. A column is a role. A row is an edge, drawn as an arrow from the
role that completes the edge's mbarriers to the role that waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from cute_attn.bench.async_copy.cases import make_spec
from cute_attn.cache import KernelDef
from cute_attn.kernels.async_copy.table import PRODUCER_WARPS
from cute_attn.kernels.attention import table as attention
from cute_attn.kernels.common.pipeline import Edge, Kind, Pipeline, Role
from cute_attn.kernels.delta import table as kda
from cute_attn.kernels.ladder.heuristics import spec_of
from cute_attn.kernels.ladder.table import find
from cute_attn.launch import Request
from cute_attn.ops.attention import plan_attention
from cute_attn.ops.attention.plan import plan_attention_backward
from cute_attn.ops.gated_delta_rule.chunk_plan import plan_chunk_gated_delta_rule
from cute_attn.ops.kda.chunk_plan import plan_chunk_kda, plan_chunk_kda_backward

FIGURES = Path(__file__).with_name("figures")

# -- which pipelines


def pipeline(kernel: KernelDef, spec: Any) -> Pipeline:
    """The edges of a kernel object. A kernel that plans its memory apart has the edges there."""
    module, _, name = kernel.target.partition(":")
    made = getattr(import_module(module), name)(spec)
    return made.pipeline if hasattr(made, "pipeline") else made.memory.pipeline


def first(kernel: KernelDef, requests: Sequence[Request]) -> Pipeline:
    """The pipeline of the first specialisation of a plan that is for this kernel."""
    return pipeline(kernel, next(spec for found, spec in requests if found == kernel))


def forward(arch: str, head_dim: int) -> Pipeline:
    requests = plan_attention(arch, head_dim=head_dim, scheduler="static", short=False)
    return first(attention.find("forward", arch, head_dim).kernel, requests)


def backward(kernel: KernelDef, arch: str, head_dim: int, **options: Any) -> Pipeline:
    plan = plan_attention_backward(
        arch, head_dim=head_dim, scheduler="static", split=False, rows_without_keys=False, **options
    )
    return first(kernel, plan)


def producer_warps() -> Pipeline:
    spec = make_spec("tensor_swizzled", "sm_90a", rows=64, stages=4, producers=1)
    return pipeline(PRODUCER_WARPS, spec)


def ladder(step: int) -> Pipeline:
    kernel = find(step).kernel
    assert kernel is not None
    return pipeline(kernel, spec_of(step, "sm_90a"))


SHOWN: dict[str, Callable[[], Pipeline]] = {
    "sm90_forward": lambda: forward("sm_90a", 128),
    "wide_heads": lambda: forward("sm_90a", 512),
    "sm90_backward_64": lambda: backward(attention.SM90_BACKWARD, "sm_90a", 64),
    "sm90_backward_128": lambda: backward(attention.SM90_HD128_BACKWARD, "sm_90a", 128),
    "sm90_backward_dkdv": lambda: backward(attention.SM90_BACKWARD_DKDV, "sm_90a", 128, dq=False),
    "sm90_backward_dq": lambda: backward(attention.SM90_BACKWARD_DQ, "sm_90a", 128, dkdv=False),
    "sm90_backward_256_dkdv": lambda: backward(
        attention.SM90_WIDE_BACKWARD_DKDV, "sm_90a", 256, keeps_ds=True
    ),
    "sm90_backward_256_dq": lambda: backward(
        attention.SM90_BACKWARD_DS_DQ, "sm_90a", 256, keeps_ds=True
    ),
    "hd256_forward_edges": lambda: forward("sm_100a", 256),
    "hd256_backward_dq": lambda: backward(attention.HD256_BACKWARD_DQ, "sm_100a", 256),
    "hd256_backward_dkdv": lambda: backward(attention.HD256_BACKWARD_DKDV, "sm_100a", 256),
    "kda_state_pass": lambda: first(kda.STATE_PASS, plan_chunk_kda("sm_90a", split=False)),
    "kda_gradients": lambda: first(kda.GRADIENTS, plan_chunk_kda_backward("sm_90a", split=False)),
    "gdn_forward": lambda: first(
        kda.HEAD_FORWARD, plan_chunk_gated_delta_rule("sm_90a", split=False)
    ),
    "async_copy": producer_warps,
    "ladder_6_tma": lambda: ladder(6),
    "ladder_10_persistent": lambda: ladder(10),
}

# -- the drawing

COLUMN, ROW, TOP, LEFT = 124, 42, 62, 66
NOTES = 270  # width of the text on the right
COLOURS = {  # what completes a phase, in the order in which an edge of several kinds is coloured
    Kind.COMMIT: ("#8a5a00", "a commit: the MMAs issued so far are done"),
    Kind.BYTES: ("#0b5cad", "the bytes of copies"),
    Kind.WARPS: ("#2e7d32", "arrivals of warps or threads"),
    Kind.THREADS: ("#2e7d32", ""),
}


def lanes(edges: Sequence[Edge]) -> list[Role]:
    """The roles that get a column, in the order of their first edge. A role that has the warps of
    several other roles, such as "all others", is drawn on their columns."""
    roles: dict[str, Role] = {}
    for edge in edges:
        for role in (edge.producer, edge.consumer):
            roles.setdefault(role.name, role)
    return [role for role in roles.values() if not parts(role, roles.values())]


def parts(role: Role, roles: Any) -> list[Role]:
    """The roles whose warps are some of this role's warps; [] if there is at most one."""
    found = [
        other
        for other in roles
        if len(other) < len(role) and set(other.warps) <= set(role.warps) and len(other)
    ]
    return found if len(found) > 1 else []


def colour(edge: Edge) -> str:
    return next(shade for kind, (shade, _) in COLOURS.items() if kind in edge.kind)


def draw(shown: Pipeline) -> str:
    edges = list(shown)
    columns = lanes(edges)
    loops = any(edge.producer == edge.consumer == columns[-1] for edge in edges)
    places = {role.name: LEFT + COLUMN * n for n, role in enumerate(columns)}
    notes = LEFT + COLUMN * (len(columns) - 1) + (170 if loops else 66)
    width, height = max(notes + NOTES, 620), TOP + ROW * len(edges) + 64

    def at(role: Role) -> list[int]:
        """The columns of a role."""
        if role.name in places:
            return [places[role.name]]
        return sorted(places[part.name] for part in parts(role, columns))

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
        "<defs>",
    ]
    shades = sorted({shade for shade, _ in COLOURS.values()})
    out += [
        f'<marker id="to{shade[1:]}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{shade}"/></marker>'
        for shade in shades
    ]
    out += ["</defs>", '<rect width="100%" height="100%" fill="white"/>']
    bottom = TOP + ROW * len(edges)
    for role in columns:
        x = places[role.name]
        warps = f"warps {role.warps[0]} to {role.warps[-1]}" if len(role) > 1 else "one warp"
        if not len(role):
            warps = ""
        out.append(
            f'<rect x="{x - 56}" y="8" width="112" height="40" rx="4" fill="#f2f2f2" '
            'stroke="#555"/>'
            f'<text x="{x}" y="25" text-anchor="middle" font-weight="bold">{escape(role.name)}'
            f'</text><text x="{x}" y="41" text-anchor="middle" font-size="11">{warps}</text>'
            f'<line x1="{x}" x2="{x}" y1="48" y2="{bottom}" stroke="#bbb"/>'
        )
    for n, edge in enumerate(edges):
        out += arrow(edge, TOP + ROW * n + 28, at(edge.producer), at(edge.consumer), notes)
    x = 20
    for shade, text in COLOURS.values():
        if text and any(colour(edge) == shade for edge in edges):
            out.append(
                f'<rect x="{x}" y="{height - 40}" width="12" height="12" fill="{shade}"/>'
                f'<text x="{x + 18}" y="{height - 30}">{text}</text>'
            )
            x += 34 + 7 * len(text)
    out.append(
        f'<text x="20" y="{height - 10}" fill="#333">An arrow: who completes the mbarrier, and who '
        "waits for it. After the name: mbarriers of the ring.</text>"
    )
    return "\n".join([*out, "</svg>", ""])


def arrow(edge: Edge, y: int, starts: list[int], ends: list[int], notes: int) -> list[str]:
    """An edge: its arrow, its name and number of stages, and what it hands over."""
    shade = colour(edge)
    stages = f"{edge.stages} a warp" if edge.by_warp else str(edge.stages)
    label = f"{edge.name} &#215;{stages}"
    line = f'stroke="{shade}" stroke-width="1.6" fill="none"'
    head = f'marker-end="url(#to{shade[1:]})"'
    text = f'font-weight="bold" fill="{shade}"'
    out = []
    if starts == ends:
        x = ends[0]
        out.append(f'<path d="M{x} {y - 12}h26v12h-26" {line} {head}/>')
        out.append(f'<text x="{x + 32}" y="{y - 2}" {text}>{label}</text>')
    else:
        # Between the farthest columns, so that the line passes all columns of both roles.
        start = max(starts, key=lambda s: max(abs(s - e) for e in ends))
        end = max(ends, key=lambda e: abs(e - start))
        out.append(f'<path d="M{start} {y}H{end}" {line} {head}/>')
        out += [
            f'<circle cx="{x}" cy="{y}" r="3.5" fill="{shade}"/>'
            for x in sorted({start, *starts, *ends} - {end})
        ]
        # The name stands beside the role that has a single column.
        near, far = (start, end) if len(starts) == 1 else (end, start)
        middle = near + (COLUMN // 2 if far > near else -COLUMN // 2)
        out.append(f'<text x="{middle}" y="{y - 6}" text-anchor="middle" {text}>{label}</text>')
    out.append(f'<text x="{notes}" y="{y - 6}" font-size="11">{escape(str(edge))}</text>')
    out.append(f'<text x="{notes}" y="{y + 9}" font-size="11">{escape(edge.payload)}</text>')
    return out


def figures() -> dict[str, str]:
    """Name of a file in FIGURES -> its text."""
    return {f"{name}.svg": draw(make()) for name, make in SHOWN.items()}


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for name, text in figures().items():
        (FIGURES / name).write_text(text)


if __name__ == "__main__":
    main()
