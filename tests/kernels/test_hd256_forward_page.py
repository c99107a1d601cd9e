"""docs/kernels/hd256_forward.md agrees with the kernel's tables."""

from __future__ import annotations

import re

from cute_attn.kernels.attention.sm100.forward_hd256 import EDGES
from docs.kernels import hd256_forward_page as page
from docs.kernels.page_tables import filled


def test_the_tables_are_current() -> None:
    text = page.PAGE.read_text()
    assert filled(text, page.tables(page.plain_spec())) == text, (
        "python -m docs.kernels.hd256_forward_page"
    )


def names_in(diagram: str) -> set[str]:
    return set(re.findall(r">([a-z]+_[a-z]+)(?:\[\d\])?<", diagram))


def test_the_diagram_names_edges_that_there_are() -> None:
    assert names_in(page.DIAGRAM.read_text()) <= {edge.name for edge in EDGES}


def test_a_timeline_shows_every_edge_of_a_key_tile() -> None:
    """Drawn anew; those of a tile of queries are not in it."""
    drawn = names_in(page.draw(page.timeline()))
    per_key_tile = {"kv_full", "kv_empty", "s_full", "scale_full", "o_ready", "p_full", "pv_done"}
    assert drawn == per_key_tile == names_in(page.DIAGRAM.read_text())
