"""A tile of a delta rule's state in the registers of a CTA, and its update by a token.

A CTA has `tile_v` columns of V and all of K of one head. A warp has some of these columns, with all
of K, so that sums over K stay within a warp. In memory the tile has contiguous rows: V rows of K
with state_v_first, else K rows of V. One access of a warp covers `rows_per_step` rows, where every
lane has `vector` neighbouring elements of a row.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp

from ...common.dtypes import DTYPE
from ...common.ptx.cache_policy import cache_policy
from ...common.spec import VECTOR_BYTES, WARP_SIZE
from .spec import StepSpec
from .tokens import KK, KQ, QQ, TokenReader, TokenStage, reciprocal_norm


class StateTile:
    """A tile's distribution over threads, and its arithmetic. All methods run on the device."""

    def __init__(self, spec: StepSpec, reader: TokenReader):
        self.spec = spec
        self.reader = reader
        self.state_dtype = DTYPE[spec.state_dtype]
        self.holds = spec.hints == "hold"
        self.vector = spec.vector
        self.lanes_per_row, self.rows_per_step = spec.lanes_per_row, spec.rows_per_step
        self.values_of_k, self.values_of_v = spec.values_of_k, spec.values_of_v
        # (vector, rows, vectors of a row) that one thread holds
        if spec.state_v_first:
            self.shape = (self.vector, self.values_of_v, self.values_of_k // self.vector)
        else:
            self.shape = (self.vector, self.values_of_k, 1)
        # Butterfly distances of the lanes that share a column of V, from far to near.
        first = 1 if spec.state_v_first else self.lanes_per_row
        self.distances = [first << i for i in reversed(range(spec.lanes_of_k.bit_length() - 1))]

    # -- distribution -----------------------------------------------------------------------

    def element(self, k: int, v: int) -> tuple[int, int, int]:
        """Return the register index, in `self.shape`, of a thread's k-th index of K and v-th index
        of V."""
        if self.spec.state_v_first:
            return k % self.vector, v, k // self.vector
        return v, k, 0

    def v_in_tile(self, v: Any) -> Any:
        """Return the tile's column of this thread's v-th index of V."""
        warp, lane = warp_and_lane()
        if self.spec.state_v_first:
            rows_per_warp = self.values_of_v * self.rows_per_step
            return warp * rows_per_warp + lane // self.lanes_per_row + v * self.rows_per_step
        return (warp * self.lanes_per_row + lane % self.lanes_per_row) * self.vector + v

    @cute.jit
    def along_k(self, x: cute.Tensor) -> list[Any]:
        """Load the elements at this thread's indices of K, from K float32 in shared memory."""
        _, lane = warp_and_lane()
        values = []
        if cutlass.const_expr(self.spec.state_v_first):
            stride = self.lanes_per_row * self.vector
            source = cute.make_tensor(
                (x.iterator + (lane % self.lanes_per_row) * self.vector).align(VECTOR_BYTES),
                cute.make_layout(
                    (self.vector, self.values_of_k // self.vector), stride=(1, stride)
                ),
            )
            loaded = cute.make_rmem_tensor(source.shape, Float32)
            cute.autovec_copy(source, loaded)
            for k in cutlass.range_constexpr(self.values_of_k):
                values.append(loaded[k % self.vector, k // self.vector])
        else:
            for k in cutlass.range_constexpr(self.values_of_k):
                values.append(x[lane // self.lanes_per_row + k * self.rows_per_step])
        return values

    def decays(self, token: TokenStage) -> list[Any]:
        """Load the decays at this thread's indices of K."""
        if self.spec.one_decay:
            return [token.decay[0]] * self.values_of_k
        return self.along_k(token.decay)

    @cute.jit
    def in_memory(self, state: cute.Tensor, tile_index: Int32) -> cute.Tensor:
        """Return this thread's part of a head's state, as `self.shape`."""
        _, lane = warp_and_lane()
        start = tile_index * self.spec.tile_v + self.v_in_tile(0)
        if cutlass.const_expr(self.spec.state_v_first):
            pitch = self.spec.head_dim_k
            offset = start * pitch + (lane % self.lanes_per_row) * self.vector
        else:
            pitch = self.spec.head_dim_v
            offset = (lane // self.lanes_per_row) * pitch + start
        return cute.make_tensor(
            (state.iterator + offset).align(VECTOR_BYTES),
            cute.make_layout(
                self.shape,
                stride=(1, self.rows_per_step * pitch, self.lanes_per_row * self.vector),
            ),
        )

    # -- copies -----------------------------------------------------------------------------

    @cute.jit
    def load(self, state: cute.Tensor, tile_index: Int32) -> cute.Tensor:
        """Start loading the tile, in the dtype of memory."""
        atom = cute.make_copy_atom(
            CopyG2ROp(), self.state_dtype, num_bits_per_copy=8 * VECTOR_BYTES
        )
        loaded = cute.make_rmem_tensor(self.shape, self.state_dtype)
        policy = cache_policy("evict_last") if cutlass.const_expr(self.holds) else None
        cute.copy(atom, self.in_memory(state, tile_index), loaded, cache_policy=policy)
        return loaded

    @cute.jit
    def store(self, s: cute.Tensor, state: cute.Tensor, tile_index: Int32) -> None:
        atom = cute.make_copy_atom(
            CopyR2GOp(), self.state_dtype, num_bits_per_copy=8 * VECTOR_BYTES
        )
        stored = cute.make_rmem_tensor(self.shape, self.state_dtype)
        stored.store(s.load().to(self.state_dtype))
        policy = cache_policy("evict_normal") if cutlass.const_expr(self.holds) else None
        cute.copy(atom, stored, self.in_memory(state, tile_index), cache_policy=policy)

    # -- arithmetic -------------------------------------------------------------------------

    @cute.jit
    def advance(self, s: cute.Tensor, token: TokenStage, scale: Float32) -> None:
        """Process one token: s <- Diag(decay) s + k u^T. Write the output o = scale s^T q to the
        stage.

        One pass computes both s^T k and s^T q of the decayed state. Then s^T q of the new state is
        s^T q of the decayed state, plus (k . q) u. The norms of k and q multiply the sums.
        """
        _, lane = warp_and_lane()
        decay, k, q = self.decays(token), self.along_k(token.k), self.along_k(token.q)
        of_columns = []
        if cutlass.const_expr(token.decay_v is not None):
            of_columns = [token.decay_v[self.v_in_tile(v)] for v in range(self.values_of_v)]
        sums = [Float32(0.0)] * (2 * self.values_of_v)
        for n in cutlass.range_constexpr(self.values_of_k):
            for v in cutlass.range_constexpr(self.values_of_v):
                at = self.element(n, v)
                decayed = s[at] * decay[n]
                if cutlass.const_expr(token.decay_v is not None):
                    decayed = decayed * of_columns[v]
                s[at] = decayed
                sums[v] = cute.math.fma(decayed, k[n], sums[v])
                other = self.values_of_v + v
                sums[other] = cute.math.fma(decayed, q[n], sums[other])

        # Of the lanes that share columns, the lower half gets the sums with k, the upper half the
        # sums with q. The sums are for the thread's columns from number `first` on.
        first, sums = self.sum_over_k(sums, lane)
        k_factor = Float32(1.0)
        if cutlass.const_expr(self.spec.l2norm):
            k_factor = reciprocal_norm(self.reader.total(token, KK))
            q_factor = reciprocal_norm(self.reader.total(token, QQ))
        kq, beta = self.reader.total(token, KQ), token.beta[0]
        corrections = []
        for i in cutlass.range_constexpr(len(sums)):
            recalled = k_factor * sums[i]
            if cutlass.const_expr(self.spec.beta_columns):
                beta = token.beta[self.v_in_tile(first + i)]
            corrections.append(beta * (token.v[self.v_in_tile(first + i)] - recalled))
        outputs = []
        for i in cutlass.range_constexpr(len(sums)):
            correction = cute.arch.shuffle_sync_bfly(corrections[i], offset=self.distances[0])
            output = cute.math.fma(kq, k_factor * correction, sums[i])
            if cutlass.const_expr(self.spec.l2norm):
                output = q_factor * output
            outputs.append(scale * output)
        half = lane & (self.distances[0] | self.idle_lanes)
        for i in cutlass.range_constexpr(len(sums)):
            place = self.v_in_tile(first + i)
            if half == self.distances[0]:
                token.o[place] = outputs[i]
            if cutlass.const_expr(token.u is not None):
                if half == 0:
                    token.u[place] = corrections[i]

        for v in cutlass.range_constexpr(self.values_of_v):
            bits, index = self.holder(v)
            u = cute.arch.shuffle_sync(corrections[index], (lane & ~sum(self.distances)) | bits)
            u = k_factor * u
            for n in cutlass.range_constexpr(self.values_of_k):
                at = self.element(n, v)
                s[at] = cute.math.fma(k[n], u, s[at])

    @cute.jit
    def replay(self, s: cute.Tensor, token: TokenStage) -> None:
        """Update the state by a recorded token, whose correction u is known. No output is computed.
        `token.v` holds u."""
        decay, k = self.decays(token), self.along_k(token.k)
        k_factor = Float32(1.0)
        if cutlass.const_expr(self.spec.l2norm):
            k_factor = reciprocal_norm(self.reader.total(token, KK))
        for v in cutlass.range_constexpr(self.values_of_v):
            u = k_factor * token.v[self.v_in_tile(v)]
            for n in cutlass.range_constexpr(self.values_of_k):
                at = self.element(n, v)
                s[at] = cute.math.fma(k[n], u, s[at] * decay[n])

    def sum_over_k(self, sums: list[Any], lane: Int32) -> tuple[Any, list[Any]]:
        """Reduce 2 * values_of_v sums over the lanes that share columns.

        Each step halves the number of sums in a lane, until the lane has its share of the totals,
        or one total in common with other lanes. Return the index of the lane's first total (less
        values_of_v in the upper half), and the totals."""
        first = Int32(0)
        for distance in self.distances:
            if len(sums) > 1:
                half = len(sums) // 2
                upper = (lane & distance) != 0
                pairs = list(zip(sums[:half], sums[half:], strict=True))
                mine = [cutlass.select_(upper, b, a) for a, b in pairs]
                yours = [cutlass.select_(upper, a, b) for a, b in pairs]
                if half < self.values_of_v:
                    first = first + cutlass.select_(upper, Int32(half), Int32(0))
            else:
                mine, yours = sums, sums
            sums = [
                a + cute.arch.shuffle_sync_bfly(b, offset=distance)
                for a, b in zip(mine, yours, strict=True)
            ]
        return first, sums

    def holder(self, v: int) -> tuple[int, int]:
        """Return where `sum_over_k` leaves the total with k of this thread's v-th column: the
        lane's bits, out of `distances`, and the index among the lane's totals."""
        bits, size = 0, self.values_of_v
        for distance in self.distances[1:]:
            if size > 1:
                size //= 2
                bits |= distance if v >= size else 0
                v -= size if v >= size else 0
        return bits, v

    @property
    def idle_lanes(self) -> int:
        """Bits of the lane number in which lanes with equal totals differ."""
        halvings = (2 * self.values_of_v).bit_length() - 1
        return sum(self.distances[halvings:])


def warp_and_lane() -> tuple[Any, Any]:
    thread, _, _ = cute.arch.thread_idx()
    thread = cutlass.Uint32(thread)
    return Int32(thread // WARP_SIZE), Int32(thread % WARP_SIZE)
