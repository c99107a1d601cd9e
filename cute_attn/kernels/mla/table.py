"""The kernels of multi-head latent attention, by name. Importing this loads no compiler."""

from __future__ import annotations

from ...cache import KernelDef
from .spec import ARCHS, LatentSpec, LatentTurnsSpec

_HERE = __name__.rpartition(".")[0]

SM90_LATENT_DECODE = KernelDef(
    name="sm90_latent_decode", target=f"{_HERE}.sm90.latent_decode:Sm90LatentDecode"
)
SM90_LATENT_DECODE_TURNS = KernelDef(
    name="sm90_latent_decode_turns",
    target=f"{_HERE}.sm90.latent_decode_turns:Sm90LatentDecodeTurns",
)


def find(spec: LatentSpec) -> KernelDef:
    """The kernel of a spec."""
    turns = isinstance(spec, LatentTurnsSpec)
    return SM90_LATENT_DECODE_TURNS if turns else SM90_LATENT_DECODE


def called(arch: str) -> set[KernelDef]:
    """The kernels that operators call on an architecture."""
    return {SM90_LATENT_DECODE, SM90_LATENT_DECODE_TURNS} if arch in ARCHS else set()
