"""8 by 8 matrices of 16-bit elements as fragments: `ldmatrix`, `stmatrix` and `movmatrix`."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Int32

from .asm import asm, operands


def load_matrices(address: Int32, count: int = 4, *, transposed: bool = False) -> Sequence[Int32]:
    """`ldmatrix`: load `count` (1, 2 or 4) matrices of 8 by 8 elements of 16 bits.

    Lane 8 m + r passes the 16-byte aligned address of row r of matrix m. With row = lane // 4 and
    col = 2 * (lane % 4), a lane gets (row, col), (row, col + 1) of each matrix, or with
    `transposed` (col, row), (col + 1, row)."""
    trans = ".trans" if transposed else ""
    text = (
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 "
        f"{{{operands(0, count)}}}, [${count}];"
    )
    out = asm(text, [Int32] * count, [Int32(address)], memory=True)
    return out if count > 1 else (out,)


def store_matrices(address: Int32, words: Sequence[Int32]) -> None:
    """`stmatrix` (sm_90 and newer): store 1, 2 or 4 matrices; each lane holds one word of each
    matrix. Addresses and words are distributed over lanes as in `load_matrices` without
    `transposed`."""
    count = len(words)
    text = f"stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [$0], {{{operands(1, count)}}};"
    asm(text, [], [Int32(address), *map(Int32, words)], memory=True)


def transpose_matrix(x: Int32) -> Int32:
    """`movmatrix`: transpose an 8 by 8 matrix of 16-bit elements, one register in each lane."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [Int32], [x], memory=True)
