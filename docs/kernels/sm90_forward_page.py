"""Writes what sm90_forward.md and wide_heads.md show of the kernel's own declarations and machine
code.

    python -m docs.kernels.sm90_forward_page

writes the tables between the pages' markers anew. The tables of machine code need nvdisasm.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import cute_attn.kernels.attention.sm90.forward as kernel
from cute_attn import cache
from cute_attn.bench.ladder.machine_code import key_tile
from cute_attn.kernels.attention.configs import SM90, forward, shapes
from cute_attn.launch import Request
from cute_attn.ops.attention import plan_attention

from .page_tables import budgets, filled

PAGE = Path(__file__).with_name("sm90_forward.md")
ARCH = "sm_90a"
WIDE_PAGE = Path(__file__).with_name("wide_heads.md")
WIDE = ((320, 256), (512, 512), (576, 512))
SHAPES = tuple(dims for dims in shapes("forward", SM90) if dims not in WIDE)

Shapes = tuple[tuple[int, int], ...]

# Rates of an SM: FLOP a clock of wgmma, bytes a clock of shared memory, exponentials a clock.
TENSOR_CORES, SHARED, SFU = 4096, 128, 16
GHZ, SMS = 1.98, 132  # clock and number of SMs of an H200


def request(head_dim: int, head_dim_v: int, *, causal: bool = False) -> Request:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    (found,) = plan_attention(ARCH, **dims, causal=causal, short=False, long=False)
    return found


def named(head_dim: int, head_dim_v: int) -> str:
    return str(head_dim) if head_dim == head_dim_v else f"{head_dim}, {head_dim_v} of v"


def tables(wide: bool = False) -> dict[str, str]:
    """Marker -> Markdown, of the specialisations without options; without machine code. `wide`
    selects the page of wide heads."""
    of_page = WIDE if wide else SHAPES
    kernels = {dims[0]: kernel.Sm90Forward(request(*dims)[1]) for dims in of_page}
    edges, budgeted = (512, (512, 576)) if wide else (128, (128, 256))
    found = {"edges": kernels[edges].pipeline.table(), "roofline": roofline(of_page)}
    for head_dim in budgeted:  # a page has room for two
        chosen = kernels[head_dim]
        load, consumers = kernel.REGISTERS[chosen.warpgroups]
        registers = {"consumers": consumers, "load and its idle warps": load}
        found[f"budgets{head_dim}"] = budgets(chosen.smem, None, registers)
    return found


def roofline(of_page: Shapes) -> str:
    """Clocks of an SM for the products and exponentials of a tile, and the bounds that they set."""
    rows = []
    peak = TENSOR_CORES * SMS * GHZ / 1e3
    for dims in of_page:
        spec, row = request(*dims)[1], forward(ARCH, *dims)
        m, n = spec.tile_m, spec.tile_n
        groups, columns = m // kernel.ROWS, row.columns + row.columns_v
        products = 2 * m * n * columns / TENSOR_CORES
        needed = sum(dims) / (row.cluster * columns)  # share of the products
        exponentials = m * n / SFU
        # A wgmma reads its operands in shared memory: Q and K for S, V for P V.
        operands = groups * 2 * ((kernel.ROWS + n) * row.columns + n * row.columns_v) / SHARED
        if row.cluster > 1:  # the other CTA's part of S is written and read
            operands += 2 * 4 * m * n / SHARED
        loads = 2 * n * columns / products
        in_turn = needed * peak * products / (products + exponentials)
        rows.append(
            f"| {named(*dims)} | {m} x {n} | {products:.0f} | {exponentials:.0f} "
            f"| {operands:.0f} | {loads:.0f} | {needed * peak:.0f} | {in_turn:.0f} |"
        )
    head = [
        "| head_dim | tile | products | exponentials | shared memory | K and V, bytes a clock | "
        "overlapped, TFLOP/s | in turn |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*head, *rows])


def machine_code(of_page: Shapes) -> str:
    """What a warp executes for a K/V tile without a mask."""
    rows = []
    for dims in of_page:
        for causal in (False, True):
            entry = cache.compile(*request(*dims, causal=causal), arch=ARCH)
            (use,) = entry.kernels
            found = key_tile(entry)
            counts = Counter(i.base for i in found)
            waits = [n for n, i in enumerate(found) if i.opcode.startswith("WARPGROUP.DEPBAR")]
            hidden = sum(i.base == "MUFU" for i in found[: waits[-1]])
            rows.append(
                f"| {named(*dims)} | {'causal' if causal else 'dense'} | {use.registers} "
                f"| {use.spills} | {len(found)} | {counts['HGMMA']} | {len(waits)} "
                f"| {hidden} of {counts['MUFU']} | {counts['R2UR']} |"
            )
    head = [
        "| head_dim | | registers | spilled bytes | instructions | HGMMA | waits for them "
        "| exponentials before the wait for O | R2UR |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*head, *rows])


def main() -> None:
    for page, of_page in ((PAGE, SHAPES), (WIDE_PAGE, WIDE)):
        parts = tables(page is WIDE_PAGE) | {"machine-code": machine_code(of_page)}
        page.write_text(filled(page.read_text(), parts))


if __name__ == "__main__":
    main()
