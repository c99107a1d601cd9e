"""docs/kernels/sm90_forward.md and wide_heads.md agree with the kernel's declarations."""

from __future__ import annotations

import re

from cute_attn.kernels.attention.sm90.forward import REGISTERS
from docs.kernels import sm90_forward_page as page
from docs.kernels.page_tables import filled


def test_the_tables_are_current() -> None:
    for path, wide in ((page.PAGE, False), (page.WIDE_PAGE, True)):
        text = path.read_text()
        assert filled(text, page.tables(wide)) == text, "python -m docs.kernels.sm90_forward_page"


def test_the_text_has_the_kernels_registers() -> None:
    text = page.PAGE.read_text()
    for number in (0, 1):
        two, three = (REGISTERS[groups][number] for groups in (2, 3))
        assert re.search(rf"\| {two} \({three}\) \|", text), number
