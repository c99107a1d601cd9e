"""The choice of a call's mode of context parallelism, from shapes alone.

Every rank computes the same choice, so no rank needs to ask another rank. For each mode, the module
estimates the time of messages that no kernel hides, and the time of the mode's extra work.
"""

from __future__ import annotations

from typing import NamedTuple

MODES = ("gather", "ring", "heads")

# Measured on two H100 with NVLink, 2026-11-26 (docs/context_parallel.md).
BYTES_PER_SECOND = 320e9  # between ranks, in each direction
MEMORY_BYTES_PER_SECOND = 2.6e12
# The float32 results of a hop cost as much time as so many passes over their bytes. The cost is
# their reads and writes, and a slower attention kernel.
PASSES_OF_A_HOP = 13.0
# Passes over dK and dV of gathered keys, to add them up and to round them.
PASSES_OF_GRADIENTS = 4.0
PASSES_OF_HEADS = 3.0  # packing and unpacking tokens of some heads

GATHERED_BYTES = 8 * 2**30  # the most bytes of K and V that a rank gathers


class Shape(NamedTuple):
    """All that the choice depends on. In a mesh, the ranks are one column, which splits tokens, and
    tokens and heads are a rank's after the exchange of heads."""

    world: int
    tokens: int  # of a rank, times the batch
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    window: bool
    gradient: bool


def choose(shape: Shape, *, mesh: bool = False) -> str:
    """The mode of a call. In a mesh of tokens and heads, the mode is "gather" or "ring"."""
    if shape.world == 1 or shape.window:
        return "gather"
    seconds = costs(shape)
    if mesh:
        seconds.pop("heads", None)
    if gathered_bytes(shape) > GATHERED_BYTES:
        del seconds["gather"]
        if shape.gradient:
            del seconds["ring"]  # the backward of "ring" gathers
    return min(seconds, key=seconds.__getitem__) if seconds else "gather"


def gathered_bytes(shape: Shape) -> int:
    """The bytes of K and V that `gather` keeps at once."""
    columns = shape.head_dim + shape.head_dim_v
    return 2 * shape.world * shape.tokens * shape.heads_k * columns


def costs(shape: Shape) -> dict[str, float]:
    """Mode -> estimated seconds that the mode adds to the attention kernels of a rank's share. With
    `shape.gradient`, the seconds include the backward."""
    world, columns = shape.world, shape.head_dim + shape.head_dim_v
    keys = 2 * shape.tokens * shape.heads_k * columns  # bytes of a rank's K and V
    queries = 2 * shape.tokens * shape.heads * columns  # bytes of a rank's Q and O
    float32_o = 4 * shape.tokens * shape.heads * shape.head_dim_v
    received = (world - 1) * keys / BYTES_PER_SECOND
    gradients = 0.0
    if shape.gradient:  # the backward receives K and V again, and sends float32 gradients
        passes = PASSES_OF_GRADIENTS * world * 2 * keys / MEMORY_BYTES_PER_SECOND
        gradients = 3 * received + passes
    merging = PASSES_OF_A_HOP * world * float32_o / MEMORY_BYTES_PER_SECOND
    found = {"gather": received + gradients, "ring": merging + gradients}
    if not shape.heads_k % world and not shape.heads % world:
        swapped = (keys + queries) * (world - 1) / world / BYTES_PER_SECOND
        swapped += PASSES_OF_HEADS * (keys + queries) / MEMORY_BYTES_PER_SECOND
        found["heads"] = swapped * (2 if shape.gradient else 1)
    return found
