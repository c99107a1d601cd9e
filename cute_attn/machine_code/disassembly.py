"""Finding and calling nvdisasm."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


class DisassemblyError(RuntimeError):
    """nvdisasm is not installed, or does not support the architecture."""


def find_nvdisasm() -> Path:
    """The path of nvdisasm: from $NVDISASM, PATH, a CUDA toolkit, nvidia-cuda-nvdisasm or triton.

    Raises:
        DisassemblyError: nvdisasm is not installed.
    """
    if (named := os.environ.get("NVDISASM")) and Path(named).is_file():
        return Path(named)
    if found := shutil.which("nvdisasm"):
        return Path(found)
    candidates = [
        Path(home) / "bin"
        for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
        if home
    ]
    for package, folder in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        places = (spec.submodule_search_locations or ()) if spec else ()
        candidates += [Path(place) / folder for place in places]
    for candidate in candidates:
        if (candidate / "nvdisasm").is_file():
            return candidate / "nvdisasm"
    raise DisassemblyError(
        "needs nvdisasm, of a CUDA toolkit 12.8 or later (on PATH, or in $CUDA_HOME/bin), of "
        "nvidia-cuda-nvdisasm (the extra test) or triton 3.6 (the extra bench), or named by "
        "$NVDISASM"
    )


def disassemble(cubin: bytes, nvdisasm: Path, *, ptx_lines: bool = False) -> str:
    """The listing of a cubin, with encodings. With `ptx_lines`, each instruction follows the line
    of PTX that it comes from, if the cubin has line information.

    Raises:
        DisassemblyError: this nvdisasm does not support the architecture.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [nvdisasm, "-c", "-hex", *(["-gp"] if ptx_lines else []), file.name],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if done.returncode:
        raise DisassemblyError(f"{nvdisasm} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def version(nvdisasm: Path) -> str:
    """The last line that `nvdisasm --version` prints, which names the build."""
    done = subprocess.run(
        [nvdisasm, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip().splitlines()[-1] if done.stdout else nvdisasm.name
