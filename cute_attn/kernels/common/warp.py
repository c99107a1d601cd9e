"""What a warp does in registers: matrix products by `mma.sync`, and the moves around them.

Values are scalars or tuples of them, and shared memory is a 32-bit address (`shared_address`), so
that a kernel says which thread holds which element. A fragment of 16-bit elements is a tuple of
Int32 of two elements each, the lower one at the lower index. With `row = lane // 4` and
`col = 2 * (lane % 4)`, the fragments of a product of 16 by 8 by 16, A times B, are

    A (16 by 16)    (row, col), (row + 8, col), (row, col + 8), (row + 8, col + 8), and each col + 1
    B (16 by 8)     (k = col, n = row), (col + 8, row), and each k + 1
    C (16 by 8)     (row, col), (row, col + 1), (row + 8, col), (row + 8, col + 1)

as in the PTX ISA, "Matrix Fragments for mma.m16n8k16"; a product with tf32 elements is 16 by 8 by 8
with (row, lane % 4), (row + 8, lane % 4), (row, lane % 4 + 4), (row + 8, lane % 4 + 4) in A and
(lane % 4, row), (lane % 4 + 4, row) in B. Everything here runs on sm_80 and newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_TYPE_NAMES = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}
_CONSTRAINT = {Float32: "f", Int32: "r", Int64: "l"}


@dsl_user_op
def _asm(
    text: str,
    results: Sequence[Any],
    arguments: Sequence[Any],
    *,
    memory: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """PTX with operands $0, $1 ...: the results, whose types are given, then the arguments."""
    values = [x.ir_value(loc=loc, ip=ip) for x in arguments]
    constraints = [f"={_CONSTRAINT[t]}" for t in results]
    constraints += [_CONSTRAINT[type(x)] for x in arguments]
    if memory:
        constraints.append("~{memory}")
    types = [t.mlir_type for t in results]
    if not types:
        struct = None
    elif len(types) == 1:
        struct = types[0]
    else:
        struct = llvm.StructType.get_literal(types)
    out = llvm.inline_asm(
        struct,
        values,
        text,
        ",".join(constraints),
        has_side_effects=memory,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not types:
        return None
    if len(types) == 1:
        return results[0](out)
    return tuple(
        t(llvm.extractvalue(t.mlir_type, out, ir.DenseI64ArrayAttr.get([i]), loc=loc, ip=ip))
        for i, t in enumerate(results)
    )


def _operands(first: int, count: int) -> str:
    return ", ".join(f"${i}" for i in range(first, first + count))


# -- products


def mma(dtype: Any, c: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    """c + a b of 16 by 8 by 16; a and b of `dtype`, bfloat16 or float16, c float32."""
    return _mma("m16n8k16", _TYPE_NAMES[dtype], c, a, b)


def mma_tf32(c: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    """c + a b of 16 by 8 by 8, a and b as `to_tf32` or `split_tf32` give them."""
    return _mma("m16n8k8", "tf32", c, a, b)


def _mma(
    shape: str, name: str, c: Sequence[Any], a: Sequence[Any], b: Sequence[Any]
) -> tuple[Any, ...]:
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{name}.{name}.f32 "
        f"{{{_operands(0, 4)}}}, {{{_operands(4, 4)}}}, {{{_operands(8, 2)}}}, "
        f"{{{_operands(10, 4)}}};"
    )
    return tuple(_asm(text, [Float32] * 4, [*map(Int32, a), *map(Int32, b), *map(Float32, c)]))


def to_tf32(x: Any) -> Any:
    """A float32 rounded to tf32, as an operand."""
    return _asm("cvt.rna.tf32.f32 $0, $1;", [Int32], [Float32(x)])


def split_tf32(x: Any) -> tuple[Any, Any]:
    """Two tf32 operands whose sum is x to 22 bits: three products of such pairs, all but that of
    the two small ones, are nearly as accurate as float32."""
    high = to_tf32(x)
    low = Float32(x) - _asm("mov.b32 $0, $1;", [Float32], [high])
    return high, to_tf32(low)


# -- elements


def pack(dtype: Any, low: Any, high: Any) -> Any:
    """Two float32 rounded to `dtype`, in one register."""
    text = f"cvt.rn.{_TYPE_NAMES[dtype]}x2.f32 $0, $1, $2;"
    return _asm(text, [Int32], [Float32(high), Float32(low)])


def unpack(dtype: Any, x: Any) -> tuple[Any, Any]:
    """The two elements of a register, as float32."""
    if dtype is cutlass.BFloat16:
        bits = (_asm("shl.b32 $0, $1, 16;", [Int32], [x]), x & Int32(-65536))
        low, high = (_asm("mov.b32 $0, $1;", [Float32], [b]) for b in bits)
        return low, high
    text = (
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\n"
        "cvt.f32.f16 $0, low;\ncvt.f32.f16 $1, high;\n}"
    )
    low, high = _asm(text, [Float32, Float32], [x])
    return low, high


def opaque(x: Any) -> Any:
    """The same number, of which the compiler knows nothing."""
    return _asm("mov.b32 $0, $1;", [type(x)], [x], memory=True)


def exp2(x: Any) -> Any:
    """2 ** x, to 2 ulp; results below 2 ** -126 are 0."""
    return _asm("ex2.approx.ftz.f32 $0, $1;", [Float32], [Float32(x)])


def log2(x: Any) -> Any:
    """To an absolute error of 2 ** -22 near 1, and to 1 ulp or so elsewhere."""
    return _asm("lg2.approx.ftz.f32 $0, $1;", [Float32], [Float32(x)])


def reciprocal(x: Any) -> Any:
    return _asm("rcp.approx.ftz.f32 $0, $1;", [Float32], [Float32(x)])


def reciprocal_sqrt(x: Any) -> Any:
    return _asm("rsqrt.approx.ftz.f32 $0, $1;", [Float32], [Float32(x)])


# -- shared and global memory


def shared_address(pointer: cute.Pointer) -> Any:
    """Of a pointer to shared memory."""
    return Int32(pointer.toint())


def load_matrices(address: Any, count: int = 4, *, transposed: bool = False) -> Any:
    """`ldmatrix`: `count` (1, 2 or 4) matrices of 8 by 8 elements of 16 bits. Lane 8 m + r passes
    the address of row r of matrix m, 16-byte aligned, and gets (row, col), (row, col + 1) of each,
    or with `transposed` (col, row), (col + 1, row)."""
    trans = ".trans" if transposed else ""
    text = (
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 "
        f"{{{_operands(0, count)}}}, [${count}];"
    )
    out = _asm(text, [Int32] * count, [Int32(address)], memory=True)
    return out if count > 1 else (out,)


def transpose_matrix(x: Any) -> Any:
    """`movmatrix`: (row, col), (row, col + 1) of an 8 by 8 matrix become (col, row), (col + 1, row)
    of it."""
    return _asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [Int32], [x], memory=True)


def load_shared(kind: Any, address: Any, count: int = 1) -> Any:
    """`count` (1, 2 or 4) Int32 or Float32 from shared memory, aligned to their size."""
    return _load("shared", kind, Int32(address), count)


def store_shared(kind: Any, address: Any, values: Sequence[Any]) -> None:
    """1, 2 or 4 Int32 or Float32 to shared memory, aligned to their size."""
    _store("shared", kind, Int32(address), values)


def load_global(kind: Any, address: Any, count: int = 1) -> Any:
    """`count` (1, 2 or 4) Int32 or Float32 from a 64-bit address in global memory."""
    return _load("global", kind, Int64(address), count)


def store_global(kind: Any, address: Any, values: Sequence[Any]) -> None:
    """1, 2 or 4 Int32 or Float32 to a 64-bit address in global memory."""
    _store("global", kind, Int64(address), values)


_BITS = {Int32: "b32", Float32: "f32"}


def _load(space: str, kind: Any, address: Any, count: int) -> Any:
    vector = f".v{count}" if count > 1 else ""
    results = f"{{{_operands(0, count)}}}" if count > 1 else "$0"
    text = f"ld.{space}{vector}.{_BITS[kind]} {results}, [${count}];"
    out = _asm(text, [kind] * count, [address], memory=True)
    return out if count > 1 else (out,)


def _store(space: str, kind: Any, address: Any, values: Sequence[Any]) -> None:
    count = len(values)
    vector = f".v{count}" if count > 1 else ""
    operands = f"{{{_operands(1, count)}}}" if count > 1 else "$1"
    text = f"st.{space}{vector}.{_BITS[kind]} [$0], {operands};"
    _asm(text, [], [address, *map(kind, values)], memory=True)


def copy_async(shared: Any, source: Any, present: Any) -> None:
    """`cp.async` of 16 bytes from a 64-bit global address; zeros where `present` is false, and then
    nothing is read. Commit and wait with `cute.arch.cp_async_commit_group`, `_wait_group`."""
    nbytes = Int32(16) if present is True else cutlass.select_(present, Int32(16), Int32(0))
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    _asm(text, [], [Int32(shared), Int64(source), Int32(nbytes)], memory=True)


def copy_bulk(shared: Any, source: Any, nbytes: int, barrier: Any) -> None:
    """`cp.async.bulk` (sm_90 and newer) of contiguous bytes from a 64-bit global address, counted
    by the mbarrier at a shared address. By one thread; everything aligned to 16 bytes."""
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$0], [$1], {nbytes}, [$2];"
    )
    _asm(text, [], [Int32(shared), Int64(source), Int32(barrier)], memory=True)


def copies_arrive(barrier: Any) -> None:
    """One of the arrivals that the mbarrier at a shared address waits for, once this thread's
    `copy_async` so far are done."""
    _asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [], [Int32(barrier)], memory=True)


def arrive(barrier: Any) -> None:
    """One of the arrivals that the mbarrier at a shared address waits for; on sm_80 too."""
    text = "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [$0];\n}"
    _asm(text, [], [Int32(barrier)], memory=True)


def wait_barrier(barrier: Any, phase: Any) -> None:
    """Until that phase (0 or 1) of the mbarrier at a shared address is complete; on sm_80 too,
    which cannot suspend a thread meanwhile."""
    text = (
        "{\n.reg .pred done;\nagain_${:uid}:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [$0], $1;\n"
        "@!done bra again_${:uid};\n}"
    )
    _asm(text, [], [Int32(barrier), Int32(phase)], memory=True)


def store_global_where(condition: Any, address: Any, *values: Any) -> None:
    """1, 2 or 4 Int32 to a 64-bit address, by predication: never a branch."""
    count = len(values)
    vector = f".v{count}" if count > 1 else ""
    text = (
        "{\n.reg .pred some;\nsetp.ne.b32 some, $1, 0;\n"
        f"@some st.global{vector}.b32 [$0], {{{_operands(2, count)}}};\n}}"
    )
    if count == 1:
        text = "{\n.reg .pred some;\nsetp.ne.b32 some, $1, 0;\n@some st.global.b32 [$0], $2;\n}"
    arguments = [Int64(address), Int32(condition), *map(Int32, values)]
    _asm(text, [], arguments, memory=True)
