"""Softmax attention forward at head_dim 256 for SM100: clusters of two CTAs, MMAs across both.

A cluster works on a tile of 256 query rows and walks over the visible keys, 128 at a time, from
the last to the first. Each CTA holds 128 of the rows, and loads half of the keys (K) and half
of the head dimensions (V): the MMAs of cta_group::2 read both halves.

    S = Q K^T        256 x 128, K = 256    Q and K in shared memory, S in tensor memory
    P = 2^(c S - m)  in place of S         c = softmax_scale * log2(e), m the row's (late) maximum
    O = O a + P V    256 x 256, K = 128    P and O in tensor memory, V in shared memory

The maximum m is only moved when it has grown by more than RESCALE_THRESHOLD (in log2), so that O is
rarely rescaled (by a); sums follow the same m, so that the result is exact. Half of the
exponentials, but for the last quarter of a tile's, run on the FMA units (`common.exp2`): the
special function unit alone would need half of the MMAs' time.

    warps    role         what a tile goes through
    8        load         Q, then K_0, K_1, V_0, K_2, V_1, ... by TMA
    9        mma          S_0, S_1, O += P_0 V_0, S_2, O += P_1 V_1, ... (CTA 0 issues for both)
    0-3      softmax      a row a thread: S -> P, and the row's maximum and sum
    4-7      correction   rescales O where a maximum moved; at the end O / sum -> shared memory
    10       store        O by TMA
    11       scheduler    publishes the tiles that all of the others work on

The tables `EDGES`, `smem_bytes` and `TMEM` below are the pipeline, and the budgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import T

from ..common.carried import Carried
from ..common.dtypes import DTYPE
from ..common.exp2 import exp2_pairs
from ..common.pipeline import (
    CTAS,
    Barriers,
    Edge,
    Kind,
    Pipeline,
    Reach,
    Role,
    tcgen05_fence_after,
    tcgen05_fence_before,
)
from ..common.scheduler import CLC_RESPONSE_BYTES, SCHEDULERS, TileMap
from ..common.spec import MAX_SMEM_BYTES, WARP_SIZE
from .spec import TILE_M, TILE_N, Hd256ForwardSpec

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
INF, NAN = float("inf"), float("nan")
FLOAT32_MAX = 2.0**128 - 2.0**104

HEAD_DIM = 256
ROWS = TILE_M // CTAS  # of a CTA's tile
KEYS = TILE_N // CTAS  # of K that a CTA loads
DIMS = HEAD_DIM // CTAS  # of V that a CTA loads
BOX = 64  # columns of a TMA box: 128 bytes, the width of the swizzle
LOG_TILE_N = TILE_N.bit_length() - 1

KV_STAGES = 4
S_STAGES = 2
O_STAGES = 2  # boxes of O on their way out
WORK_STAGES = 2
WORK_WORDS = 8

# Softmax.
RESCALE_THRESHOLD = 8.0  # log2 of the growth of the maximum that is let pass: P stays below 2^8
# Below, an offset m * scale is off by 2^-13 at the most, which is a factor of 1 + 8.5e-5: as much
# as the exponentials on the FMA units err by. See docs/kernels/hd256_forward.md.
LARGE_OFFSET = 2.0**12
FRAGMENT = 32  # columns of a row that are loaded and stored at once
EX2_EMU_FREQ, EX2_EMU_RES = 4, 3  # of 4 columns, taken as pairs: one pair on the FMA units

# Columns of tensor memory. P lies on the S that it comes from.
TMEM_S, TMEM_O, TMEM_COLUMNS = 0, S_STAGES * TILE_N, 512
assert TMEM_O + HEAD_DIM == TMEM_COLUMNS

# Warps.
SOFTMAX, CORRECTION = Role("softmax", range(0, 4)), Role("correction", range(4, 8))
LOAD, MMA = Role("load", range(8, 9)), Role("mma", range(9, 10))
STORE, SCHEDULER = Role("store", range(10, 11)), Role("scheduler", range(11, 12))
ROLES = (SOFTMAX, CORRECTION, LOAD, MMA, STORE, SCHEDULER)
WORKERS = Role("all others", range(0, 11))
NUM_WARPS = sum(map(len, ROLES))

# Registers of a thread: 384 threads start with 168; the last warpgroup hands some to softmax.
SOFTMAX_REGISTERS, CORRECTION_REGISTERS, OTHER_REGISTERS = 240, 168, 96
assert SOFTMAX_REGISTERS + CORRECTION_REGISTERS + OTHER_REGISTERS <= 3 * CORRECTION_REGISTERS

# In the order of a tile's life. Counts: Q and work by tiles, O boxes by boxes, all others by K/V
# tiles (K and V of one share the ring, two uses).
EDGES = (
    Edge("work_full", SCHEDULER, WORKERS, WORK_STAGES, Kind.WARPS, payload="the next tile"),
    Edge("work_empty", WORKERS, SCHEDULER, WORK_STAGES, Kind.WARPS, payload="its stage"),
    Edge("q_full", LOAD, MMA, 1, Kind.BYTES, Reach.LEADER, "Q"),
    Edge("q_empty", MMA, LOAD, 1, Kind.COMMIT, Reach.PAIR, "Q's buffer, after the tile's last S"),
    Edge("kv_full", LOAD, MMA, KV_STAGES, Kind.BYTES, Reach.LEADER, "K or V"),
    Edge("kv_empty", MMA, LOAD, KV_STAGES, Kind.COMMIT, Reach.PAIR, "its stage"),
    Edge("s_full", MMA, SOFTMAX, S_STAGES, Kind.COMMIT, Reach.PAIR, "S"),
    Edge("scale_full", SOFTMAX, CORRECTION, S_STAGES, Kind.WARPS, payload="factors for O"),
    Edge("o_ready", CORRECTION, MMA, S_STAGES, Kind.WARPS, Reach.LEADER, "O, to add P V to"),
    Edge("p_full", SOFTMAX, MMA, S_STAGES, Kind.WARPS, Reach.LEADER, "P, in place of S"),
    Edge("pv_done", MMA, CORRECTION, S_STAGES, Kind.COMMIT, Reach.PAIR, "O with P V added"),
    Edge("sum_full", SOFTMAX, CORRECTION, 2, Kind.WARPS, payload="what to divide O by"),
    # S paces softmax, but for tiles that see no key.
    Edge("sum_read", CORRECTION, SOFTMAX, 2, Kind.WARPS, payload="its stage"),
    Edge("o_staged", CORRECTION, STORE, O_STAGES, Kind.WARPS, payload="a box of O"),
    Edge("o_stored", STORE, CORRECTION, O_STAGES, Kind.WARPS, payload="its stage"),
)

Q_BYTES = ROWS * HEAD_DIM * 2
KV_BYTES = KEYS * HEAD_DIM * 2
O_BYTES = ROWS * BOX * 2
assert KV_BYTES == TILE_N * DIMS * 2, "K and V share a ring"
SMEM_ALIGNMENT = 1024  # of a buffer with a 128-byte swizzle


@dataclass(frozen=True)
class Storage(Carried):
    """Pointers to a CTA's shared memory."""

    q: cute.Pointer  # boxes of (128 rows, 64)
    kv: cute.Pointer  # the ring: boxes of (64 keys, 64) for K, (128 keys, 64) for V
    o: cute.Pointer  # boxes of (128 rows, 64)
    scale: cute.Pointer  # of O's rows, by stage of S
    inverse_sum: cute.Pointer  # of rows, for two tiles
    work: cute.Pointer
    clc_response: cute.Pointer
    barriers: cute.Pointer
    tmem_address: cute.Pointer


