"""The pass of the state's gradient backwards through the chunks, from qg, kg and w: the gradients
dh of the states after the chunks, and the gradient of u.

    dh = dS        du = dv_new + kg dS        dS <- Diag(exp2(G_e)) dS + scale qg^T do - w^T du

The pass is the adjoint of `delta_h`, with the same structure: a warp owns 16 columns of V and all
of K. dv_new is the gradient of v_new through the output, from `output_backward`.

    CTA (tile of V, value head, sequence), tile_v / 16 warps
      load      qg, kg, w, do, dv_new of chunk c - num_stages + 1, by cp.async; G_e of chunk c - 1
      keep      store dh
      correct   du
      update    dS
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.memory import shared_address
from ....common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ....common.spec import WARP_SIZE
from ..chunks import (
    row_address,
    row_bytes,
)
from ..spec import CHUNK, DeltaHBackwardSpec
from ..state import STEP
from ..tiles import (
    FRAGMENT_ROWS,
    SUB_TILE_BYTES,
    add_product,
    copy_rows,
    right_offsets,
    thread_and_warp,
    transposed_accumulators,
)
from .delta_h import ChunkStates


class Arguments(NamedTuple):
    """The kernel's arguments."""

    qg: cute.Tensor
    kg: cute.Tensor
    w: cute.Tensor
    g: cute.Tensor
    do: cute.Tensor
    dv: cute.Tensor
    dfinal_state: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    dh: cute.Tensor
    dinitial_state: cute.Tensor | None
    du: cute.Tensor
    scale: Float32


