"""Version, changelog, tag and workflow of a release agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cute_attn

from .test_repository import PYPROJECT, ROOT, load, tomllib

release = load(".github/release.py")
VERSION = cute_attn.__version__
START = "<!-- towncrier release notes start -->\n"
CHANGELOG = f"# Changelog\n\n{START}\n## [{VERSION}] - 2026-11-22\n\n- It works.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of a checkout that a release reads, with a version to release."""
    (tmp_path / "cute_attn").mkdir()
    shutil.copy(ROOT / "cute_attn/_version.py", tmp_path / "cute_attn")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_this_checkout_agrees_with_itself() -> None:
    assert release.main(["check"]) == 0
    assert release.version(ROOT) == VERSION


def test_a_release_tag_names_the_version() -> None:
    command = ["git", "tag", "--points-at", "HEAD", "v*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.split():
        pytest.skip("HEAD has no release tag")
    for tag in done.stdout.split():
        release.check(ROOT, tag)


def test_what_agrees_passes(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["check", "--tag", f"v{VERSION}"], checkout) == 0
    assert release.main(["notes"], checkout) == 0
    assert capsys.readouterr().out == "- It works.\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"[{VERSION}]", "[9.9.9]", rf"newest version in CHANGELOG.md is 9\.9\.9, not {VERSION}"),
        ("2026-11-22", "2026-13-22", "2026-13-22 is no date"),
        (" - 2026-11-22", "", "write ## "),
        (START, "## [Unreleased]\n", r"\[Unreleased\] in CHANGELOG.md: write ## "),
        (CHANGELOG[CHANGELOG.index(f"## [{VERSION}") :], "", f"no section for {VERSION}"),
    ],
)
def test_a_change_log_that_disagrees(checkout: Path, old: str, new: str, message: str) -> None:
    assert old in CHANGELOG
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace(old, new))
    with pytest.raises(release.ReleaseError, match=message):
        release.check(checkout, f"v{VERSION}")


def add_change(checkout: Path, name: str, text: str) -> None:
    folder = checkout / release.CHANGES
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("+more.md", "More.\n", "name it"),
        ("+more.removed.md", "More.\n", "name it"),
        ("more.added.md", "More.\n", "name it"),
        ("+more.added.md", "More,\nand more.\n", "must be one line"),
        ("+more.added.md", "", "must be one line"),
    ],
)
def test_a_change_that_no_section_would_show(
    checkout: Path, name: str, text: str, message: str
) -> None:
    add_change(checkout, name, text)
    with pytest.raises(release.ReleaseError, match=message):
        release.check(checkout, None)


def test_the_changes_become_the_section_of_a_release(checkout: Path) -> None:
    pytest.importorskip("towncrier", reason="needs the extra lint")
    shutil.copytree(ROOT / release.CHANGES, checkout / release.CHANGES)
    add_change(checkout, "+toy.fixed.md", "A toy works.\n")
    add_change(checkout, "+other-toy.added.md", "Another toy.\n")
    changes = [path.read_text() for path in release.changes(checkout)]
    assert release.main(["check"], checkout) == 0
    with pytest.raises(release.ReleaseError, match="has changes: towncrier build"):
        release.check(checkout, f"v{VERSION}")
    (checkout / "CHANGELOG.md").write_text((ROOT / "CHANGELOG.md").read_text())
    (checkout / "cute_attn/_version.py").write_text('__version__ = "9.9.9"\n')
    command = [sys.executable, "-m", "towncrier", "build", "--version", "9.9.9", "--yes"]
    subprocess.run([*command, "--date", "2026-12-01"], cwd=checkout, check=True)
    assert release.main(["check", "--tag", "v9.9.9"], checkout) == 0
    assert release.changes(checkout) == []
    (heading, section), (before, _), *_ = release.sections(checkout)
    assert heading == "[9.9.9] - 2026-12-01" and before.startswith(f"[{VERSION}]")
    assert sorted(re.findall(r"^- (.+\n)", section, re.MULTILINE)) == sorted(changes)
    assert (
        section.index("Another toy.") < section.index("### Fixed") < section.index("A toy works.")
    )


@pytest.mark.parametrize("tag", [VERSION, "v9.9.9", "release"])
def test_another_tag(checkout: Path, tag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["check", "--tag", tag], checkout) == 1
    assert f"the tag is {tag}, and of version {VERSION}" in capsys.readouterr().err


def test_urls_are_those_of_the_repository_that_builds(checkout: Path) -> None:
    assert "urls" not in PYPROJECT["project"]
    assert release.main(["urls", "https://code.example/someone/cute_attn"], checkout) == 0
    changed = tomllib.loads((checkout / "pyproject.toml").read_text())
    urls = changed["project"].pop("urls")
    assert changed == PYPROJECT
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith("https://code.example/someone/cute_attn") for url in urls.values())
    for name in ("Documentation", "Changelog"):
        assert (ROOT / urls[name].partition(f"/blob/v{VERSION}/")[2]).is_file()
    assert release.main(["urls", "https://code.example/someone/cute_attn"], checkout) == 1
    assert release.main(["urls", "someone/cute_attn"], checkout) == 1


def test_the_readme_of_a_release_has_no_relative_links(checkout: Path) -> None:
    """The README is shown where the package is offered, without the files around it."""
    before = (checkout / "README.md").read_text()
    assert release.main(["urls", "https://code.example/someone/cute_attn"], checkout) == 0
    after = (checkout / "README.md").read_text()
    old, new = (re.findall(r"\]\(([^)\s]+)", text) for text in (before, after))
    assert len(old) == len(new)
    assert [link for link in new if not link.startswith(("https://", "#"))] == []
    files = [link.partition(f"/v{VERSION}/")[2].partition("#")[0] for link in new]
    assert "docs/operators.md" in files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_links_are_made_absolute_outside_of_code() -> None:
    text = """[a](docs/a.md#x), [b](#b), [![c](docs/c.svg)](https://else.example/), [d
e](LICENSE "title"), <img src="docs/d.png" alt="">
```python
f[0](docs)
```
[g](docs/g.md)
"""
    at = "https://code.example/x"
    assert (
        release.absolute_links(text, at, "v1.2.3")
        == f"""[a]({at}/blob/v1.2.3/docs/a.md#x), \
[b](#b), [![c]({at}/raw/v1.2.3/docs/c.svg)](https://else.example/), [d
e]({at}/blob/v1.2.3/LICENSE "title"), <img src="{at}/raw/v1.2.3/docs/d.png" alt="">
```python
f[0](docs)
```
[g]({at}/blob/v1.2.3/docs/g.md)
"""
    )


def test_the_workflow_names_files_and_targets_that_exist() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    named = set(re.findall(r"(?:\.github|\btests|\bexamples|\bdocs)/[\w./-]+", workflow))
    assert ".github/release.py" in named
    assert {name for name in named if not (ROOT / name).exists()} == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", workflow)) <= targets
