"""Processes that compile, each for the process that started it; they run `_worker`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .entry import Built
from .errors import CacheError, CompileError
from .key import KernelDef, KeyDescription
from .settings import for_children
from .store import Store
from .wire import END, NotPortable, encode_request

# With the parent's sys.path, so that the worker finds the same modules. A package that was loaded
# from a file, under a name that is on no path, is loaded so again.
_PROGRAM = """
import importlib, json, sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
path, parent, package, file = json.loads(sys.argv[1])
sys.path[:] = path
root = package.partition(".")[0]
if find_spec(root) is None:
    spec = spec_from_file_location(root, file)
    sys.modules[root] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[root])
importlib.import_module(package + "._worker").main(parent)
"""


class Worker:
    """A process that runs `cute_attn.cache._worker`."""

    def __init__(self) -> None:
        assert __package__
        file = sys.modules[__package__.partition(".")[0]].__file__
        facts = json.dumps((sys.path, os.getpid(), __package__, file))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, facts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**for_children(), "CUTE_ATTN_LOG": ""},  # this process logs for the worker
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Send a request and return the answer; None if the process died instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        answer: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return answer

    def close(self) -> str:
        """Wait for the process to end; return in words how the process ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(END)
            self._process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        return _ending(self._process.wait())


def _ending(status: int) -> str:
    text = f"its process ended with status {status}"
    if status >= 0:
        return text
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        text += f" ({signal.Signals(-status).name})"
    if status == -signal.SIGKILL:
        text += (
            ": the system may have run out of memory, of which a compiler takes about 1 GB. Try "
            "fewer processes at once (-j of build, jobs of warmup)"
        )
    return text


def compile_elsewhere(kernel: KernelDef, spec: Any, key: KeyDescription) -> Built:
    """Compile in a new process, for a forked process that cannot use its own compiler.

    Raises CompileError.
    """
    try:
        request = encode_request(kernel, spec)
        with tempfile.TemporaryDirectory(prefix="cute_attn-") as scratch:
            store = Store(Path(scratch) / "cache")
            worker = Worker()
            try:
                answer = worker.ask(addressed(request, key, store))
            finally:
                ending = worker.close()
            if answer is None:
                raise CacheError(ending)
            if "error" in answer:
                raise CacheError(answer["error"])
            entry = store.open(key.digest)
            assert entry is not None  # nobody else knows of the directory
            with contextlib.closing(entry):
                files = {name: entry.read(name) for name in entry.meta["files"]}
                return Built(key, files, entry.kernels, entry.meta["compile_seconds"])
    except (CacheError, NotPortable, OSError) as error:
        raise CompileError(
            f"{name_of(key)} does not compile. This process was forked while another thread was "
            f"compiling, so a new process tried: {error}"
        ) from error


def addressed(request: dict[str, Any], key: KeyDescription, store: Store) -> dict[str, Any]:
    """A request with the kernel's key, and the store for the result."""
    root = {"root": str(store.root), "public": store.public}
    return {**request, **root, "arch": key.arch, "digest": key.digest}


def name_of(key: KeyDescription) -> str:
    """A kernel's name in messages."""
    return f"{key.kernel} {key.specialisation} for {key.arch} (key {key.digest[:12]})"
