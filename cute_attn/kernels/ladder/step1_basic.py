"""Step 1 of the ladder, basic: attention on tensor cores, one K/V tile after the other.

    CTA (query tile, head, batch)
      for each K/V tile with a key that the query tile sees
        load K, and wait; transpose it through shared memory
        S = softmax_scale Q K^T             mma.sync
        m' = max(m, rows of S), P = exp(S - m'), a = exp(m - m')
        l = a l + sum of the rows of P      each thread sums its own columns
        load V, and wait
        O = a O + P V                       mma.sync
      o = O / l

A warp has tile_m / num_warps query rows and all of head_dim, so that only K and V are shared.
Tiles ascend, and every row sees key 0: a maximum is finite after the first tile.

Runs on sm_80 and newer. The next steps replace methods of this class; a step's file is its diff.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..attention.parts.mask import mask_row
from ..attention.parts.visibility import Visibility
from ..common.carried import Carried
from ..common.dtypes import DTYPE
from ..common.entry import entry, gathered, placeholders
from ..common.numbers import INF
from ..common.ptx.compiler import keep_branch
from ..common.ptx.convert import pack
from ..common.ptx.matrices import load_matrices
from ..common.ptx.memory import shared_address, store_shared
from ..common.ptx.mma import mma
from ..common.smem import Buffer, Pointers, SharedMemory
from .arguments import Arguments, fake_arguments
from .spec import ELEMENT_BYTES, FRAGMENT_ROWS, FmhaLadderSpec
from .tiles import Rows, TileLayout


@dataclass(frozen=True)
class Work(Carried):
    """The work of a warp.

    Attributes:
        first_row: the warp's first query.
        end: the K/V tiles of the CTA are 0 to end - 1.
        whole: the tiles that need no mask are 0 to whole - 1.
        scale: factor of the scores; see `scale`.
        smem_q: shared address of the warp's rows of Q.
        smem_k, smem_v: shared addresses of the tiles of K and V.
    """

    first_row: Int32
    seqlen: Int32
    end: Int32
    whole: Int32
    scale: Float32
    smem_q: Int32
    smem_k: Int32
    smem_v: Int32


@dataclass(frozen=True)
class CopyingWork(Work):
    """The work of a warp that also copies K and V; `Work` explains the inherited attributes."""

    k: Rows
    v: Rows
    smem_k_transposed: Int32 | None


class FmhaStep1:
    """The kernel for one FmhaLadderSpec; see the module's docstring."""

    operands_per_load = 1  # right operands that one ldmatrix loads

    def __init__(self, spec: FmhaLadderSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.layout = TileLayout(spec.row_bytes, spec.swizzled)
        self.transposed_layout = TileLayout(spec.tile_n * ELEMENT_BYTES, spec.swizzled)
        self.visibility = Visibility(
            spec.tile_m, spec.tile_n, rows_per_token=1, right=0 if spec.causal else None
        )
        self.warp_rows = spec.tile_m // spec.num_warps
        self.m_blocks = self.warp_rows // FRAGMENT_ROWS
        self.rows = 2 * self.m_blocks  # rows of S and O in which a thread has elements
        self.memory = SharedMemory(*self.buffers())

    def buffers(self) -> list[Buffer]:
        spec = self.spec
        tile = spec.tile_n * spec.head_dim
        return [
            Buffer("q", self.dtype, spec.tile_m * spec.head_dim, alignment=128),
            Buffer("k", self.dtype, tile, spec.k_stages, alignment=128),
            Buffer("v", self.dtype, tile, spec.v_stages, alignment=128),
            Buffer("k_transposed", self.dtype, tile, alignment=128),
        ]

    def fake_args(self) -> tuple[Any, ...]:
        return placeholders(fake_arguments(self.spec))

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        batch, seqlen, heads, _ = a.q.shape
        tiles = (seqlen + (self.spec.tile_m - 1)) // self.spec.tile_m
        self.kernel(a).launch(
            grid=[tiles, heads, batch],
            block=[self.spec.num_threads, 1, 1],
            smem=self.memory.nbytes,
            min_blocks_per_mp=self.spec.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        block, head, batch = cute.arch.block_idx()
        block = self.query_tile(block)
        seqlen = x.q.shape[1]
        _, end = self.visibility.key_tiles(block, seqlen, seqlen)
        first_row = block * self.spec.tile_m
        _, whole = self.visibility.whole_key_tiles(first_row, self.spec.tile_m, seqlen, seqlen)
        smem = self.memory.allocate()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        work = CopyingWork(
            k=Rows.of(x.k, batch, head),
            v=Rows.of(x.v, batch, head),
            first_row=first_row + warp * self.warp_rows,
            seqlen=seqlen,
            end=end,
            whole=whole,
            scale=self.scale(x.softmax_scale),
            smem_q=shared_address(smem.q) + warp * (self.warp_rows * self.spec.row_bytes),
            smem_k=shared_address(smem.k),
            smem_v=shared_address(smem.v),
            smem_k_transposed=self.transposed(smem),
        )
        self.copy(shared_address(smem.q), Rows.of(x.q, batch, head), first_row, self.spec.tile_m)

        acc = cute.make_rmem_tensor((self.m_blocks * self.spec.head_dim // 2,), Float32)
        maximum = cute.make_rmem_tensor((self.rows,), Float32)
        total = cute.make_rmem_tensor((self.rows,), Float32)
        acc.fill(0.0)
        maximum.fill(-INF)
        total.fill(0.0)
        self.key_tiles(work, acc, maximum, total)
        self.finish(work, acc, total, Rows.of(x.o, batch, head))

    def query_tile(self, block: Int32) -> Int32:
        """The query tile of a CTA."""
        return block

    def scale(self, softmax_scale: Float32) -> Float32:
        return softmax_scale

    def transposed(self, smem: Pointers) -> Int32 | None:
        return shared_address(smem.k_transposed)

    # -- the loop over K/V tiles --------------------------------------------------------------

    @cute.jit
    def key_tiles(
        self, work: CopyingWork, acc: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor
    ) -> None:
        for tile in cutlass.range(work.end, unroll=1):
            self.copy(work.smem_k, work.k, tile * self.spec.tile_n, self.spec.tile_n)
            self.copies_done()
            self.transpose(work)
            scores = self.scores(work, work.smem_k_transposed)
            p = self.softmax(work, scores, tile, acc, maximum, total)
            self.copy(work.smem_v, work.v, tile * self.spec.tile_n, self.spec.tile_n)
            self.copies_done()
            self.add_values(work.smem_v, p, acc)
            cute.arch.sync_threads()  # all warps have read K^T and V

    def copy(self, shared: Int32, source: Rows, first: Int32, rows: int) -> None:
        self.layout.copy(shared, source, first, rows, self.spec.num_threads)
        cute.arch.cp_async_commit_group()

    def copies_done(self, pending: int = 0) -> None:
        """Wait until each thread has at most its latest `pending` groups of copies unfinished."""
        cute.arch.cp_async_wait_group(pending)
        cute.arch.sync_threads()

    def transpose(self, work: CopyingWork) -> None:
        """Write the transpose of the K tile, 8 by 8 elements for each matrix of an ldmatrix."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        blocks = self.spec.tile_n // 8
        for i in range(self.spec.head_dim // 32 * blocks // self.spec.num_warps):
            index = i * self.spec.num_warps + warp  # index of a block of 8 keys by 32 columns
            key, unit = index % blocks * 8, index // blocks * 4
            source = self.layout.offset(key + (lane & 7), unit + (lane >> 3))
            block = load_matrices(work.smem_k + source, transposed=True)
            for m, x in enumerate(block):
                target = self.transposed_layout.offset((unit + m) * 8 + (lane >> 2), key // 8)
                store_shared(Int32, work.smem_k_transposed + target + (lane & 3) * 4, [x])
        cute.arch.sync_threads()

    # -- S = Q K^T ----------------------------------------------------------------------------

    def scores(self, work: Work, smem_k: Int32) -> cute.Tensor:
        """Return the scores of the warp's rows, indexed (row of the thread, column of the
        thread)."""
        columns = self.spec.tile_n // 8
        zeros: Sequence[Float32] = [Float32(0.0)] * 4
        s = [[zeros] * columns for _ in range(self.m_blocks)]
        for step in range(self.spec.head_dim // 16):
            q = [
                self.layout.left(work.smem_q + m * FRAGMENT_ROWS * self.layout.pitch, step)
                for m in range(self.m_blocks)
            ]
            for n in range(0, columns, self.operands_per_load):
                keys = self.keys(smem_k, n, step)
                for i in range(self.operands_per_load):
                    for m in range(self.m_blocks):
                        s[m][n + i] = mma(self.dtype, s[m][n + i], q[m], keys[2 * i : 2 * i + 2])
        values = cute.make_rmem_tensor(
            cute.make_layout((self.rows, 2 * columns), stride=(2 * columns, 1)), Float32
        )
        for m in range(self.m_blocks):
            for n in range(columns):
                for i in range(4):
                    values[2 * m + i // 2, 2 * n + i % 2] = s[m][n][i]
        return values

    def keys(self, smem_k: Int32, n: int, step: int) -> Sequence[Int32]:
        """Return right operands of K^T, with keys from 8 n on and columns from 16 step on."""
        return self.transposed_layout.right(smem_k, n, step, self.operands_per_load)

    # -- P = softmax(S) -----------------------------------------------------------------------

    @cute.jit
    def softmax(
        self,
        work: Work,
        s: cute.Tensor,
        tile: Int32,
        acc: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
    ) -> list[Int32]:
        """Return P as left operands, and scale `acc` and `total` to the new maximum."""
        if tile >= work.whole:
            keep_branch()  # most tiles need no mask
            self.mask(work, s, tile)
        for row in cutlass.range_constexpr(self.rows):
            self.softmax_row(work, s[row, None], row, acc, maximum, total)
        return self.packed(s)

    def mask(self, work: Work, s: cute.Tensor, tile: Int32) -> None:
        """Set the scores of keys that a row does not see to -inf."""
        lane = cute.arch.lane_idx()
        columns = [8 * (c // 2) + c % 2 for c in range(self.spec.tile_n // 4)]
        first = tile * self.spec.tile_n + 2 * (lane & 3)
        for row in range(self.rows):
            token = work.first_row + 8 * row + (lane >> 2)
            _, high = self.visibility.keys(token, work.seqlen, work.seqlen)
            mask_row(s[row, None], columns, None, high - first)

    def softmax_row(
        self, work: Work, s: cute.Tensor, row: int, acc: cute.Tensor, maximum: cute.Tensor,
        total: cute.Tensor,
    ) -> None:  # fmt: skip
        values = [s[c] * work.scale for c in range(cute.size(s))]
        highest = self.row_maximum(values, maximum[row])
        values = [cute.math.exp(x - highest) for x in values]
        factor = cute.math.exp(maximum[row] - highest)
        maximum[row] = highest
        self.rescale(values, row, factor, acc, total)
        for c, x in enumerate(values):
            s[c] = x

    def row_maximum(self, values: list[Float32], previous: Float32) -> Float32:
        """The maximum of a row's values and of `previous`; 4 threads share a row."""
        chains = [*values[:4]]
        for c, x in enumerate(values[4:]):
            chains[c % 4] = cute.arch.fmax(chains[c % 4], x)
        highest = previous
        for x in chains:
            highest = cute.arch.fmax(highest, x)
        for offset in (1, 2):
            other = cute.arch.shuffle_sync_bfly(highest, offset=offset)
            highest = cute.arch.fmax(highest, other)
        return highest

    def rescale(
        self,
        values: list[Float32],
        row: int,
        factor: Float32,
        acc: cute.Tensor,
        total: cute.Tensor,
    ) -> None:
        """Multiply the row of `acc` and its total by `factor`, and add the values to the total."""
        sums = [*values[:2]]
        for c, x in enumerate(values[2:]):
            sums[c % 2] = sums[c % 2] + x
        total[row] = total[row] * factor + (sums[0] + sums[1])
        for i in self.row_of_acc(row):
            acc[i] = acc[i] * factor

    def row_of_acc(self, row: int) -> list[int]:
        """Indices of a row's elements in `acc`."""
        m, half = divmod(row, 2)
        columns = self.spec.head_dim // 8
        return [4 * (m * columns + n) + 2 * half + i for n in range(columns) for i in range(2)]

    def packed(self, p: cute.Tensor) -> list[Int32]:
        """Return P rounded to left operands, with 4 registers for each 16 rows by 16 keys."""
        return [
            pack(
                self.dtype, p[2 * m + half, 4 * step + 2 * n], p[2 * m + half, 4 * step + 2 * n + 1]
            )
            for m in range(self.m_blocks)
            for step in range(self.spec.tile_n // 16)
            for n in range(2)
            for half in range(2)
        ]

    # -- O += P V, and the epilogue -----------------------------------------------------------

    def add_values(self, smem_v: Int32, p: list[Int32], acc: cute.Tensor) -> None:
        steps, columns = self.spec.tile_n // 16, self.spec.head_dim // 8
        o = [acc[i] for i in range(cute.size(acc))]
        for step in range(steps):
            for n in range(0, columns, self.operands_per_load):
                values = self.layout.right(smem_v, n, step, self.operands_per_load)
                for i in range(self.operands_per_load):
                    for m in range(self.m_blocks):
                        at = 4 * (m * columns + n + i)
                        left = 4 * (m * steps + step)
                        o[at : at + 4] = mma(
                            self.dtype,
                            o[at : at + 4],
                            p[left : left + 4],
                            values[2 * i : 2 * i + 2],
                        )
        for i, x in enumerate(o):
            acc[i] = x

    def finish(self, work: Work, acc: cute.Tensor, total: cute.Tensor, o: Rows) -> None:
        """Divide by the totals and store the warp's rows, through its rows of Q."""
        for row in range(self.rows):
            whole = total[row]
            for offset in (1, 2):
                whole = whole + cute.arch.shuffle_sync_bfly(whole, offset=offset)
            self.divide(acc, row, whole)
        for m in range(self.m_blocks):
            size = cute.size(acc) // self.m_blocks
            values = [acc[m * size + i] for i in range(size)]
            shared = work.smem_q + m * FRAGMENT_ROWS * self.layout.pitch
            self.layout.store(self.dtype, values, shared, o, work.first_row + 16 * m)

    def divide(self, acc: cute.Tensor, row: int, total: Float32) -> None:
        for i in self.row_of_acc(row):
            acc[i] = acc[i] / total
