"""A CTA's tensor memory (sm_100), declared as regions of columns and checked to fit."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from .carried import Carried

MAX_TMEM_COLUMNS = 512  # columns of 32 bits, in each of 128 lanes


@dataclass(frozen=True)
class Region:
    """Columns of tensor memory.

    Attributes:
        columns: columns of a stage.
        holds: contents, for the documentation.
    """

    name: str
    columns: int
    stages: int = 1
    holds: str = ""


class TensorMemory(Carried):
    """Regions of tensor memory, in the order given. All 512 columns are always allocated: addresses
    are then compile-time constants and take no register.

    Raises:
        ValueError: the regions take more columns than there are.
    """

    def __init__(self, *regions: Region, pair: bool):
        """pair: MMAs use cta_group::2, and both CTAs of a pair allocate together."""
        self.regions = regions
        self.pair = pair
        self.offsets: dict[str, int] = {}
        self.columns = 0
        for region in regions:
            self.offsets[region.name] = self.columns
            self.columns += region.columns * region.stages
        if self.columns > MAX_TMEM_COLUMNS:
            raise ValueError(
                f"{self.columns} columns of tensor memory, at most {MAX_TMEM_COLUMNS}: "
                + ", ".join(f"{r.name} {r.columns} x {r.stages}" for r in regions)
            )

    def allocate(self, address: cute.Pointer) -> None:
        """Allocate the memory, by one warp. The hardware writes the address, which is 0, to shared
        memory."""
        cute.arch.alloc_tmem(MAX_TMEM_COLUMNS, address, is_two_cta=self.pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)

    def free(self) -> None:
        """Free the memory after the last use. The warp that allocated calls this."""
        cute.arch.dealloc_tmem(self._start(), MAX_TMEM_COLUMNS, is_two_cta=self.pair)

    def pointer(self, name: str) -> cute.Pointer:
        """Pointer to stage 0 of a region."""
        return self._start() + self.offsets[name]

    def _start(self) -> cute.Pointer:
        return cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)


def shifted(x: cute.Tensor, columns: Int32) -> cute.Tensor:
    """Return x moved by `columns`, counted in elements of x; for example to another stage."""
    return cute.make_tensor(x.iterator + columns, x.layout)


def first_columns(accumulator: cute.Tensor, columns: int) -> cute.Tensor:
    """The first columns of an accumulator: (rows of the CTA, columns)."""
    rows = accumulator[(None, None), 0, 0]
    return cute.composition(rows, cute.make_layout((cute.size(rows, mode=[0]), columns)))


def row_load(
    rows: cute.Tensor, row: Int32, columns: int
) -> tuple[cute.TiledCopy, cute.Tensor, cute.Shape]:
    """Return (copy, source, shape of the values) with which a thread loads its row, `columns` at
    once."""
    copy = _row_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), rows, row)
    return copy, copy.partition_S(rows), copy.partition_D(_identity(rows)).shape


def row_store(
    rows: cute.Tensor, row: Int32, columns: int
) -> tuple[cute.TiledCopy, cute.Tensor, cute.Shape]:
    """Return (copy, target, shape of the values) with which a thread stores its row; see
    `row_load`."""
    copy = _row_copy(tcgen05.St32x32bOp(tcgen05.Repetition(columns)), rows, row)
    return copy, copy.partition_D(rows), copy.partition_S(_identity(rows)).shape


def _row_copy(
    op: tcgen05.Ld32x32bOp | tcgen05.St32x32bOp, rows: cute.Tensor, row: Int32
) -> cute.TiledCopy:
    return tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), rows).get_slice(row)


def _identity(rows: cute.Tensor) -> cute.Tensor:
    return cute.make_identity_tensor(rows.shape)
