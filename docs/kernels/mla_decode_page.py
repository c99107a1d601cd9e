"""Writes what mla_decode.md, mla_turns.md and mla_rows.md show of the kernels' own declarations.

python -m docs.kernels.mla_decode_page
"""

from __future__ import annotations

from pathlib import Path

import cute_attn.kernels.mla.sm90.latent_decode as few
import cute_attn.kernels.mla.sm90.latent_decode_turns as many
from cute_attn.kernels.common.pipeline import Pipeline
from cute_attn.kernels.mla.spec import LatentDecodeSpec, LatentTurnsSpec
from cute_attn.ops.mla import plan_mla_decode

from .page_tables import budgets, filled

PAGE = Path(__file__).with_name("mla_decode.md")
TURNS_PAGE = Path(__file__).with_name("mla_turns.md")
ROWS_PAGE = Path(__file__).with_name("mla_rows.md")
CHANGED = ("q_full", "cache_full", "cache_empty")  # edges that gathered rows change


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


def rows_tables() -> dict[str, str]:
    """Marker -> Markdown, of mla_rows.md."""
    ((_, gathered),) = plan_mla_decode("sm_90a", page_size=1)
    ((_, eight),) = plan_mla_decode("sm_90a", kv_dtype="float8_e4m3fn")
    assert isinstance(gathered, LatentDecodeSpec) and isinstance(eight, LatentDecodeSpec)
    by_gathering, of_fp8 = few.Sm90LatentDecode(gathered), few.Sm90LatentDecode(eight)
    softmax, outputs, loads = few.REGISTERS_WITH_FP8
    registers = {"softmax": softmax, "outputs": outputs, "queries and load": loads}
    edges = [Pipeline(*(x.pipeline[name] for name in CHANGED)) for x in (by_gathering, of_fp8)]
    return {
        "edges of gathered rows": edges[0].table(),
        "edges of fp8": edges[1].table(),
        "budgets of fp8": budgets(of_fp8.smem, None, registers),
    }


def pages() -> dict[Path, dict[str, str]]:
    """The tables of each page."""
    return {PAGE: tables(), TURNS_PAGE: turns_tables(), ROWS_PAGE: rows_tables()}


def main() -> None:
    for page, parts in pages().items():
        page.write_text(filled(page.read_text(), parts))


if __name__ == "__main__":
    main()
