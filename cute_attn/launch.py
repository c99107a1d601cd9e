"""The bridge between operators and compiled kernels: (kernel, Spec, arch) -> callable.

Kernels know nothing of the cache and the cache nothing of kernels; here they meet. A KernelDef
names a kernel class by its import path, so that the class, and with it the compiler, is imported
only when something has to be compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import cache
from .cache import KernelDef

if TYPE_CHECKING:
    from .cache import WarmupReport

LIGHTNING_DECODE = KernelDef(
    name="lightning_decode", target="cute_attn.kernels.lightning.decode:LightningDecode"
)

# Measured beside it, and chosen nowhere: see docs/kernels/lightning_decode.md.
LIGHTNING_DECODE_PIPELINED = KernelDef(
    name="lightning_decode_pipelined",
    target="cute_attn.kernels.lightning.decode_pipelined:LightningDecodePipelined",
)

Request = tuple[KernelDef, Any]  # a kernel and its Spec


def get(kernel: KernelDef, spec: Any, arch: str) -> Callable[..., Any]:
    """The TVM-FFI function of `kernel` for `spec` and `arch`, loaded or compiled.

    Raises:
        cute_attn.cache.CacheError: the cache is frozen and has no such entry.
        cute_attn.cache.CompileError: the compiler failed.
    """
    return cache.get(kernel, spec, arch)


def arch_of(device_index: int) -> str:
    """The architecture to compile for on a CUDA device, such as "sm_90a".

    Raises:
        NotImplementedError: a device older than sm_80.
    """
    return cache.current_arch(device_index)


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
