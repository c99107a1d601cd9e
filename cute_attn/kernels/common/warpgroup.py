"""Products of a warpgroup by `wgmma` (sm_90a), with the left operand in registers.

Fragments are those of `warp`: warp w of the warpgroup has rows 16 w to 16 w + 15 of the left
operand and of the result, in the layout of products of 16 by 8 by 16. The right operand is in
shared memory, in sub-tiles of 64 rows of 128 bytes, swizzled as TMA does, whose addresses are
multiples of 1024.

`product` only starts a product. Its result may not be touched before `wait`, which hands it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

SUB_TILE_BYTES = 64 * 128
_TYPE_NAMES = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}

_SWIZZLE_128 = 1 << 62
_STRIDE = (8 * 128) >> 4  # from 8 rows to the next 8, in units of 16 bytes
_ROWS = _SWIZZLE_128 | _STRIDE << 32 | 1 << 16
_COLUMNS = _SWIZZLE_128 | _STRIDE << 32 | (SUB_TILE_BYTES >> 4) << 16


def rows_descriptor(address: Any) -> Any:
    """Of a right operand whose columns are the rows at `address`: the k of a product lie side by
    side. Further k are 16 bytes for each 8, and a sub-tile for each 64."""
    return Int64(_ROWS) | Int64((Int32(address) >> 4) & 0x3FFF)


def columns_descriptor(address: Any) -> Any:
    """Of a right operand whose rows are the rows at `address`: its columns lie side by side, 64 a
    sub-tile. Further k are 128 bytes each."""
    return Int64(_COLUMNS) | Int64((Int32(address) >> 4) & 0x3FFF)


@dsl_user_op
def product(
    dtype: Any,
    c: Sequence[Any] | None,
    a: Sequence[Any],
    descriptors: Sequence[Any],
    n: int,
    *,
    columns: bool,
    loc: Any = None,
    ip: Any = None,
) -> list[Any]:
    """Start c + a b, 64 by n, as a group of its own.

    Args:
        c: n / 2 float32 of each thread; None is 0.
        a: 4 registers for each 16 of k.
        descriptors: of b, one for each 16 of k.
        columns: which of the two kinds of descriptors they are.
    """
    name = _TYPE_NAMES[dtype]
    count = n // 2
    first = count if c is None else 2 * count
    steps = len(descriptors)
    accumulators = ", ".join(f"${i}" for i in range(count))
    lines = ["{", ".reg .pred none, some;", "setp.ne.b32 none, 0, 0;", "setp.eq.b32 some, 0, 0;"]
    lines.append("wgmma.fence.sync.aligned;")
    for s in range(steps):
        left = ", ".join(f"${first + 4 * s + i}" for i in range(4))
        keep = "some" if s or c is not None else "none"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} {{{accumulators}}}, "
            f"{{{left}}}, ${first + 4 * steps + s}, {keep}, 1, 1, {int(columns)};"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    values = [] if c is None else [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    values += [Int32(x).ir_value(loc=loc, ip=ip) for x in a]
    values += [Int64(x).ir_value(loc=loc, ip=ip) for x in descriptors]
    constraints = ["=f"] * count
    constraints += [] if c is None else [str(i) for i in range(count)]
    constraints += ["r"] * len(a) + ["l"] * steps + ["~{memory}"]
    return _asm("\n".join(lines), count, values, constraints, loc, ip)


@dsl_user_op
def wait(c: Sequence[Any], pending: int = 0, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """The result c of a product, once at most `pending` later ones are under way."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    constraints = ["=f"] * len(c) + [str(i) for i in range(len(c))] + ["~{memory}"]
    text = f"wgmma.wait_group.sync.aligned {pending};"
    return _asm(text, len(c), values, constraints, loc, ip)


def _asm(
    text: str, count: int, values: list[Any], constraints: list[str], loc: Any, ip: Any
) -> list[Any]:
    struct = llvm.StructType.get_literal([Float32.mlir_type] * count)
    out = llvm.inline_asm(
        struct,
        values,
        text,
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [
        Float32(
            llvm.extractvalue(Float32.mlir_type, out, ir.DenseI64ArrayAttr.get([i]), loc=loc, ip=ip)
        )
        for i in range(count)
    ]
