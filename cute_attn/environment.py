"""Facts about this machine and installation: versions, the processor, GPUs, the commit.

`python -m cute_attn env` prints these facts, and reports of benchmarks hold them.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

# Distributions that the numbers depend on; distributions that are not installed are left out.
PACKAGES = ("cute-attn", "torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")
PEERS = ("fla-core", "flash-linear-attention", "flash-attn-4", "fa3-fwd")


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_checkout(directory: Path) -> bool:
    """Whether `directory` is the root of a checkout of this project."""
    try:
        text = (directory / "pyproject.toml").read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return re.search(r'^name = "cute-attn"$', text, re.MULTILINE) is not None


def nvidia_smi(query: str) -> list[str]:
    """What nvidia-smi says of each GPU, such as "name, driver_version"; nothing if it cannot."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def cpu_name() -> str:
    """The processor's model, else the kind of machine."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def source_commit() -> str | None:
    """The commit of the checkout that this package is imported from; None without one."""
    git = shutil.which("git")
    if git is None:
        return None
    root = Path(__file__).resolve().parents[1]
    if not is_checkout(root):  # installed; a git history around it may belong to another project
        return None

    def ask(*words: str) -> str | None:
        done = subprocess.run(
            [git, "-C", str(root), *words], capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "--short=12", "HEAD")
    if commit and ask("status", "--porcelain", "--untracked-files=no"):
        commit += " with local changes"
    return commit
