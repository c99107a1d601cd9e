"""The ways to copy a tile from global to shared memory, one class each, behind one interface.

    class             who copies       instruction                             a tile is complete
    VectorLoads       all threads      ld.global.v4, st.shared.v4              when they arrive
    CpAsync           all threads      cp.async of 16 bytes, .cg or .ca        when their copies are
    Bulk              one thread       cp.async.bulk                           when all bytes are
    Tensor            one thread       cp.async.bulk.tensor.2d (TMA)           when all bytes are
    MulticastTensor   one of each CTA  cp.async.bulk.tensor.2d to both CTAs    when all bytes are

A tile lies in shared memory as boxes of `box_columns` columns, each row after row; the 128-byte
swizzle permutes the 16-byte units of a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..common.carried import Carried
from ..common.ptx.async_copy import copy_async, copy_bulk
from ..common.ptx.cluster import cta_rank
from ..common.ptx.memory import load_global, shared_address, store_shared
from ..common.spec import VECTOR_BYTES
from ..common.tma import box_layout, partition, swizzled
from .arguments import Arguments
from .spec import BY_ONE_WARP, CLUSTER, ELEMENT_BYTES, VECTOR_WORDS, AsyncCopySpec

BOTH_CTAS = 0b11


@dataclass(frozen=True)
class Source(Carried):
    """Tiles in global memory: the tensor `[rows, heads * tile_columns]`, and how TMA sees it."""

    tensor: cute.Tensor
    atom: cute.CopyAtom | None
    coordinates: cute.Tensor | None


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors and numbers that the device code reads and writes; see `Arguments`."""

    source: Source
    sums: cute.Tensor
    clocks: cute.Tensor
    tiles: Int32
    count: Int32
    sharing: Int32


