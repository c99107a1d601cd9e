"""The kernels that study copies, by name; no operator uses these kernels. Importing this loads no
compiler.
"""

from __future__ import annotations

from ...cache import KernelDef
from .spec import AsyncCopySpec

SAME_WARPS = KernelDef(
    name="async_copy_same_warps", target="cute_attn.kernels.async_copy.same_warps:SameWarps"
)
PRODUCER_WARPS = KernelDef(
    name="async_copy_producer_warps",
    target="cute_attn.kernels.async_copy.producer_warps:ProducerWarps",
)
PLAIN_READ = KernelDef(
    name="async_copy_plain_read", target="cute_attn.kernels.async_copy.plain_read:PlainRead"
)


def kernel_of(spec: AsyncCopySpec) -> KernelDef:
    """The kernel that a spec is for."""
    return PRODUCER_WARPS if spec.producer_warps else SAME_WARPS
