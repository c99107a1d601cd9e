"""Runs a script or a module in an emulated process."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

from ..build import EmulatorUnavailable
from . import process
from .install import install, say
from .options import parse

FOUND = 3
"""The exit status of a program that succeeds, but whose kernels have errors."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options, module, program = parse(arguments)
    if module is None and not Path(program[0]).is_file():
        say(f"python -m cute_attn.emulator: error: there is no file {program[0]}")
        return 2
    try:
        if not process.is_prepared():
            process.restart()
        launches = install(options)
    except EmulatorUnavailable as error:
        say(f"python -m cute_attn.emulator: error: {error}")
        return 1
    status, told = _run(module, program)
    if launches.count:
        say(launches.summary())
        if options.time:
            say(launches.predictions())
    else:
        say(f"emulator: {options.arch}: no kernel was launched")
    if "CUTE_DSL_ARCH" in told:  # the compiler refuses an operation of another architecture
        say(f"emulator: the GPU is {options.arch}; --arch chooses another one")
    if status == 0 and launches.errors_found and options.on_findings != "ignore":
        status = FOUND
    if options.report is not None:
        launches.write(options.report)
    return status


def _run(module: str | None, program: list[str]) -> tuple[int, str]:
    """Run the program; return its status, and the exception that has ended it, in words."""
    from .tensors import CudaTensors

    sys.argv = program
    # As with `python script.py`; the folder that `python -m` has put first is replaced.
    sys.path[0] = str(Path(program[0]).resolve().parent) if module is None else str(Path.cwd())
    try:
        with CudaTensors():
            if module is None:
                runpy.run_path(program[0], run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0, ""
        say(str(error.code))
        return 1, ""
    except Exception as error:
        traceback.print_exc()
        return 1, str(error)
    return 0, ""
