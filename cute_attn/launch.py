"""The bridge between operators and compiled kernels: (kernel, Spec, arch) -> callable.

Kernels know nothing of the cache and the cache nothing of kernels; here they meet. A KernelDef
names a kernel class by its import path, so that the class, and with it the compiler, is imported
only when something has to be compiled.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from . import cache
from .cache import KernelDef
from .cache.arch import check_arch
from .cache.planner import planner as planner
from .settings import on_reload, settings

if TYPE_CHECKING:
    import torch

    from .cache import WarmupReport
    from .emulator import Emulator

LIGHTNING_DECODE = KernelDef(
    name="lightning_decode", target="cute_attn.kernels.lightning.decode:LightningDecode"
)

# Measured beside it, and chosen nowhere: see docs/kernels/lightning_decode.md.
LIGHTNING_DECODE_PIPELINED = KernelDef(
    name="lightning_decode_pipelined",
    target="cute_attn.kernels.lightning.decode_pipelined:LightningDecodePipelined",
)

HD256_FORWARD = KernelDef(
    name="hd256_forward", target="cute_attn.kernels.attention.sm100_fwd_hd256:Sm100Hd256Forward"
)

# Kimi Delta Attention: the fused path (two kernels), the stages of the modular one, and decode.
KDA_PREPARE = KernelDef(name="kda_prepare", target="cute_attn.kernels.kda.prepare:KdaPrepare")
KDA_RECURRENCE = KernelDef(
    name="kda_recurrence", target="cute_attn.kernels.kda.recurrence:KdaRecurrence"
)
KDA_SEGMENTS = KernelDef(name="kda_segments", target="cute_attn.kernels.kda.segments:KdaSegments")
KDA_GATE_CUMSUM = KernelDef(
    name="kda_gate_cumsum", target="cute_attn.kernels.kda.gate_cumsum:KdaGateCumsum"
)
KDA_CHUNK_INTRA = KernelDef(
    name="kda_chunk_intra", target="cute_attn.kernels.kda.chunk_intra:KdaChunkIntra"
)
KDA_RECOMPUTE_W_U = KernelDef(
    name="kda_recompute_w_u", target="cute_attn.kernels.kda.recompute_w_u:KdaRecomputeWU"
)
KDA_DELTA_H = KernelDef(name="kda_delta_h", target="cute_attn.kernels.kda.delta_h:KdaDeltaH")
KDA_OUTPUT = KernelDef(name="kda_output", target="cute_attn.kernels.kda.output:KdaOutput")
KDA_DECODE = KernelDef(name="kda_decode", target="cute_attn.kernels.kda.decode:KdaDecode")
KDA_DECODE_RECORDS = KernelDef(
    name="kda_decode_records", target="cute_attn.kernels.kda.decode_records:KdaDecodeRecords"
)
KDA_RECURRENT = KernelDef(
    name="kda_recurrent", target="cute_attn.kernels.kda.recurrent:KdaRecurrent"
)

Request = tuple[KernelDef, Any]  # a kernel and its Spec


def get(kernel: KernelDef, spec: Any, arch: str) -> Callable[..., Any]:
    """The TVM-FFI function of `kernel` for `spec` and `arch`, loaded or compiled.

    Raises:
        cute_attn.cache.CacheError: the cache is frozen and has no such entry.
        cute_attn.cache.CompileError: the compiler failed.
    """
    return cache.get(kernel, spec, arch)


def get_for(device: torch.device, kernel: KernelDef, spec: Any) -> Callable[..., Any]:
    """The function of `kernel` for tensors on `device`: emulated for those on the CPU."""
    if device.type != "cpu":
        return get(kernel, spec, arch_of(device.index))
    emulation = current_emulation()
    assert emulation is not None, "checked by check_device"
    return emulation.function(kernel, spec)


def arch_of(device_index: int) -> str:
    """The architecture to compile for on a CUDA device, such as "sm_90a".

    Raises:
        NotImplementedError: a device older than sm_80.
    """
    return cache.current_arch(device_index)


def arch_for(device: torch.device) -> str:
    """The architecture of the kernels for tensors on `device`."""
    emulation = current_emulation() if device.type == "cpu" else None
    return emulation.arch if emulation else arch_of(device.index)


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of the device, or of the emulator that stands for one."""
    emulation = current_emulation() if device.type == "cpu" else None
    if emulation:
        return emulation.emulator.num_sms
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_device(name: str, device: torch.device) -> None:
    """Raises ValueError unless kernels can run on tensors of `device`: CUDA, or emulated."""
    if device.type != "cuda" and not (device.type == "cpu" and current_emulation()):
        hint = ", or on the CPU in a thread within cute_attn.emulated()"
        raise ValueError(
            f"{name} is on {device}, must be on a CUDA device{hint if device.type == 'cpu' else ''}"
        )


