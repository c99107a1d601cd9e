"""Lightning Attention decode with bulk copies: every warp is a pipeline of its own.

The same function as `decode`, for sm_90 and newer. A tile (tile_v rows of K, contiguous in
memory) travels global -> shared -> registers -> shared -> global by `cp.async.bulk`, one
instruction each way, while the warp works on another tile. No warp waits for another: a warp has
its own ring of `num_stages` tiles, its own mbarriers, and its own share of the tiles, dealt out
round robin over a persistent grid.

    warp, lane 0     load    tile i + num_stages - 1 into the stage that tile i - 1 has left
    warp             wait    for tile i
                     compute in registers, write back to the stage
    warp, lane 0     store   tile i from its stage

Shared memory: num_warps * num_stages * (tile bytes + one mbarrier); checked in BulkDecodeSpec.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .arguments import fake_args
from .spec import WARP_SIZE, BulkDecodeSpec
from .tile import StateTile


class Sm90LightningDecodeBulk:
    """The kernel for one BulkDecodeSpec; see the module's docstring."""

    def __init__(self, spec: BulkDecodeSpec):
        self.spec = spec
        self.tile = StateTile(spec)
        self.state_dtype = self.tile.state_dtype
        self.num_stages = spec.num_stages
        self.tiles_per_head = spec.head_dim_v // spec.tile_v
        self.tile_elements = spec.tile_v * spec.head_dim_k

    def fake_args(self) -> tuple[Any, ...]:
        return fake_args(self.spec)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        state: cute.Tensor,
        decay: cute.Tensor,
        state_indices: cute.Tensor | None,
        draft_k: cute.Tensor | None,
        draft_v: cute.Tensor | None,
        num_accepted: cute.Tensor | None,
        softmax_scale: cutlass.Float32,
        num_blocks: cutlass.Int32,
        stream: Any,
    ) -> None:
        num_tiles = self.tiles_per_head * state.shape[1] * q.shape[0]
        blocks = cutlass.min(num_blocks, cute.ceil_div(num_tiles, self.spec.num_warps))
        self.kernel(
            q, k, v, o, state, decay, state_indices, draft_k, draft_v, num_accepted, softmax_scale
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.spec.num_threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        state: cute.Tensor,
        decay: cute.Tensor,
        state_indices: cute.Tensor | None,
        draft_k: cute.Tensor | None,
        draft_v: cute.Tensor | None,
        num_accepted: cute.Tensor | None,
        softmax_scale: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        lane = thread % WARP_SIZE
        num_warps, stages = self.spec.num_warps, self.num_stages

        smem = cutlass.utils.SmemAllocator()
        ring = smem.allocate_tensor(
            self.state_dtype, cute.make_layout((self.tile_elements, stages, num_warps)), 128
        )
        barriers = smem.allocate_array(cutlass.Int64, num_warps * stages)
        tile_loaded = barriers + warp * stages

        if lane == 0:
            for s in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(tile_loaded + s, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

        num_tiles = self.tiles_per_head * state.shape[1] * q.shape[0]
        first = block * num_warps + warp
        step = blocks * num_warps
        mine = (num_tiles - first + step - 1) // step  # at most 0 when there is none

        if lane == 0:
            for i in cutlass.range_constexpr(stages - 1):
                if i < mine:
                    self.load(
                        state, state_indices, first + i * step, ring[None, i, warp], tile_loaded + i
                    )

        for i in cutlass.range(mine):
            stage = i % stages
            tile_index, head, sequence, slot, valid = self.locate(
                first + i * step, state, state_indices
            )
            if valid:
                buffer = ring[None, stage, warp]
                part = self.tile.thread_part(buffer, cutlass.Int32(0))
                stored = cute.make_rmem_tensor(part.shape, self.state_dtype)
                s = cute.make_rmem_tensor(part.shape, cutlass.Float32)
                factor = cute.math.exp(-decay[head])
                if cutlass.const_expr(self.spec.multi_token):
                    cute.arch.mbarrier_wait(tile_loaded + stage, (i // stages) & 1)
                    cute.autovec_copy(part, stored)
                    s.store(stored.load().to(cutlass.Float32))
                    if cutlass.const_expr(self.spec.replay):
                        self.tile.replay(
                            s, factor, draft_k, draft_v, num_accepted, sequence, slot, head,
                            tile_index,
                        )
                        self.store(s, stored, part, state, slot, head, tile_index, buffer, lane)
                    self.tile.tokens(
                        s, factor, q, k, v, o, softmax_scale, sequence, head, tile_index
                    )
                    if cutlass.const_expr(not self.spec.replay):
                        self.store(s, stored, part, state, slot, head, tile_index, buffer, lane)
                else:
                    # q, k and v are on their way while the tile is waited for.
                    q_frag = self.tile.along_k(q[sequence, head, None])
                    k_frag = self.tile.along_k(k[sequence, head, None])
                    v_frag = self.tile.along_v(v[sequence, head, None], tile_index)
                    cute.arch.mbarrier_wait(tile_loaded + stage, (i // stages) & 1)
                    cute.autovec_copy(part, stored)
                    s.store(stored.load().to(cutlass.Float32))
                    self.tile.update(s, factor, k_frag, v_frag)
                    self.store(s, stored, part, state, slot, head, tile_index, buffer, lane)
                    self.tile.output(s, q_frag, o[sequence, head, None], softmax_scale, tile_index)
            else:
                cute.arch.mbarrier_wait(tile_loaded + stage, (i // stages) & 1)
                self.tile.zeros(o, sequence, head, tile_index)
                if lane == 0:
                    cute.arch.cp_async_bulk_commit_group()  # an empty one: a group for every tile

            following = i + stages - 1
            if lane == 0 and following < mine:
                # Its stage held tile i - 1: wait until that store, not the latest, has read it.
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                refill = following % stages
                self.load(
                    state,
                    state_indices,
                    first + following * step,
                    ring[None, refill, warp],
                    tile_loaded + refill,
                )

        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def locate(
        self, index: cutlass.Int32, state: cute.Tensor, state_indices: cute.Tensor | None
    ) -> Any:
        """(tile of V, head, sequence, slot, whether the slot exists) of a tile's index. Tiles
        next to each other in memory have neighbouring indices."""
        heads = state.shape[1]
        tile_index = index % self.tiles_per_head
        head = (index // self.tiles_per_head) % heads
        sequence = index // (self.tiles_per_head * heads)
        slot = sequence
        valid = cutlass.Boolean(True)
        if cutlass.const_expr(self.spec.indexed):
            # A negative index is a padded row; one past the pool is treated alike, see `decode`.
            slot = state_indices[sequence]
            valid = slot >= 0 and slot < state.shape[0]
        return tile_index, head, sequence, slot, valid

    @cute.jit
    def load(
        self,
        state: cute.Tensor,
        state_indices: cute.Tensor | None,
        index: cutlass.Int32,
        buffer: cute.Tensor,
        loaded: cute.Pointer,
    ) -> None:
        """Start the copy of a tile into its stage. One lane only."""
        tile_index, head, _, slot, valid = self.locate(index, state, state_indices)
        if valid:
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, self.spec.tile_bytes)
            atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.state_dtype)
            cute.copy(
                atom, self.global_tile(state, slot, head, tile_index), buffer, mbar_ptr=loaded
            )
        else:
            cute.arch.mbarrier_arrive(loaded)

    @cute.jit
    def store(
        self,
        s: cute.Tensor,
        stored: cute.Tensor,
        part: cute.Tensor,
        state: cute.Tensor,
        slot: cutlass.Int32,
        head: cutlass.Int32,
        tile_index: cutlass.Int32,
        buffer: cute.Tensor,
        lane: cutlass.Int32,
    ) -> None:
        """Write s into its stage, and start the copy of the stage to global memory."""
        stored.store(s.load().to(self.state_dtype))
        cute.autovec_copy(stored, part)
        cute.arch.fence_proxy("async.shared", space="cta")  # before the copy engine reads it
        cute.arch.sync_warp()
        if lane == 0:
            atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.state_dtype)
            cute.copy(atom, buffer, self.global_tile(state, slot, head, tile_index))
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def global_tile(
        self,
        state: cute.Tensor,
        slot: cutlass.Int32,
        head: cutlass.Int32,
        tile_index: cutlass.Int32,
    ) -> cute.Tensor:
        matrix = state[slot, head, None, None]
        start = (matrix.iterator + tile_index * self.tile_elements).align(16)
        return cute.make_tensor(start, cute.make_layout((self.tile_elements,)))
