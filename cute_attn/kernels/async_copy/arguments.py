"""The arguments that both kernels take, and the order in which CTAs take tiles."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common.arguments import fake_contiguous
from .spec import VECTOR_WORDS, AsyncCopySpec


class Arguments(NamedTuple):
    """The kernels' arguments.

    Attributes:
        source: `[rows, heads * tile_columns]`, float16.
        sums: `[CTAs, consumer threads, 4]`, int32, the results of `work`.
        clocks: `[CTAs]`, int64; with the spec's `latency`, the sum of the latencies of a CTA's
            tiles.
        tiles: number of the source's tiles; the CTAs read them in turns. At least the number of
            CTAs, and of producer warps.
        count: tiles that each CTA reads.
        sharing: CTAs that read the same tiles.
    """

    source: cute.Tensor
    sums: cute.Tensor
    clocks: cute.Tensor
    tiles: Int32
    count: Int32
    sharing: Int32


def fake_arguments(spec: AsyncCopySpec) -> Arguments:
    """Placeholders to compile against."""
    ctas = cute.sym_int()
    shape = (cute.sym_int(), spec.heads * spec.tile_columns)
    return Arguments(
        source=fake_contiguous(cutlass.Float16, shape, 128),
        sums=fake_contiguous(Int32, (ctas, spec.consumer_threads, VECTOR_WORDS), 16),
        clocks=fake_contiguous(Int64, (ctas,)),
        tiles=Int32(1),
        count=Int32(1),
        sharing=Int32(1),
    )


def first_and_step(sums: cute.Tensor, sharing: Int32) -> tuple[Int32, Int32]:
    """The index of this CTA's first tile, and the step from each of its tiles to the next."""
    cta, _, _ = cute.arch.block_idx()
    return cta // sharing, Int32(sums.shape[0]) // sharing


def next_place(place: Int32, step: Int32, tiles: Int32) -> Int32:
    place = place + step
    return cutlass.select_(place >= tiles, place - tiles, place)


def store_result(sums: cute.Tensor, values: list[Int32], thread: Int32) -> None:
    cta, _, _ = cute.arch.block_idx()
    for i, value in enumerate(values):
        sums[cta, thread, i] = value
