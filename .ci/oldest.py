#!/usr/bin/env python3
"""Usage: PYTHON .ci/oldest.py DIRECTORY

Create a virtual environment in DIRECTORY with the oldest release of each package that cute-attn
requires, by the lower bounds in pyproject.toml. It takes everything else from the environment of
PYTHON, which has to have pip and packaging. `make test-oldest` runs the tests there.

torch stays that of PYTHON: it is the largest of them, and few indexes have an old build for CPUs.
"""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"torch"}
COMPILER = "nvidia-cutlass-dsl"

# Run there: does Python import what was installed, and not the newer release?
CHECK = """
import sys
from importlib.metadata import version
from packaging.version import Version
for pin in sys.argv[1:]:
    name, _, wanted = pin.partition("==")
    found = version(name.partition("[")[0])
    assert Version(found) == Version(wanted), f"{name} is {found}, not {wanted}"
"""


def oldest(requirements: Iterable[str], extras: Iterable[str] = ()) -> list[str]:
    """`name==version` for the lower bound of each requirement that applies to this Python.

    Args:
        extras: of the compiler, all of whose libraries have to have its version.
    """
    pins = []
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or requirement.marker.evaluate()
        if requirement.name in LEFT_OUT or not applies:
            continue
        bounds = [bound.version for bound in requirement.specifier if bound.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"{requirement} in pyproject.toml has no lower bound to test")
        wanted = {*requirement.extras, *(extras if requirement.name == COMPILER else ())}
        chosen = f"[{','.join(sorted(wanted))}]" if wanted else ""
        pins.append(f"{requirement.name}{chosen}=={bounds[0]}")
    return pins


def main() -> None:
    directory = Path(sys.argv[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {distribution.name for distribution in metadata.distributions()}
    extras = {"cu13"} if f"{COMPILER}-libs-cu13" in installed else set()
    pins = oldest(project["dependencies"], extras)
    print(f"installing {' '.join(pins)}", flush=True)
    venv.create(directory, clear=True, symlinks=True)
    python = directory / "bin/python"
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    # Read after the .pth files of the packages in it, which so come first on Python's path.
    paths = [*site.getsitepackages(), *([site.getusersitepackages()] * bool(site.ENABLE_USER_SITE))]
    below = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths)
    (directory / packages / "zz_below.pth").write_text(below)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-warn-conflicts", *pins], check=True)
    subprocess.run([python, "-c", CHECK, *pins], check=True)


if __name__ == "__main__":
    main()
