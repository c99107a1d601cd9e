"""Makes a directory from which a server of language models can be imported without a GPU.

    python -m tests.clients.unpack vllm

reads vllm.txt beside this file, and makes build/clients/vllm, or the directory that follows the
name. Packages are installed there without what they require, since the list is complete: torch and
all that the list leaves out come from the interpreter's environment. A line that ends with
"# without compiled files" is a package with extensions that need CUDA: its Python code is unpacked.
"# unless installed" leaves a package out where the environment has one, as Triton beside a torch
for CUDA. A directory that was made from the present list stays.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from . import results

LISTS = Path(__file__).parent
CLIENTS = sorted(path.stem for path in LISTS.glob("*.txt"))
MADE = LISTS.parents[1] / "build/clients"
WITHOUT = "# without compiled files"
UNLESS = "# unless installed"
STAMP = "unpacked.txt"


def listed(client: str) -> tuple[list[str], list[str]]:
    """The requirements of a client's list that pip installs, and the others, which are unpacked."""
    installed, unpacked = [], []
    for line in (LISTS / f"{client}.txt").read_text().splitlines():
        requirement = line.partition("#")[0].strip()
        name = requirement.partition("==")[0]
        if requirement and not (line.endswith(UNLESS) and find_spec(name)):
            (unpacked if line.endswith(WITHOUT) else installed).append(requirement)
    return installed, unpacked


def version(client: str) -> str:
    """The client's own version in its list."""
    lines = (line for lines in listed(client) for line in lines)
    name = results.DISTRIBUTIONS.get(client, client)
    (found,) = (x for x in map(Requirement, lines) if x.name == name)
    (pin,) = found.specifier
    return pin.version


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-qq", arguments[0], "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, *arguments[1:]], check=True)


def unpack(wheel: Path, directory: Path) -> None:
    """Extract a wheel's files to `directory`, except programs and shared libraries."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                if file.read(4) != b"\x7fELF":
                    archive.extract(member, directory)


def make(client: str, directory: Path) -> bool:
    """Make the client's directory unless it is there; returns whether it had to be made."""
    text = (LISTS / f"{client}.txt").read_text()
    stamp = directory / STAMP
    if stamp.is_file() and stamp.read_text() == text:
        return False
    installed, unpacked = listed(client)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        new, wheels = Path(temporary, "new"), Path(temporary, "wheels")
        pip("install", "--target", str(new), *installed)
        if unpacked:
            pip("download", "--dest", str(wheels), *unpacked)
            for wheel in wheels.iterdir():
                unpack(wheel, new)
        (new / STAMP).write_text(text)
        shutil.rmtree(directory, ignore_errors=True)
        new.replace(directory)
    return True


def main() -> None:
    client, *rest = sys.argv[1:]
    if client not in CLIENTS:
        sys.exit(f"unknown client {client}, there are: {', '.join(CLIENTS)}")
    directory = Path(rest[0]) if rest else MADE / client
    if make(client, directory):
        print(f"made {directory} for {client} {version(client)}")


if __name__ == "__main__":
    main()