@dataclass(frozen=True)
class Scaling(Carried):
    """Factors and bounds for what the softmax warps take from S: scores, or with a softcap tanh.

    Attributes:
        factor: that makes scaled scores of it: the softmax scale, or the softcap.
        log2: the same for base 2.
        before_tanh: factor of scores; 1 without a softcap.
        growth: of the maximum, in units of S, that is let pass.
        large: from here on, in units of S, a maximum is subtracted before the factor meets it.
        lowest: finite, and below any maximum that is not large.
    """

    factor: Float32
    log2: Float32
    before_tanh: Float32
    growth: Float32
    large: Float32
    lowest: Float32

    @classmethod
    def of(cls, factor: Any, before_tanh: Any = 1.0) -> Scaling:
        log2 = factor * LOG2_E
        large = LARGE_OFFSET / log2
        lowest = cutlass.max(-2.0 * large, Float32(-FLOAT32_MAX))
        return cls(factor, log2, Float32(before_tanh), RESCALE_THRESHOLD / log2, large, lowest)

    def multiply_add(self, x: Any, y: Any) -> Any:
        """factor * x + y with one rounding."""
        return cute.math.fma(self.factor, x, y)

    def rounded_off(self, maximum: Any) -> Any:
        """What the offset of exponents lacks of maximum * log2; sums are too large by 2 to it."""
        rest = cute.math.fma(maximum, self.log2, -(maximum * self.log2))
        return cutlass.select_(abs(maximum) >= self.large, Float32(0.0), rest)


