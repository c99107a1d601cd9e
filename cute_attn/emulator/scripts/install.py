"""Puts the stand-ins of a whole program in place."""

from __future__ import annotations

import sys

from . import process
from .launches import Launches
from .options import Options


def install(options: Options) -> Launches:
    """Emulate a CUDA device in this process, which `process.restart` has started.

    The caller enters `tensors.CudaTensors()` around the program.

    Raises:
        RuntimeError: the process was not started by `process.restart`.
    """
    if not process.is_prepared():
        raise RuntimeError("the process has no stand-ins in C: call process.restart first")
    process.set_compiler_environment(options)
    launches = Launches(options)
    launches.install()
    from . import bindings, cuda, dsl, tensors

    bindings.install(options.device)
    cuda.install(launches)
    major, minor = options.device.capability
    tensors.install(10 * major + minor)
    dsl.install(launches)
    return launches


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)
