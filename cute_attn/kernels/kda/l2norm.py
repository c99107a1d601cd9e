"""Rows of q and k to length 1: x / sqrt(sum of squares + 1e-6), both tensors in one launch.

Bound by bytes. K / 8 lanes have a row, 16 bytes each, and a thread 4 rows, all loaded before the
first is used.

    block (64 or 128 rows, q or k)
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.runtime import make_fake_stream

from ..common import warp
from ..common.dtypes import DTYPE
from .spec import L2NORM_EPSILON, L2NormSpec
from .tiles import fake_rows, pack_all, row_address, unpack_all

NUM_THREADS = 256
ELEMENTS = 8  # of a thread's part of a row
ROWS = 4  # of a thread


class KdaL2Norm:
    """The kernel for one L2NormSpec; see the module's docstring."""

    def __init__(self, spec: L2NormSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.lanes = spec.head_dim_k // ELEMENTS
        self.rows_at_once = NUM_THREADS // self.lanes
        self.rows = ROWS * self.rows_at_once

    def fake_args(self) -> tuple[Any, ...]:
        shape = (*(cute.sym_int() for _ in range(3)), self.spec.head_dim_k)
        return (
            *(fake_rows(self.dtype, shape) for _ in range(4)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        q_out: cute.Tensor,
        k_out: cute.Tensor,
        stream: Any,
    ) -> None:
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        tokens, heads = (cute.fast_divmod_create_divisor_v2(q.shape[i]) for i in (1, 2))
        self.kernel(q, k, q_out, k_out, tokens, heads).launch(
            grid=[(rows + self.rows - 1) // self.rows, 2, 1],
            block=[NUM_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        q_out: cute.Tensor,
        k_out: cute.Tensor,
        tokens: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
    ) -> None:
        _, which, _ = cute.arch.block_idx()
        if which == 0:
            self.normalise(q, q_out, tokens, heads)
        else:
            self.normalise(k, k_out, tokens, heads)

    @cute.jit
    def normalise(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        tokens: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
    ) -> None:
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        rows = x.shape[0] * x.shape[1] * x.shape[2]
        shift = self.lanes.bit_length() - 1
        first = block * self.rows + Int32(Uint32(thread) >> shift)
        column = (thread & (self.lanes - 1)) * ELEMENTS

        targets, loaded = [], []
        for i in cutlass.range_constexpr(ROWS):
            row = cutlass.min(first + i * self.rows_at_once, rows - 1)
            position, head = divmod(row, heads)
            batch, token = divmod(position, tokens)
            at = (batch, token, head, column)
            targets.append(row_address(out, *at))
            loaded.append(warp.load_global(Int32, row_address(x, *at), ELEMENTS // 2))
        for i in cutlass.range_constexpr(ROWS):
            values = unpack_all(self.dtype, loaded[i])
            total = Float32(0.0)
            for value in values:
                total = total + value * value
            for bit in cutlass.range_constexpr(shift):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
            factor = warp.reciprocal_sqrt(total + Float32(L2NORM_EPSILON))
            packed = pack_all(self.dtype, [value * factor for value in values])
            if first + i * self.rows_at_once < rows:
                warp.store_global(Int32, targets[i], packed)
