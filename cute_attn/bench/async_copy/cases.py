"""The runs of each part of the study: kernels and how CTAs take tiles. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Union

from ...kernels.async_copy.spec import (
    BY_ONE_WARP,
    CLUSTER,
    SWIZZLED_COLUMNS,
    AsyncCopySpec,
)
from ...kernels.common.spec import smem_bytes

COPIES = ("vector", "cp_async", "bulk", "tensor", "tensor_swizzled", "multicast")
KIB = 1024

# The published experiment: head_dim and rows of K or V of a tile, and GB/s on an RTX 5090 with
# cp.async and with TMA.
PUBLISHED = {
    (128, 128): (6008, 4616),
    (128, 64): (14193, 4598),
    (64, 128): (14938, 4561),
    (256, 64): (5848, 4646),
}
REPEATS = 4096  # copies of the same tile
REPEATED_COPIES = ("vector", "cp_async", "cp_async_l1", "bulk", "tensor", "tensor_swizzled")

IN_FLIGHT_KIB = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
SHORT_IN_FLIGHT_KIB = (4, 32, 128)
MOST_VECTOR_KIB = 32  # the most that four warps hold in registers
LARGEST_TILE = 16 * KIB
PRODUCER_WARPS = (1, 2, 4)
LATENCY_ROWS = (8, 16, 32, 64, 128)
PRODUCTS = (4, 8, 16)

Labels = dict[str, Union[str, int]]  # noqa: UP007  (evaluated on 3.10)
Boxes = tuple[str, int, int]  # copy, rows, columns
BOXES: tuple[Boxes, ...] = (
    *(("tensor", rows, 128) for rows in (64, 32, 16, 8, 4)),
    *(("tensor", 64, columns) for columns in (64, 32, 16, 8)),
    *(("tensor_swizzled", rows, 64) for rows in (64, 32, 16, 8)),
    *(("bulk", rows, 128) for rows in (64, 16, 4, 1)),
)
BOX_HEADS = (1, 32)


def producer_warps(copy: str) -> int:
    """The number of warps that a copy needs: one if one thread copies, else four, with the usual
    128 threads."""
    return 1 if copy in BY_ONE_WARP else 4


def make_spec(
    copy: str,
    arch: str,
    *,
    rows: int,
    columns: int = 128,
    stages: int = 1,
    producers: int = 0,
    products: int = 0,
    heads: int = 1,
    box: tuple[int, int] | None = None,
    whole_tile: bool = True,
    latency: bool = False,
) -> AsyncCopySpec:
    """A spec with four consumer warps and the largest boxes."""
    if box is None:
        swizzled = copy in ("tensor_swizzled", "multicast")
        box = (
            rows // (CLUSTER if copy == "multicast" else 1),
            SWIZZLED_COLUMNS if swizzled else columns,
        )
    return AsyncCopySpec(
        copy=copy,
        tile_rows=rows,
        tile_columns=columns,
        heads=heads,
        box_rows=box[0],
        box_columns=box[1],
        num_stages=stages,
        consumer_warps=4,
        producer_warps=producers,
        products=products,
        whole_tile=whole_tile,
        latency=latency,
        try_wait=has_async_proxy(arch),
    )


def has_async_proxy(arch: str) -> bool:
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90


def supported(copy: str, arch: str) -> bool:
    return has_async_proxy(arch) or copy not in BY_ONE_WARP


# Copy, producer warps, CTAs that share a tile. "pairs" has the CTA pairs of multicast, but no
# multicast.
STREAMS = {
    **{copy: (copy, producer_warps(copy), 1) for copy in COPIES[:-1]},
    "cp_async_same_warps": ("cp_async", 0, 1),
    "tensor_same_warps": ("tensor_swizzled", 0, 1),
    "pairs": ("tensor_swizzled", 1, CLUSTER),
    "multicast": ("multicast", 1, CLUSTER),
}


@dataclass(frozen=True)
class Run:
    """A kernel, and columns of the report's row that it belongs to."""

    spec: AsyncCopySpec
    labels: tuple[tuple[str, str | int], ...]
    sharing: int = 1

    def __getitem__(self, name: str) -> str | int:
        return dict(self.labels)[name]


def _runs(arch: str, specs: Iterable[tuple[AsyncCopySpec, dict[str, str | int], int]]) -> list[Run]:
    """The runs whose shared memory the architecture has."""
    return [
        Run(spec, tuple(labels.items()), sharing)
        for spec, labels, sharing in specs
        if spec.smem_bytes <= smem_bytes(arch)
    ]


def repeated(arch: str, short: bool) -> list[Run]:
    """The published experiment, for each shape and copy."""
    shapes = list(PUBLISHED)[1:3] if short else list(PUBLISHED)
    return _runs(
        arch,
        (
            (
                make_spec(copy, arch, rows=rows, columns=head_dim, whole_tile=False),
                {"head_dim": head_dim, "block_kv": rows, "copy": copy},
                1,
            )
            for head_dim, rows in shapes
            for copy in REPEATED_COPIES
            if supported(copy, arch)
        ),
    )


