"""The work of warps on a tile in shared memory: a checksum of its words, or MMAs.

The checksum and the MMAs cover every byte, and their results are exact, so that a missing, stale or
misplaced tile changes the result. A thread reads 16-byte vectors, `consumer_threads` vectors apart.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.ptx.memory import load_shared
from ..common.ptx.mma import mma
from ..common.spec import VECTOR_BYTES
from .spec import VECTOR_WORDS, AsyncCopySpec

# A checksum c becomes FACTOR c + word, modulo 2 ** 32, and so depends on the order of the words.
FACTOR = 0x9E3779B1 - (1 << 32)


class Checksum:
    """Four checksums a thread, one for each word of its vectors."""

    def __init__(self, spec: AsyncCopySpec):
        self.spec = spec

    def start(self, count: Int32) -> cute.Tensor:
        del count
        sums = cute.make_rmem_tensor((VECTOR_WORDS,), Int32)
        sums.fill(0)
        return sums

    @cute.jit
    def use(self, sums: cute.Tensor, tile: Int32, thread: Int32, n: Int32) -> None:
        """Add the tile at shared address `tile`, the n-th of the CTA."""
        step = self.spec.consumer_threads * VECTOR_BYTES
        tile += thread * VECTOR_BYTES
        if cutlass.const_expr(self.spec.whole_tile):
            for vector in cutlass.range_constexpr(self.spec.vectors):
                self.add(sums, tile + vector * step)
        else:
            self.add(sums, tile + n % self.spec.vectors * step)

    def add(self, sums: cute.Tensor, address: Int32) -> None:
        words = load_shared(Int32, address, VECTOR_WORDS)
        for i in range(VECTOR_WORDS):
            sums[i] = sums[i] * FACTOR + words[i]

    def result(self, sums: cute.Tensor) -> list[Int32]:
        return [sums[i] for i in range(VECTOR_WORDS)]


class Products:
    """`products` MMAs with each half of a vector as their right operand.

    All elements of the j-th left operand are j + 1, so the results are multiples of column sums.
    For tiles of small integers, these are exact in float32."""

    def __init__(self, spec: AsyncCopySpec):
        self.spec = spec

    def start(self, count: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """The accumulators, and the elements of the left operands in pairs. The elements are opaque
        to the compiler, which would otherwise copy constants again for each tile."""
        accumulators = cute.make_rmem_tensor((4, 2, self.spec.products), Float32)
        accumulators.fill(0.0)
        left = cute.make_rmem_tensor((self.spec.products,), Int32)
        for j in range(self.spec.products):
            bits = int.from_bytes(struct.pack("<e", j + 1), "little")
            left[j] = Int32(bits << 16 | bits) | (count >> 31)
        return accumulators, left

    @cute.jit
    def use(
        self,
        operands: tuple[cute.Tensor, cute.Tensor],
        tile: Int32,
        thread: Int32,
        n: Int32,
    ) -> None:
        """Multiply by the tile at shared address `tile`."""
        tile += thread * VECTOR_BYTES
        for vector in cutlass.range_constexpr(self.spec.vectors):
            at = tile + vector * self.spec.consumer_threads * VECTOR_BYTES
            words = load_shared(Int32, at, VECTOR_WORDS)
            for half in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(self.spec.products):
                    self.multiply(operands, half, j, words[2 * half : 2 * half + 2])

    def multiply(
        self, operands: tuple[cute.Tensor, cute.Tensor], half: int, j: int, right: Sequence[Int32]
    ) -> None:
        accumulators, left = operands
        c = [accumulators[i, half, j] for i in range(4)]
        for i, x in enumerate(mma(cutlass.Float16, c, [left[j]] * 4, right)):
            accumulators[i, half, j] = x

    def result(self, operands: tuple[cute.Tensor, cute.Tensor]) -> list[Int32]:
        """For each of the four elements of a fragment, the sum over all accumulators."""
        accumulators, _ = operands
        results = []
        for i in range(4):
            total = Int32(0)
            for half in range(2):
                for j in range(self.spec.products):
                    total += Int32(accumulators[i, half, j])
            results.append(total)
        return results


def work(spec: AsyncCopySpec) -> Checksum | Products:
    return Products(spec) if spec.products else Checksum(spec)
