"""Lightning Attention decode, with a tile of the recurrent state in a CTA's registers.

Per token and head, with S the state as a V by K matrix:

    S <- exp(-decay) * S + v k^T            o = softmax_scale * S q

A call reads and writes the state once; all other tensors have a hundredth of the state's bytes. So
the kernel is bound by memory bandwidth. Every thread issues all of its loads before the first use,
and the CTAs resident on an SM hide each other's latency.

    CTA (tile of V, head, sequence)
      load      the tile of the slot's state, 16 bytes an access
      replay    with drafts: the accepted tokens of the previous call; then store the state
      token     for each of the T tokens: decay, rank-1 update, o = S q
      store     the tile, in place

Runs on sm_80 and newer. Shared memory holds only the sums of the output: tile_v floats in "vk",
num_warps * tile_v in "kv".
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, LoadCacheMode, StoreCacheMode

from ..common.decay import decay_exp
from ..common.entry import entry, gathered, placeholders
from ..common.overlap import overlaps
from ..common.ptx.cache_policy import cache_policy
from ..common.spec import VECTOR_BYTES
from .arguments import Arguments, fake_arguments
from .spec import DecodeSpec
from .tile import StateTile


class LightningDecode:
    """The kernel for one DecodeSpec; see the module's docstring."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec
        self.tile = StateTile(spec)
        self.state_dtype = self.tile.state_dtype

    def fake_args(self) -> tuple[Any, ...]:
        return placeholders(fake_arguments(self.spec))

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        batch, heads = a.q.shape[0], a.state.shape[1]
        # Bad arguments launch no CTAs; the driver rejects an empty grid, and the operator raises
        # the reason.
        drafts = (a.draft_k, a.draft_v)
        inputs = (a.q, a.k, a.v, a.decay, a.state_indices, *drafts, a.num_accepted)
        if overlaps((a.o, a.state), inputs, (a.state, *drafts)):
            heads = 0
        if cutlass.const_expr(self.spec.multi_token):
            if a.q.shape[1] == 0:
                heads = 0
        self.kernel(a).launch(
            grid=[self.spec.head_dim_v // self.spec.tile_v, heads, batch],
            block=[self.spec.num_threads, 1, 1],
            # Without a register bound, ptxas for sm_80 spills in the loop over tokens to gain
            # occupancy.
            min_blocks_per_mp=1 if self.spec.multi_token and not self.tile.state_is_vk else 0,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        tile_index, head, sequence = cute.arch.block_idx()
        slot = sequence
        valid = cutlass.Boolean(True)
        if cutlass.const_expr(self.spec.indexed):
            # A negative index is padding. An index past the pool is a caller's bug; treating it as
            # padding keeps every access in bounds.
            slot = x.state_indices[sequence]
            valid = slot >= 0 and slot < x.state.shape[0]

        if valid:
            part = self.tile.thread_part(x.state[slot, head, None, None], tile_index)
            stored = cute.make_rmem_tensor(part.shape, self.state_dtype)
            self.load(part, stored)
            factor = decay_exp(-x.decay[head])
            s = cute.make_rmem_tensor(part.shape, cutlass.Float32)

            if cutlass.const_expr(self.spec.replay):
                s.store(stored.load().to(cutlass.Float32))
                self.tile.replay(s, factor, x, sequence, slot, head, tile_index)
                # The stored state has the accepted tokens only; this call's tokens are drafts.
                stored.store(s.load().to(self.state_dtype))
                self.store(stored, part)
                self.tile.tokens(s, factor, x, sequence, head, tile_index)
            elif cutlass.const_expr(self.spec.multi_token):
                s.store(stored.load().to(cutlass.Float32))
                self.tile.tokens(s, factor, x, sequence, head, tile_index)
                stored.store(s.load().to(self.state_dtype))
                self.store(stored, part)
            else:
                # Issue the loads of q, k and v before the first use of the state.
                q_frag = self.tile.along_k(x.q[sequence, head, None])
                k_frag = self.tile.along_k(x.k[sequence, head, None])
                v_frag = self.tile.along_v(x.v[sequence, head, None], tile_index)
                s.store(stored.load().to(cutlass.Float32))
                self.tile.update(s, factor, k_frag, v_frag)
                stored.store(s.load().to(self.state_dtype))
                self.store(stored, part)
                row = x.o[sequence, head, None]
                self.tile.output(s, q_frag, row, x.softmax_scale, tile_index)
        else:
            self.tile.zeros(x.o, sequence, head, tile_index)

    # -- copies -----------------------------------------------------------------------------

    @cute.jit
    def load(self, part: cute.Tensor, stored: cute.Tensor) -> None:
        """Start loading this thread's part of the tile."""
        hints = self.spec.hints
        mode = LoadCacheMode.STREAMING if hints == "streaming" else LoadCacheMode.ALWAYS
        atom = cute.make_copy_atom(
            CopyG2ROp(), self.state_dtype, num_bits_per_copy=8 * VECTOR_BYTES, load_cache_mode=mode
        )
        policy = cache_policy("evict_last") if cutlass.const_expr(hints == "hold") else None
        cute.copy(atom, part, stored, cache_policy=policy)

    @cute.jit
    def store(self, stored: cute.Tensor, part: cute.Tensor) -> None:
        hints = self.spec.hints
        mode = StoreCacheMode.STREAMING if hints == "streaming" else StoreCacheMode.WRITE_BACK
        atom = cute.make_copy_atom(
            CopyR2GOp(), self.state_dtype, num_bits_per_copy=8 * VECTOR_BYTES, store_cache_mode=mode
        )
        policy = cache_policy("evict_normal") if cutlass.const_expr(hints == "hold") else None
        cute.copy(atom, stored, part, cache_policy=policy)
