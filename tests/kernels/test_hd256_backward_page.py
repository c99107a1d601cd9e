"""docs/kernels/hd256_backward.md agrees with the kernels' tables."""

from __future__ import annotations

from docs.kernels import hd256_backward_page as page
from docs.kernels.page_tables import filled


def test_the_tables_are_current() -> None:
    text = page.PAGE.read_text()
    assert filled(text, page.tables()) == text, "python -m docs.kernels.hd256_backward_page"
