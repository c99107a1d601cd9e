"""The documentation renders as it is meant to. Needs the extra `docs`, which `make lint` brings."""

from __future__ import annotations

import importlib
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/**/*.md"))

griffe = pytest.importorskip("griffe", reason="needs the extra docs")
yaml = pytest.importorskip("yaml", reason="needs the extra docs")


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return loaded


# ---- length

MAX_WORDS = 3000


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/kernels/*.md")), ids=lambda page: page.name)
def test_the_page_of_a_kernel_is_short(page: Path) -> None:
    """What was tried belongs into docs/log."""
    assert len(page.read_text().split()) <= MAX_WORDS


# ---- links


@pytest.mark.parametrize("link", ["there.md", "there.md#a-place", "gone.md", "there.md#gone"])
def test_lint_fails_for_a_broken_link(link: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    """The command of `make lint`, on a site with our rules and one link."""
    recipe = subprocess.run(
        ["make", "-n", "lint", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (command,) = (line for line in recipe.splitlines() if " -m mkdocs " in line)
    site = {"site_name": "one link", "validation": settings["validation"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(site))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"[a link]({link})\n")
    (tmp_path / "docs/there.md").write_text("# A title\n\n## A place\n")
    built = subprocess.run(
        shlex.split(command, comments=True),
        cwd=tmp_path,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (built.returncode != 0) == ("gone" in link), built.stdout


# ---- formulas


def formulas(text: str) -> str:
    """The HTML of a page with formulas, as the build makes it."""
    pytest.importorskip("latex2mathml", reason="needs the extra docs")
    markdown = pytest.importorskip("markdown")
    extension = {"pymdownx.arithmatex": {"generic": True}}
    page = markdown.markdown(text, extensions=list(extension), extension_configs=extension)
    html: str = importlib.import_module("docs.mathml").on_page_content(page)
    return html


def test_formulas_become_mathml() -> None:
    html = formulas("A row of $P V$, and\n\n$$\na < b^2\n$$\n")
    assert re.findall(r'<math [^>]*display="(\w+)"', html) == ["inline", "block"]
    assert "&#x0003C;" in html or "&lt;" in html
    # The block scrolls on a narrow screen, and not the page.
    assert html.count('<div class="formula"><math') == html.count("<math") - 1 == 1
    style = (ROOT / "docs/stylesheets/pages.css").read_text()
    assert re.search(r"\.formula \{\s*overflow-x: auto;", style)
    assert "arithmatex" not in html and "\\(" not in html


@pytest.mark.parametrize(
    "latex", [r"\frac{a}{", r"\unheard{x}", r"\begin{aligned}a&b\end{aligned}"]
)
def test_a_formula_that_cannot_be_read_fails_the_build(latex: str) -> None:
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match=re.escape(latex.partition("{")[0].replace("\\", ""))):
        formulas(f"So ${latex}$.")


# ---- where the pages are from

GITHUB = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "someone/fork"}


def configured(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Any:
    """The settings of a build after our hooks, and the address at which to edit a page of it."""
    from mkdocs.config import load_config
    from mkdocs.structure.files import File
    from mkdocs.structure.pages import Page

    for name in ("REPOSITORY", *GITHUB):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    facts = importlib.import_module("docs.site_facts")
    config = facts.on_config(load_config(str(ROOT / "mkdocs.yml")))
    page = File("kernels/kda.md", config.docs_dir, config.site_dir, use_directory_urls=True)
    return config, Page(None, page, config).edit_url


def test_pages_show_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    config, edit = configured(monkeypatch, {})
    assert config.site_name == f"cute_attn {importlib.import_module('cute_attn').__version__}"
    assert config.repo_url is None and edit is None


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        (GITHUB, "https://github.com/someone/fork"),
        ({"REPOSITORY": "https://example.com/x/y"}, "https://example.com/x/y"),
        (GITHUB | {"REPOSITORY": "https://example.com/x/y"}, "https://example.com/x/y"),
    ],
)
def test_pages_link_to_the_repository_that_builds_them(
    environment: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, edit = configured(monkeypatch, environment)
    assert config.repo_url == url
    assert edit == f"{url}/edit/main/docs/kernels/kda.md"


@pytest.mark.parametrize("url", ["github.com/x/y", "http://x/y", "https://user:word@x/y", "x"])
def test_an_address_that_pages_must_not_link_to_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match="must be the https:// address of a repository"):
        configured(monkeypatch, {"REPOSITORY": url})


# ---- commands

COMMANDS = [
    (page.name, command)
    for page in [*PAGES, *sorted(ROOT.glob("cute_attn/models/*.toml"))]
    for command in re.findall(r"python -m cute_attn\.cache (build [^`\n]+)", page.read_text())
]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_builds_are_given_all_that_they_need(page: str, command: str) -> None:
    parser = importlib.import_module("cute_attn.cache.__main__")._parser()
    assert parser.parse_args(shlex.split(command)).out


# ---- the reference

DOCUMENTED = [
    (page.name, name)
    for page in PAGES
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
]


@pytest.fixture(scope="module")
def sources() -> Any:
    """The packages as mkdocstrings reads them: by their text."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], allow_inspection=False)
    loader.load("cute_attn")
    loader.load("cache")
    return loader.modules_collection


@pytest.fixture(scope="module")
def docstring_options(settings: dict[str, Any]) -> Any:
    (handlers,) = (p["mkdocstrings"] for p in settings["plugins"] if "mkdocstrings" in p)
    return handlers["handlers"]["python"]["options"]["docstring_options"]


def functions(documented: Any) -> list[Any]:
    """What a reader of an entry sees of functions: itself, or the public methods of a class."""
    if documented.is_function:
        return [documented]
    return [
        member
        for member in documented.members.values()
        if not member.is_alias
        and member.is_function
        and (not member.name.startswith("_") or member.name.startswith("__"))
    ]


@pytest.mark.parametrize("name", [name for _, name in DOCUMENTED])
def test_docstrings_render_as_sections(
    name: str, sources: Any, docstring_options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A row for each parameter, in order, one for what is returned, and one for each exception."""
    documented = sources[name]
    assert documented.docstring
    caplog.set_level(logging.DEBUG, logger="griffe")
    for section in griffe.parse_google(documented.docstring, **docstring_options):
        if section.kind.value == "attributes":
            assert {row.name for row in section.value} <= set(documented.members)
    for function in functions(documented):
        if function.docstring is None:
            assert function.name.startswith("__")  # its class says it, or it is not shown
            continue
        sections: dict[str, Any] = {}
        for section in griffe.parse_google(function.docstring, **docstring_options):
            kind = section.kind.value
            assert kind in ("text", "examples", "admonition") or kind not in sections
            sections[kind] = section.value
            if kind == "admonition":
                assert section.value.kind not in ("args", "raises", "returns", "yields")
        taken = [p.name.lstrip("*") for p in function.parameters if p.name != "self"]
        rows = [row.name.lstrip("*") for row in sections.get("parameters", ())]
        assert rows == taken
        assert len(sections.get("returns", ())) <= 1
        # A type that is read out of the text was meant as text: "(o, lse): ..."
        for row in sections.get("returns", ()):
            assert row.name == "" and str(row.annotation) == str(function.returns)
        for row in sections.get("raises", ()):
            assert re.fullmatch(r"[\w.]+", str(row.annotation)), row.annotation
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []
