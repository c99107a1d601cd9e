"""Writes the tables of what runs on which GPU, in support.md, README and index.md.

    python -m docs.support_page

asks the plan functions of cute_attn.families, which know what there are kernels for.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cute_attn.families import FAMILIES, Support

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
DTYPES = ("bfloat16", "float16", "float32")
DIMS = (32, 64, 96, 128, 192, 256, 320, 512, 576)


@dataclass(frozen=True, eq=False)
class Row:
    """A family's record of public functions in one direction, with their plan function."""

    support: Support
    plan: Callable[..., Any]

    @property
    def functions(self) -> tuple[str, ...]:
        return self.support.functions

    @property
    def direction(self) -> str:
        return self.support.direction

    def has(self, arch: str, **options: Any) -> bool:
        sizes = [options[name] for name in self.support.sizes.values() if name in options]
        if self.support.unequal and len({*sizes}) < len(sizes):
            return False
        try:
            return bool(self.plan(arch, **options))
        except (NotImplementedError, ValueError):
            return False

    def combinations(self, archs: Iterable[str] = ARCHS) -> set[tuple[int, ...]]:
        """The values of all sizes for which there are kernels on one of the architectures."""
        return set().union(*(planned(self, arch) for arch in archs))

    def sizes(self, archs: Iterable[str] = ARCHS) -> dict[str, tuple[object, ...]]:
        """For each size the values for which there are kernels, in any combination. Two unequal
        sizes are one entry, with their pairs."""
        found = self.combinations(archs)
        if self.support.unequal:
            first, second = self.support.sizes
            return {f"{first} ({second})": tuple(f"{a} ({b})" for a, b in sorted(found))}
        each: dict[str, tuple[object, ...]] = {
            name: tuple(d for d in DIMS if any(values[i] == d for values in found))
            for i, name in enumerate(self.support.sizes)
        }
        assert set(product(*each.values())) == found, self
        return each

    def dtypes(self) -> tuple[str, ...]:
        """The dtypes, on which all architectures that have kernels agree."""
        names = self.support.sizes.values()
        dims = dict(zip(names, max(self.combinations()), strict=True))
        found = {
            tuple(dtype for dtype in DTYPES if self.has(arch, **dims | {self.support.dtype: dtype}))
            for arch in ARCHS
        } - {()}
        (dtypes,) = found
        return dtypes


@functools.cache  # a plan takes a millisecond, and the tables ask for each one many times
def planned(row: Row, arch: str) -> set[tuple[int, ...]]:
    """The values of all sizes for which `row` has kernels on one architecture."""
    names = list(row.support.sizes.values())
    return {
        values
        for values in product(DIMS, repeat=len(names))
        if row.has(arch, **dict(zip(names, values, strict=True)))
    }


ROWS = [
    Row(support, pkgutil.resolve_name(support.plan))
    for family in FAMILIES
    for support in family.support
]


def cell(row: Row, archs: tuple[str, ...]) -> str:
    """The level of verification on these architectures. Sizes come first if the architectures lack
    some of the row's sizes."""
    (sizes,) = {tuple(row.sizes([arch]).items()) for arch in archs}  # they agree
    level = "measured" if set(archs) <= set(row.support.measured) else "emulated"
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
        dtypes = listed(row.dtypes())
        if row.support.states:
            dtypes += f"; state: {listed(row.support.states)}"
        cells = [cell(row, archs) for archs in GPUS.values()]
        names = listed(f"`{name}`" for name in row.functions)
        rows.append([names, row.direction, dtypes, sizes(row), *cells])
    return table(rows)


def short() -> str:
    """For README: a row for each operator and direction, without dtypes of states."""
    rows = [["", "dtypes", "sizes", *GPUS]]
    for label in dict.fromkeys(row.support.summary for row in ROWS if row.support.summary):
        members = [row for row in ROWS if row.support.summary == label]
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
