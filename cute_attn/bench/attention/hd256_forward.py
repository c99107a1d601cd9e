"""Machine code of the forward at head_dim 256, ours and FlashAttention-4's, by specialisation."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...machine_code.cubin import cubins
from ...machine_code.tile_model import SMS
from ..harness.registry import Unavailable

if TYPE_CHECKING:
    from .. import peers

ARCH = "sm_100a"
OURS, THEIRS = "cute_attn", "FlashAttention-4"

# FlashAttention-4 pull request 2454, B200 at 1965 MHz, head_dim 256, bf16, 8 heads, non-causal,
# half of the exponentials on the FMA units: TFLOP/s by sequence length.
PUBLISHED_TFLOPS = {4096: 1488, 8192: 1608, 16384: 1680, 32768: 1726}


@dataclass(frozen=True)
class Specialisation:
    """A specialisation of our kernel, and that of FlashAttention-4 to compare it with.

    Attributes:
        ours: fields of our spec that differ from the plain one.
        theirs: options of FlashAttention-4's forward; None if it has no such specialisation.
        beside: without `theirs`, the specialisation whose `theirs` this one is compared with.
    """

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any] | None = None
    beside: str = ""


_VARLEN = {"varlen_q": True, "varlen_k": True}
_LENGTHS = {"seqlens_q": (256, 512)}
_LOCAL = {"window_left": True, "window_right": True}

FORWARD = (
    Specialisation("non-causal", {}, {}),
    Specialisation("causal", {"window_right": True}, {"causal": True}),
    Specialisation("local", _LOCAL, {"window": (256, 0)}),
    Specialisation("varlen", _VARLEN, _LENGTHS),
    Specialisation(
        "varlen causal", {**_VARLEN, "window_right": True}, {**_LENGTHS, "causal": True}
    ),
    Specialisation("softcap", {"softcap": True}, {"softcap": 30.0}),
    Specialisation("sink", {"sink_dtype": "bfloat16"}, {"learnable_sink": True}),
    Specialisation("fp16", {"dtype": "float16"}, {"dtype": "float16"}),
    Specialisation("packed heads", {"packed_heads": 8}, beside="non-causal"),
    Specialisation("without lse", {"lse": False}, {"lse": False}),
    Specialisation("one tile a cluster", {"scheduler": "single"}, beside="non-causal"),
    Specialisation("clc", {"scheduler": "clc"}, beside="non-causal"),
    Specialisation("clc causal", {"scheduler": "clc", "window_right": True}, beside="causal"),
    Specialisation(
        "clc varlen causal",
        {**_VARLEN, "scheduler": "clc", "window_right": True},
        beside="varlen causal",
    ),
)
SHORT = ("non-causal", "causal")

PLAIN = {
    "dtype": "bfloat16",
    "scheduler": "static",
    "packed_heads": 1,
    "window_left": False,
    "window_right": False,
    "softcap": False,
    "sink_dtype": "none",
    "varlen_q": False,
    "varlen_k": False,
    "seqused_q": False,
    "seqused_k": False,
    "lse": True,
}


@dataclass(frozen=True)
class Program:
    """One compiled kernel.

    Attributes:
        spilled: bytes of spills that ptxas reports; None if there is no report.
        shared: bytes of shared memory of a CTA, static and dynamic.
    """

    kernel: str
    specialisation: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    registers: int
    stack: int
    spilled: int | None
    shared: int | None


# -- compiling ------------------------------------------------------------------------------------


def our_program(specialisation: Specialisation) -> Program:
    """Compile our kernel, or take it from the cache.

    Raises:
        Unavailable: there is no compiler.
        cute_attn.cache.CompileError: it does not compile.
    """
    if importlib.util.find_spec("cutlass") is None:
        raise Unavailable("needs nvidia-cutlass-dsl, which is not installed")
    from ... import cache
    from ...kernels.attention.spec import Hd256ForwardSpec
    from ...kernels.attention.table import HD256_FORWARD

    spec = Hd256ForwardSpec(**{**PLAIN, **specialisation.ours})
    entry = cache.compile(HD256_FORWARD.kernel, spec, arch=ARCH)
    (cubin,) = cubins(entry.read("kernel.o"))
    (use,) = entry.kernels
    dynamic = use.dynamic_shared
    return Program(
        OURS,
        specialisation.name,
        cubin,
        entry.read("kernel.ptx").decode(),
        use.registers,
        use.stack,
        use.spills,
        None if dynamic is None else use.static_shared + dynamic,
    )


def their_programs(
    specialisations: Sequence[Specialisation], directory: Path
) -> tuple[list[Program], list[str]]:
    """FlashAttention-4's programs, compiled into `directory` or found there, and notes on failures.

    Raises:
        ImportError: FlashAttention-4 is not installed.
    """
    from .. import peers  # imports torch

    if reason := peers.missing("flash_attention_4"):
        raise ImportError(reason)
    programs, missing = [], []
    for specialisation in specialisations:
        if specialisation.theirs is None:
            continue
        request = peers.flash_attention_4.forward(
            arch=ARCH, head_dim=256, seqlen_q=512, **specialisation.theirs
        )
        try:
            captured = request.capture(directory)
        except peers.CaptureError as error:
            last = str(error).strip().splitlines()[-1]
            missing.append(f"{THEIRS} has no {specialisation.name}: {last}")
            continue
        programs.append(_their_program(specialisation.name, captured))
    return programs, missing


def _their_program(name: str, captured: peers.Captured) -> Program:
    from ...cache.cubin import kernel_uses

    (call,) = captured.calls
    (cubin,) = cubins(Path(call.function.object_file).read_bytes())
    (use,) = kernel_uses(cubin, ptxas_log="", host_code="")
    dynamic = _dynamic_shared(captured)
    return Program(
        THEIRS,
        name,
        cubin,
        call.function.ptx,
        use.registers,
        use.stack,
        use.spills,
        None if dynamic is None else use.static_shared + dynamic,
    )


def _dynamic_shared(captured: peers.Captured) -> int | None:
    """Bytes of dynamic shared memory that the host code requests; it runs without launching."""
    from ...emulator import EmulatorUnavailable
    from ...emulator.host import HostFunction, Launch

    (call,) = captured.calls
    launches: list[Launch] = []
    try:
        function = HostFunction(
            Path(call.function.object_file).read_bytes(),
            "k",
            launches.append,
            num_sms=SMS,
            capability=(10, 0),
        )
    except EmulatorUnavailable:  # no C compiler to link with
        return None
    memory = captured.materialise(captured.random_inputs())
    function(*memory.arguments(call))
    (launch,) = launches
    return launch.dynamic_shared
