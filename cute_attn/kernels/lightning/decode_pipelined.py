"""Lightning Attention decode through shared memory, with a pipeline for each warp.

The kernel computes what `decode` computes, for one token per call. A warp computes on one tile
(tile_v rows of K, contiguous in memory) while its next tiles are loaded into shared memory. Warps
never wait for other warps, because each warp has its own ring of `num_stages` tiles, and gets tiles
round robin in a persistent grid.

    start      the load of tile i + num_stages - 1, into the stage of tile i - 1
    wait       for tile i
    compute    in registers
    write back tile i, from registers or through its stage

`load="bulk"` loads a tile with one `cp.async.bulk` by lane 0, and has an mbarrier for each stage
(sm_90 and newer). With "cp_async" every lane loads what it uses, so lanes need no barrier.

Shared memory: num_warps * num_stages * (tile bytes + one mbarrier); checked in the Spec.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ..common.decay import decay_exp
from ..common.entry import entry, placeholders
from ..common.pipeline import Edge, Kind, Pipeline, Role
from ..common.smem import Buffer, SharedMemory
from ..common.spec import VECTOR_BYTES, WARP_SIZE
from .arguments import Arguments, fake_arguments
from .spec import PipelinedDecodeSpec
from .tile import StateTile


class LightningDecodePipelined:
    """The kernel for one PipelinedDecodeSpec; see the module's docstring."""

    def __init__(self, spec: PipelinedDecodeSpec):
        self.spec = spec
        self.tile = StateTile(spec)
        self.state_dtype = self.tile.state_dtype
        self.num_stages = spec.num_stages
        self.bulk_load = spec.load == "bulk"
        self.bulk_write_back = spec.write_back == "bulk"
        self.tiles_per_head = spec.head_dim_v // spec.tile_v
        self.tile_elements = spec.tile_v * spec.head_dim_k
        # Each warp is producer and consumer of its own ring.
        warp = Role("warp", range(1))
        self.pipeline = Pipeline(
            Edge("tile_full", warp, warp, spec.num_stages, Kind.BYTES, payload="a tile")
        )
        self.memory = SharedMemory(
            Buffer(
                "ring", self.state_dtype, self.tile_elements, spec.num_warps * spec.num_stages, 128
            ),
            Buffer("barriers", cutlass.Int64, spec.num_warps * self.pipeline.count),
        )

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        """Arguments of the emulator's `Names`: mbarriers and tiles as reports name them. Shared
        memory begins at address `shared_base`."""
        shared = self.memory.names(shared_base)
        barriers, _, _ = shared.pop("barriers")
        for warp in range(self.spec.num_warps):
            names = self.pipeline.names(barriers + warp * self.pipeline.nbytes)
            shared |= {f"warp {warp} {name}": place for name, place in names.items()}
        return {"shared": shared, "warps": {}}

    def fake_args(self) -> tuple[Any, ...]:
        return placeholders(fake_arguments(self.spec), cutlass.Int32(1))

    @entry(Arguments, num_blocks=cutlass.Int32)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel, with `num_blocks` CTAs at most."""
        *given, num_blocks, stream = args
        a = Arguments(*given)
        num_tiles = self.tiles_per_head * a.state.shape[1] * a.q.shape[0]
        blocks = cutlass.min(num_blocks, cute.ceil_div(num_tiles, self.spec.num_warps))
        self.kernel(a).launch(
            grid=[blocks, 1, 1],
            block=[self.spec.num_threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        lane = thread % WARP_SIZE
        num_warps, stages = self.spec.num_warps, self.num_stages

        smem = self.memory.allocate()
        ring = cute.make_tensor(
            smem.ring, cute.make_layout((self.tile_elements, stages, num_warps))
        )
        barriers = self.pipeline.at(smem.barriers + warp * self.pipeline.count)

        if cutlass.const_expr(self.bulk_load):
            if lane == 0:
                barriers.init()
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()

        num_tiles = self.tiles_per_head * x.state.shape[1] * x.q.shape[0]
        first = block * num_warps + warp
        step = blocks * num_warps
        mine = (num_tiles - first + step - 1) // step  # the warp's tiles; none if <= 0

        for i in cutlass.range_constexpr(stages - 1):
            self.start_load(
                i, mine, first + i * step, x, ring[None, i, warp],
                barriers.stage_pointer("tile_full", i), lane,
            )  # fmt: skip

        for i in cutlass.range(mine, unroll=1):
            stage = i % stages
            tile_index, head, sequence, slot, valid = self.locate(first + i * step, x)
            buffer = ring[None, stage, warp]
            if valid:
                part = self.tile.thread_part(buffer, cutlass.Int32(0))
                target = self.tile.thread_part(x.state[slot, head, None, None], tile_index)
                stored = cute.make_rmem_tensor(part.shape, self.state_dtype)
                s = cute.make_rmem_tensor(part.shape, cutlass.Float32)
                factor = decay_exp(-x.decay[head])
                # Issue the loads of q, k and v before waiting for the tile.
                q_frag = self.tile.along_k(x.q[sequence, head, None])
                k_frag = self.tile.along_k(x.k[sequence, head, None])
                v_frag = self.tile.along_v(x.v[sequence, head, None], tile_index)
                self.wait_load(barriers.stage_pointer("tile_full", stage), i)
                cute.autovec_copy(part, stored)
                s.store(stored.load().to(cutlass.Float32))
                self.tile.update(s, factor, k_frag, v_frag)
                self.write_back(s, stored, part, target, buffer, lane)
                row = x.o[sequence, head, None]
                self.tile.output(s, q_frag, row, x.softmax_scale, tile_index)
            else:
                self.wait_load(barriers.stage_pointer("tile_full", stage), i)
                self.tile.zeros(x.o, sequence, head, tile_index)
                if cutlass.const_expr(self.bulk_write_back):
                    cute.arch.cp_async_bulk_commit_group()  # empty, because each tile has a group

            following = i + stages - 1
            if cutlass.const_expr(self.bulk_write_back):
                # The next load overwrites tile i - 1, so the store of tile i - 1 must have read it.
                cute.arch.cp_async_bulk_wait_group(1, read=True)
            if cutlass.const_expr(self.bulk_load):
                cute.arch.sync_warp()  # every lane has read tile i - 1
            refill = following % stages
            self.start_load(
                following, mine, first + following * step, x,
                ring[None, refill, warp], barriers.stage_pointer("tile_full", refill), lane,
            )  # fmt: skip

        if cutlass.const_expr(self.bulk_write_back):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def locate(
        self, index: cutlass.Int32, x: Arguments
    ) -> tuple[cutlass.Int32, cutlass.Int32, cutlass.Int32, cutlass.Int32, cutlass.Boolean]:
        """Return (tile of V, head, sequence, slot, whether the slot exists) of a tile's index.
        Tiles with consecutive indices are adjacent in memory."""
        heads = x.state.shape[1]
        tile_index = index % self.tiles_per_head
        head = (index // self.tiles_per_head) % heads
        sequence = index // (self.tiles_per_head * heads)
        slot = sequence
        valid = cutlass.Boolean(True)
        if cutlass.const_expr(self.spec.indexed):
            # Negative indices and indices past the pool are padding: see `decode`.
            slot = x.state_indices[sequence]
            valid = slot >= 0 and slot < x.state.shape[0]
        return tile_index, head, sequence, slot, valid

    @cute.jit
    def start_load(
        self,
        i: cutlass.Int32,
        mine: cutlass.Int32,
        index: cutlass.Int32,
        x: Arguments,
        buffer: cute.Tensor,
        loaded: cute.Pointer,
        lane: cutlass.Int32,
    ) -> None:
        """Start the copy of this warp's i-th tile, if there is one, into its stage."""
        if i < mine:
            tile_index, head, _, slot, valid = self.locate(index, x)
            if cutlass.const_expr(self.bulk_load):
                if lane == 0:
                    if valid:
                        cute.arch.mbarrier_arrive_and_expect_tx(loaded, self.spec.tile_bytes)
                        matrix = x.state[slot, head, None, None]
                        start = (matrix.iterator + tile_index * self.tile_elements).align(16)
                        source = cute.make_tensor(start, cute.make_layout((self.tile_elements,)))
                        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.state_dtype)
                        cute.copy(atom, source, buffer, mbar_ptr=loaded)
                    else:
                        cute.arch.mbarrier_arrive(loaded)
            else:
                if valid:
                    atom = cute.make_copy_atom(
                        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
                        self.state_dtype,
                        num_bits_per_copy=8 * VECTOR_BYTES,
                    )
                    source = self.tile.thread_part(x.state[slot, head, None, None], tile_index)
                    cute.copy(atom, source, self.tile.thread_part(buffer, cutlass.Int32(0)))
        if cutlass.const_expr(not self.bulk_load):
            cute.arch.cp_async_commit_group()  # every tile has a group, which may be empty

    @cute.jit
    def wait_load(self, loaded: cute.Pointer, i: cutlass.Int32) -> None:
        """Wait for the load of this warp's i-th tile."""
        if cutlass.const_expr(self.bulk_load):
            cute.arch.mbarrier_wait(loaded, (i // self.num_stages) & 1)
        else:
            cute.arch.cp_async_wait_group(self.num_stages - 2)

    @cute.jit
    def write_back(
        self,
        s: cute.Tensor,
        stored: cute.Tensor,
        part: cute.Tensor,
        target: cute.Tensor,
        buffer: cute.Tensor,
        lane: cutlass.Int32,
    ) -> None:
        """Store s to global memory, through its stage or straight from the registers."""
        stored.store(s.load().to(self.state_dtype))
        if cutlass.const_expr(self.bulk_write_back):
            cute.autovec_copy(stored, part)
            cute.arch.fence_proxy("async.shared", space="cta")  # the async proxy reads it next
            cute.arch.sync_warp()
            if lane == 0:
                atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.state_dtype)
                # Lane 0 has the tile's first elements, so its target is the start of the tile.
                tile = cute.make_tensor(target.iterator, cute.make_layout((self.tile_elements,)))
                cute.copy(atom, buffer, tile)
            cute.arch.cp_async_bulk_commit_group()  # a group per lane; only lane 0's has a copy
        else:
            cute.autovec_copy(stored, target)