class KdaDeltaHBackward(ChunkStates):
    """The kernel for one DeltaHBackwardSpec; see the module's docstring."""

    def __init__(self, spec: DeltaHBackwardSpec):
        dtype = DTYPE[spec.dtype]
        rows = CHUNK * spec.head_dim_k
        stage = SharedMemory(
            Buffer("kg", dtype, rows, alignment=SWIZZLE_ALIGNMENT),
            Buffer("qg", dtype, rows),
            Buffer("w", dtype, rows),
            Buffer("do", dtype, CHUNK * spec.tile_v),
            Buffer("dv", dtype, CHUNK * spec.tile_v),
        )
        super().__init__(spec, stage)

    def fake_args(self) -> tuple[Any, ...]:
        x = self.placeholders()
        return placeholders(
            Arguments(
                qg=x.of_k(),
                kg=x.of_k(),
                w=x.of_k(),
                g=x.g,
                do=x.of_v(),
                dv=x.of_v(),
                dfinal_state=x.end,
                cu_seqlens=x.cu_seqlens,
                dh=x.h,
                dinitial_state=x.start,
                du=x.of_v(),
                scale=Float32(1.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(**self.launch_config(a.do, a.cu_seqlens), stream=stream)

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        spec = self.spec
        tile, head, sequence = cute.arch.block_idx()
        _, warp_index = thread_and_warp()
        place, first_chunk, num_chunks = self.chunks_of(sequence, x.do.shape[1], x.cu_seqlens, x.dh)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        tile_start = tile * spec.tile_v
        first_v = tile_start + warp_index * FRAGMENT_ROWS

        sources = ((x.kg, "kg"), (x.qg, "qg"), (x.w, "w"), (x.do, "do"), (x.dv, "dv"))
        last = num_chunks - 1
        for i in cutlass.range_constexpr(spec.num_stages - 1):
            self.load(last - i, base + i * self.stage_bytes, sources, place, head, tile_start)
        logs = cute.make_rmem_tensor((self.decays,), Float32)  # G_e of the thread's channels
        logs.fill(0.0)
        self.load_decay(logs, cutlass.max(last, Int32(0)), num_chunks, x.g, place, head)
        state = self.state.empty()
        self.state.load(state, x.dfinal_state, spec.state_v_first, sequence, head, first_v)
        self.keep_decay(logs, 0, base)

        stage = Int32(0)
        for i in cutlass.range(num_chunks, unroll=1):
            c = last - i
            ahead = stage + (spec.num_stages - 1)
            ahead = ahead - spec.num_stages if ahead >= spec.num_stages else ahead
            if cutlass.const_expr(spec.num_stages == 1):
                # All warps have read the previous chunk.
                cute.arch.sync_threads()
                self.load(c, base, sources, place, head, tile_start)
                cute.arch.cp_async_wait_group(0)
            else:
                cute.arch.cp_async_wait_group(spec.num_stages - 2)
            if cutlass.const_expr(self.state.wgmma):
                cute.arch.fence_proxy("async.shared", space="cta")
            # All threads' copies of this chunk have finished, and all warps have read the previous
            # chunk.
            cute.arch.sync_threads()
            before = c - 1 if c > 0 else num_chunks  # there is no chunk num_chunks to load
            self.load_decay(logs, before, num_chunks, x.g, place, head)
            self.chunk(
                state,
                base + stage * self.stage_bytes,
                base + self.memory["decay"] + (i & 1) * self.decay_bytes,
                x.dh,
                x.du,
                x.scale,
                place,
                head,
                tile_start,
                warp_index,
                c,
                first_chunk + c,
                (c - spec.num_stages + 1, base + ahead * self.stage_bytes, sources),
            )
            self.keep_decay(logs, i + 1, base)
            stage = stage + 1
            stage = Int32(0) if stage == spec.num_stages else stage

        cute.arch.cp_async_wait_group(0)
        self.state.store(state, x.dinitial_state, spec.state_v_first, sequence, head, first_v)

    def load(
        self,
        c: Any,
        stage: Any,
        sources: tuple[Any, ...],
        place: Any,
        head: Int32,
        tile_start: Int32,
    ) -> None:
        """Start the copies of chunk c. Before the first chunk, fill the stage with zeros."""
        length = cutlass.select_(c < 0, Int32(0), place.length - c * CHUNK)
        start = place.start + cutlass.max(c, Int32(0)) * CHUNK
        for x, name in sources:
            of_v = name in ("do", "dv")
            copy_rows(
                stage + self.stage[name],
                row_address(x, place.batch, start, head, tile_start if of_v else 0),
                row_bytes(x),
                length,
                self.spec.tile_v if of_v else self.spec.head_dim_k,
                self.num_threads,
                few_registers=True,
            )
        cute.arch.cp_async_commit_group()

    def chunk(
        self,
        state: cute.Tensor,
        stage: Any,
        decay: Any,
        dh: cute.Tensor,
        du: cute.Tensor,
        scale: Any,
        place: Any,
        head: Int32,
        tile_start: Int32,
        warp_index: Any,
        c: Any,
        index: Any,
        copies: tuple[Any, Any, tuple[Any, ...]],
    ) -> None:
        """Update dS, and start the loads given by `copies`. The loop over loads must not stand
        between the start and the wait of a `wgmma`."""
        first_v = tile_start + warp_index * FRAGMENT_ROWS

        # keep and correct: `s` is dS^T rounded, 4 registers for each 16 of K
        s = self.state.operand(self.state.values(state))
        if self.spec.num_stages > 1:
            self.load(*copies, place, head, tile_start)
        recalled = self.state.times_rows(s, stage + self.stage["kg"])
        self.store_h(s, dh, place.batch, index, head, first_v)
        dv = self.transposed(stage + self.stage["dv"], warp_index)
        recalled = self.state.done(recalled)
        corrected = self.state.operand([x + y for x, y in zip(dv, recalled, strict=True)])

        # update
        do = self.state.operand(self.transposed(stage + self.stage["do"], warp_index))
        updated = self.state.decayed(state, decay)
        self.add_seen(updated, do, stage + self.stage["qg"], scale)
        updated = self.state.times_columns(
            self.state.negated(corrected), stage + self.stage["w"], updated
        )
        self.store_v_new(corrected, du, place, head, first_v, c)
        self.state.assign(state, self.state.done(updated))

    def add_seen(self, c: list[Any], do: list[Any], qg: Any, scale: Any) -> None:
        """c += scale do^T qg. Few columns are accumulated at once, or the kernel would spill."""
        columns = 64 if self.state.wgmma else STEP
        offsets = right_offsets()
        for first in range(0, self.spec.head_dim_k, columns):
            if self.state.wgmma:
                sub_tile = qg + first // columns * SUB_TILE_BYTES
                seen = self.state.done(self.state.times_columns(do, sub_tile, columns=columns))
            else:
                part = cute.make_rmem_tensor((FRAGMENT_ROWS * columns // WARP_SIZE,), Float32)
                part.fill(0.0)
                for step in range(CHUNK // STEP):
                    a = do[4 * step : 4 * step + 4]
                    add_product(part, self.dtype, a, qg, offsets, step, first)
                seen = self.state.values(part)
            at = first * FRAGMENT_ROWS // WARP_SIZE
            for i, x in enumerate(seen, at):
                c[i] = cute.math.fma(scale, x, c[i])

    def transposed(self, rows: Any, warp_index: Any) -> list[Any]:
        """Load the warp's 16 columns of a chunk's rows as accumulators of the transpose."""
        values = []
        for j in range(0, CHUNK // 8, 2):
            values += transposed_accumulators(self.dtype, rows, 8 * j, warp_index * FRAGMENT_ROWS)
        return values
