"""The tables of the pages of the latent decode are those of the kernels."""

from __future__ import annotations

from docs.kernels import mla_decode_page as page
from docs.kernels.page_tables import filled


def test_the_tables_are_current() -> None:
    for path, tables in page.pages().items():
        text = path.read_text()
        assert filled(text, tables) == text, "python -m docs.kernels.mla_decode_page"
