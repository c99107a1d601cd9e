"""The package as a kernel of Hugging Face `kernels`: a folder for `kernels.get_local_kernel`.

`kernels` imports a folder's `__init__.py` under the name that metadata.json gives, so that several
versions may be loaded at once. So no module of the package names the package, and operators are
registered as `torch.ops.<name>`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from . import __version__, cache

__all__ = ["write"]

PACKAGE = Path(__file__).parent
# Only a checkout has these: pyproject.toml leaves them out of a wheel.
LEFT_OUT = ("bench", "machine_code", "timing", "kernels/async_copy", "kernels/ladder")
# What `kernels` knows of the requirements.
KNOWN = {"cuda": ["nvidia-cutlass-dsl", "tvm-ffi"], "cpu": ["tvm-ffi"]}


def write(directory: Path, backend: str = "cuda") -> Path:
    """Write the package to `directory`/build/torch-<backend>, and return that folder.

    Args:
        directory: the repository of the kernel; may exist.
        backend: "cuda", or "cpu" for a PyTorch without CUDA, where kernels are emulated.

    Raises:
        FileExistsError: the folder exists.
        ValueError: another backend.
    """
    if backend not in KNOWN:
        raise ValueError(f"backend is {backend!r}, must be one of {', '.join(KNOWN)}")
    folder = directory / "build" / f"torch-{backend}"
    if folder.exists():
        raise FileExistsError(f"{folder} exists: remove it, or name another folder")

    def left_out(parent: str, names: list[str]) -> set[str]:
        at = Path(parent).relative_to(PACKAGE)
        return {x for x in names if x == "__pycache__" or (at / x).as_posix() in LEFT_OUT}

    shutil.copytree(PACKAGE, folder, ignore=left_out)
    if not (folder / "cache").exists():  # beside the package in a checkout
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(cache.__file__).parent, folder / "cache", ignore=without)
    metadata = {
        "name": "cute-attn",
        "id": "_cute_attn_" + __version__.replace(".", "_"),
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": KNOWN[backend],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return folder
