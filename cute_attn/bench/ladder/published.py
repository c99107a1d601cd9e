"""Published numbers of a ladder of the same steps, in cuTile Python; none was measured here."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A published number, and the step of this ladder that has the same ideas."""

    gpu: str
    seqlen: int
    step: int
    theirs: str  # the step's name in the published ladder
    tflops: float


_SPARK = "DGX Spark (sm_121)"
_B300 = "B300"

PUBLISHED = (
    Published(_SPARK, 2048, 1, "basic", 62.8),
    Published(_SPARK, 2048, 2, "exp2", 66.5),
    Published(_SPARK, 2048, 3, "load order", 66.3),
    Published(_SPARK, 2048, 3, "latency hints", 66.5),
    Published(_SPARK, 2048, 4, "occupancy two", 79.5),
    Published(_SPARK, 2048, 4, "approximate division", 81.1),
    Published(_B300, 1024, 4, "last", 465.0),
    Published(_B300, 2048, 4, "last", 770.0),
    Published(_B300, 4096, 4, "last", 999.0),
    Published(_B300, 8192, 4, "last", 1159.0),
    Published(_B300, 16384, 4, "last", 1254.0),
)