def in_flight(copy: str, arch: str, kib: int, warps: int) -> AsyncCopySpec | None:
    """A ring of two or more tiles with `kib` KiB in flight, or None."""
    if copy == "vector":
        # Registers hold the data in flight; shared memory has two stages in addition.
        if kib > MOST_VECTOR_KIB:
            return None
        rows, stages = kib * KIB // 256, 2
    else:
        tile = max(2 * KIB, min(LARGEST_TILE, kib * KIB // 2))
        rows, stages = tile // 256, kib * KIB // tile + (warps == 0)
    if copy == "multicast" and rows < 16:
        return None  # half of a tile would be less than a period of the swizzle
    return make_spec(copy, arch, rows=rows, stages=stages, producers=warps)


def streams(arch: str, short: bool) -> list[Run]:
    """Copies by the bytes in flight."""
    specs: list[tuple[AsyncCopySpec, Labels, int]] = []
    for kib in SHORT_IN_FLIGHT_KIB if short else IN_FLIGHT_KIB:
        for name, (copy, warps, sharing) in STREAMS.items():
            spec = in_flight(copy, arch, kib, warps) if supported(copy, arch) else None
            if spec is not None:
                specs.append((spec, {"in_flight_kib": kib, "copy": name}, sharing))
    return _runs(arch, specs)


def producers(arch: str, short: bool) -> list[Run]:
    """1 to 4 producer warps with 64 KiB in flight, 16 of vector loads."""
    counts: Sequence[int] = PRODUCER_WARPS[::2] if short else PRODUCER_WARPS
    return _runs(
        arch,
        (
            (
                make_spec(copy, arch, rows=64, stages=4, producers=warps),
                {"producer_warps": warps, "copy": copy},
                1,
            )
            for warps in counts
            for copy in ("vector", "cp_async", "bulk", "tensor_swizzled")
            if supported(copy, arch)
        ),
    )


def boxes(arch: str, short: bool) -> list[Run]:
    """Tiles of 64 by 128 in boxes of all shapes; with the heads adjacent to each other (BHSD) and
    interleaved (BSHD)."""
    chosen: Sequence[Boxes] = BOXES[::4] if short else BOXES
    specs = [
        (copy, rows, columns, heads)
        for heads in BOX_HEADS
        for copy, rows, columns in (("cp_async", 64, 128), *chosen)
        if supported(copy, arch) and (copy != "bulk" or heads == 1 or rows == 1)
    ]
    return _runs(
        arch,
        (
            (
                make_spec(
                    copy, arch, rows=64, stages=4, producers=producer_warps(copy), heads=heads,
                    box=(rows, columns),
                ),
                {"heads": heads, "copy": copy, "box_rows": rows, "box_columns": columns},
                1,
            )
            for copy, rows, columns, heads in specs
        ),
    )  # fmt: skip


def latency(arch: str, short: bool) -> list[Run]:
    """Copies of one tile at a time, by one CTA on an idle GPU."""
    return _runs(
        arch,
        (
            (
                make_spec(copy, arch, rows=rows, latency=True),
                {"tile_kib": rows // 4, "copy": copy},
                1,
            )
            for rows in (LATENCY_ROWS[::2] if short else LATENCY_ROWS)
            for copy in ("vector", "cp_async", "bulk", "tensor", "tensor_swizzled")
            if supported(copy, arch)
        ),
    )


WORK = (
    ("no copies, by the same warps", "none", 0),
    ("no copies, 1 producer warp", "none", 1),
    ("cp.async, by the same warps", "cp_async", 0),
    ("cp.async, 1 producer warp", "cp_async", 1),
    ("cp.async, 4 producer warps", "cp_async", 4),
    ("vector loads, 4 producer warps", "vector", 4),
    ("bulk, 1 producer warp", "bulk", 1),
    ("TMA, by one of the same warps", "tensor_swizzled", 0),
    ("TMA, 1 producer warp", "tensor_swizzled", 1),
)


def with_products(arch: str, short: bool) -> list[Run]:
    """Loops with four stages and a fixed number of MMAs for each tile of 64 by 128."""
    return _runs(
        arch,
        (
            (
                make_spec(
                    copy, arch, rows=64, stages=4, producers=warps, products=products
                ),
                {"mmas_per_fragment": products, "how": how},
                1,
            )
            for products in (PRODUCTS[1:2] if short else PRODUCTS)
            for how, copy, warps in WORK
            if supported(copy, arch)
        ),
    )  # fmt: skip


PARTS = {
    "repeated": repeated,
    "streams": streams,
    "producers": producers,
    "boxes": boxes,
    "latency": latency,
    "products": with_products,
}
