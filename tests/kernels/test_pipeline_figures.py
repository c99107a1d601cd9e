"""The figures of the kernels' pages agree with the edges that the kernels declare."""

from __future__ import annotations

from itertools import chain

import pytest

from cute_attn.kernels.common.pipeline import Edge, Kind, Pipeline, Role
from docs.kernels import pipeline_figures as page


def test_the_figures_are_current() -> None:
    committed = {path.name: path.read_text() for path in page.FIGURES.glob("*.svg")}
    assert committed == page.figures(), "python -m docs.kernels.pipeline_figures"


@pytest.mark.parametrize("name", page.SHOWN)
def test_a_figure_names_every_edge(name: str) -> None:
    shown = page.SHOWN[name]()
    text = (page.FIGURES / f"{name}.svg").read_text()
    for edge in shown:
        assert text.count(f">{edge.name} &#215;") == 1
    assert text.count("marker-end") == len(list(shown))


@pytest.mark.parametrize("name", page.SHOWN)
def test_a_page_shows_every_figure(name: str) -> None:
    docs = page.FIGURES.parents[1]
    pages = chain((docs / "kernels").glob("*.md"), docs.glob("*.md"))
    assert any(f"figures/{name}.svg)" in path.read_text() for path in pages)


def test_a_role_of_several_roles_has_no_column_of_its_own() -> None:
    load, mma, store = (Role(n, range(i, i + 1)) for i, n in enumerate(("load", "mma", "store")))
    others = Role("others", range(1, 3))
    edges = [
        Edge("a", load, others, 2, Kind.WARPS),
        Edge("b", mma, load, 1, Kind.COMMIT),
        Edge("c", store, load, 1, Kind.WARPS),
    ]
    assert [role.name for role in page.lanes(edges)] == ["load", "mma", "store"]
    assert page.draw(Pipeline(*edges)).count("<rect") == 1 + 3 + 2  # background, roles, two kinds
