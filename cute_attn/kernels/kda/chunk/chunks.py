"""Where a chunk of 64 tokens lies, found by the block that works on it.

The chunks of a batch have slots: chunk c of sequence n has

    n * ceil(T / 64) + c              where all sequences have T tokens
    cu_seqlens[n] // 64 + n + c       where they are packed

In the second case, too, slots of different chunks differ and ascend, since the chunks of the
sequences before n are at most (cu_seqlens[n] + 63 n) / 64; some slots are nobody's. So a slot can
be turned into its chunk by a search, and nothing has to be planned or read back beforehand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .spec import CHUNK

CHUNK_SHIFT = CHUNK.bit_length() - 1


class ChunkPlace(NamedTuple):
    """A chunk's place: its row of the batch, sequence, index within it, first token and length."""

    valid: Any  # whether the slot is somebody's; all else is 0 where it is not
    batch: Any
    sequence: Any
    index: Any
    start: Any
    length: Any


class SequencePlace(NamedTuple):
    """A sequence's place: its row of the batch, first token, length, and its first chunk's slot."""

    batch: Any
    start: Any
    length: Any
    slot: Any


@cute.jit
def num_slots(batch: Int32, tokens: Int32, cu_seqlens: cute.Tensor | None) -> Any:
    """How many slots there are at most, for host code."""
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
    """Of a sequence; `tokens` is T. Offsets that descend or leave the tensor are taken for empty
    sequences, so that no call reads or writes what is not its own."""
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
    """Of a slot; `tokens` is T."""
    if cutlass.const_expr(cu_seqlens is None):
        chunks = Int32(cutlass.Uint32(tokens + (CHUNK - 1)) >> CHUNK_SHIFT)
        sequence = slot // chunks
        index = slot - sequence * chunks
        start = index * CHUNK
        length = cutlass.min(tokens - start, Int32(CHUNK))
        return ChunkPlace(Boolean(True), sequence, sequence, index, start, length)
    else:
        # The last sequence whose first slot is not behind `slot`.
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
