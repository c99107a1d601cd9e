"""Writes what mla_decode.md shows of the kernel's own declarations.

python -m docs.kernels.mla_decode_page
"""

from __future__ import annotations

from pathlib import Path

import cute_attn.kernels.mla.sm90.latent_decode as kernel
from cute_attn.kernels.mla.spec import LatentDecodeSpec
from cute_attn.ops.mla import plan_mla_decode

from .page_tables import budgets, filled

PAGE = Path(__file__).with_name("mla_decode.md")


def decode() -> kernel.Sm90LatentDecode:
    """The kernel of one query over tokens of 576 columns."""
    ((_, spec),) = plan_mla_decode("sm_90a")
    assert isinstance(spec, LatentDecodeSpec)
    return kernel.Sm90LatentDecode(spec)


def tables() -> dict[str, str]:
    """Marker -> Markdown."""
    chosen = decode()
    softmax, outputs, loads = kernel.REGISTERS
    registers = {"softmax": softmax, "outputs": outputs, "queries and load": loads}
    return {
        "edges": chosen.pipeline.table(),
        "budgets": budgets(chosen.smem, None, registers),
    }


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), tables()))


if __name__ == "__main__":
    main()
