"""The tables that the pages of kernels show of the kernels' own declarations."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cute_attn.kernels.common.smem import SharedMemory
from cute_attn.kernels.common.spec import MAX_SMEM_BYTES
from cute_attn.kernels.common.tmem import MAX_TMEM_COLUMNS, TensorMemory


def budgets(memory: SharedMemory, tmem: TensorMemory | None, registers: Mapping[str, int]) -> str:
    """A CTA's shared memory, tensor memory and registers, in Markdown. `registers` has a thread's
    registers, by roles."""
    buffers = memory.buffers.values()
    large = [b for b in buffers if b.nbytes >= 8192]
    small = [b for b in buffers if b not in large]
    rows = [(b.holds, f"{b.stages} x {b.stage_bytes:,}", f"{b.nbytes:,} bytes") for b in large]
    rows += [
        (", ".join(b.name for b in small), "", f"{sum(b.nbytes for b in small):,} bytes"),
        ("all, aligned", "", f"{memory.nbytes:,} of {MAX_SMEM_BYTES:,} bytes"),
    ]
    table = [("shared memory", *row) for row in rows]
    if tmem is not None:
        table += [
            ("tensor memory", r.holds, f"{r.stages} x {r.columns}",
             f"{r.stages * r.columns} columns")
            for r in tmem.regions
        ]  # fmt: skip
        table.append(("tensor memory", "all", "", f"{tmem.columns} of {MAX_TMEM_COLUMNS} columns"))
    table += [("registers", roles, "", f"{n} a thread") for roles, n in registers.items()]
    head = ["| resource | for | stages | |", "| --- | --- | ---: | ---: |"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in table)])


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with what is between `<!-- name -->` and `<!-- /name -->` replaced."""
    for name, text in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page, count = re.subn(
            pattern, lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"the page has {count} places for {name}")
    return page
