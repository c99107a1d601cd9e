"""Writes what hd256_backward.md shows of the kernels' own tables, between the page's markers.

python -m docs.kernels.hd256_backward_page
"""

from __future__ import annotations

from pathlib import Path

import cute_attn.kernels.attention.sm100.backward_hd256_dkdv as dkdv
import cute_attn.kernels.attention.sm100.backward_hd256_dq as dq
from cute_attn.kernels.attention.spec import Hd256BackwardSpec

from .page_tables import budgets, filled

PAGE = Path(__file__).with_name("hd256_backward.md")

PLAIN = Hd256BackwardSpec(
    dtype="bfloat16",
    scheduler="static",
    window_left=False,
    window_right=False,
    softcap=False,
    varlen_q=False,
    varlen_k=False,
    seqused_q=False,
    seqused_k=False,
)


def tables() -> dict[str, str]:
    """Marker -> Markdown, of the specialisations without options."""
    found = {}
    for name, module, kernel in (
        ("dq", dq, dq.Sm100Hd256Dq(PLAIN)),
        ("dkdv", dkdv, dkdv.Sm100Hd256DkDv(PLAIN)),
    ):
        registers = {
            "elementwise": module.ELEMENTWISE_REGISTERS,
            "load, mma, store, scheduler": module.OTHER_REGISTERS,
        }
        found[f"{name} edges"] = kernel.pipeline.table()
        found[f"{name} budgets"] = budgets(kernel.smem, module.TMEM, registers)
    return found


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), tables()))
