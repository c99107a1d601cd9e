#!/usr/bin/env python3
"""What workflows/release.yml asks of a checkout before it builds.

    .github/release.py check [--tag v0.1.0]   do version, change log and the tag agree?
    .github/release.py urls URL               name a repository in pyproject.toml and README.md
    .github/release.py notes                  print the newest version's section of CHANGELOG.md

The checkout does not say where its repository is, as it would be wrong in every copy: what is built
for a release names the repository that builds it. It has [project.urls], and README.md, which is
shown where the package is offered, links to the files of that repository at the release's tag.
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The target of a Markdown link or image, or of an HTML attribute.
TARGET = re.compile(
    r"""(?<=\]\()[^)\s]+|(?<=src=")[^"\s]+|(?<=srcset=")[^"\s]+|(?<=href=")[^"\s]+"""
)
ELSEWHERE = re.compile(r"#|[a-z]+:")
CHANGES = Path("docs/changelog")  # a file for each change of the next version, for towncrier
CHANGE = re.compile(r"\+[a-z0-9-]+\.(added|changed|fixed)\.md")


class ReleaseError(Exception):
    """This checkout cannot be released as it is."""


def version(root: Path) -> str:
    text = (root / "cute_attn/_version.py").read_text()
    found = re.fullmatch(r'__version__ = "(\d+\.\d+\.\d+)"\n', text)
    if found is None:
        raise ReleaseError(f'cute_attn/_version.py must be __version__ = "X.Y.Z", not {text!r}')
    return found[1]


def sections(root: Path) -> list[tuple[str, str]]:
    """(heading, text) of each version in CHANGELOG.md, the newest first."""
    parts = re.split(r"^## (.+)\n", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def changes(root: Path) -> list[Path]:
    """The changes of the next version.

    Raises:
        ReleaseError: one has a name that towncrier would not take, or is not one line.
    """
    found = [path for path in sorted((root / CHANGES).glob("*")) if path.name != "README.md"]
    for path in found:
        if not CHANGE.fullmatch(path.name):
            raise ReleaseError(f"{CHANGES}/{path.name}: name it +WHAT.KIND.md, {CHANGE.pattern}")
        if not re.fullmatch(r"\S.*\n", path.read_text()):
            raise ReleaseError(f"{CHANGES}/{path.name} must be one line")
    return found


def check(root: Path, tag: str | None) -> None:
    """Raises ReleaseError, naming what disagrees."""
    current = version(root)
    headings = [heading for heading, _ in sections(root)]
    if not headings:
        raise ReleaseError(f"CHANGELOG.md has no section for {current}")
    found = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\S+)", headings[0])
    if found is None:
        raise ReleaseError(f"## {headings[0]} in CHANGELOG.md: write ## [X.Y.Z] - YYYY-MM-DD")
    if found[1] != current:
        raise ReleaseError(f"the newest version in CHANGELOG.md is {found[1]}, not {current}")
    try:
        date.fromisoformat(found[2])
    except ValueError:
        raise ReleaseError(f"## {headings[0]} in CHANGELOG.md: {found[2]} is no date") from None
    if tag is not None and tag != f"v{current}":
        raise ReleaseError(f"the tag is {tag}, and of version {current} it has to be v{current}")
    if changes(root) and tag is not None:
        raise ReleaseError(f"{CHANGES} has changes: towncrier build --version {current}")


def absolute_links(text: str, url: str, tag: str) -> str:
    """Markdown whose links and images within the repository `url` are those of `tag`."""

    def absolute(found: re.Match[str]) -> str:
        target = found[0]
        if ELSEWHERE.match(target):
            return target
        image = target.endswith((".svg", ".png", ".gif", ".jpg", ".webp"))
        return f"{url}/{'raw' if image else 'blob'}/{tag}/{target}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)  # code is every other
    parts[::2] = [TARGET.sub(absolute, part) for part in parts[::2]]
    return "".join(parts)


def add_urls(root: Path, url: str) -> None:
    """Raises ReleaseError if the URL is none, or the table is there."""
    if not re.fullmatch(r"https://[^\s\"\\]+[^/\s\"\\]", url):
        raise ReleaseError(f"{url!r} is not the https:// address of a repository")
    path = root / "pyproject.toml"
    text = path.read_text()
    if "[project.urls]" in text:
        raise ReleaseError("pyproject.toml has [project.urls] already")
    tree = f"{url}/blob/v{version(root)}"
    table = {
        "Repository": url,
        "Documentation": f"{tree}/docs/index.md",
        "Changelog": f"{tree}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in table.items())
    path.write_text(f"{text}\n[project.urls]\n{lines}")
    readme = root / "README.md"
    readme.write_text(absolute_links(readme.read_text(), url, f"v{version(root)}"))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("--tag", help="that the release is made for")
    commands.add_parser("urls").add_argument("url")
    commands.add_parser("notes")
    options = parser.parse_args(arguments)
    try:
        if options.command == "check":
            check(root, options.tag)
        elif options.command == "urls":
            add_urls(root, options.url)
        else:
            check(root, None)
            print(sections(root)[0][1].strip())
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
