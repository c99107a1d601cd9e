"""Inline PTX whose operands and results are DSL values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Numeric
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

TYPE_NAMES = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}
_CONSTRAINT = {Float32: "f", Int32: "r", Int64: "l"}


@dsl_user_op
def asm(
    text: str,
    results: Sequence[type[Numeric]],
    arguments: Sequence[Numeric],
    *,
    tied: int = 0,
    memory: bool = False,
    volatile: bool = False,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Any:
    """Emit PTX with operands $0, $1 ...: the results, then the arguments.

    Args:
        results: types of the results.
        tied: how many leading arguments share their registers with the results.
        memory: the instruction accesses memory; the compiler moves no memory access across it.
        volatile: the instruction has side effects; the compiler neither drops nor repeats it.

    Returns:
        None, the result, or a tuple of the results.
    """
    values = [x.ir_value(loc=loc, ip=ip) for x in arguments]
    constraints = [f"={_CONSTRAINT[t]}" for t in results]
    constraints += [str(i) for i in range(tied)]
    constraints += [_CONSTRAINT[type(x)] for x in arguments[tied:]]
    if memory:
        constraints.append("~{memory}")
    types = [t.mlir_type for t in results]
    struct = None
    if types:
        struct = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    out = llvm.inline_asm(
        struct,
        values,
        text,
        ",".join(constraints),
        has_side_effects=memory or volatile,
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


def operands(first: int, count: int) -> str:
    return ", ".join(f"${i}" for i in range(first, first + count))
