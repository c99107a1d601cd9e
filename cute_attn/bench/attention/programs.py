"""Compiled attention kernels, ours and FlashAttention-4's, for the analysis of machine code."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...emulator.cubin import cubins
from ...machine_code.tile_model import SMS
from ..harness.registry import Unavailable

if TYPE_CHECKING:
    from ...cache import KernelDef
    from .. import peers

ARCH = "sm_100a"
OURS, THEIRS = "cute_attn", "FlashAttention-4"


@dataclass(frozen=True)
class Program:
    """One compiled kernel.

    Attributes:
        kernel: the package that the kernel comes from, OURS or THEIRS.
        name: the kernel's symbol, or the part of the symbol that tells a module's kernels apart.
        spilled: bytes of spills that ptxas reports; None if there is no report.
        shared: bytes of shared memory of a CTA, static and dynamic.
    """

    kernel: str
    specialisation: str
    name: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    registers: int
    stack: int
    spilled: int | None
    shared: int | None


def our_program(kernel: KernelDef, spec: Any, specialisation: str, *, arch: str = ARCH) -> Program:
    """Compile our kernel, or take our kernel from the cache.

    Raises:
        Unavailable: there is no compiler.
        cute_attn.cache.CompileError: the kernel does not compile.
    """
    if importlib.util.find_spec("cutlass") is None:
        raise Unavailable("needs nvidia-cutlass-dsl, which is not installed")
    from ... import cache

    entry = cache.compile(kernel, spec, arch=arch)
    (cubin,) = cubins(entry.read("kernel.o"))
    (use,) = entry.kernels
    dynamic = use.dynamic_shared
    return Program(
        OURS,
        specialisation,
        "",
        cubin,
        entry.read("kernel.ptx").decode(),
        use.registers,
        use.stack,
        use.spills,
        None if dynamic is None else use.static_shared + dynamic,
    )


def their_programs(
    requests: Sequence[tuple[str, peers.Request]], directory: Path, call: int = 0
) -> tuple[list[Program], list[str]]:
    """FlashAttention-4's programs, compiled into `directory` or found there, and notes on failures.

    Args:
        requests: requests by specialisation.
        call: which call of a request has the kernels.

    Raises:
        ImportError: FlashAttention-4 is not installed.
    """
    from .. import peers  # imports torch

    if reason := peers.missing("flash_attention_4"):
        raise ImportError(reason)
    programs: list[Program] = []
    missing: list[str] = []
    for specialisation, request in requests:
        try:
            captured = request.capture(directory)
        except peers.CaptureError as error:
            last = str(error).strip().splitlines()[-1]
            missing.append(f"{THEIRS} has no {specialisation}: {last}")
            continue
        programs += _their_programs(specialisation, captured, call)
    return programs, missing


def _their_programs(name: str, captured: peers.Captured, call: int) -> Iterator[Program]:
    from ...cache.cubin import kernel_uses

    function = captured.calls[call].function
    (cubin,) = cubins(Path(function.object_file).read_bytes())
    dynamic = _dynamic_shared(captured, call)
    for use in kernel_uses(cubin, ptxas_log="", host_code=""):
        bytes_ = dynamic.get(use.name)
        yield Program(
            THEIRS,
            name,
            use.name,
            cubin,
            function.ptx,
            use.registers,
            use.stack,
            use.spills,
            None if bytes_ is None else use.static_shared + bytes_,
        )


def _dynamic_shared(captured: peers.Captured, call: int) -> dict[str, int]:
    """Bytes of dynamic shared memory that the host code requests. The host code runs without
    launching."""
    from ...emulator import EmulatorUnavailable
    from ...emulator.host import HostFunction, Launch

    launches: list[Launch] = []
    try:
        function = HostFunction(
            Path(captured.calls[call].function.object_file).read_bytes(),
            "k",
            launches.append,
            num_sms=SMS,
            capability=(10, 0),
        )
    except EmulatorUnavailable:  # no C compiler to link with
        return {}
    memory = captured.materialise(captured.random_inputs())
    function(*memory.arguments(captured.calls[call]))
    return {launch.kernel: launch.dynamic_shared for launch in launches}
