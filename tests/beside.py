"""What servers that this package is installed beside require of the packages that it names as well.

    python -m tests.beside vllm==0.33.0 sglang==0.5.23

asks the package index for these releases, and records them in tests/data/beside.json. Without a
version it takes the newest one, and without a name all that are recorded. tests/test_installed.py
compares them with pyproject.toml, and `make test-beside` has pip do so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data/beside.json"
# Extras for users; the other extras are for working on this package.
EXTRAS = ("cu13", "fla", "transformers")


class PipError(Exception):
    """pip can't install something here; the message is pip's."""


def recorded() -> dict[str, dict[str, Any]]:
    """Name -> what `release` said of it."""
    known: dict[str, dict[str, Any]] = json.loads(DATA.read_text())
    return known


def ours() -> list[Requirement]:
    """What this package requires, and its extras for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    listed = [*project["dependencies"], *(text for name in EXTRAS for text in optional[name])]
    return [Requirement(text) for text in listed]


def resolve(*wanted: str, options: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The metadata of all that pip would install for `wanted` into an empty environment, by name.

    Only metadata is fetched, from an index that offers it apart or parts of files.

    Raises:
        PipError: they cannot be installed together, or the index cannot be asked.
    """
    pip = [sys.executable, "-m", "pip", "--use-feature=fast-deps", "install", "--quiet"]
    only = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--report=-"]
    command = [*pip, *only, *options, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PipError(done.stderr.strip())
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {canonicalize_name(metadata["name"]): metadata for metadata in found}


def release(wanted: str) -> dict[str, Any]:
    """A release's version, the Python that it needs, and what it requires of what we name too.

    Raises PipError where the index cannot be asked or has no such release.
    """
    (metadata,) = resolve(wanted, options=["--no-deps"]).values()
    names = {canonicalize_name(requirement.name) for requirement in ours()}
    shared = [
        text
        for text in metadata["requires_dist"]
        if canonicalize_name(Requirement(text).name) in names and "extra ==" not in text
    ]
    return {
        "version": metadata["version"],
        "requires_python": metadata["requires_python"],
        "requires": sorted(shared),
    }


def conflicts(theirs: Sequence[str], mine: Sequence[Requirement]) -> list[str]:
    """Pairs of requirements that no version of a package meets."""
    return [
        f"{one} here, {other} there"
        for one in mine
        for other in map(Requirement, theirs)
        if canonicalize_name(one.name) == canonicalize_name(other.name)
        if (one.specifier & other.specifier).is_unsatisfiable()
    ]


def main() -> None:
    known = recorded()
    found = {Requirement(text).name: release(text) for text in sys.argv[1:] or known}
    DATA.write_text(json.dumps({**known, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
