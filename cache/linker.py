"""Links the compiler's object file into a shared object, if the machine has a linker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .log import logger


def _commands() -> list[list[str]]:
    """The linkers to try: the user's compiler, the usual compilers, and the bare linkers."""
    drivers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    commands = [[name, "-nostdlib"] for name in drivers if name and shutil.which(name)]
    return commands + [[name] for name in ("ld", "ld.lld") if shutil.which(name)]


def link(object_file: Path, library: Path) -> str | None:
    """Link `object_file` into `library`. Return None, or the errors if every linker fails.

    No library is linked in, so that the result runs with any C library. libtvm_ffi and the DSL's
    runtime, loaded before, define the undefined symbols.
    """
    failures = []
    for command in _commands():
        arguments = [*command, "-shared", "-o", str(library), str(object_file)]
        try:
            done = subprocess.run(
                arguments, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            failures.append(f"{command[0]}: {error}")
            continue
        if done.returncode == 0:
            logger.debug("linked by %s", command[0])
            return None
        failures.append(f"{command[0]}: {done.stderr.strip()}")
    return "; ".join(failures) or "none of $CC, cc, gcc, clang, ld, ld.lld found"
