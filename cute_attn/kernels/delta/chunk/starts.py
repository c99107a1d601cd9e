"""Segments that start from a state of zero, because the earlier state has decayed.

A token's transition is (I - beta k k^T) Diag(exp(g)). With |k| at most 1 and beta between 0 and 2,
the transition's norm is at most the largest decay of the token's channels. So the product of these
largest decays bounds what is left of an earlier state. The product of each channel's own decays is
no bound, because I - beta k k^T moves a state from channel to channel.

`prepare` stores the base-2 logarithm of this bound as two numbers, whose sum counts. A warp of 32
tokens stores one of them, or +inf if the bound does not hold: a beta is out of range.

A boundary between two segments is negligible if some chunks before the boundary, at most
`longest_warm_up`, have a bound of at most 2^NEGLIGIBLE. The segment after the boundary then starts
that many chunks earlier, from a state of zero. The segment stores no output of these chunks, its
warm-up. If all boundaries of a sequence and head are negligible, no segment needs transitions.
Otherwise the sequence and head take exact transitions. Every warp computes this decision from the
same numbers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common.arguments import fake_rows
from ...common.spec import WARP_SIZE
from .chunks import ChunkPlace, sequence_place
from .spec import CHUNK, HALVES

NEGLIGIBLE = -40.0  # log2 of the bound: float32 rounds at 2^-24, and v may vary by 2^16
MOST_WARM_UP = 8  # chunks


def fake_bounds(slots: Any, heads: Any) -> cute.Tensor:
    """Placeholder of the tensor of bounds; its rows may be parts of longer rows."""
    return fake_rows(Float32, (slots, heads, HALVES), align=4)


def longest_warm_up(chunks_per_start: Any) -> Any:
    """The most chunks of warm-up of a segment of `chunks_per_start` chunks."""
    most = cutlass.min(cutlass.max(chunks_per_start // 4, 2), MOST_WARM_UP)
    return cutlass.min(most, chunks_per_start)


@cute.jit
def chunks_before_starts(tokens: Int32, chunks_per_start: Int32) -> Any:
    """Return the most chunks of a sequence whose bounds are needed."""
    boundaries = ((tokens + (CHUNK - 1)) // CHUNK - 1) // chunks_per_start
    return boundaries * longest_warm_up(chunks_per_start)


@cute.jit
def chunk_before_start(
    number: Int32, tokens: Int32, cu_seqlens: cute.Tensor | None, chunks_per_start: Int32
) -> Any:
    """Return the slot and place of a chunk whose bound is needed. Numbers count the chunks before
    the boundaries of all sequences; some numbers have no chunk."""
    most = longest_warm_up(chunks_per_start)
    of_sequence = chunks_before_starts(tokens, chunks_per_start)
    sequence = number // of_sequence
    rest = number - sequence * of_sequence
    boundary = (rest // most + 1) * chunks_per_start
    index = boundary - 1 - rest % most
    place = sequence_place(sequence, tokens, cu_seqlens)
    valid = boundary < (place.length + (CHUNK - 1)) // CHUNK
    start = place.start + index * CHUNK
    chunk = ChunkPlace(valid, place.batch, sequence, index, start, Int32(CHUNK))
    return place.slot + index, chunk


def chunks_until_negligible(bounds: cute.Tensor, end: Int32, head: Int32, most: Int32) -> Any:
    """Return how many chunks before slot `end` make an earlier state negligible; 0 if `most` chunks
    do not suffice. All loads start before the first wait."""
    halves = []
    for i in range(MOST_WARM_UP):
        at = end - cutlass.min(Int32(i + 1), most)
        halves.append((bounds[at, head, 0], bounds[at, head, 1]))
    total, count = Float32(0.0), Int32(0)
    for i, pair in enumerate(halves):
        total = total + (pair[0] + pair[1])
        found = (count == 0) & (most > i) & (total <= NEGLIGIBLE)  # false for NaN
        count = Int32(cutlass.select_(found, Int32(i + 1), count))
    return count


@cute.jit
def short_start(
    bounds: cute.Tensor, slot: Int32, num_chunks: Int32, head: Int32, segment: Int32,
    chunks_per_start: Int32,
) -> Any:  # fmt: skip
    """Return whether all boundaries of a sequence and head are negligible, and the number of
    `segment`'s warm-up chunks. A whole warp calls this function.

    Args:
        bounds: float32 [slots, HV, HALVES], see the module's docstring.
        slot: the slot of the sequence's first chunk.
        num_chunks: chunks of the sequence.
        chunks_per_start: chunks of a segment. Each lane checks one boundary.
    """
    lane = cute.arch.lane_idx()
    boundary = lane * chunks_per_start
    inner = lane > 0 and boundary < num_chunks
    most = longest_warm_up(chunks_per_start)
    warm_up = Int32(0)
    if inner:
        warm_up = chunks_until_negligible(bounds, slot + boundary, head, most)
    exact = cute.arch.vote_any_sync(inner and warm_up == 0)
    own = cute.arch.shuffle_sync(warm_up, segment & (WARP_SIZE - 1))
    return not exact, own


@cute.jit
def half_bound(log2_decay: Float32, beta: Float32) -> Any:
    """Return `log2_decay`, or +inf if beta of one of the warp's 32 tokens is out of range."""
    outside = Boolean(not (beta >= 0.0 and beta <= 2.0))
    outside = cute.arch.vote_any_sync(outside)
    return Float32(cutlass.select_(outside, Float32.inf, log2_decay))


assert CHUNK == HALVES * WARP_SIZE
