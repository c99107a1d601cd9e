"""The tables of docs/kernels/mla_decode.md are those of the kernel."""

from __future__ import annotations

from docs.kernels import mla_decode_page as page
from docs.kernels.page_tables import filled


def test_the_tables_are_current() -> None:
    text = page.PAGE.read_text()
    assert filled(text, page.tables()) == text, "python -m docs.kernels.mla_decode_page"