class TileCopy:
    """Base of the copies for one spec. `place` is the index of a tile in memory. All threads that
    copy call `start`. With `one_warp`, all threads of one warp call `start`, and one thread copies.
    """

    one_warp = False

    def __init__(self, spec: AsyncCopySpec):
        self.spec = spec

    def operands(self, a: Arguments) -> Operands:
        """For host code: the operands that the device code takes."""
        source = Source(a.source, *self.prepare(a.source))
        return Operands(source, a.sums, a.clocks, a.tiles, a.count, a.sharing)

    def prepare(self, source: cute.Tensor) -> tuple[cute.CopyAtom | None, cute.Tensor | None]:
        """The TMA atom and coordinates of the source, or None."""
        del source
        return None, None

    def address(self, source: Source, place: Int32) -> Int64:
        """The 64-bit address of a tile's first element."""
        spec = self.spec
        row = Int64(place // spec.heads) * (spec.tile_rows * spec.heads)
        element = (row + place % spec.heads) * spec.tile_columns
        return (source.tensor.iterator + element).toint()

    @property
    def pitch(self) -> int:
        """Bytes from a row of a tile to the next, in global memory."""
        return self.spec.heads * self.spec.row_bytes


class ByThreads(TileCopy):
    """Base of copies in which each thread copies 16-byte units of the tile."""

    def units(self, thread: Int32) -> list[tuple[Int32, Int64]]:
        """Byte offsets of a thread's units in shared and in global memory. All threads together
        copy whole rows at once."""
        spec = self.spec
        units_of_row = spec.row_bytes // VECTOR_BYTES
        step = spec.copying_threads * VECTOR_BYTES
        rows = step // spec.row_bytes
        row, unit = thread // units_of_row, thread % units_of_row
        source = Int64(row * self.pitch + unit * VECTOR_BYTES)
        return [
            (thread * VECTOR_BYTES + n * step, source + n * rows * self.pitch)
            for n in range(spec.tile_bytes // step)
        ]


class VectorLoads(ByThreads):
    """Plain loads to registers: a thread issues all loads of a tile before the first store."""

    def load(self, source: Source, place: Int32, thread: Int32) -> list[Sequence[Int32]]:
        tile = self.address(source, place)
        return [load_global(Int32, tile + at, VECTOR_WORDS) for _, at in self.units(thread)]

    def store(self, stage: cute.Pointer, thread: Int32, values: list[Sequence[Int32]]) -> None:
        for (at, _), words in zip(self.units(thread), values, strict=True):
            store_shared(Int32, shared_address(stage) + at, words)


class CpAsync(ByThreads):
    """cp.async of 16 bytes a thread."""

    def start(self, source: Source, place: Int32, stage: cute.Pointer, thread: Int32) -> None:
        level = "ca" if self.spec.copy == "cp_async_l1" else "cg"
        to, tile = shared_address(stage), self.address(source, place)
        for shared, at in self.units(thread):
            copy_async(to + shared, tile + at, True, level=level)


class Bulk(TileCopy):
    """cp.async.bulk: `box_rows` adjacent rows with each instruction."""

    one_warp = True

    def start(
        self, source: Source, place: Int32, tiles: cute.Pointer, stage: Int32, full: cute.Pointer
    ) -> None:
        spec = self.spec
        to = shared_address(tiles) + stage * spec.tile_bytes
        tile = self.address(source, place)
        nbytes = spec.box_rows * spec.row_bytes
        with cute.arch.elect_one():
            for box in range(spec.tile_rows // spec.box_rows):
                source_rows = tile + box * spec.box_rows * self.pitch
                copy_bulk(to + box * nbytes, source_rows, nbytes, shared_address(full))


class Tensor(TileCopy):
    """TMA through a descriptor of the two-dimensional source: a box with each instruction."""

    one_warp = True
    op: Any = staticmethod(cpasync.CopyBulkTensorTileG2SOp)
    ctas = 1  # CTAs that copy a tile together

    def prepare(self, source: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        spec = self.spec
        return cpasync.make_tiled_tma_atom(
            self.op(), source, self.layout(), (spec.box_rows, spec.box_columns)
        )

    def layout(self, *more: tuple[int, int]) -> cute.Layout | cute.ComposedLayout:
        """A box in shared memory, and further modes of (size, stride)."""
        spec = self.spec
        if spec.copy != "tensor":
            return box_layout(spec.box_rows, *more, columns=spec.box_columns)
        return cute.make_layout(
            (spec.box_rows, spec.box_columns, *(size for size, _ in more)),
            stride=(spec.box_columns, 1, *(step for _, step in more)),
        )

    def start(
        self, source: Source, place: Int32, tiles: cute.Pointer, stage: Int32, full: cute.Pointer
    ) -> None:
        spec = self.spec
        row_boxes = spec.tile_rows // spec.box_rows
        column_boxes = spec.tile_columns // spec.box_columns
        box = spec.box_rows * spec.box_columns
        elements = spec.tile_bytes // ELEMENT_BYTES
        layout = self.layout(
            (row_boxes, box), (column_boxes, box * row_boxes), (spec.num_stages, elements)
        )
        if isinstance(layout, cute.ComposedLayout):
            boxes = swizzled(tiles, layout)
        else:
            boxes = cute.make_tensor(tiles, layout)
        everything = cute.local_tile(
            source.coordinates, (spec.box_rows, spec.box_columns), (None, None)
        )
        origin, to = partition(source.atom, everything, boxes)
        row = place // spec.heads * row_boxes
        column = place % spec.heads * column_boxes
        first = self.first_row_box(row_boxes)
        for c in range(column_boxes):
            for r in range(row_boxes // self.ctas):
                r = first + r
                cute.copy(
                    source.atom, origin[None, row + r, column + c], to[None, r, c, stage],
                    tma_bar_ptr=full, **self.options(),
                )  # fmt: skip

    def first_row_box(self, row_boxes: int) -> Int32:
        del row_boxes
        return 0

    def options(self) -> dict[str, Any]:
        return {}


class MulticastTensor(Tensor):
    """TMA to both CTAs of a cluster: each CTA loads half of a tile's rows for both CTAs."""

    op = staticmethod(cpasync.CopyBulkTensorTileG2SMulticastOp)
    ctas = CLUSTER

    def first_row_box(self, row_boxes: int) -> Int32:
        return cta_rank() * (row_boxes // CLUSTER)

    def options(self) -> dict[str, Any]:
        return {"mcast_mask": cutlass.Int16(BOTH_CTAS)}


CLASSES = {
    "none": VectorLoads,
    "vector": VectorLoads,
    "cp_async": CpAsync,
    "cp_async_l1": CpAsync,
    "bulk": Bulk,
    "tensor": Tensor,
    "tensor_swizzled": Tensor,
    "multicast": MulticastTensor,
}
assert {name for name, kind in CLASSES.items() if kind.one_warp} == set(BY_ONE_WARP)
