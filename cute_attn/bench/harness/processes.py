"""Measuring in a fresh process, whose last line of output is the result as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 180.0


class ChildError(RuntimeError):
    """A measured process failed; the message holds the end of its output."""


def run_child(text: str, env: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Run a Python program in a fresh process. Returns the JSON object on its last output line.

    Raises:
        ChildError: the program failed, or the last output line is no JSON object.
        subprocess.TimeoutExpired: the program took longer than `timeout_s`.
    """
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=dict(env), capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    return last_line(done.stdout, done.stderr, done.returncode)


def last_line(stdout: str, stderr: str, returncode: int) -> dict[str, Any]:
    """The JSON object on the last line of a process that has ended.

    Raises:
        ChildError: see `run_child`.
    """
    lines = stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    if returncode != 0 or not isinstance(result, dict):
        raise ChildError(f"a measured process exited with {returncode}:\n{stdout}{stderr}"[-2000:])
    return result
