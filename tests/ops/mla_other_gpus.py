"""Multi-head latent attention on GPUs other than sm_90 and sm_100, which have no kernel."""

from __future__ import annotations

from . import mla_cases
from .calls import OTHER_ARCHS, ArchCall


def mla_decode() -> None:
    args = mla_cases.Case().arguments()
    mla_cases.assert_agrees(args, *mla_cases.run(args))


CALLS = {
    "mla_decode": ArchCall(mla_decode, covers=(("mla_decode", "forward"),), refused=OTHER_ARCHS),
}
