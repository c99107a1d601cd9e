"""`wgmma` of a warpgroup (sm_90a), with the left operand in registers or in shared memory.

Fragments are laid out as in `mma` (m16n8k16). Warp w of the warpgroup has rows 16 w to 16 w + 15 of
the left operand and of the result. The right operand is in shared memory, in sub-tiles of 64 rows
of 128 bytes with TMA's 128-byte swizzle, at multiples of 1024.

`product`, `shared_product` and `mixed_product` start an asynchronous product. The product's result
may be used only as returned by `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from cutlass import Float32, Int32, Int64, Numeric

from .asm import TYPE_NAMES, asm, operands

SUB_TILE_BYTES = 64 * 128

_SWIZZLE_128 = 1 << 62
_STRIDE = (8 * 128) >> 4  # from 8 rows to the next 8, in units of 16 bytes
_ROWS = _SWIZZLE_128 | _STRIDE << 32 | 1 << 16
_COLUMNS = _SWIZZLE_128 | _STRIDE << 32


def rows_descriptor(address: Int32) -> Int64:
    """Describe a right operand whose columns are the rows at `address` (K-major). Each step of 8 in
    k advances the address by 16 bytes; each step of 64 advances it by one sub-tile."""
    return Int64(_ROWS) | Int64((Int32(address) >> 4) & 0x3FFF)


def columns_descriptor(address: Int32, sub_tile_step: Int32 = SUB_TILE_BYTES) -> Int64:
    """Describe a right operand whose rows are the rows at `address` (MN-major), 64 columns in each
    sub-tile; sub-tiles are `sub_tile_step` bytes apart. Each step of 1 in k advances the address by
    128 bytes."""
    step = (sub_tile_step >> 4) << 16
    return Int64(_COLUMNS) | Int64(step) | Int64((Int32(address) >> 4) & 0x3FFF)


def product(
    dtype: type[Numeric],
    c: Sequence[Float32] | None,
    a: Sequence[Int32],
    descriptors: Sequence[Int64],
    n: int,
    *,
    columns: bool,
    adds: Int32 | None = None,
) -> list[Float32]:
    """Start c + a b, 64 by n, as one wgmma group.

    Args:
        c: n / 2 float32 of each thread; None is 0.
        a: 4 registers for each 16 of k.
        descriptors: descriptors of b, one for each 16 of k.
        columns: whether the descriptors come from `columns_descriptor` rather than
            `rows_descriptor`.
        adds: an Int32, equal in all threads; 0 replaces c by zeros.
    """
    return _start(dtype, c, _fragments(a), [(n, descriptors)], columns, adds=adds)


def product_of_parts(
    dtype: type[Numeric],
    c: Sequence[Float32] | None,
    a: Sequence[Int32],
    parts: Sequence[tuple[int, Sequence[Int64]]],
    *,
    columns: bool,
) -> list[Float32]:
    """Start a `product` whose b and accumulators have several parts: (n, descriptors) of each
    part."""
    return _start(dtype, c, _fragments(a), parts, columns)


def shared_product(
    dtype: type[Numeric],
    c: Sequence[Float32] | None,
    a: Sequence[Int64],
    descriptors: Sequence[Int64],
    n: int,
    *,
    columns: bool,
    transposed: bool = False,
) -> list[Float32]:
    """Start a `product` whose left operand is in shared memory. `a` has a descriptor of 64 rows for
    each 16 of k, made by `rows_descriptor`, or with `transposed` by `columns_descriptor`."""
    return _start(dtype, c, [[Int64(x)] for x in a], [(n, descriptors)], columns, transposed)


def shared_product_of_parts(
    dtype: type[Numeric],
    c: Sequence[Float32] | None,
    a: Sequence[Int64],
    parts: Sequence[tuple[int, Sequence[Int64]]],
    *,
    columns: bool,
) -> list[Float32]:
    """Start a `shared_product` whose b and accumulators have several parts: (n, descriptors) of
    each part. ptxas refuses one instruction with more accumulators than a thread has registers at
    the launch."""
    return _start(dtype, c, [[Int64(x)] for x in a], parts, columns)


def mixed_product(
    dtype: type[Numeric],
    c: Sequence[Float32] | None,
    held: Sequence[Int32],
    a: Sequence[Int64],
    descriptors: Sequence[Int64],
    n: int,
    *,
    columns: bool,
) -> list[Float32]:
    """Start a product whose left operand is in the registers `held` for the first part of k, as in
    `product`, and in shared memory (descriptors `a`) for the rest of k, as in `shared_product`."""
    left = _fragments(held) + [[Int64(x)] for x in a]
    return _start(dtype, c, left, [(n, descriptors)], columns)


def _fragments(registers: Sequence[Int32]) -> list[list[Int32]]:
    """Left operands in registers, 4 for each 16 of k."""
    return [[*map(Int32, registers[i : i + 4])] for i in range(0, len(registers), 4)]


def _start(
    dtype: type[Numeric],
    c: Sequence[Float32] | None,
    left: Sequence[Sequence[Int32 | Int64]],
    parts: Sequence[tuple[int, Sequence[Int64]]],
    columns: bool,
    transposed: bool = False,
    adds: Int32 | None = None,
) -> list[Float32]:
    """Start c + a b. `left` has a's operand for each 16 of k: 4 registers, or a descriptor. `parts`
    are (n, descriptors) of neighbouring columns of b. `product` explains `adds`."""
    name = TYPE_NAMES[dtype]
    count = sum(n for n, _ in parts) // 2
    first = count if c is None else 2 * count
    ends = list(accumulate((len(x) for x in left), initial=first))
    lines = ["{", ".reg .pred none, some;", "setp.ne.b32 none, 0, 0;", "setp.eq.b32 some, 0, 0;"]
    added = "none" if c is None else "some"
    if adds is not None:
        lines += [".reg .pred adds;", f"setp.ne.b32 adds, ${ends[-1] + len(parts) * len(left)}, 0;"]
        added = "adds"
    lines.append("wgmma.fence.sync.aligned;")
    for s, operand in enumerate(left):
        keep = "some" if s else added
        a = operands(ends[s], len(operand))
        shared = len(operand) == 1
        majors = f"{int(transposed)}, {int(columns)}" if shared else f"{int(columns)}"
        at = 0
        for i, (n, _) in enumerate(parts):
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} "
                f"{{{operands(at, n // 2)}}}, {a if shared else f'{{{a}}}'}, "
                f"${ends[-1] + i * len(left) + s}, {keep}, 1, 1, {majors};"
            )
            at += n // 2
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    arguments = [*map(Float32, c or ()), *(x for xs in left for x in xs)]
    arguments += [Int64(x) for _, descriptors in parts for x in descriptors]
    if adds is not None:
        arguments.append(Int32(adds))
    tied = 0 if c is None else count
    return list(asm("\n".join(lines), [Float32] * count, arguments, tied=tied, memory=True))


def wait_for_all_but(pending: int) -> None:
    """Wait until at most `pending` groups are unfinished. No result of an unfinished group may be
    in use."""
    asm(f"wgmma.wait_group.sync.aligned {pending};", [], [], memory=True)


def wait(c: Sequence[Float32], pending: int = 0) -> list[Float32]:
    """Return the result c of a product, once at most `pending` later groups are unfinished."""
    text = f"wgmma.wait_group.sync.aligned {pending};"
    tied = len(c)
    return list(asm(text, [Float32] * tied, [*map(Float32, c)], tied=tied, memory=True))
