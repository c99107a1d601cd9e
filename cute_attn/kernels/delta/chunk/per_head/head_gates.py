"""Decays of the tokens of a chunk, one for each head.

The decay from token j to token i is exp2(G_i - G_j), where G sums the gates of a chunk in base 2.
A difference of large sums would lose the digits of later weak gates. So a gate is split into a
multiple of STEP, whose sums are exact in float32, and a rest below STEP:

    G_i - G_j = (coarse_i - coarse_j) + (fine_i - fine_j)

Between sub-chunks of 16 tokens, a decay is a product of two factors, as `between` is the last token
before i's sub-chunk:

    exp2(G_i - G_j) = exp2(G_i - G_between) exp2(G_between - G_j)

The second factors are in a table. With gates of at most 0 no factor exceeds 1, so a factor
underflows only where the decay does.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....common.dtypes import DTYPE
from ....common.numbers import LOG2_E
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared, store_shared
from ....common.smem import SharedMemory
from ....common.spec import WARP_SIZE
from ...gates import log2_decay, nonzero_beta, sigmoid
from ..spec import CHUNK, HeadPrepareSpec
from ..sub_chunks import SUB_CHUNK, SUB_CHUNKS

# 64 gates sum to 64 * 185 at most, which is less than 2^24 steps.
STEP = 2.0**-9
TOKENS = CHUNK // WARP_SIZE  # neighbouring tokens of a lane


def split_gate(gate: Any) -> tuple[Any, Any]:
    """Return the multiple of STEP in a gate, and the rest."""
    steps = Float32(Int32(gate * Float32(1.0 / STEP))) * Float32(STEP)
    return steps, gate - steps


def sum_of_earlier_lanes(x: Any) -> Any:
    """Return the sum of x over the lanes before the caller's. A whole warp calls this."""
    lane = cute.arch.lane_idx()
    for bit in range(5):
        got = cute.arch.shuffle_sync_up(x, offset=1 << bit, mask_and_clamp=0)
        x = x + cutlass.select_(lane >= 1 << bit, got, Float32(0.0))
    x = cute.arch.shuffle_sync_up(x, offset=1, mask_and_clamp=0)
    return cutlass.select_(lane >= 1, x, Float32(0.0))


def sums_up_to(values: list[Any]) -> list[Any]:
    """Return the sums of all tokens up to each token of the lane. `values` are the lane's."""
    own = [values[0], values[0] + values[1]]
    before = sum_of_earlier_lanes(own[1])
    return [Float32(before + y) for y in own]


class HeadGates:
    """Computes the gates and beta of value heads, a head in each warp. All methods run on the
    device.

    Attributes:
        memory: has the buffers "coarse", "fine" and "beta", float32, CHUNK elements a warp, and
            "earlier" with CHUNK elements for each sub-chunk but the first.
    """

    def __init__(self, spec: HeadPrepareSpec, memory: SharedMemory):
        self.spec, self.memory = spec, memory

    @cute.jit
    def store(self, smem: Int32, warp: Int32, x: Any, place: Any, head: Int32) -> None:
        """Store the sums of gates, and beta, of the value head that this warp has."""
        lane = cute.arch.lane_idx()
        spec = self.spec
        rate, bias = Float32(1.0), Float32(0.0)
        if cutlass.const_expr(spec.has_A_log):
            rate = exp2(x.A_log[head] * LOG2_E)
        if cutlass.const_expr(spec.has_dt_bias):
            bias = x.dt_bias[head]
        coarse, fine, betas = [], [], []
        for t in cutlass.range_constexpr(TOKENS):
            token = TOKENS * lane + t
            present = token < place.length
            at = place.start + cutlass.select_(present, token, Int32(0))
            g = Float32(x.g[place.batch, at, head])
            beta = Float32(x.beta[place.batch, at, head])
            gate = log2_decay(spec.gate, g, rate, bias, Float32(0.0))
            gate = Float32(cutlass.select_(present, gate, Float32(0.0)))
            if cutlass.const_expr(spec.beta_sigmoid):
                beta = x.beta_scale * sigmoid(beta)
            if cutlass.const_expr(spec.for_backward):
                beta = nonzero_beta(DTYPE[spec.dtype], beta)
            betas.append(Float32(cutlass.select_(present, beta, Float32(0.0))))
            steps, rest = split_gate(gate)
            coarse.append(steps)
            fine.append(rest)
        at = smem + (warp * CHUNK + TOKENS * lane) * 4
        coarse, fine = sums_up_to(coarse), sums_up_to(fine)
        store_shared(Float32, at + self.memory["coarse"], coarse)
        store_shared(Float32, at + self.memory["fine"], fine)
        store_shared(Float32, at + self.memory["beta"], betas)
        for b in cutlass.range_constexpr(1, SUB_CHUNKS):
            lane_before = b * SUB_CHUNK // TOKENS - 1
            between = [cute.arch.shuffle_sync(x[-1], lane_before) for x in (coarse, fine)]
            factors = [decay_between(between, x) for x in zip(coarse, fine, strict=True)]
            row = warp * (SUB_CHUNKS - 1) + b - 1
            at = smem + (row * CHUNK + TOKENS * lane) * 4
            store_shared(Float32, at + self.memory["earlier"], factors)

    def sums(self, smem: Int32, n: Any, token: Any, count: int = 1) -> list[Any]:
        """Load (coarse, fine) of `count` tokens of the CTA's n-th head."""
        at = smem + (n * CHUNK + token) * 4
        both = [load_shared(Float32, at + self.memory[name], count) for name in ("coarse", "fine")]
        return list(zip(*both, strict=True))

    def of_earlier(self, smem: Int32, n: Any, b: Any, token: Any) -> Any:
        """Load the decays from two tokens to the last token before sub-chunk b > 0."""
        at = smem + ((n * (SUB_CHUNKS - 1) + b - 1) * CHUNK + token) * 4
        return load_shared(Float32, at + self.memory["earlier"], 2)

    def of_later(self, smem: Int32, n: Any, b: Any, sums: Any) -> Any:
        """Return the decay from the last token before sub-chunk b > 0 to a token with these sums;
        any finite number for b = 0."""
        return decay_between(sums, self.sums(smem, n, cutlass.max(b * SUB_CHUNK - 1, 0))[0])

    def betas(self, smem: Int32, n: Any, token: Any, count: int = 1) -> Any:
        at = smem + (n * CHUNK + token) * 4
        return load_shared(Float32, at + self.memory["beta"], count)


def log2_between(later: Any, earlier: Any) -> Any:
    """Return the base-2 logarithm of the decay between two tokens, from their sums."""
    return (later[0] - earlier[0]) + (later[1] - earlier[1])


def decay_between(later: Any, earlier: Any) -> Any:
    return exp2(log2_between(later, earlier))
