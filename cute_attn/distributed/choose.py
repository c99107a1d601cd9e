"""Which way of context parallelism a call takes, from shapes alone.

Every rank computes the same choice, so no rank needs to ask another. The estimate is the time that
messages take where no kernel runs beside them, and the extra work of each way.
"""

from __future__ import annotations

from typing import NamedTuple

MODES = ("gather", "ring", "heads")

# Of two H100 with NVLink; the order of the modes depends little on them.
BYTES_PER_SECOND = 320e9  # between ranks, in each direction
MEMORY_BYTES_PER_SECOND = 2.6e12
FLOPS_PER_SECOND = 6e14
LATENCY = 15e-6  # of one exchange

FEW_TOKENS = 8192  # with fewer tokens on a rank, the heads travel in one part
MOST_PARTS = 4
GATHERED_BYTES = 8 * 2**30  # more K and V than this is not gathered


class Shape(NamedTuple):
    """All that the choice depends on: numbers of one rank, but for the number of ranks."""

    world: int
    tokens: int  # of a rank, times the batch
    keys: int  # that a query sees, at most
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: bool


def parts_of(shape: Shape) -> int:
    """In how many parts of the heads K and V are gathered."""
    return 1 if shape.tokens < FEW_TOKENS else min(MOST_PARTS, shape.heads_k)


def choose(shape: Shape) -> str:
    """The mode of a call."""
    if shape.world == 1 or shape.window:
        return "gather"
    seconds = costs(shape)
    if gathered_bytes(shape) > GATHERED_BYTES:
        del seconds["gather"]
    return min(seconds, key=lambda mode: seconds[mode])


def gathered_bytes(shape: Shape) -> int:
    """The bytes of K and V that `gather` keeps at once."""
    columns = shape.head_dim + shape.head_dim_v
    return 2 * shape.world * shape.tokens * shape.heads_k * columns


def costs(shape: Shape) -> dict[str, float]:
    """Mode -> the seconds of a forward that do not compute attention."""
    world, columns = shape.world, shape.head_dim + shape.head_dim_v
    keys = 2 * shape.tokens * shape.heads_k * columns  # bytes of a rank's K and V
    queries = 2 * shape.tokens * shape.heads * columns
    computing = 2 * shape.tokens * shape.keys * shape.heads * columns / FLOPS_PER_SECOND
    computing *= 0.5 if shape.causal else 1.0
    moving = (world - 1) * keys / BYTES_PER_SECOND
    parts = parts_of(shape)
    first, hop = moving / parts, moving / (world - 1)
    rest = max(0.0, moving - first - computing * (1 - 1 / parts))
    # Every hop writes and reads float32 results of half of the queries, or of all.
    merged = queries * shape.head_dim_v / columns * 2 * 2 * world
    merging = merged * (0.75 if shape.causal else 1.0) / MEMORY_BYTES_PER_SECOND
    found = {
        "gather": LATENCY * parts + first + rest,
        "ring": LATENCY * world + merging + (world - 1) * max(0.0, hop - computing / world),
    }
    if not shape.heads_k % world:
        bytes_of_heads = (keys + queries) * (world - 1) / world
        copied = 4 * (keys + queries) / MEMORY_BYTES_PER_SECOND
        found["heads"] = 2 * LATENCY + bytes_of_heads / BYTES_PER_SECOND + copied
    return found
