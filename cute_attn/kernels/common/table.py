"""The kernels that several families share, by name. Importing this loads no compiler."""

from __future__ import annotations

from ...cache import KernelDef

_HERE = __name__.rpartition(".")[0]

SUM_PARTIALS = KernelDef(name="sum_partials", target=f"{_HERE}.sum_partials:SumPartials")

ZERO_UNUSED = KernelDef(name="zero_unused", target=f"{_HERE}.zero_unused:ZeroUnused")
