"""The choice of a call's mode of context parallelism, from shapes alone.

Every rank computes the same choice, so no rank needs to ask another rank. For each mode, the module
estimates the time of messages that no kernel hides, and the time of the mode's extra work.
"""

from __future__ import annotations

from typing import NamedTuple

MODES = ("gather", "ring", "heads")

# Measured on two and four H100 with NVLink, 2026-11-26 and 27 (docs/context_parallel.md).
MEMORY_BYTES_PER_SECOND = 2.6e12
FORWARD_FLOPS_PER_SECOND, BOTH_FLOPS_PER_SECOND = 7.2e14, 6.3e14


class Rates(NamedTuple):
    """What depends on the number of ranks.

    Attributes:
        bytes_per_second: of a rank, in each direction.
        uneven: calls over gathered keys take longer than a call with as much work on one GPU, by
            this share. They end with long tiles, and their heads change more often.
    """

    bytes_per_second: float
    uneven: float


OF_TWO, OF_MORE = Rates(260e9, 0.01), Rates(300e9, 0.04)

# The float32 results of a hop cost as much time as so many passes over their bytes. The cost is
# their reads and writes, and a slower attention kernel.
PASSES_OF_A_HOP = 13.0
# Passes over dK and dV of gathered keys, to add them up and to round them.
PASSES_OF_GRADIENTS = 4.0
PASSES_OF_HEADS = 3.0  # packing and unpacking tokens of some heads

# Head dimensions at which the backward of "ring" goes by hops on Hopper; see `ring`.
HEAD_DIMS_OF_HOPS = (64, 128)

GATHERED_BYTES = 8 * 2**30  # the most bytes of K and V that a rank gathers


class Shape(NamedTuple):
    """All that the choice depends on. In a mesh, the ranks are one column, which splits tokens, and
    tokens and heads are a rank's after the exchange of heads.

    Attributes:
        world: the number of ranks.
        tokens: a rank's number of tokens, times the batch.
        received: how many keys a rank receives at most, times the batch.
        pairs: a rank's pairs of queries and keys that they see, times the batch.
        heads, heads_k, head_dim, head_dim_v: of q, k and v.
        window: whether there is a window but the causal mask.
        gradient: whether a backward follows.
    """

    world: int
    tokens: int
    received: int
    pairs: int
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
        if shape.gradient and shape.head_dim not in HEAD_DIMS_OF_HOPS:
            del seconds["ring"]  # its backward gathers
    return min(seconds, key=seconds.__getitem__) if seconds else "gather"


def gathered_bytes(shape: Shape) -> int:
    """The bytes of K and V that `gather` keeps at once."""
    columns = shape.head_dim + shape.head_dim_v
    return 2 * shape.world * shape.tokens * shape.heads_k * columns


def kernel_seconds(shape: Shape) -> float:
    """Estimated seconds of a rank's share of the attention kernels."""
    flops = 2 * shape.pairs * shape.heads * (shape.head_dim + shape.head_dim_v)
    if shape.gradient:
        return 3.5 * flops / BOTH_FLOPS_PER_SECOND
    return flops / FORWARD_FLOPS_PER_SECOND


def costs(shape: Shape) -> dict[str, float]:
    """Mode -> estimated seconds that the mode adds to the attention kernels of a rank's share. With
    `shape.gradient`, the seconds include the backward."""
    world, columns = shape.world, shape.head_dim + shape.head_dim_v
    keys = 2 * shape.tokens * shape.heads_k * columns  # bytes of a rank's K and V
    queries = 2 * shape.tokens * shape.heads * columns  # bytes of a rank's Q and O
    float32_o = 4 * shape.tokens * shape.heads * shape.head_dim_v
    seen = 2 * shape.received * shape.heads_k * columns
    rates = OF_TWO if world == 2 else OF_MORE
    received = seen / rates.bytes_per_second
    gradients = rates.uneven * kernel_seconds(shape) * (seen > 0)
    if shape.gradient:  # the backward receives K and V again, and sends float32 gradients
        passes = PASSES_OF_GRADIENTS * 2 * (keys + seen) / MEMORY_BYTES_PER_SECOND
        gradients += 3 * received + passes
    merging = PASSES_OF_A_HOP * world * float32_o / MEMORY_BYTES_PER_SECOND
    found = {"gather": received + gradients, "ring": merging + gradients}
    if not shape.heads_k % world and not shape.heads % world:
        swapped = (keys + queries) * (world - 1) / world / rates.bytes_per_second
        swapped += PASSES_OF_HEADS * (keys + queries) / MEMORY_BYTES_PER_SECOND
        found["heads"] = swapped * (2 if shape.gradient else 1)
    return found
