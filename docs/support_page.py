"""Writes the tables of what runs on which GPU, in support.md, README and index.md.

    python -m docs.support_page

asks the operators' plan functions, which know what there are kernels for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from cute_attn.kernels.lightning.spec import STATE_DTYPES
from cute_attn.ops.attention import (
    plan_attention,
    plan_attention_backward,
    plan_attention_combine,
)
from cute_attn.ops.kda import (
    plan_chunk_kda,
    plan_chunk_kda_backward,
    plan_fused_recurrent_kda,
    plan_kda_decode,
)
from cute_attn.ops.lightning import plan_decode

from .kernels.page_tables import filled

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/support.md"
FIRST_SCREENS = (ROOT / "README.md", ROOT / "docs/index.md")

GPUS = {  # a column -> its architectures, for which every cell is the same
    "sm_80 (A100)": ("sm_80",),
    "sm_86, sm_89 (RTX 30, RTX 40, L40)": ("sm_86", "sm_89"),
    "sm_90 (H100, H200)": ("sm_90a",),
    "sm_100, sm_103 (B200, B300)": ("sm_100a", "sm_103a"),
    "sm_120 (RTX 50)": ("sm_120a",),
}
ARCHS = tuple(arch for archs in GPUS.values() for arch in archs)
MEASURED = ("sm_90a",)  # the others are emulated
DTYPES = ("bfloat16", "float16", "float32")
DIMS = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Row:
    """An operator in one direction.

    Attributes:
        plan: its plan function.
        dims: the parameters of `plan` that are sizes, by the names that a reader knows.
        dtype: the parameter that is the dtype; also: what else has a dtype.
        measured: whether the sizes were timed on the architectures `MEASURED`.
    """

    operator: str
    direction: str
    plan: Callable[..., Any]
    dims: dict[str, str] = field(default_factory=lambda: {"head_dim": "head_dim"})
    dtype: str = "dtype"
    also: str = ""
    measured: bool = True

    def has(self, arch: str, **options: Any) -> bool:
        try:
            return bool(self.plan(arch, **options))
        except (NotImplementedError, ValueError):
            return False

    def sizes(self, archs: Iterable[str] = ARCHS) -> dict[str, tuple[int, ...]]:
        """For each size the values for which there are kernels, in any combination."""
        names = list(self.dims.values())
        found = {
            values
            for values in product(DIMS, repeat=len(names))
            if any(self.has(arch, **dict(zip(names, values, strict=True))) for arch in archs)
        }
        each = {
            name: tuple(d for d in DIMS if any(values[i] == d for values in found))
            for i, name in enumerate(self.dims)
        }
        assert set(product(*each.values())) == found, self
        return each

    def dtypes(self) -> tuple[str, ...]:
        """The dtypes, on which all architectures that have kernels agree."""
        dims = {name: max(self.sizes()[label]) for label, name in self.dims.items()}
        found = {
            tuple(dtype for dtype in DTYPES if self.has(arch, **dims | {self.dtype: dtype}))
            for arch in ARCHS
        } - {()}
        (dtypes,) = found
        return dtypes


def plan_unequal(arch: str, *, head_dim: int, head_dim_v: int, **options: Any) -> Any:
    """`plan_attention` of v that is wider or narrower than q and k."""
    if head_dim == head_dim_v:
        raise ValueError(f"head_dim_v is {head_dim_v}, must not be head_dim")
    return plan_attention(arch, head_dim=head_dim, head_dim_v=head_dim_v, **options)


K_V = {"K": "head_dim_k", "V": "head_dim_v"}
STATES = f"state: {', '.join(STATE_DTYPES)}"
ATTENTION = "`flash_attn_func`, `flash_attn_varlen_func`"
ROWS = [
    Row(ATTENTION, "forward", plan_attention),
    Row(ATTENTION, "backward", plan_attention_backward),
    Row(
        ATTENTION,
        "forward",
        plan_unequal,
        {"head_dim": "head_dim", "head_dim_v": "head_dim_v"},
        measured=False,
    ),
    Row("`flash_attn_combine`", "forward", plan_attention_combine, dtype="out_dtype"),
    Row("`lightning_attn_decode`", "forward", plan_decode, K_V, also=STATES),
    Row("`chunk_kda`", "forward", plan_chunk_kda, K_V, also="state: float32"),
    Row("`chunk_kda`", "backward", plan_chunk_kda_backward, K_V),
    Row("`fused_recurrent_kda`", "forward", plan_fused_recurrent_kda, K_V, also="state: float32"),
    Row("`kda_decode`", "forward", plan_kda_decode, K_V, also=STATES),
]


def cell(row: Row, archs: tuple[str, ...]) -> str:
    """The level of verification there, after the sizes if these are not all of the row's."""
    (sizes,) = {tuple(row.sizes([arch]).items()) for arch in archs}  # they agree
    level = "measured" if row.measured and set(archs) <= set(MEASURED) else "emulated"
    if not any(values for _, values in sizes):
        return ""
    fewer = [(name, values) for name, values in sizes if values != row.sizes()[name]]
    if not fewer:
        return level
    return f"{', '.join(f'{name} {listed(values)}' for name, values in fewer)}: {level}"


def listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def table(rows: list[list[str]]) -> str:
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join("|".join(["", *(f" {x} " if x else " " for x in line), ""]) for line in lines)


def sizes(row: Row) -> str:
    return "; ".join(f"{name} {listed(values)}" for name, values in row.sizes().items())


def whole() -> str:
    rows = [["operator", "direction", "dtypes", "sizes", *GPUS]]
    for row in ROWS:
        dtypes = "; ".join(filter(None, [listed(row.dtypes()), row.also]))
        cells = [cell(row, archs) for archs in GPUS.values()]
        rows.append([row.operator, row.direction, dtypes, sizes(row), *cells])
    return table(rows)


def short() -> str:
    """For README: a row for each operator and direction, without dtypes of states."""
    rows = [["", "dtypes", "sizes", *GPUS]]
    for label, members in (
        ("Softmax attention, forward and backward", ROWS[:2]),
        ("Softmax attention with narrower v, forward", ROWS[2:3]),
        ("KDA, prefill", ROWS[5:6]),
        ("KDA, backward", ROWS[6:7]),
        ("KDA, decode", ROWS[7:9]),
        ("Lightning Attention, decode", ROWS[4:5]),
    ):
        (cells,) = {  # the members agree
            (listed(row.dtypes()), sizes(row), *(cell(row, archs) for archs in GPUS.values()))
            for row in members
        }
        rows.append([label, *cells])
    return table(rows)


def pages() -> dict[Path, str]:
    """The pages with their tables as they should be."""
    found = {PAGE: filled(PAGE.read_text(), {"support": whole()})}
    return found | {page: filled(page.read_text(), {"support": short()}) for page in FIRST_SCREENS}


def main() -> None:
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
