"""The kernels that several families share, by name. Importing this loads no compiler."""

from __future__ import annotations

from ...cache import KernelDef

SUM_PARTIALS = KernelDef(
    name="sum_partials", target="cute_attn.kernels.common.sum_partials:SumPartials"
)

ZERO_UNUSED = KernelDef(
    name="zero_unused", target="cute_attn.kernels.common.zero_unused:ZeroUnused"
)
