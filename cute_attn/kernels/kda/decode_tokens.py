"""What tokens bring to a block: read a token ahead, made ready once for the whole block.

    fetch     a token's q, k, v, g and beta, from global memory to registers
    prepare   norms, gate and sigmoid; what the warps need of the token, in float32, to its stage
              in shared memory

q and k are the last warp's, who reduces over them; a channel of g belongs to a thread, and so does
an element of v. Everything is computed once a block, so that accuracy costs nothing: library
functions rather than approximations.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.carried import Carried
from ..common.dtypes import DTYPE
from ..common.spec import WARP_SIZE
from .spec_decode import VECTOR_BYTES, StepSpec

L2NORM_EPSILON = 1e-6  # added to the sum of squares
STAGES = 2


class TokenStage(Carried):
    """A token in shared memory, all float32.

    decay, k, q   [K]: the factor of the state's decay; k and q as they multiply the state, q with
                  the scale
    v             [tile_v]: of the tile; in its place, u where that is known
    scalars       beta, k . q
    o, u          [tile_v]: the results, to be written by whole sectors; u only if it is recorded
    """

    def __init__(self, spec: StepSpec, memory: cute.Tensor, record: bool):
        offset = 0
        parts = []
        for size in (spec.head_dim_k,) * 3 + (spec.tile_v, 4, spec.tile_v, spec.tile_v):
            parts.append(
                cute.make_tensor(
                    (memory.iterator + offset).align(VECTOR_BYTES), cute.make_layout((size,))
                )
            )
            offset += size
        self.decay, self.k, self.q, self.v, self.scalars, self.o, u = parts
        self.u = u if record else None

    @staticmethod
    def elements(spec: StepSpec) -> int:
        return 3 * spec.head_dim_k + 3 * spec.tile_v + 4


def stage_of(spec: StepSpec, memory: cute.Tensor, i: Any, *, record: bool) -> TokenStage:
    """The stage of the i-th token in the memory of all stages."""
    return TokenStage(
        spec, cute.domain_offset(((i & (STAGES - 1)) * TokenStage.elements(spec),), memory), record
    )


class Token(Carried):
    """A token's rows in global memory: q, k, v and g of a head, and beta's one element."""

    def __init__(self, q: Any, k: Any, v: Any, g: Any, beta: Any):
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta


class Tokens(Carried):
    """The tokens of a sequence and head, `[B, T, H, D]` from row `batch` and token `start` on."""

    def __init__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        batch: Any,
        start: Any,
        head: Any,
        head_qk: Any,
    ):
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.batch, self.start, self.head, self.head_qk = batch, start, head, head_qk

    def at(self, i: Any) -> Token:
        t = self.start + i
        return Token(
            self.q[self.batch, t, self.head_qk, None],
            self.k[self.batch, t, self.head_qk, None],
            self.v[self.batch, t, self.head, None],
            self.g[self.batch, t, self.head, None],
            cute.domain_offset((self.batch, t, self.head), self.beta),
        )


class Gate(Carried):
    """What the gate of a head has besides g: scalars, and this thread's channels of dt_bias."""

    def __init__(self, rate: Any, bias: Any, lower_bound: Any):
        self.rate, self.bias, self.lower_bound = rate, bias, lower_bound


class Fetched(Carried):
    """A token in registers, as it is in memory: this thread's share."""

    def __init__(self, spec: StepSpec):
        dtype = DTYPE[spec.dtype]
        of_warp = spec.head_dim_k // WARP_SIZE
        self.q = cute.make_rmem_tensor((of_warp,), dtype)
        self.k = cute.make_rmem_tensor((of_warp,), dtype)
        self.g = cute.make_rmem_tensor((shares(spec.head_dim_k, spec),), DTYPE[spec.gate_dtype])
        self.v = cute.make_rmem_tensor((shares(spec.tile_v, spec),), dtype)
        self.u = cute.make_rmem_tensor((shares(spec.tile_v, spec),), Float32)
        self.beta = cute.make_rmem_tensor((1,), DTYPE[spec.beta_dtype])


