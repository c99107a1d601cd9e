"""Real Python processes for the tests: started with a program, awaited, and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# torch takes seconds to import and the toy kernels do without: tvm_ffi imports it if it can.
_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"

_PRELUDE = """
import json, os, pathlib, sys, time
from cute_attn import cache
from toy_specs import *

def tell(**facts):
    print(json.dumps(facts), flush=True)

def stop_at(module, name, call=1):
    \"\"\"Sleep for ever in the given call of a function, having told so.\"\"\"
    original = getattr(module, name)
    calls = 0
    def stopping(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            tell(reached=name)
            time.sleep(1000)
        return original(*args, **kwargs)
    setattr(module, name, stopping)
"""


class Process:
    """A running Python process whose stdout is lines of JSON."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen

    def hear(self) -> dict[str, Any]:
        """The next line it tells."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise AssertionError(f"the process ended with {self._popen.wait()}: {self.errors()}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def tell(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()

    def result(self, timeout: float = 120) -> dict[str, Any]:
        """The last line that it tells before it ends, which it does with status 0."""
        out, err = self._popen.communicate(timeout=timeout)
        assert self._popen.returncode == 0, err
        facts: dict[str, Any] = json.loads(out.splitlines()[-1])
        return {**facts, "stderr": err}

    def errors(self) -> str:
        assert self._popen.stderr is not None
        return self._popen.stderr.read()

    def error_line(self) -> str:
        """The next line on its stderr."""
        assert self._popen.stderr is not None
        return self._popen.stderr.readline()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self._popen.send_signal(signal.SIGSTOP)
        os.waitpid(self._popen.pid, os.WUNTRACED)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGKILL)
        self._popen.communicate()


def python_path() -> str:
    """``PYTHONPATH`` for a process that imports the toy kernels."""
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def start(
    program: str,
    environment: dict[str, str | None],
    *,
    torch: bool = False,
    cwd: Path | None = None,
) -> Process:
    """Run ``program`` after a prelude that imports the cache and the toy kernels' names.

    A variable that is None in ``environment`` is unset.
    """
    variables = {**os.environ, "PYTHONPATH": python_path(), **environment}
    source = ("" if torch else _WITHOUT_TORCH) + _PRELUDE + program
    return Process(
        subprocess.Popen(
            [sys.executable, "-c", source],
            cwd=cwd,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
