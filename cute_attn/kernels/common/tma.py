"""TMA copies of the rows of attention tensors, in boxes 128 bytes wide with the 128-byte swizzle.

TMA checks the bounds of a tensor, but not of a packed sequence or of a sequence's used part. So
ragged rows have two coordinates (i, j), which name row i + j - (size of i). A box that reaches past
its sequence is placed so that rows beyond the end have an i out of bounds. For such rows loads give
0 and stores do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from .pipeline import BOTH_CTAS, CTAS, Barriers
from .ptx.cluster import cta_rank
from .spec import BOX as BOX

FLOAT32_BOX = BOX // 2


@dataclass(frozen=True)
class BoxedRows:
    """How TMA sees a tensor `[batch, tokens, heads, columns]`, or `[tokens, heads, columns]` of
    packed sequences: ((packed heads, tokens), columns, [first token,] heads, [batch]).

    Attributes:
        rows: rows of a box.
        columns: columns of a box: of a whole row, or of a part that starts at a given column.
        packed: query heads that share a box, interleaved token by token; `box` counts them as one
            head.
        ragged: rows of another sequence, or unused rows, may follow a sequence's rows. Boxes then
            need at least two tokens: TMA sees no index out of bounds in a dimension of size 1.
        batched: the tensor has a batch mode.
        box_columns: columns of a box, 128 bytes, or less without the swizzle.
        swizzle: the boxes have the 128-byte swizzle.
    """

    rows: int
    columns: int
    ragged: bool
    batched: bool
    packed: int = 1
    box_columns: int = BOX
    swizzle: bool = True

    @property
    def tokens(self) -> int:
        return self.rows // self.packed

    def view(self, x: cute.Tensor) -> cute.Tensor:
        *outer, tokens, heads, columns = x.shape
        *outer_strides, token, head, one = x.stride
        heads_mode, heads_stride = heads // self.packed, head * self.packed
        if self.ragged:
            shape = ((self.packed, self.tokens), columns, tokens + 1, heads_mode, *outer)
            stride = ((head, token), one, token, heads_stride, *outer_strides)
            start = x.iterator - token * self.tokens
        else:
            shape = ((self.packed, tokens), columns, heads_mode, *outer)
            stride = ((head, token), one, heads_stride, *outer_strides)
            start = x.iterator
        return cute.make_tensor(start, cute.make_layout(shape, stride=stride))

    def atom(self, op: cpasync.TmaCopyOp, x: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """Return (TMA atom, tensor of coordinates) of copies of x, box by box."""
        return cpasync.make_tiled_tma_atom(
            op,
            self.view(x),
            box_layout(self.rows, columns=self.box_columns, swizzle=self.swizzle),
            (self.rows, self.box_columns),
        )

    def box(
        self,
        x: cute.Tensor,
        index: Int32,
        head: Int32,
        sequence: Int32,
        start: Int32,
        seqlen: Int32,
        *,
        stored: bool = False,
        column: Int32 | None = None,
    ) -> cute.Tensor:
        """Box number `index` of a sequence's rows: (rows, columns). A packed sequence starts at row
        `start` and has `seqlen` tokens. Past the sequence's end, a `stored` box has no row; a
        loaded box starts with the sequence's last row. The box starts at `column`, by default at
        column 0."""
        place = self.place(index, start, seqlen, stored=stored)
        return self.at(x, place, head, sequence, column)

    def place(
        self, index: Int32, start: Int32, seqlen: Int32, *, stored: bool = False
    ) -> tuple[Int32, ...]:
        """The computed coordinates of a box, for `at`."""
        if not self.ragged:
            return (index,)
        token = index * self.tokens
        if not stored:
            # A load of no row touches the first byte that TMA sees, which lies before the tensor.
            token = cutlass.min(token, seqlen - 1)
        valid = cutlass.min(cutlass.max(seqlen - token, 0), self.tokens)
        return start + token + valid, self.tokens - valid

    def at(
        self,
        x: cute.Tensor,
        place: tuple[Int32, ...],
        head: Int32,
        sequence: Int32,
        column: Int32 | None = None,
    ) -> cute.Tensor:
        """The box at `place`, from `column` on: (rows, columns)."""
        if not self.ragged:
            x = x[None, None, head, sequence]
            if column is not None:
                x = cute.domain_offset((0, column), x)
            return cute.local_tile(x, (self.rows, self.columns), (*place, 0))
        first, skipped = place
        outer = (first, head, sequence) if self.batched else (first, head)
        everything = (None, None, *outer)
        column = 0 if column is None else column
        x = cute.domain_offset(((0, skipped), column), x[everything])
        return cute.local_tile(x, (self.rows, self.columns), (0, 0))


def box_layout(
    rows: int, *more: tuple[int, int], columns: int = BOX, swizzle: bool = True
) -> cute.ComposedLayout:
    """Boxes of (rows, columns) in shared memory, 128 bytes wide with the swizzle; `more` are (size,
    stride) of further modes."""
    shape = (rows, columns, *(size for size, _ in more))
    stride = (columns, 1, *(step for _, step in more))
    return cute.make_composed_layout(
        cute.make_swizzle(3 if swizzle else 0, 4, 3), 0, cute.make_layout(shape, stride=stride)
    )


def swizzled(buffer: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """A buffer in shared memory under a swizzled layout."""
    return cute.make_tensor(cute.recast_ptr(buffer, layout.inner), layout.outer)


def boxes(
    buffer: cute.Pointer,
    rows: int,
    *more: tuple[int, int],
    columns: int = BOX,
    swizzle: bool = True,
) -> cute.Tensor:
    """A buffer in shared memory as boxes: see `box_layout`."""
    return swizzled(buffer, box_layout(rows, *more, columns=columns, swizzle=swizzle))


def partition(
    tma: cute.CopyAtom, rows: cute.Tensor, smem: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """The operands (global, shared) of cute.copy, (box, ...), from tensors of (rows, BOX, ...)."""
    shared, source = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(rows, 0, 2)
    )
    return source, shared


@cute.jit
def load_boxes(
    tma: cute.CopyAtom,
    rows: cute.Tensor,
    smem: cute.Tensor,
    barriers: Barriers,
    edge: cutlass.Constexpr[str],
    n: Int32,
    multicast: cutlass.Constexpr[bool] = False,
) -> None:
    """Load rows to the stage of use n of `edge`, in `smem`: (rows, BOX, boxes, stages). With
    `multicast` each CTA of a pair loads half of the boxes into both CTAs. If the number of boxes
    is odd, CTA 0 loads one more box than CTA 1."""
    tiled = cute.local_tile(rows, (cute.size(smem, mode=[0]), BOX), (0, None))
    source, to = partition(tma, tiled, smem)
    stage = barriers.stage(edge, n)
    count = cute.size(smem, mode=[2])
    if cutlass.const_expr(multicast and count % CTAS):
        for i in cutlass.range_constexpr(count):
            if cta_rank() == i % CTAS:
                cute.copy(
                    tma, source[None, i], to[None, i, stage],
                    tma_bar_ptr=barriers.pointer(edge, n), mcast_mask=Int16(BOTH_CTAS),
                )  # fmt: skip
    elif cutlass.const_expr(multicast):
        count = count // CTAS
        first = cta_rank() * count
        for i in cutlass.range_constexpr(count):
            cute.copy(
                tma, source[None, first + i], to[None, first + i, stage],
                tma_bar_ptr=barriers.pointer(edge, n), mcast_mask=Int16(BOTH_CTAS),
            )  # fmt: skip
    else:
        for box in cutlass.range_constexpr(count):
            cute.copy(
                tma, source[None, box], to[None, box, stage],
                tma_bar_ptr=barriers.pointer(edge, n),
            )  # fmt: skip


@cute.jit
def load_use(
    name: cutlass.Constexpr[str],
    tma: cute.CopyAtom,
    rows: cute.Tensor,
    smem: cute.Tensor,
    barriers: Barriers,
    n: Int32,
    more_bytes: cutlass.Constexpr[int] = 0,
    multicast: cutlass.Constexpr[bool] = False,
    element_bytes: cutlass.Constexpr[int] = 2,
) -> None:
    """Wait until the stage of use n is empty and start to fill it, by `load_boxes`. The ring has
    the edges `{name}_empty` and `{name}_full`, and elements of `element_bytes`. One warp calls
    this; it copies `more_bytes` of the stage itself."""
    barriers.wait_previous(f"{name}_empty", n)
    with cute.arch.elect_one():
        barriers.expect(f"{name}_full", n, cute.size(rows) * element_bytes + more_bytes)
    load_boxes(tma, rows, smem, barriers, f"{name}_full", n, multicast)


@cute.jit
def store_boxes(
    tma: cute.CopyAtom,
    rows: cute.Tensor,
    smem: cute.Tensor,
    barriers: Barriers,
    edges: cutlass.Constexpr[tuple[str, str]],
    stored: Int32,
) -> Int32:
    """Store rows from boxes that other warps write to `smem`, (rows, columns of a box, stages).
    Return the number of boxes stored so far.

    Args:
        edges: the edge that says a box is staged, and the edge that says TMA has read the box.
        stored: boxes stored before this call.
    """
    box_shape = (cute.size(smem, mode=[0]), cute.size(smem, mode=[1]))
    to, source = partition(tma, cute.local_tile(rows, box_shape, (0, None)), smem)
    for box in cutlass.range_constexpr(cute.size(to, mode=[1])):
        barriers.wait(edges[0], stored)
        with cute.arch.elect_one():
            cute.copy(tma, source[None, barriers.stage(edges[0], stored)], to[None, box])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            barriers.arrive(edges[1], stored)
        stored += 1
    return stored