def shares(size: int, spec: StepSpec) -> int:
    """How many of `size` elements a thread has at most."""
    return -(-size // spec.num_threads)


class TokenReader:
    """Fetches tokens, and prepares them. All methods run on the device."""

    def __init__(self, spec: StepSpec):
        self.spec = spec

    @cute.jit
    def gate(
        self,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        lower_bound: Float32,
        head: Int32,
    ) -> Gate:
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        rate = Float32(1.0)
        if cutlass.const_expr(A_log is not None):
            rate = cute.math.exp(Float32(A_log[head]))
        bias = cute.make_rmem_tensor((shares(spec.head_dim_k, spec),), Float32)
        for i in cutlass.range_constexpr(shares(spec.head_dim_k, spec)):
            bias[i] = Float32(0.0)
            channel = thread + i * spec.num_threads
            if cutlass.const_expr(dt_bias is not None):
                if channel < spec.head_dim_k:
                    if cutlass.const_expr(spec.dt_bias_dims == 1):
                        bias[i] = Float32(dt_bias[head * spec.head_dim_k + channel])
                    else:
                        bias[i] = Float32(dt_bias[head, channel])
        return Gate(rate, bias, lower_bound)

    @cute.jit
    def fetch(self, into: Fetched, token: Token, tile_index: Int32) -> None:
        """Loads, for which nothing waits."""
        self.fetch_k_and_g(into, token.k, token.g)
        thread, _, _ = cute.arch.thread_idx()
        if self.is_last_warp():
            lane = thread % WARP_SIZE
            for i in cutlass.range_constexpr(self.spec.head_dim_k // WARP_SIZE):
                into.q[i] = token.q[lane + i * WARP_SIZE]
            into.beta[0] = token.beta.iterator[0]
        self.fetch_v(into.v, token.v, tile_index)

    @cute.jit
    def fetch_recorded(
        self,
        into: Fetched,
        k: cute.Tensor,
        g: cute.Tensor,
        u: cute.Tensor,
        tile_index: Int32,
    ) -> None:
        self.fetch_k_and_g(into, k, g)
        self.fetch_v(into.u, u, tile_index)

    @cute.jit
    def fetch_k_and_g(self, into: Fetched, k: cute.Tensor, g: cute.Tensor) -> None:
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        if self.is_last_warp():
            lane = thread % WARP_SIZE
            for i in cutlass.range_constexpr(spec.head_dim_k // WARP_SIZE):
                into.k[i] = k[lane + i * WARP_SIZE]
        for i in cutlass.range_constexpr(shares(spec.head_dim_k, spec)):
            channel = thread + i * spec.num_threads
            if channel < spec.head_dim_k:
                into.g[i] = g[channel]

    @cute.jit
    def fetch_v(self, into: cute.Tensor, v: cute.Tensor, tile_index: Int32) -> None:
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(shares(spec.tile_v, spec)):
            column = thread + i * spec.num_threads
            if column < spec.tile_v:
                into[i] = v[tile_index * spec.tile_v + column]

    @cute.jit
    def prepare(
        self, stage: TokenStage, fetched: Fetched, gate: Gate, scale: Float32, beta_scale: Float32
    ) -> None:
        self.prepare_decay(stage, fetched, gate)
        self.prepare_v(stage, fetched.v)
        if self.is_last_warp():
            thread, _, _ = cute.arch.thread_idx()
            lane = thread % WARP_SIZE
            of_warp = self.spec.head_dim_k // WARP_SIZE
            q = [Float32(fetched.q[i]) for i in range(of_warp)]
            k = [Float32(fetched.k[i]) for i in range(of_warp)]
            if cutlass.const_expr(self.spec.l2norm):
                q_factor = reciprocal_norm(q)
                k_factor = reciprocal_norm(k)
                q = [x * q_factor for x in q]
                k = [x * k_factor for x in k]
            q = [x * scale for x in q]
            for i in cutlass.range_constexpr(of_warp):
                stage.q[lane + i * WARP_SIZE] = q[i]
                stage.k[lane + i * WARP_SIZE] = k[i]
            kq = warp_dot(k, q)
            beta = Float32(fetched.beta[0])
            if cutlass.const_expr(self.spec.beta_sigmoid):
                beta = beta_scale / (1.0 + cute.math.exp(-beta))
            if lane == 0:
                stage.scalars[0] = beta
                stage.scalars[1] = kq

    @cute.jit
    def prepare_recorded(self, stage: TokenStage, fetched: Fetched, gate: Gate) -> None:
        self.prepare_decay(stage, fetched, gate)
        self.prepare_v(stage, fetched.u)
        if self.is_last_warp():
            thread, _, _ = cute.arch.thread_idx()
            lane = thread % WARP_SIZE
            of_warp = self.spec.head_dim_k // WARP_SIZE
            k = [Float32(fetched.k[i]) for i in range(of_warp)]
            if cutlass.const_expr(self.spec.l2norm):
                k_factor = reciprocal_norm(k)
                k = [x * k_factor for x in k]
            for i in cutlass.range_constexpr(of_warp):
                stage.k[lane + i * WARP_SIZE] = k[i]

    @cute.jit
    def prepare_decay(self, stage: TokenStage, fetched: Fetched, gate: Gate) -> None:
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(shares(spec.head_dim_k, spec)):
            channel = thread + i * spec.num_threads
            if channel < spec.head_dim_k:
                g = log_decay(
                    spec.gate, Float32(fetched.g[i]), gate.rate, gate.bias[i], gate.lower_bound
                )
                stage.decay[channel] = cute.math.exp(g)

    @cute.jit
    def prepare_v(self, stage: TokenStage, v: cute.Tensor) -> None:
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(shares(spec.tile_v, spec)):
            column = thread + i * spec.num_threads
            if column < spec.tile_v:
                stage.v[column] = Float32(v[i])

    @cute.jit
    def write(self, result: cute.Tensor, row: cute.Tensor, tile_index: Int32) -> None:
        """What a stage has collected, o or u, to its row in global memory."""
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(shares(spec.tile_v, spec)):
            column = thread + i * spec.num_threads
            if column < spec.tile_v:
                row[tile_index * spec.tile_v + column] = result[column].to(row.element_type)

    @cute.jit
    def write_zeros(self, row: cute.Tensor, tile_index: Int32) -> None:
        """The output of padding."""
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(shares(spec.tile_v, spec)):
            column = thread + i * spec.num_threads
            if column < spec.tile_v:
                row[tile_index * spec.tile_v + column] = row.element_type(0.0)

    def is_last_warp(self) -> Any:
        thread, _, _ = cute.arch.thread_idx()
        return thread >= self.spec.num_threads - WARP_SIZE


def log_decay(gate: str, g: Any, rate: Any, bias: Any, lower_bound: Any) -> Any:
    """The natural logarithm of a decay; `rate` is exp(A_log). Formulas in `gates`, which has them
    from approximate instructions."""
    if gate == "none":
        return g
    x = g + bias
    if gate == "lower_bound":
        return lower_bound / (1.0 + cute.math.exp(-rate * x))
    # softplus(x) = max(x, 0) + log(1 + exp(-|x|)), whose terms stay in range
    magnitude = cute.arch.fmax(x, -x)
    softplus = cute.arch.fmax(x, Float32(0.0)) + cute.math.log1p(cute.math.exp(-magnitude))
    return -rate * softplus


def warp_dot(a: list[Any], b: list[Any]) -> Any:
    """Over all lanes of a warp, for all of them."""
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = cute.math.fma(x, y, total)
    distance = WARP_SIZE // 2
    while distance:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        distance //= 2
    return total


def reciprocal_norm(x: list[Any]) -> Any:
    return 1.0 / cute.math.sqrt(warp_dot(x, x) + Float32(L2NORM_EPSILON))
