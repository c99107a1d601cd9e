"""Formulas of the pages as MathML, made when mkdocs builds the pages, so a reader needs no script.

In a page, `$...$` stands in a line and `$$...$$` by itself, in LaTeX.
"""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

# What pymdownx.arithmatex makes of them, with `generic: true`.
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def mathml(latex: str, *, block: bool = False) -> str:
    """The <math> element of a formula.

    Raises:
        PluginError: it cannot be read, or has a command that is not known.
    """
    try:
        element = convert(latex, display="block" if block else "inline")
        texts = list(ElementTree.fromstring(element).itertext())
    except Exception as error:  # latex2mathml has a dozen kinds, without a common base
        raise PluginError(f"{latex!r} is no formula: {type(error).__name__}") from error
    if unknown := next((text for text in texts if "\\" in text), None):
        raise PluginError(f"{unknown} of {latex!r} is no command that latex2mathml knows")
    return element


def on_page_content(content: str, **_: Any) -> str:
    """mkdocs calls this with the HTML of each page."""
    return _FORMULA.sub(_converted, content)


def _converted(found: re.Match[str]) -> str:
    block = found["open"] == "["
    element = mathml(html.unescape(found["latex"]), block=block)
    # On a narrow screen a formula by itself scrolls, and not the page: see stylesheets/pages.css.
    return f'<div class="formula">{element}</div>' if block else element
