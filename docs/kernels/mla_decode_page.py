"""Writes what mla_decode.md and mla_turns.md show of the kernels' own declarations.

python -m docs.kernels.mla_decode_page
"""

from __future__ import annotations

from pathlib import Path

import cute_attn.kernels.mla.sm90.latent_decode as few
import cute_attn.kernels.mla.sm90.latent_decode_turns as many
from cute_attn.kernels.mla.spec import LatentDecodeSpec, LatentTurnsSpec
from cute_attn.ops.mla import plan_mla_decode

from .page_tables import budgets, filled

PAGE = Path(__file__).with_name("mla_decode.md")
TURNS_PAGE = Path(__file__).with_name("mla_turns.md")


def kernels() -> tuple[few.Sm90LatentDecode, many.Sm90LatentDecodeTurns]:
    """The kernels of one query with 16 heads, and of two queries with 128 heads, over tokens of 576
    columns."""
    ((_, one),) = plan_mla_decode("sm_90a")
    (_, several), _ = plan_mla_decode("sm_90a", queries=2, heads=128)
    assert isinstance(one, LatentDecodeSpec) and isinstance(several, LatentTurnsSpec)
    return few.Sm90LatentDecode(one), many.Sm90LatentDecodeTurns(several)


def tables() -> dict[str, str]:
    """Marker -> Markdown, of mla_decode.md."""
    one, _ = kernels()
    softmax, outputs, loads = few.REGISTERS
    registers = {"softmax": softmax, "outputs": outputs, "queries and load": loads}
    return {"edges": one.pipeline.table(), "budgets": budgets(one.smem, None, registers)}


def turns_tables() -> dict[str, str]:
    """Marker -> Markdown, of mla_turns.md."""
    _, several = kernels()
    of_many = dict(zip(("even and odd", "queries and load"), many.REGISTERS, strict=True))
    return {
        "edges of many rows": several.pipeline.table(),
        "budgets of many rows": budgets(several.smem, None, of_many),
    }


def pages() -> dict[Path, dict[str, str]]:
    """The tables of each page."""
    return {PAGE: tables(), TURNS_PAGE: turns_tables()}


def main() -> None:
    for page, parts in pages().items():
        page.write_text(filled(page.read_text(), parts))


if __name__ == "__main__":
    main()
