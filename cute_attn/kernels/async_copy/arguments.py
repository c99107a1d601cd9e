"""The arguments that both kernels take, and the order in which CTAs take tiles.

source   float16 [rows, heads * tile_columns]
sums     int32 [CTAs, consumer threads, 4], the results of `work`
clocks   int64 [CTAs], the sum of the latencies of a CTA's tiles, with `latency`
tiles    tiles of the source that the CTAs read in turns; at least as many as CTAs and producer
         warps
count    tiles that each CTA reads
sharing  CTAs that read the same tiles
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ..common.arguments import fake_contiguous
from .spec import VECTOR_WORDS, AsyncCopySpec


def fake_args(spec: AsyncCopySpec) -> tuple[Any, ...]:
    """Placeholders to compile against."""
    ctas = cute.sym_int()
    return (
        fake_contiguous(cutlass.Float16, (cute.sym_int(), spec.heads * spec.tile_columns), 128),
        fake_contiguous(Int32, (ctas, spec.consumer_threads, VECTOR_WORDS), 16),
        fake_contiguous(Int64, (ctas,)),
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def first_and_step(sums: cute.Tensor, sharing: Any) -> tuple[Any, Any]:
    """The place of this CTA's first tile, and the places from one of its tiles to the next."""
    cta, _, _ = cute.arch.block_idx()
    return cta // sharing, Int32(sums.shape[0]) // sharing


def next_place(place: Any, step: Any, tiles: Any) -> Any:
    place = place + step
    return cutlass.select_(place >= tiles, place - tiles, place)


def store_result(sums: cute.Tensor, values: list[Any], thread: Any) -> None:
    cta, _, _ = cute.arch.block_idx()
    for i, value in enumerate(values):
        sums[cta, thread, i] = value
