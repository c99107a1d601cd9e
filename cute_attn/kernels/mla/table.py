"""The kernels of multi-head latent attention, by name. Importing this loads no compiler."""

from __future__ import annotations

from ...cache import KernelDef
from .spec import ARCHS

_HERE = __name__.rpartition(".")[0]

SM90_LATENT_DECODE = KernelDef(
    name="sm90_latent_decode", target=f"{_HERE}.sm90.latent_decode:Sm90LatentDecode"
)


def called(arch: str) -> set[KernelDef]:
    """The kernels that operators call on an architecture."""
    return {SM90_LATENT_DECODE} if arch in ARCHS else set()