def warmup(
    requests: Iterable[Request] | str | os.PathLike[str],
    *,
    arch: str | None = None,
    jobs: int | None = None,
    progress: bool | None = None,
) -> WarmupReport:
    """Compile or load what a server will need, so that no request waits for the compiler.

    Args:
        requests: (kernel, Spec) pairs, as the `plan_*` functions of `cute_attn.ops` return them, or
            the path of a TOML spec file such as those in `cute_attn/models`.
        arch: "sm_90a", "sm_100a" ...; None is the current device's.
        jobs: compilers to run at once; None is one for each core.
        progress: show a progress bar; None shows one on a terminal.

    Raises:
        cute_attn.cache.CompileError: naming every kernel that failed; the others are ready.
    """
    if isinstance(requests, str | os.PathLike):
        requests = cache.plan_file(requests, arch or cache.current_arch())
    return cache.warmup(requests, arch=arch, jobs=jobs, progress=progress)


# -- emulation ----------------------------------------------------------------------------------

DEFAULT_EMULATED_ARCH = "sm_90a"


class Emulation:
    """What operators on CPU tensors run on: an emulator, and the architecture it stands for."""

    def __init__(self, emulator: Emulator, arch: str) -> None:
        self.emulator = emulator
        self.arch = arch
        self._functions: dict[tuple[KernelDef, Any], Callable[..., Any]] = {}

    def function(self, kernel: KernelDef, spec: Any) -> Callable[..., Any]:
        """A kernel's function in the emulator, from the object and PTX that the cache holds."""
        key = kernel, spec
        if key not in self._functions:
            self._functions[key] = self.emulator.load(cache.compile(kernel, spec, arch=self.arch))
        return self._functions[key]


_emulation: contextvars.ContextVar[Emulation | None] = contextvars.ContextVar(
    "cute_attn_emulation", default=None
)


@functools.cache
def _emulation_of_environment() -> Emulation | None:
    if not settings().emulate:
        return None
    from .emulator import Emulator

    return Emulation(Emulator(), _arch_to_emulate())


on_reload(_emulation_of_environment.cache_clear)


def _arch_to_emulate() -> str:
    chosen = os.environ.get("CUTE_ATTN_ARCH", "").strip()
    return check_arch(chosen) if chosen else DEFAULT_EMULATED_ARCH


def current_emulation() -> Emulation | None:
    """What CPU tensors run on: `emulated()`'s, else that of CUTE_ATTN_EMULATE=1, else None."""
    return _emulation.get() or _emulation_of_environment()


@contextlib.contextmanager
def emulated(arch: str | None = None, emulator: Emulator | None = None) -> Iterator[Emulator]:
    """Within it, operators take CPU tensors and run their kernels in an emulator.

        with cute_attn.emulated("sm_100a") as emulator:
            o = cute_attn.lightning_attn_decode(q, k, v, state, decay)
        print(emulator.report)

    `CUTE_ATTN_EMULATE=1` does the same for a whole process. This one holds for the thread or task
    that enters it. A thread that is started within does not see it, unless it runs in a copy of
    the context, as `asyncio.to_thread` does:

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(function,)).start()

    Args:
        arch: to emulate: "sm_80", "sm_90a", "sm_100a" ...; None is `CUTE_ATTN_ARCH`, else
            "sm_90a".
        emulator: to run on; None makes one with every check on.

    Raises:
        TypeError: arch is no string, or emulator no Emulator.
        ValueError: arch is not written like "sm_90a".
        NotImplementedError: arch is older than "sm_80".
        cute_attn.emulator.EmulatorUnavailable: there is no C compiler to build the emulator with.
    """
    from .emulator import Emulator

    chosen = _arch_to_emulate() if arch is None else check_arch(arch)
    if emulator is None:
        emulator = Emulator()
    elif not isinstance(emulator, Emulator):
        raise TypeError(f"emulator must be an Emulator, got {type(emulator).__name__}")
    token = _emulation.set(Emulation(emulator, chosen))
    try:
        yield emulator
    finally:
        _emulation.reset(token)
