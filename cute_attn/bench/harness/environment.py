"""The environment of a measurement: hardware, software and command line."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Union

from ...environment import (
    PACKAGES,
    PEERS,
    cpu_name,
    is_checkout,
    nvidia_smi,
    source_commit,
    version_of,
)

Facts = dict[str, Union[str, int, float, bool, None]]  # noqa: UP007  (evaluated on 3.10)

# Options of the command line that do not change the results.
OUTPUT_OPTIONS = ("--out", "--json", "--tag", "--commit")


def slug(text: str) -> str:
    """`text` as part of a file name: lower case letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def checkout() -> Path | None:
    """The root of this project's checkout around the working directory, or None."""
    here = Path.cwd()
    return next(filter(is_checkout, (here, *here.parents)), None)


def describe(argv: Sequence[str], *, commit: str | None = None) -> Facts:
    """The environment of a report as plain values; values that do not apply are left out.

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
        return {}  # CPU benchmarks must not pay for importing torch
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
