"""CUTE_ATTN_EMULATE=all: programs that start as they always do run in the emulator.

A library runs no code before a program imports it, and then it is too late: the stand-ins have to
be loaded before all other libraries. So a file in site-packages, the hook, calls `start` whenever
Python starts. The user installs the hook once; without the variable the hook does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..build import EmulatorUnavailable
from . import process
from .hook import VARIABLE

COMMAND = "cute_attn.emulator"
_WITH_VALUE = "WX"  # options of Python that take a value
_LONG_WITH_VALUE = "--check-hash-based-pycs"


def command_of(arguments: Sequence[str]) -> list[str] | None:
    """The command line that emulates a program.

    Args:
        arguments: the command line of a Python process, as `sys.orig_argv`.

    Returns:
        The command line, or None for what is not emulated: `python -c`, input from a terminal or a
        pipe, the emulator's own command, and pytest, whose plugin reads the variable.
    """
    emulate = ["-m", COMMAND]
    at = 1
    while at < len(arguments):
        argument, rest = arguments[at], list(arguments[at + 1 :])
        if not argument.startswith("-"):
            is_pytest = Path(argument).stem in ("pytest", "py.test")
            return None if is_pytest else [*arguments[:at], *emulate, argument, *rest]
        if argument == "-":
            return None
        at += 1
        if argument.startswith("--"):
            at += argument == _LONG_WITH_VALUE
            continue
        for i, letter in enumerate(argument[1:], 1):
            value = argument[i + 1 :]
            if letter == "c":
                return None
            if letter == "m":
                module, *program = [value, *rest] if value else rest
                if module in (COMMAND, "pytest"):
                    return None
                flags = [argument[:i]] if i > 1 else []
                return [*arguments[: at - 1], *flags, *emulate, "-m", module, *program]
            if letter in _WITH_VALUE:
                at += not value
                break
    return None


def start() -> None:
    """Start this process anew as an emulated one. Called by the hook, when Python starts."""
    if process.is_emulated():
        return
    command = command_of(sys.orig_argv)
    if command is None:
        return
    try:
        process.restart(command)
    except EmulatorUnavailable as error:
        print(f"{VARIABLE}=all: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
