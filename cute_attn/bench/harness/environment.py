"""The environment of a measurement: hardware, software and command line."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Union

Facts = dict[str, Union[str, int, float, bool, None]]  # noqa: UP007  (evaluated on 3.10)

# Distributions that the numbers depend on; those not installed are left out.
PACKAGES = ("cute-attn", "torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")
PEERS = ("fla-core", "flash-linear-attention", "flash-attn-4")

# Options of the command line that do not change the results.
OUTPUT_OPTIONS = ("--out", "--json", "--tag", "--commit")


def slug(text: str) -> str:
    """`text` as part of a file name: lower case letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


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


def checkout() -> Path | None:
    """The root of this project's checkout around the working directory, or None."""
    here = Path.cwd()
    return next(filter(is_checkout, (here, *here.parents)), None)


def describe(argv: Sequence[str], *, commit: str | None = None) -> Facts:
    """The environment of a report as plain values; those that do not apply are left out.

    Args:
        argv: arguments after `python -m cute_attn.bench`.
        commit: the source's commit where the checkout carries no git history.
    """
    facts: Facts = {
        **_gpu(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in (*PACKAGES, *PEERS)},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or source_commit(),
        "command": command_line(argv),
    }
    return {name: value for name, value in facts.items() if value is not None}


def command_line(argv: Sequence[str]) -> str:
    """The command that repeats the measurement, without the options for its output."""
    kept: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name not in OUTPUT_OPTIONS:
            kept.append(argument)
        elif not equals:
            next(arguments, None)
    return shlex.join(["python", "-m", "cute_attn.bench", *kept])


def _gpu() -> Facts:
    if "torch" not in sys.modules:
        return {}  # CPU benchmarks do not load torch, and must not pay for the import
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_sms": properties.multi_processor_count,
        "gpu_l2_mib": properties.L2_cache_size // 2**20,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": next(iter(nvidia_smi("driver_version")), None),
        "cuda": torch.version.cuda,
    }


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
    root = Path(__file__).resolve().parents[3]
    if not is_checkout(root):  # installed: a git history around it may be another project's
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
