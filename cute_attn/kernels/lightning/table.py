"""The Lightning Attention kernels, by name. Importing this loads no compiler."""

from __future__ import annotations

from ...cache import KernelDef

_HERE = __name__.rpartition(".")[0]

DECODE = KernelDef(name="lightning_decode", target=f"{_HERE}.decode:LightningDecode")
# Only for measurements; no operator uses it (see docs/kernels/lightning_decode.md).
DECODE_PIPELINED = KernelDef(
    name="lightning_decode_pipelined",
    target=f"{_HERE}.decode_pipelined:LightningDecodePipelined",
)


def called(arch: str) -> set[KernelDef]:
    """The kernels that operators call, on any architecture."""
    return {DECODE}
