"""A process that compiles kernels for `cute_attn.cache.warmup`.

The worker reads one JSON request per line from stdin, and writes one JSON answer per line to the
original stdout. The worker ends at an empty line, or when stdin or the parent ends. multiprocessing
would import a server's main module again, so the worker does not use multiprocessing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .entry import Built
from .jit import Places, obtain, stats, verified
from .key import describe
from .store import Store
from .wire import END, decode_request

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main(parent: int) -> None:
    """Serve requests of the process `parent` until stdin or that process ends."""
    _end_with(parent)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of kernels and compilers goes to stderr
    for line in iter(sys.stdin.readline, ""):
        if line == END:
            return
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")


def _end_with(parent: int) -> None:
    """Have the system kill this process as soon as its parent ends.

    The worker notices the end of stdin only between two compilations, which may take minutes. The
    signal comes when the thread that started this process ends, so each thread ends its own worker
    first.
    """
    with contextlib.suppress(AttributeError, OSError):  # no prctl on this system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        os.kill(parent, 0)
    except ProcessLookupError:  # the parent had ended before prctl
        sys.exit(1)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    compiles = stats().compiles
    try:
        kernel, spec = decode_request(request)
        key = describe(kernel, spec, request["arch"])
        if key.digest != request["digest"]:
            return {
                "error": f"{key.kernel} {key.specialisation} has another key in a new process: "
                "its sources were edited, or its fields are not what its class was given"
            }
        places = Places((), Store(Path(request["root"]), public=request["public"]))
        found = obtain(kernel, spec, key, verified, places)
    except Exception as error:  # any failure of a kernel is an answer; the worker goes on
        return {"error": str(error) or type(error).__name__}
    if isinstance(found, Built):
        return {"error": f"{key.kernel} {key.digest[:12]} could not be stored in {request['root']}"}
    found.close()
    return {
        "compiled": stats().compiles > compiles,
        "compile_seconds": found.meta["compile_seconds"],
    }
