"""The places of 64-token chunks, which each CTA finds for itself.

Chunk c of sequence n has the slot

    n * ceil(T / 64) + c              if all sequences have T tokens
    cu_seqlens[n] // 64 + n + c       if sequences are packed

Slots of packed chunks are also distinct and ascending, since the sequences before n have at most
(cu_seqlens[n] + 63 n) / 64 chunks; some slots have no chunk. A CTA finds the chunk of its slot by
binary search, so the host needs no plan and reads nothing back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from ...common.spec import WARP_SIZE
from .spec import CHUNK

CHUNK_SHIFT = CHUNK.bit_length() - 1


class ChunkPlace(NamedTuple):
    """A chunk's place: row of the batch, sequence, index in the sequence, first token and
    length."""

    valid: Any  # whether the slot has a chunk; without a chunk the length is 0
    batch: Any
    sequence: Any
    index: Any
    start: Any
    length: Any


class SequencePlace(NamedTuple):
    """A sequence's place: row of the batch, first token, length, and the first chunk's slot."""

    batch: Any
    start: Any
    length: Any
    slot: Any


@cute.jit
def num_slots(batch: Int32, tokens: Int32, cu_seqlens: cute.Tensor | None) -> Any:
    """For host code: return an upper bound of the number of slots."""
    slots = batch * ((tokens + (CHUNK - 1)) // CHUNK)
    if cutlass.const_expr(cu_seqlens is not None):
        slots = tokens // CHUNK + cu_seqlens.shape[0] - 1
    return slots


@cute.jit
def num_sequences(batch: Int32, cu_seqlens: cute.Tensor | None) -> Any:
    count = batch
    if cutlass.const_expr(cu_seqlens is not None):
        count = cu_seqlens.shape[0] - 1
    return count


@cute.jit
def sequence_place(sequence: Int32, tokens: Int32, cu_seqlens: cute.Tensor | None) -> Any:
    """Find a sequence; `tokens` is T. A sequence whose cu_seqlens descend or leave the tensor
    counts as empty, so that no access is out of bounds."""
    if cutlass.const_expr(cu_seqlens is None):
        chunks = Int32(cutlass.Uint32(tokens + (CHUNK - 1)) >> CHUNK_SHIFT)
        return SequencePlace(sequence, Int32(0), tokens, sequence * chunks)
    else:
        start = Int32(cu_seqlens[sequence])
        end = Int32(cu_seqlens[sequence + 1])
        inside = start >= 0 and start <= end and end <= tokens
        start = start if inside else Int32(0)
        end = end if inside else Int32(0)
        return SequencePlace(Int32(0), start, end - start, Int32(start >> CHUNK_SHIFT) + sequence)


@cute.jit
def chunk_place(slot: Int32, tokens: Int32, cu_seqlens: cute.Tensor | None) -> Any:
    """Find the chunk of a slot; `tokens` is T."""
    if cutlass.const_expr(cu_seqlens is None):
        chunks = Int32(cutlass.Uint32(tokens + (CHUNK - 1)) >> CHUNK_SHIFT)
        sequence = slot // chunks
        index = slot - sequence * chunks
        start = index * CHUNK
        length = cutlass.min(tokens - start, Int32(CHUNK))
        return ChunkPlace(Boolean(True), sequence, sequence, index, start, length)
    else:
        # The last sequence whose first slot is at most `slot`.
        low = Int32(0)
        high = Int32(cu_seqlens.shape[0] - 1)
        while high - low > 1:
            middle = (low + high) >> 1
            first = Int32(Int32(cu_seqlens[middle]) >> CHUNK_SHIFT) + middle
            if first <= slot:
                low = middle
            else:
                high = middle
        place = sequence_place(low, tokens, cu_seqlens)
        index = slot - place.slot
        offset = index * CHUNK
        valid = index >= 0 and offset < place.length
        index = index if valid else Int32(0)
        offset = offset if valid else Int32(0)
        length = cutlass.min(place.length - offset, Int32(CHUNK)) if valid else Int32(0)
        return ChunkPlace(valid, Int32(0), low, index, place.start + offset, length)


# -- for the stages --------------------------------------------------------------------------------


def slot_and_head(heads: Any) -> tuple[Any, Any]:
    """The slot and value head of this CTA, in a grid of slots times heads. The head is the fast
    index, so that value heads that share q and k find both in L2."""
    block, _, _ = cute.arch.block_idx()
    slot = Uint32(block) // Uint32(heads)
    return Int32(slot), Int32(Uint32(block) - slot * Uint32(heads))


def shared_head(head: Int32, heads_v: Any, heads_qk: Any) -> Any:
    """Return the query and key head that a value head uses."""
    return Int32(Uint32(head) // (Uint32(heads_v) // Uint32(heads_qk)))


@cute.jit
def chunks_before(sequence: Int32, tokens: Int32, cu_seqlens: cute.Tensor | None) -> Any:
    """Return how many chunks the packed sequences before `sequence` have, which is the index in h
    of the first chunk of `sequence`. Every lane of a warp must call this, because each lane counts
    some of the sequences."""
    count = Int32(0)
    if cutlass.const_expr(cu_seqlens is not None):
        for i in cutlass.range(cute.arch.lane_idx(), sequence, WARP_SIZE, unroll=1):
            place = sequence_place(i, tokens, cu_seqlens)
            count = count + ((place.length + (CHUNK - 1)) >> CHUNK_SHIFT)
        for bit in cutlass.range_constexpr(5):
            count = count + cute.arch.shuffle_sync_bfly(count, offset=1 << bit)
    return count


def row_address(x: cute.Tensor, batch: Int32, token: Int32, head: Int32, column: Any = 0) -> Any:
    """Return the address of an element of x, `[B, T, heads, columns]`."""
    offset = (
        Int64(batch) * x.stride[0] + Int64(token) * x.stride[1] + Int64(head) * x.stride[2]
    ) + column
    return (x.iterator + offset).toint()


def row_bytes(x: cute.Tensor) -> Any:
    """Return the stride of a token's row of x, in bytes."""
    return Int64(x.stride[1]) * (x.element_type.width // 8)


# -- for `prepare` and `chunk_intra` ---------------------------------------------------------------


class Rows(NamedTuple):
    """The chunk's rows of a tensor."""

    start: Any  # address of the first row
    pitch: Any  # row stride in bytes, Uint32


def row_offset(row: Any, pitch: Any) -> Any:
    """Return the byte offset of a row, with one 32-bit multiplication to 64 bits."""
    return Int64(Uint64(Uint32(row)) * Uint64(pitch))


class Divisors(NamedTuple):
    """The divisors of `place_of`.

    Attributes:
        heads: the number of value heads.
        group: the number of value heads that share a head of q and k.
        chunks: the number of chunks of a sequence that is not packed.
    """

    heads: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2
    chunks: cute.FastDivmodDivisorV2

    @classmethod
    def of(cls, g: cute.Tensor, q: cute.Tensor) -> Divisors:
        """The divisors of a call; for host code."""
        heads = g.shape[2]
        sizes = (heads, heads // q.shape[2], (g.shape[1] + (CHUNK - 1)) // CHUNK)
        return cls(*map(cute.fast_divmod_create_divisor_v2, sizes))


@cute.jit
def place_of(by: Divisors, tokens: Int32, cu_seqlens: cute.Tensor | None) -> Any:
    """Return (slot, value head, head of q and k, chunk) of this CTA. The value head is the fast
    index, so that the value heads of a group find q and k in L2."""
    block, _, _ = cute.arch.block_idx()
    slot, head = divmod(block, by.heads)
    head_qk, _ = divmod(head, by.group)
    return slot, head, head_qk, place_of_slot(slot, by.chunks, tokens, cu_seqlens)


@cute.jit
def place_of_slot(
    slot: Int32, by_chunks: cute.FastDivmodDivisorV2, tokens: Int32, cu_seqlens: cute.Tensor | None
) -> Any:
    """Find the chunk of a slot as `chunk_place` does, with the divisor `Divisors.chunks`."""
    if cutlass.const_expr(cu_seqlens is None):
        sequence, index = divmod(slot, by_chunks)
        start = index * CHUNK
        length = cutlass.min(tokens - start, Int32(CHUNK))
        place = ChunkPlace(cutlass.Boolean(True), sequence, sequence, index, start, length)
    else:
        place = chunk_place(slot, tokens, cu_seqlens)
    return place


def rows_of(x: cute.Tensor | None, place: Any, head: Int32) -> Any:
    """The chunk's `Rows` of a tensor [B, T, heads, columns], or None without a tensor."""
    if x is None:
        return None
    width = x.element_type.width // 8
    start = (
        x.iterator
        + (Int64(place.batch) * x.stride[0] + Int64(head) * x.stride[2])
        + Int64(place.start) * x.stride[1]
    ).toint()
    return Rows(start, Uint32(x.stride[1] * width))