def cta_rank() -> Any:
    """Rank in the cluster. Read anew where it is used: kept, it would be spilled."""
    rank = llvm.inline_asm(
        T.i32(),
        [],
        "mov.u32 $0, %cluster_ctarank;",
        "=r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return cute.arch.make_warp_uniform(Int32(rank))


def keep_branch() -> None:
    """Keeps the branch that it stands in a branch. The compiler would turn the mask into selects
    that every tile pays for, and so would the assembler if it did not hold for it that a
    performance-monitor trigger (of which nobody counts number 7) is not to be predicated."""
    llvm.inline_asm(
        None,
        [],
        "pmevent 7;",
        "",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


class Sm100Hd256Forward:
    """The kernel for one Hd256ForwardSpec; see the module's docstring."""

    def __init__(self, spec: Hd256ForwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.scheduler = SCHEDULERS[spec.scheduler]
        self.pipeline = Pipeline(*EDGES, *self.scheduler.edges(SCHEDULER))
        self.packed = spec.packed_heads
        self.log_packed = self.packed.bit_length() - 1
        self.tokens = ROWS // self.packed  # in a CTA's rows
        if self.smem_bytes > MAX_SMEM_BYTES:
            raise ValueError(f"{self.smem_bytes} bytes of shared memory, at most {MAX_SMEM_BYTES}")

    @property
    def buffers(self) -> dict[str, tuple[Any, int]]:
        """Shared memory, in order: name -> (element, bytes). See `Storage`."""
        return {
            "q": (self.dtype, Q_BYTES),
            "kv": (self.dtype, KV_STAGES * KV_BYTES),
            "o": (self.dtype, O_STAGES * O_BYTES),
            "scale": (Float32, 4 * S_STAGES * ROWS),
            "inverse_sum": (Float32, 4 * 2 * ROWS),
            "work": (Int32, 4 * WORK_STAGES * WORK_WORDS),
            "clc_response": (Int32, CLC_RESPONSE_BYTES),
            "barriers": (Int64, self.pipeline.nbytes),
            "tmem_address": (Int32, 4),
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Where each buffer lies, and where the last one ends ("end")."""
        offsets, end = {}, 0
        for name, (_, nbytes) in self.buffers.items():
            alignment = SMEM_ALIGNMENT if nbytes >= SMEM_ALIGNMENT else 16
            offsets[name] = -(-end // alignment) * alignment
            end = offsets[name] + nbytes
        return offsets | {"end": end}

    @property
    def smem_bytes(self) -> int:
        return self.offsets["end"]

    def allocate(self) -> Storage:
        """On the device: the buffers."""
        smem = cutlass.utils.SmemAllocator()
        return Storage(
            **{
                name: smem.allocate_array(
                    element,
                    8 * nbytes // element.width,
                    byte_alignment=SMEM_ALIGNMENT if nbytes >= SMEM_ALIGNMENT else 16,
                )
                for name, (element, nbytes) in self.buffers.items()
            }
        )

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        """What reports and traces call barriers, buffers and warps: the arguments of the emulator's
        `Names`. Shared memory begins at address `shared_base`."""
        items = {"kv": KV_BYTES, "o": O_BYTES, "scale": 4 * ROWS, "inverse_sum": 4 * ROWS}
        shared = {
            name: (shared_base + self.offsets[name], nbytes, items.get(name, nbytes))
            for name, (_, nbytes) in self.buffers.items()
            if name != "barriers"
        }
        return {
            "shared": shared | self.pipeline.names(shared_base + self.offsets["barriers"]),
            "warps": {role.name: (role.warps[0], role.warps[-1]) for role in ROLES},
        }

    def fake_args(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`, in order."""
        spec = self.spec
        batch, heads, kv_heads = (cute.sym_int() for _ in range(3))
        seqlen_q, seqlen_k = cute.sym_int(), cute.sym_int()
        bounds = cute.sym_int()

        def rows(packed: bool, seqlen: Any, heads: Any) -> Any:
            shape = (seqlen, heads, HEAD_DIM) if packed else (batch, seqlen, heads, HEAD_DIM)
            strides = (cute.sym_int64(divisibility=8) for _ in shape[:-1])
            return make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

        def vector(element: Any, length: Any) -> Any:
            return make_fake_tensor(element, (length,), (1,), assumed_align=4)

        lse = None
        if spec.lse:
            shape = (heads, seqlen_q) if spec.varlen_q else (batch, heads, seqlen_q)
            strides = tuple(cute.sym_int64() for _ in shape)
            lse = make_fake_tensor(Float32, shape, strides, assumed_align=4)
        sink = None
        if spec.sink_dtype != "none":
            element = DTYPE[spec.sink_dtype]
            sink = make_fake_tensor(element, (heads,), (1,), assumed_align=element.width // 8)
        return (
            rows(spec.varlen_q, seqlen_q, heads),
            rows(spec.varlen_k, seqlen_k, kv_heads),
            rows(spec.varlen_k, seqlen_k, kv_heads),
            rows(spec.varlen_q, seqlen_q, heads),
            lse,
            sink,
            vector(Int32, bounds) if spec.varlen_q else None,
            vector(Int32, bounds) if spec.varlen_k else None,
            vector(Int32, batch) if spec.seqused_q else None,
            vector(Int32, batch) if spec.seqused_k else None,
            Float32(1.0),
            Float32(1.0),
            Int32(0),
            Int32(0),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    # -- host ---------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        sink: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        num_clusters: Int32,
        stream: Any,
    ) -> None:
        spec = self.spec
        heads, kv_heads = q.shape[-2], k.shape[-2]
        if cutlass.const_expr(spec.varlen_q):
            batch = cu_seqlens_q.shape[0] - 1
        else:
            batch = q.shape[0]
        seqlen_k = k.shape[-3]

        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        store = cpasync.CopyBulkTensorTileS2GOp()
        q_copy = self.box_copy(load, self.query_rows(q), ROWS)
        k_copy = self.box_copy(load, self.key_rows(k, KEYS), KEYS)
        v_copy = self.box_copy(load, self.key_rows(v, TILE_N), TILE_N)
        o_copy = self.box_copy(store, self.query_rows(o), ROWS)

        # K and V of so many heads stay in the L2 cache while their blocks of rows are worked on.
        head_bytes = Int64(seqlen_k) * (2 * 2 * HEAD_DIM)
        heads_at_once = cutlass.max(Int32(1), Int32(32 * 1024 * 1024 // (head_bytes + 1)))
        heads_at_once = cutlass.min(heads_at_once, heads // self.packed * batch)
        tiles = self.tile_map(heads, batch, q.shape[-3], heads_at_once, cu_seqlens_q, seqused_q)
        num_tiles = tiles.count(q.shape[-3])

        if cutlass.const_expr(spec.softcap):
            before_tanh = cutlass.min(softmax_scale / softcap, Float32(FLOAT32_MAX))
            scaling = Scaling.of(softcap, before_tanh)
        else:
            scaling = Scaling.of(softmax_scale)

        self.kernel(
            *q_copy, *k_copy, *v_copy, *o_copy,
            lse, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            scaling, window_left, window_right,
            heads, kv_heads, batch, q.shape[-3], seqlen_k, heads_at_once, num_tiles,
        ).launch(
            grid=[CTAS * self.scheduler.clusters(num_tiles, num_clusters), 1, 1],
            block=[NUM_WARPS * WARP_SIZE, 1, 1],
            cluster=[CTAS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    def tile_map(
        self,
        heads: Any,
        batch: Any,
        seqlen_q: Any,
        heads_at_once: Any,
        cu_seqlens_q: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
    ) -> TileMap:
        return TileMap(
            tile_rows=TILE_M,
            rows_per_token=self.packed,
            longest_last=self.spec.window_right,
            heads=heads // self.packed,
            batch=batch,
            seqlen_q=seqlen_q,
            heads_at_once=heads_at_once,
            cu_seqlens_q=cu_seqlens_q,
            seqused_q=seqused_q,
        )

    def mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """For S = Q K^T and O += P V. Made in the kernel: as its arguments their flags would be
        variables, which take registers and instructions."""
        qk_mma = sm100.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            tcgen05.CtaGroup.TWO, (TILE_M, TILE_N),
        )  # fmt: skip
        pv_mma = sm100.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
            tcgen05.CtaGroup.TWO, (TILE_M, HEAD_DIM), tcgen05.OperandSource.TMEM,
        )  # fmt: skip
        return qk_mma, pv_mma

    # A tensor as TMA sees it: (rows of a tile, head_dim, then what picks the sequence and the
    # head). Rows of a sequence among others are addressed as (i, j) -> row i + j - size of i, so
    # that those past the sequence's end have an i past its size: loads see 0 there, and stores
    # leave them alone, whoever's they are.

    def query_rows(self, x: cute.Tensor) -> cute.Tensor:
        """q or o: ((packed heads, tokens), head_dim, [first token,] heads, [batch])."""
        *outer, tokens, heads, _ = x.shape
        *outer_strides, token, head, one = x.stride
        heads_mode, heads_stride = heads // self.packed, head * self.packed
        if self.spec.ragged_q:
            start = x.iterator - token * self.tokens
            return cute.make_tensor(
                start,
                cute.make_layout(
                    ((self.packed, self.tokens), HEAD_DIM, tokens + 1, heads_mode),
                    stride=((head, token), one, token, heads_stride),
                ),
            )
        return cute.make_tensor(
            x.iterator,
            cute.make_layout(
                ((self.packed, tokens), HEAD_DIM, heads_mode, *outer),
                stride=((head, token), one, heads_stride, *outer_strides),
            ),
        )

    def key_rows(self, x: cute.Tensor, rows: int) -> cute.Tensor:
        """k or v, in boxes of so many rows: (tokens, head_dim, [first token,] heads, [batch])."""
        *outer, tokens, heads, _ = x.shape
        *outer_strides, token, head, one = x.stride
        if self.spec.ragged_k:
            return cute.make_tensor(
                x.iterator - token * rows,
                cute.make_layout(
                    (rows, HEAD_DIM, tokens + 1, heads, *outer),
                    stride=(token, one, token, head, *outer_strides),
                ),
            )
        return cute.make_tensor(
            x.iterator,
            cute.make_layout(
                (tokens, HEAD_DIM, heads, *outer), stride=(token, one, head, *outer_strides)
            ),
        )

    def box_layout(self, rows: int, *more: tuple[int, int]) -> Any:
        """Boxes of (rows, 64) in shared memory, swizzled; `more` are further (size, stride)s."""
        shape = (rows, BOX, *(size for size, _ in more))
        stride = (BOX, 1, *(step for _, step in more))
        return cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout(shape, stride=stride)
        )

    def box_copy(self, op: Any, x: cute.Tensor, rows: int) -> Any:
        return cpasync.make_tiled_tma_atom(op, x, self.box_layout(rows), (rows, BOX))

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        q_tma: cute.CopyAtom,
        q: cute.Tensor,
        k_tma: cute.CopyAtom,
        k: cute.Tensor,
        v_tma: cute.CopyAtom,
        v: cute.Tensor,
        o_tma: cute.CopyAtom,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        sink: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        scaling: Scaling,
        window_left: Int32,
        window_right: Int32,
        heads: Int32,
        kv_heads: Int32,
        batch: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        heads_at_once: Int32,
        num_tiles: Int32,
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.allocate()
        barriers = self.pipeline.at(storage.barriers)

        if warp == LOAD.warps[0]:
            for tma in (q_tma, k_tma, v_tma, o_tma):
                cpasync.prefetch_descriptor(tma)
            with cute.arch.elect_one():
                barriers.init()
            cute.arch.mbarrier_init_fence()
        if warp == MMA.warps[0]:
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_address, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            tcgen05_fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        tcgen05_fence_after()
        # All columns are ours, so that the address is known, and takes no register.
        tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)

        qk_mma, pv_mma = self.mmas()

        # S, of stage 0, and O, as a CTA sees them: (rows, columns).
        s_shape = qk_mma.get_slice(0).partition_shape_C((TILE_M, TILE_N))
        s = qk_mma.make_fragment_C(s_shape)
        s = cute.make_tensor(tmem + TMEM_S, s.layout)
        o_shape = pv_mma.get_slice(0).partition_shape_C((TILE_M, HEAD_DIM))
        o_acc = pv_mma.make_fragment_C(o_shape)
        o_acc = cute.make_tensor(tmem + TMEM_O, o_acc.layout)

        work = cute.make_tensor(storage.work, cute.make_layout((WORK_WORDS, WORK_STAGES)))
        scale = cute.make_tensor(storage.scale, cute.make_layout((ROWS, S_STAGES)))
        inverse_sum = cute.make_tensor(storage.inverse_sum, cute.make_layout((ROWS, 2)))
        window = (window_left, window_right)

        # Registers change hands by whole warpgroups. (Correction gives none, but the assembler has
        # to be told what each may use.)
        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == SCHEDULER.warps[0]:
                tiles = self.tile_map(
                    heads, batch, seqlen_q, heads_at_once, cu_seqlens_q, seqused_q
                )
                scheduler = self.scheduler(num_tiles, barriers, storage.clc_response)
                self.scheduler_warp(
                    scheduler, tiles, barriers, work, heads, kv_heads, seqlen_k,
                    cu_seqlens_q, cu_seqlens_k, seqused_k,
                )  # fmt: skip
            elif warp == LOAD.warps[0]:
                self.load_warp(q_tma, q, k_tma, k, v_tma, v, storage, barriers, work, window)
            elif warp == MMA.warps[0]:
                self.mma_warp(qk_mma, pv_mma, storage, s, o_acc, barriers, work, window)
            else:
                self.store_warp(o_tma, o, storage, barriers, work)
        elif warp < SOFTMAX.warps.stop:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            self.softmax_warps(
                s, scale, inverse_sum, lse, sink, barriers, work, window, scaling
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(CORRECTION_REGISTERS)
            self.correction_warps(o_acc, scale, inverse_sum, storage, barriers, work, window)

        # A CTA stays while the other may still signal its barriers, or read its shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == MMA.warps[0]:
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS, is_two_cta=True)

    # -- device: which tile -------------------------------------------------------------------

    @cute.jit
    def scheduler_warp(
        self,
        scheduler: Any,
        tiles: TileMap,
        barriers: Barriers,
        work: cute.Tensor,
        heads: Int32,
        kv_heads: Int32,
        seqlen_k: Int32,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
    ) -> None:
        """Publish the place of one tile after the other, then that there are no more."""
        published = Int32(0)
        requests = Int32(0)
        tile = scheduler.initial_work_tile()
        while tile >= 0:
            exists, block, head, sequence = tiles.locate(tile)
            if exists:
                q_start = Int32(0)
                if cutlass.const_expr(self.spec.varlen_q):
                    q_start = cu_seqlens_q[sequence]
                k_start = Int32(0)
                k_length = seqlen_k
                if cutlass.const_expr(self.spec.varlen_k):
                    k_start = cu_seqlens_k[sequence]
                    k_length = cu_seqlens_k[sequence + 1] - k_start
                if cutlass.const_expr(self.spec.seqused_k):
                    k_length = cutlass.min(k_length, seqused_k[sequence])
                kv_head = head * self.packed // (heads // kv_heads)
                self.publish(
                    work, barriers, published,
                    (block, head, kv_head, sequence, q_start, tiles.seqlen(sequence), k_start,
                     k_length),
                )  # fmt: skip
                published += 1
            scheduler.prefetch_next_work(requests)
            tile = scheduler.advance_to_next_work(tile, requests)
            requests += 1
        self.publish(work, barriers, published, (Int32(-1),))
        scheduler.producer_tail(requests)

    @cute.jit
    def publish(self, work: cute.Tensor, barriers: Barriers, n: Int32, words: Any) -> None:
        barriers.wait_previous("work_empty", n)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(words)):
                work[i, n & (WORK_STAGES - 1)] = words[i]
            barriers.arrive("work_full", n)

    @cute.jit
    def next_work(self, work: cute.Tensor, barriers: Barriers, n: Int32) -> Any:
        """(block, head, kv_head, sequence, q_start, seqlen_q, k_start, seqlen_k); block is -1
        after the last. Heads of q are counted in packs; starts are rows of packed sequences."""
        barriers.wait("work_full", n)
        words = self.work_words(work, n)
        barriers.warp_arrives("work_empty", n)
        return words

    @cute.jit
    def work_words(self, work: cute.Tensor, n: Int32) -> Any:
        words = cute.make_rmem_tensor((WORK_WORDS,), Int32)
        cute.autovec_copy(work[None, n & (WORK_STAGES - 1)], words)
        return tuple(cute.arch.make_warp_uniform(words[i]) for i in range(WORK_WORDS))

    def visible_tiles(self, block: Any, seqlen_q: Any, seqlen_k: Any, window: Any) -> Any:
        """[first, end) of the K/V tiles that some row of the cluster's tile sees."""
        left, right = window
        shift = seqlen_k - seqlen_q  # of the diagonal, which ends in the bottom right corner
        first_key, end_key = Int32(0), seqlen_k
        if self.spec.window_right:
            last_row = block * TILE_M + (TILE_M - 1)
            last_token = cutlass.min(last_row >> self.log_packed, seqlen_q - 1)
            end_key = cutlass.min(end_key, last_token + shift + right + 1)
        if self.spec.window_left:
            first_token = (block * TILE_M) >> self.log_packed
            first_key = cutlass.max(first_key, first_token + shift - left)
        first = first_key >> LOG_TILE_N
        end = (cutlass.max(end_key, 0) + (TILE_N - 1)) >> LOG_TILE_N
        return first, cutlass.max(first, end)

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_warp(
        self,
        q_tma: cute.CopyAtom,
        q: cute.Tensor,
        k_tma: cute.CopyAtom,
        k: cute.Tensor,
        v_tma: cute.CopyAtom,
        v: cute.Tensor,
        storage: Storage,
        barriers: Barriers,
        work: cute.Tensor,
        window: Any,
    ) -> None:
        """Q of each tile, then the K/V tiles from the last to the first, each CTA its half."""
        boxes = HEAD_DIM // BOX
        q_smem = self.boxes(storage.q, ROWS, (boxes, ROWS * BOX), (1, Q_BYTES // 2))
        k_smem = self.boxes(storage.kv, KEYS, (boxes, KEYS * BOX), (KV_STAGES, KV_BYTES // 2))
        v_smem = self.boxes(
            storage.kv, TILE_N, (DIMS // BOX, TILE_N * BOX), (KV_STAGES, KV_BYTES // 2)
        )
        tile = Int32(0)
        loaded_q = Int32(0)
        n = Int32(0)  # uses of the ring
        block, head, kv_head, sequence, q_start, seqlen_q, k_start, seqlen_k = self.next_work(
            work, barriers, tile
        )
        while block >= 0:
            cta = cta_rank()
            first, end = self.visible_tiles(block, seqlen_q, seqlen_k, window)
            if first < end:
                barriers.wait_previous("q_empty", loaded_q)
                self.expect(barriers, "q_full", loaded_q, Q_BYTES, cta)
                rows = self.query_box(q, CTAS * block + cta, head, sequence, q_start, seqlen_q)
                self.load(q_tma, rows, q_smem, barriers, "q_full", loaded_q)
                loaded_q += 1
                for i in cutlass.range(end - first + 1, unroll=1):
                    if i < end - first:
                        barriers.wait_previous("kv_empty", n)
                        self.expect(barriers, "kv_full", n, KV_BYTES, cta)
                        keys = self.key_box(
                            k,
                            KEYS,
                            CTAS * (end - 1 - i) + cta,
                            kv_head,
                            sequence,
                            k_start,
                            seqlen_k,
                        )
                        self.load(k_tma, keys, k_smem, barriers, "kv_full", n)
                        n += 1
                    if i > 0:
                        barriers.wait_previous("kv_empty", n)
                        self.expect(barriers, "kv_full", n, KV_BYTES, cta)
                        values = self.key_box(
                            v, TILE_N, end - i, kv_head, sequence, k_start, seqlen_k
                        )
                        values = cute.domain_offset((0, cta * DIMS), values)
                        self.load(v_tma, values, v_smem, barriers, "kv_full", n)
                        n += 1
            tile += 1
            block, head, kv_head, sequence, q_start, seqlen_q, k_start, seqlen_k = self.next_work(
                work, barriers, tile
            )

    @cute.jit
    def expect(
        self, barriers: Barriers, name: cutlass.Constexpr, n: Int32, nbytes: int, cta: Int32
    ) -> None:
        """CTA 0, whose barrier it is, expects the bytes of both."""
        if cta == 0:
            with cute.arch.elect_one():
                barriers.expect(name, n, nbytes)

    @cute.jit
    def load(
        self,
        tma: cute.CopyAtom,
        rows: cute.Tensor,
        smem: cute.Tensor,
        barriers: Barriers,
        name: cutlass.Constexpr,
        n: Int32,
    ) -> None:
        """Rows to a stage of shared memory, box by box."""
        boxes = cute.local_tile(rows, (cute.size(smem, mode=[0]), BOX), (0, None))
        source, to = self.partition(tma, boxes, smem)
        stages = cute.size(smem, mode=[3])
        for box in cutlass.range_constexpr(cute.size(smem, mode=[2])):
            cute.copy(
                tma, source[None, box], to[None, box, n & (stages - 1)],
                tma_bar_ptr=barriers.pointer(name, n),
            )  # fmt: skip

    def boxes(self, buffer: cute.Pointer, rows: int, *more: tuple[int, int]) -> cute.Tensor:
        return self.swizzled(buffer, self.box_layout(rows, *more))

    def swizzled(self, buffer: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
        return cute.make_tensor(cute.recast_ptr(buffer, layout.inner), layout.outer)

    def partition(self, tma: cute.CopyAtom, rows: cute.Tensor, smem: cute.Tensor) -> Any:
        """(global, shared) boxes for cute.copy: (box, boxes of a row, ...)."""
        to, source = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(rows, 0, 2)
        )
        return source, to

    def query_box(
        self, x: Any, box: Any, head: Any, sequence: Any, start: Any, seqlen: Any
    ) -> cute.Tensor:
        """The box-th 128 rows of a sequence in q or o: (128, 256)."""
        if self.spec.ragged_q:
            token = box * self.tokens
            valid = cutlass.min(cutlass.max(seqlen - token, 0), self.tokens)
            x = cute.domain_offset(
                ((0, self.tokens - valid), 0), x[None, None, start + token + valid, head]
            )
            return cute.local_tile(x, (ROWS, HEAD_DIM), (0, 0))
        return cute.local_tile(x[None, None, head, sequence], (ROWS, HEAD_DIM), (box, 0))

    def key_box(
        self, x: Any, rows: int, box: Any, head: Any, sequence: Any, start: Any, seqlen: Any
    ) -> cute.Tensor:
        """The box-th `rows` keys of a sequence in k or v: (rows, 256)."""
        if self.spec.ragged_k:
            token = box * rows
            valid = cutlass.min(cutlass.max(seqlen - token, 0), rows)
            coord = (start + token + valid, head)
            if not self.spec.varlen_k:
                coord = (*coord, sequence)
            x = cute.domain_offset((rows - valid, 0), x[(None, None, *coord)])
            return cute.local_tile(x, (rows, HEAD_DIM), (0, 0))
        return cute.local_tile(x[None, None, head, sequence], (rows, HEAD_DIM), (box, 0))

    # -- device: MMA --------------------------------------------------------------------------

    @cute.jit
    def mma_warp(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        storage: Storage,
        s: cute.Tensor,
        o_acc: cute.Tensor,
        barriers: Barriers,
        work: cute.Tensor,
        window: Any,
    ) -> None:
        """S of the next K/V tile before O of this one, so that softmax has the time of an MMA."""
        q_layout = sm100.make_smem_layout_a(qk_mma, (TILE_M, TILE_N, HEAD_DIM), self.dtype, 1)
        k_layout = sm100.make_smem_layout_b(
            qk_mma, (TILE_M, TILE_N, HEAD_DIM), self.dtype, KV_STAGES
        )
        v_layout = sm100.make_smem_layout_b(
            pv_mma, (TILE_M, HEAD_DIM, TILE_N), self.dtype, KV_STAGES
        )
        p_layout = sm100.make_smem_layout_a(pv_mma, (TILE_M, HEAD_DIM, TILE_N), self.dtype, 1)
        q_frag = qk_mma.make_fragment_A(self.swizzled(storage.q, q_layout))
        k_frag = qk_mma.make_fragment_B(self.swizzled(storage.kv, k_layout))
        v_frag = pv_mma.make_fragment_B(self.swizzled(storage.kv, v_layout))
        p_frag = pv_mma.get_slice(0).make_fragment_A(cute.make_tensor(s.iterator, p_layout.outer))

        tile = Int32(0)
        loaded_q = Int32(0)
        n = Int32(0)  # uses of the ring
        issued = Int32(0)  # K/V tiles whose S has been issued
        added = Int32(0)  # K/V tiles whose P V has been
        block, _, _, _, _, seqlen_q, _, seqlen_k = self.next_work(work, barriers, tile)
        while block >= 0:
            first, end = self.visible_tiles(block, seqlen_q, seqlen_k, window)
            if first < end and cta_rank() == 0:
                barriers.wait("q_full", loaded_q)
                for i in cutlass.range(end - first + 1, unroll=1):
                    if i < end - first:
                        barriers.wait("kv_full", n)
                        # S of this stage two tiles ago has become P, and the P V that reads it
                        # has been issued: MMAs run in order.
                        tcgen05_fence_after()
                        self.issue_qk(qk_mma, s, q_frag, k_frag, issued, n)
                        barriers.commit("kv_empty", n)
                        barriers.commit("s_full", issued)
                        n += 1
                        issued += 1
                        if i == end - first - 1:
                            barriers.commit("q_empty", loaded_q)
                    if i > 0:
                        barriers.wait("kv_full", n)
                        barriers.wait("o_ready", added)
                        barriers.wait("p_full", added)
                        tcgen05_fence_after()
                        self.issue_pv(pv_mma, o_acc, p_frag, v_frag, added, n, i > 1)
                        barriers.commit("kv_empty", n)
                        barriers.commit("pv_done", added)
                        n += 1
                        added += 1
                loaded_q += 1
            tile += 1
            block, _, _, _, _, seqlen_q, _, seqlen_k = self.next_work(work, barriers, tile)

    @cute.jit
    def issue_qk(
        self,
        mma: cute.TiledMma,
        s: cute.Tensor,
        q_frag: cute.Tensor,
        k_frag: cute.Tensor,
        issued: Int32,
        n: Int32,
    ) -> None:
        stage = n & (KV_STAGES - 1)
        column = TILE_N * (issued & (S_STAGES - 1))
        s = cute.make_tensor(s.iterator + column, s.layout)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for step in cutlass.range_constexpr(cute.size(q_frag, mode=[2])):
            cute.gemm(
                mma,
                s,
                q_frag[None, None, step, 0],
                k_frag[None, None, step, stage],
                s,
            )
            mma.set(tcgen05.Field.ACCUMULATE, True)

    @cute.jit
    def issue_pv(
        self,
        mma: cute.TiledMma,
        o_acc: cute.Tensor,
        p_frag: cute.Tensor,
        v_frag: cute.Tensor,
        added: Int32,
        n: Int32,
        accumulate: Boolean,
    ) -> None:
        stage = n & (KV_STAGES - 1)
        # Two values of P in a column of tensor memory.
        column = 2 * TILE_N * (added & (S_STAGES - 1))
        p = cute.make_tensor(p_frag.iterator + column, p_frag.layout)
        mma.set(tcgen05.Field.ACCUMULATE, accumulate)
        for step in cutlass.range_constexpr(cute.size(v_frag, mode=[2])):
            cute.gemm(
                mma,
                o_acc,
                p[None, None, step, 0],
                v_frag[None, None, step, stage],
                o_acc,
            )
            mma.set(tcgen05.Field.ACCUMULATE, True)

    # -- device: softmax ----------------------------------------------------------------------

    @cute.jit
    def softmax_warps(
        self,
        s: cute.Tensor,
        scale: cute.Tensor,
        inverse_sum: cute.Tensor,
        lse: cute.Tensor | None,
        sink: cute.Tensor | None,
        barriers: Barriers,
        work: cute.Tensor,
        window: Any,
        scaling: Scaling,
    ) -> None:
        """A thread has a row of S, and writes P over it."""
        row = cute.arch.thread_idx()[0] % ROWS
        s_rows = s[(None, None), 0, 0]
        load = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT)), Float32), s_rows
        ).get_slice(row)
        s_from = load.partition_S(s_rows)
        values_shape = load.partition_D(cute.make_identity_tensor((ROWS, TILE_N))).shape
        p_rows = cute.make_tensor(
            s_rows.iterator, cute.composition(s_rows.layout, cute.make_layout((ROWS, TILE_N // 2)))
        )
        store = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(FRAGMENT // 2)), Float32),
            p_rows,
        ).get_slice(row)
        p_to = store.partition_D(p_rows)
        words_shape = store.partition_S(cute.make_identity_tensor((ROWS, TILE_N // 2))).shape

        tile = Int32(0)
        n = Int32(0)  # K/V tiles
        # The words that are not needed for now stay in shared memory: registers are short.
        barriers.wait("work_full", tile)
        block, _, _, _, _, seqlen_q, _, seqlen_k = self.work_words(work, tile)
        while block >= 0:
            first, end = self.visible_tiles(block, seqlen_q, seqlen_k, window)
            first_row = (CTAS * block + cta_rank()) * ROWS
            # Tiles that every row of this CTA sees whole need no mask.
            whole_first, whole_end = self.whole_tiles(first_row, seqlen_q, seqlen_k, window)
            maximum = Float32(-INF)
            total = Float32(0.0)
            for i in cutlass.range(end - first, unroll=1):
                key_tile = end - 1 - i
                barriers.wait("s_full", n)
                tcgen05_fence_after()
                column = TILE_N * (n & (S_STAGES - 1))
                values = cute.make_rmem_tensor(values_shape, Float32)
                cute.copy(load, cute.make_tensor(s_from.iterator + column, s_from.layout), values)
                cute.arch.fence_view_async_tmem_load()
                if cutlass.const_expr(self.spec.softcap):
                    for j in cutlass.range_constexpr(TILE_N):
                        values[j] = cute.math.tanh(values[j] * scaling.before_tanh, fastmath=True)
                if key_tile < whole_first or key_tile >= whole_end:
                    self.mask(values, key_tile, row, work, tile, window)

                previous = maximum
                maximum, used, stays, large = self.move_maximum(values, previous, scaling)
                offset = -used * scaling.log2
                if large:
                    used, offset = self.subtract_maximum(values, maximum), Float32(0.0)
                factor = cute.math.exp2((previous - used) * scaling.log2, fastmath=True)
                if stays:
                    factor = Float32(1.0)
                scale[row, n & (S_STAGES - 1)] = factor
                barriers.warp_arrives("scale_full", n)

                tile_sum = self.exponentiate(
                    values,
                    store,
                    cute.make_tensor(p_to.iterator + column, p_to.layout),
                    words_shape,
                    scaling.log2,
                    offset,
                )
                cute.arch.fence_view_async_tmem_store()
                tcgen05_fence_before()
                barriers.warp_arrives("p_full", n)
                total = total * factor + tile_sum
                n += 1

            # What O is divided by, and the log-sum-exp; in base 2 up to the end.
            block, head, _, sequence, q_start, seqlen_q, _, _ = self.work_words(work, tile)
            barriers.warp_arrives("work_empty", tile)
            packed_row = (CTAS * block + cta_rank()) * ROWS + row
            token = packed_row >> self.log_packed
            head_of_q = head * self.packed + (packed_row & (self.packed - 1))
            if maximum == INF:  # inf - inf, which the FMA path for exponentials does not see
                total = Float32(NAN)
            rest = scaling.rounded_off(maximum)
            inverse = Float32(0.0)
            log_sum = Float32(-INF)
            if cutlass.const_expr(sink is not None):
                sink_value = Float32(0.0)
                if token < seqlen_q:
                    sink_value = Float32(sink[head_of_q])
                log_sum = sink_value
                if total != 0.0:
                    if not (sink_value < INF):
                        total = Float32(NAN)
                    # Both are compared before they meet base 2, which would round them again.
                    above_sink = scaling.multiply_add(maximum, -sink_value)
                    below, above = cutlass.min(above_sink, 0.0), cutlass.min(-above_sink, 0.0)
                    ratio = cute.math.exp2(below * LOG2_E - rest, fastmath=True)
                    own = cute.math.exp2(above * LOG2_E, fastmath=True)
                    whole = total * ratio + own
                    inverse = ratio / whole
                    log_whole = cute.math.log2(whole, fastmath=True) * LN_2
                    log_sum = sink_value + log_whole
                    if above_sink > 0.0:
                        log_sum = scaling.multiply_add(maximum, log_whole)
            else:
                if total != 0.0:
                    inverse = Float32(1.0) / total
                    log_total = (cute.math.log2(total, fastmath=True) - rest) * LN_2
                    log_sum = scaling.multiply_add(maximum, log_total)
            barriers.wait_previous("sum_read", tile)
            inverse_sum[row, tile & 1] = inverse
            barriers.warp_arrives("sum_full", tile)
            if cutlass.const_expr(lse is not None):
                if token < seqlen_q:
                    if cutlass.const_expr(self.spec.varlen_q):
                        lse[head_of_q, q_start + token] = log_sum
                    else:
                        lse[sequence, head_of_q, token] = log_sum
            tile += 1
            barriers.wait("work_full", tile)
            block, _, _, _, _, seqlen_q, _, seqlen_k = self.work_words(work, tile)
        barriers.warp_arrives("work_empty", tile)

    def visible_keys(self, token: Any, seqlen_q: Any, seqlen_k: Any, window: Any) -> Any:
        """[low, high) of the keys that a token sees."""
        left, right = window
        diagonal = token + seqlen_k - seqlen_q
        low, high = Int32(0), seqlen_k
        if self.spec.window_right:
            high = cutlass.min(high, diagonal + right + 1)
        if self.spec.window_left:
            low = diagonal - left
        return low, high

    def whole_tiles(self, first_row: Any, seqlen_q: Any, seqlen_k: Any, window: Any) -> Any:
        """[first, end) of the K/V tiles all of whose keys are seen by all of the CTA's rows."""
        low, _ = self.visible_keys(
            (first_row + ROWS - 1) >> self.log_packed, seqlen_q, seqlen_k, window
        )
        _, high = self.visible_keys(first_row >> self.log_packed, seqlen_q, seqlen_k, window)
        first = (cutlass.max(low, 0) + (TILE_N - 1)) >> LOG_TILE_N
        return first, cutlass.max(high, 0) >> LOG_TILE_N

    @cute.jit
    def mask(
        self,
        values: cute.Tensor,
        key_tile: Int32,
        row: Int32,
        work: cute.Tensor,
        tile: Int32,
        window: Any,
    ) -> None:
        """-inf in the columns of keys that the row does not see."""
        keep_branch()
        block, _, _, _, _, seqlen_q, _, seqlen_k = self.work_words(work, tile)
        token = (CTAS * block + cta_rank()) * ROWS + row >> self.log_packed
        low, high = self.visible_keys(token, seqlen_q, seqlen_k, window)
        low, high = low - key_tile * TILE_N, high - key_tile * TILE_N
        for j in cutlass.range_constexpr(TILE_N):
            visible = j < high
            if cutlass.const_expr(self.spec.window_left):
                visible = visible and j >= low
            values[j] = values[j] if visible else Float32(-INF)

    @cute.jit
    def move_maximum(
        self, values: cute.Tensor, previous: Float32, scaling: Scaling
    ) -> tuple[Float32, Float32, Boolean, Boolean]:
        """(the maximum to go on with, the same but finite where it is -inf, whether it is the
        previous one, whether the row's scores are large). NaN where a score is."""
        chains = [values[j] for j in range(4)]
        for j in cutlass.range_constexpr(4, TILE_N):
            chains[j % 4] = cute.arch.fmax(chains[j % 4], values[j], nan=True)
        highest = cute.arch.fmax(
            cute.arch.fmax(chains[0], chains[1], nan=True),
            cute.arch.fmax(chains[2], chains[3], nan=True),
            nan=True,
        )
        highest = cute.arch.fmax(highest, previous, nan=True)
        large = (abs(highest) >= scaling.large) & (highest != -INF)
        # Rounded down: an ulp of a large maximum may be more than the growth that is let pass.
        passed, _ = cute.arch.add_packed_f32x2(
            (previous, previous), (scaling.growth, scaling.growth), rnd="rm"
        )
        stays = highest <= passed
        maximum = previous if stays else highest
        used = cute.arch.fmax(maximum, scaling.lowest, nan=True)
        return maximum, used, stays, large

    @cute.jit
    def subtract_maximum(self, values: cute.Tensor, maximum: Float32) -> Float32:
        """Subtracts a maximum too large to multiply, and returns it: what is used then."""
        keep_branch()
        for j in cutlass.range_constexpr(0, TILE_N, 2):
            values[j], values[j + 1] = cute.arch.add_packed_f32x2(
                (values[j], values[j + 1]), (-maximum, -maximum)
            )
        return maximum

    @cute.jit
    def exponentiate(
        self,
        values: cute.Tensor,
        store: cute.TiledCopy,
        to: cute.Tensor,
        shape: Any,
        scale_log2: Float32,
        offset: Float32,
    ) -> Float32:
        """P = 2 ** (values * scale_log2 + offset), two in a word, to tensor memory; its sum."""
        words = cute.make_rmem_tensor(shape, Float32)  # (words of a fragment, 1, fragments)
        sums = [(Float32(0.0), Float32(0.0)) for _ in range(4)]
        for fragment in cutlass.range_constexpr(TILE_N // FRAGMENT):
            pairs = [
                cute.arch.fma_packed_f32x2(
                    (values[j], values[j + 1]), (scale_log2, scale_log2), (offset, offset)
                )
                for j in range(fragment * FRAGMENT, (fragment + 1) * FRAGMENT, 2)
            ]
            pairs = self.exp2(pairs, fragment == TILE_N // FRAGMENT - 1)
            floats = cute.make_rmem_tensor((FRAGMENT,), Float32)
            for j in cutlass.range_constexpr(FRAGMENT // 2):
                floats[2 * j], floats[2 * j + 1] = pairs[j]
                sums[j % 4] = cute.arch.add_packed_f32x2(sums[j % 4], pairs[j])
            part = words[None, None, fragment]
            rounded = cute.make_tensor(
                cute.recast_ptr(part.iterator, dtype=self.dtype), cute.make_layout(FRAGMENT)
            )
            rounded.store(floats.load().to(self.dtype))
            cute.copy(store, part, to[None, None, fragment])
        add = cute.arch.add_packed_f32x2
        x, y = add(add(sums[0], sums[1]), add(sums[2], sums[3]))
        return x + y

    def exp2(self, pairs: list[Any], last: bool) -> list[Any]:
        """2 ** x of a fragment: some pairs on the FMA units, but none of the last fragment, on
        which the MMA waits."""
        emulated = [
            j
            for j in range(len(pairs))
            if not last and 2 * j % EX2_EMU_FREQ >= EX2_EMU_FREQ - EX2_EMU_RES
        ]
        results = dict(
            zip(emulated, exp2_pairs([pairs[j] for j in emulated], bounded=True), strict=True)
        )
        for j in range(len(pairs)):
            if j not in results:
                x, y = pairs[j]
                results[j] = cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True)
        return [results[j] for j in range(len(pairs))]

    # -- device: correction -------------------------------------------------------------------

    @cute.jit
    def correction_warps(
        self,
        o_acc: cute.Tensor,
        scale: cute.Tensor,
        inverse_sum: cute.Tensor,
        storage: Storage,
        barriers: Barriers,
        work: cute.Tensor,
        window: Any,
    ) -> None:
        """A thread has a row of O: rescale it where its maximum moved, and at the end divide it."""
        row = cute.arch.thread_idx()[0] % ROWS
        o_rows = cute.composition(o_acc[(None, None), 0, 0], cute.make_layout((ROWS, BOX)))
        load = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT)), Float32), o_rows
        ).get_slice(row)
        store = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(FRAGMENT)), Float32), o_rows
        ).get_slice(row)
        o_from, o_to = load.partition_S(o_rows), store.partition_D(o_rows)
        shape = load.partition_D(cute.make_identity_tensor((ROWS, BOX))).shape
        o_smem = self.boxes(storage.o, ROWS, (O_STAGES, O_BYTES // 2))

        tile = Int32(0)
        n = Int32(0)  # K/V tiles
        staged = Int32(0)  # boxes of O
        block, _, _, _, _, seqlen_q, _, seqlen_k = self.next_work(work, barriers, tile)
        while block >= 0:
            first, end = self.visible_tiles(block, seqlen_q, seqlen_k, window)
            for i in cutlass.range(end - first, unroll=1):
                barriers.wait("scale_full", n)
                factor = scale[row, n & (S_STAGES - 1)]
                if i > 0:
                    if cute.arch.vote_any_sync(factor != 1.0):
                        barriers.wait("pv_done", n - 1)
                        tcgen05_fence_after()
                        for box in cutlass.range(HEAD_DIM // BOX, unroll=1):
                            at = box * BOX
                            values = cute.make_rmem_tensor(shape, Float32)
                            cute.copy(
                                load, cute.make_tensor(o_from.iterator + at, o_from.layout), values
                            )
                            cute.arch.fence_view_async_tmem_load()
                            self.multiply(values, factor)
                            cute.copy(
                                store, values, cute.make_tensor(o_to.iterator + at, o_to.layout)
                            )
                        cute.arch.fence_view_async_tmem_store()
                        tcgen05_fence_before()
                # For a tile's first: O has been read by the previous tile's end.
                barriers.warp_arrives("o_ready", n)
                n += 1

            barriers.wait("sum_full", tile)
            inverse = inverse_sum[row, tile & 1]
            barriers.warp_arrives("sum_read", tile)
            if first < end:
                barriers.wait("pv_done", n - 1)
                tcgen05_fence_after()
            for box in cutlass.range(HEAD_DIM // BOX, unroll=1):
                values = cute.make_rmem_tensor(shape, Float32)
                if first < end:
                    at = box * BOX
                    cute.copy(load, cute.make_tensor(o_from.iterator + at, o_from.layout), values)
                    cute.arch.fence_view_async_tmem_load()
                if inverse == 0.0:  # no visible key; O may hold anything
                    values.fill(0.0)
                self.multiply(values, inverse)
                rounded = cute.make_rmem_tensor((BOX,), self.dtype)
                rounded.store(values.load().to(self.dtype).reshape((BOX,)))
                barriers.wait_previous("o_stored", staged)
                self.stage(rounded, o_smem[row, None, staged & (O_STAGES - 1)])
                cute.arch.fence_view_async_shared()
                barriers.warp_arrives("o_staged", staged)
                staged += 1
            tcgen05_fence_before()
            tile += 1
            block, _, _, _, _, seqlen_q, _, seqlen_k = self.next_work(work, barriers, tile)

    @cute.jit
    def multiply(self, values: cute.Tensor, factor: Float32) -> None:
        for j in cutlass.range_constexpr(0, BOX, 2):
            values[j], values[j + 1] = cute.arch.mul_packed_f32x2(
                (values[j], values[j + 1]), (factor, factor)
            )

    @cute.jit
    def stage(self, rounded: cute.Tensor, smem_row: cute.Tensor) -> None:
        """A row of a box to shared memory, 16 bytes at once."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        chunks = cute.logical_divide(smem_row, cute.make_layout(8))
        source = cute.logical_divide(rounded, cute.make_layout(8))
        for c in cutlass.range_constexpr(BOX // 8):
            cute.copy(atom, source[None, c], chunks[None, c])

    # -- device: store ------------------------------------------------------------------------

    @cute.jit
    def store_warp(
        self,
        o_tma: cute.CopyAtom,
        o: cute.Tensor,
        storage: Storage,
        barriers: Barriers,
        work: cute.Tensor,
    ) -> None:
        o_smem = self.boxes(storage.o, ROWS, (O_STAGES, O_BYTES // 2))
        tile = Int32(0)
        stored = Int32(0)
        block, head, _, sequence, q_start, seqlen_q, _, _ = self.next_work(work, barriers, tile)
        while block >= 0:
            rows = self.query_box(o, CTAS * block + cta_rank(), head, sequence, q_start, seqlen_q)
            boxes = cute.local_tile(rows, (ROWS, BOX), (0, None))
            o_to, o_from = self.partition(o_tma, boxes, o_smem)
            for box in cutlass.range_constexpr(HEAD_DIM // BOX):
                barriers.wait("o_staged", stored)
                with cute.arch.elect_one():
                    cute.copy(o_tma, o_from[None, stored & (O_STAGES - 1)], o_to[None, box])
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    barriers.arrive("o_stored", stored)
                stored += 1
            tile += 1
            block, head, _, sequence, q_start, seqlen_q, _, _ = self.next_work(work, barriers, tile)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)
