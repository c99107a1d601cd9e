"""Specs of the micro-benchmarks. Importing this loads no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...cache import KernelDef
from ...kernels.common.spec import Spec
from .loops import LOOPS

KERNEL = KernelDef(name="bench_rates", target="cute_attn.bench.rates.kernel:Loops")


@dataclass(frozen=True)
class LoopsSpec(Spec):
    """The compile-time parameters of a kernel of timed loops.

    Attributes:
        what: a name in `LOOPS`.
        width: the loops' parameter: chains of operations, or N of wgmma; 0 without one.
        warps: warps of a CTA.
        shared_bytes: shared memory of a CTA.
        cluster: CTAs of a cluster.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {"what": tuple(LOOPS)}

    what: str
    width: int
    warps: int
    shared_bytes: int
    cluster: int = 1
