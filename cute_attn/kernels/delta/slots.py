"""The slots of a pool, which state_indices name."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from ..common.arguments import fake_contiguous, fake_rows, fake_strided
from .spec import SlotsSpec

_DTYPE = {"int32": Int32, "int64": Int64}


def fake_slots(spec: SlotsSpec, *shape: cute.SymInt) -> cute.Tensor:
    """A placeholder of state_indices."""
    dtype = _DTYPE[spec.slot_dtype]
    if not spec.strided_slots:
        return fake_contiguous(dtype, shape)
    if len(shape) == 1:
        return fake_strided(dtype, shape)
    return fake_rows(dtype, shape, align=dtype.width // 8)


def fake_flags(spec: SlotsSpec, sequences: cute.SymInt) -> cute.Tensor | None:
    """A placeholder of has_initial_state, whose bools are bytes."""
    return fake_contiguous(Uint8, (sequences,)) if spec.fresh else None


@cute.jit
def is_slot(slot: Any, pool: cute.Tensor, null_slot: cutlass.Constexpr) -> Any:
    """Whether a slot is in the pool. A negative index is padding, and with `null_slot` 0 too. An
    index past the pool is a caller's bug; treating it as padding keeps every access in bounds."""
    first = 1 if cutlass.const_expr(null_slot) else 0
    return slot >= first and slot < pool.shape[0]
