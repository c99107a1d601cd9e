"""Tokens in registers and shared memory, fetched one token ahead and prepared once for the CTA.

    fetch     a token's q, k, v, g and beta, from global memory to registers
    prepare   gate, sigmoid and sums of squares; the token, in float32, to its stage in shared
              memory

A thread has the same channels of q, k and g, and some threads have an element of v. The CTA
computes the gate only once, so it can afford accurate functions. The norms of q and k multiply the
sums over K; each warp applies them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.carried import Carried
from ...common.decay import decay_exp
from ...common.dtypes import DTYPE
from ...common.ptx.math import reciprocal_sqrt
from ...common.spec import VECTOR_BYTES, WARP_SIZE
from ..gates import accurate_sigmoid, log_decay, rate_of
from ..spec import L2NORM_EPSILON
from .spec import StepSpec

STAGES = 2
QQ, KK, KQ = range(3)


class TokenStage(Carried):
    """A token in shared memory, all float32.

    decay         [K], or [1] with one_decay: the decay factors of the state
    decay_v       [tile_v]: the decay factors of the tile's columns; only with gv
    k, q          [K], without normalisation
    sums          [3, K / 32]: q . q, k . k and k . q over each group of 32 channels
    v             [tile_v]: v of the tile; for a recorded token, its u
    beta          [1], or [tile_v] with beta_columns
    o, u          [tile_v]: the results, staged to be written in whole sectors; u only with records
    """

    def __init__(self, spec: StepSpec, memory: cute.Tensor, record: bool):
        offset = 0
        parts = []
        for size in self.sizes(spec):
            parts.append(
                cute.make_tensor(
                    (memory.iterator + offset).align(VECTOR_BYTES), cute.make_layout((size,))
                )
            )
            offset += size
        self.decay, self.k, self.q, self.sums, self.v, self.o, u, self.beta, *decay_v = parts
        self.u = u if record else None
        self.decay_v = decay_v[0] if decay_v else None

    @staticmethod
    def sizes(spec: StepSpec) -> tuple[int, ...]:
        sums = -(-3 * groups_of_k(spec) // 4) * 4
        decay = 4 if spec.one_decay else spec.head_dim_k
        beta = spec.tile_v if spec.beta_columns else 4
        decay_v = (spec.tile_v,) if spec.gv_dtype != "none" else ()
        return (decay, *(spec.head_dim_k,) * 2, sums, *(spec.tile_v,) * 3, beta, *decay_v)

    @classmethod
    def elements(cls, spec: StepSpec) -> int:
        return sum(cls.sizes(spec))


def stage_of(spec: StepSpec, memory: cute.Tensor, i: Any, *, record: bool) -> TokenStage:
    """Return the stage of the i-th token; `memory` has all stages."""
    offset = (i & (STAGES - 1)) * TokenStage.elements(spec)
    return TokenStage(spec, cute.domain_offset((offset,), memory), record)


def groups_of_k(spec: StepSpec) -> int:
    """Return the number of groups of 32 channels. Sums over K add the groups' sums, so that the
    result does not depend on the number of threads."""
    return spec.head_dim_k // WARP_SIZE


class Token(Carried):
    """A token's rows of q, k, v, g, beta, gk and gv of a head in global memory. With head_gate, g
    begins with the token's element, and beta does without beta_columns."""

    def __init__(self, q: Any, k: Any, v: Any, g: Any, beta: Any, gk: Any = None, gv: Any = None):
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.gk, self.gv = gk, gv


class Tokens(Carried):
    """The tokens of a sequence and head, in tensors `[B, T, H, D]` from row `batch` and token
    `start` on."""

    def __init__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        batch: Int32,
        start: Any,
        head: Int32,
        head_qk: Any,
        gk: cute.Tensor | None = None,
        gv: cute.Tensor | None = None,
    ):
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.gk, self.gv = gk, gv
        self.batch, self.start, self.head, self.head_qk = batch, start, head, head_qk

    def at(self, i: Any) -> Token:
        t = self.start + i
        of_head = (self.batch, t, self.head)
        return Token(
            self.q[self.batch, t, self.head_qk, None],
            self.k[self.batch, t, self.head_qk, None],
            self.v[self.batch, t, self.head, None],
            gates_at(self.g, *of_head),
            gates_at(self.beta, *of_head),
            None if self.gk is None else gates_at(self.gk, *of_head),
            None if self.gv is None else gates_at(self.gv, *of_head),
        )


def gates_at(g: cute.Tensor, *at: Any) -> cute.Tensor:
    """The row of g, or of beta, at these indices; where a head has one number, the tensor from this
    number on."""
    row = (*at, None)
    return g[row] if cute.rank(g) > len(at) else cute.domain_offset(at, g)


class Gate(Carried):
    """The parameters of a head's gate: scalars, and this thread's channels of dt_bias."""

    def __init__(self, rate: Any, bias: Any, lower_bound: Any):
        self.rate, self.bias, self.lower_bound = rate, bias, lower_bound


class Fetched(Carried):
    """This thread's share of a token in registers, in the dtypes of memory."""

    def __init__(self, spec: StepSpec):
        dtype = DTYPE[spec.dtype]
        of_k, of_v = shares(spec.head_dim_k, spec), shares(spec.tile_v, spec)
        self.q = cute.make_rmem_tensor((of_k,), dtype)
        self.k = cute.make_rmem_tensor((of_k,), dtype)
        of_g = 1 if spec.head_gate else of_k
        self.g = cute.make_rmem_tensor((of_g,), DTYPE[spec.gate_dtype])
        self.v = cute.make_rmem_tensor((of_v,), dtype)
        self.u = cute.make_rmem_tensor((of_v,), Float32)
        of_beta = of_v if spec.beta_columns else 1
        self.beta = cute.make_rmem_tensor((of_beta,), DTYPE[spec.beta_dtype])
        self.gk = self.gv = None
        if spec.gk_dtype != "none":
            self.gk = cute.make_rmem_tensor((of_k,), DTYPE[spec.gk_dtype])
        if spec.gv_dtype != "none":
            self.gv = cute.make_rmem_tensor((of_v,), DTYPE[spec.gv_dtype])


def shares(size: int, spec: StepSpec) -> int:
    """Return how many of `size` elements a thread has at most."""
    return -(-size // spec.num_threads)


class TokenReader:
    """Fetches tokens, and prepares them. All methods run on the device."""

    def __init__(self, spec: StepSpec):
        self.spec = spec
        self.of_k, self.of_v = shares(spec.head_dim_k, spec), shares(spec.tile_v, spec)

    def channel(self, i: int) -> Any:
        """Return this thread's i-th channel of K; a channel past K does not exist."""
        thread, _, _ = cute.arch.thread_idx()
        return thread + i * self.spec.num_threads

    def column(self, i: int) -> Any:
        """Return this thread's i-th column of the tile; a negative column does not exist. The last
        threads have the columns, since the first threads have the channels."""
        thread, _, _ = cute.arch.thread_idx()
        return (
            thread
            + i * self.spec.num_threads
            - self.of_v * self.spec.num_threads
            + (self.spec.tile_v)
        )

    def is_last_thread(self) -> Any:
        """Return whether this thread has a head's beta, and with one_decay the gate."""
        thread, _, _ = cute.arch.thread_idx()
        return thread == self.spec.num_threads - 1

    # -- from global memory -----------------------------------------------------------------

    @cute.jit
    def gate(
        self,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        lower_bound: Float32,
        head: Int32,
    ) -> Gate:
        spec = self.spec
        rate = rate_of(A_log, head)
        of_g = 1 if spec.head_gate else self.of_k
        bias = cute.make_rmem_tensor((of_g,), Float32)
        for i in cutlass.range_constexpr(of_g):
            bias[i] = Float32(0.0)
            if cutlass.const_expr(dt_bias is not None and spec.head_gate):
                bias[i] = Float32(dt_bias[head])
            elif cutlass.const_expr(dt_bias is not None):
                if self.channel(i) < spec.head_dim_k:
                    if cutlass.const_expr(spec.dt_bias_dims == 1):
                        bias[i] = Float32(dt_bias[head * spec.head_dim_k + self.channel(i)])
                    else:
                        bias[i] = Float32(dt_bias[head, self.channel(i)])
        return Gate(rate, bias, lower_bound)

    @cute.jit
    def fetch(self, into: Fetched, token: Token, tile_index: Int32) -> None:
        """Start the loads of a token, without waiting for them."""
        for i in cutlass.range_constexpr(self.of_k):
            if self.channel(i) < self.spec.head_dim_k:
                into.q[i] = token.q[self.channel(i)]
                into.k[i] = token.k[self.channel(i)]
                if cutlass.const_expr(not self.spec.head_gate):
                    into.g[i] = token.g[self.channel(i)]
                if cutlass.const_expr(into.gk is not None):
                    into.gk[i] = token.gk[self.channel(i)]
        for i in cutlass.range_constexpr(self.of_v):
            if self.column(i) >= 0:
                column = tile_index * self.spec.tile_v + self.column(i)
                into.v[i] = token.v[column]
                if cutlass.const_expr(self.spec.beta_columns):
                    into.beta[i] = token.beta[column]
                if cutlass.const_expr(into.gv is not None):
                    into.gv[i] = token.gv[column]
        if cutlass.const_expr(into.gk is not None):
            into.g[0] = token.g.iterator[0]
        if self.is_last_thread():
            if cutlass.const_expr(not self.spec.beta_columns):
                into.beta[0] = token.beta.iterator[0]
            if cutlass.const_expr(self.spec.one_decay):
                into.g[0] = token.g.iterator[0]

    @cute.jit
    def fetch_recorded(
        self,
        into: Fetched,
        k: cute.Tensor,
        g: cute.Tensor,
        u: cute.Tensor,
        tile_index: Int32,
    ) -> None:
        """Start the loads of a recorded token, which has only k, g and u."""
        for i in cutlass.range_constexpr(self.of_k):
            if self.channel(i) < self.spec.head_dim_k:
                into.k[i] = k[self.channel(i)]
                if cutlass.const_expr(not self.spec.head_gate):
                    into.g[i] = g[self.channel(i)]
        for i in cutlass.range_constexpr(self.of_v):
            if self.column(i) >= 0:
                into.u[i] = u[tile_index * self.spec.tile_v + self.column(i)]
        if cutlass.const_expr(self.spec.head_gate):
            if self.is_last_thread():
                into.g[0] = g.iterator[0]

    # -- to shared memory -------------------------------------------------------------------

    @cute.jit
    def prepare(self, stage: TokenStage, fetched: Any, gate: Gate, beta_scale: Float32) -> None:
        if self.channel(0) < self.spec.head_dim_k:
            q = [Float32(fetched.q[i]) for i in range(self.of_k)]
            k = [Float32(fetched.k[i]) for i in range(self.of_k)]
            for i in cutlass.range_constexpr(self.of_k):
                stage.q[self.channel(i)] = q[i]
            if cutlass.const_expr(self.spec.l2norm):
                self.put_sums(stage, {QQ: times(q, q), KK: times(k, k), KQ: times(k, q)})
            else:
                self.put_sums(stage, {KQ: times(k, q)})
            self.put_k_and_decay(stage, k, fetched, gate)
        self.put_v(stage, fetched.v)
        self.put_columns(stage, fetched, beta_scale)
        if self.is_last_thread():
            if cutlass.const_expr(not self.spec.beta_columns):
                stage.beta[0] = self.beta_of(fetched.beta[0], beta_scale)
            if cutlass.const_expr(self.spec.one_decay):
                stage.decay[0] = decay_exp(self.log_decay(fetched, gate, 0))

    def beta_of(self, given: Any, beta_scale: Float32) -> Any:
        beta = Float32(given)
        return beta_scale * accurate_sigmoid(beta) if self.spec.beta_sigmoid else beta

    @cute.jit
    def put_columns(self, stage: TokenStage, fetched: Any, beta_scale: Float32) -> None:
        """Store what each column of V has of its own: beta and the decay."""
        if cutlass.const_expr(self.spec.beta_columns or stage.decay_v is not None):
            for i in cutlass.range_constexpr(self.of_v):
                if self.column(i) >= 0:
                    if cutlass.const_expr(self.spec.beta_columns):
                        stage.beta[self.column(i)] = self.beta_of(fetched.beta[i], beta_scale)
                    if cutlass.const_expr(stage.decay_v is not None):
                        stage.decay_v[self.column(i)] = decay_exp(Float32(fetched.gv[i]))

    @cute.jit
    def prepare_recorded(self, stage: TokenStage, fetched: Fetched, gate: Gate) -> None:
        if self.channel(0) < self.spec.head_dim_k:
            k = [Float32(fetched.k[i]) for i in range(self.of_k)]
            if cutlass.const_expr(self.spec.l2norm):
                self.put_sums(stage, {KK: times(k, k)})
            self.put_k_and_decay(stage, k, fetched, gate)
        self.put_v(stage, fetched.u)
        if cutlass.const_expr(self.spec.head_gate):
            if self.is_last_thread():
                stage.decay[0] = decay_exp(self.log_decay(fetched, gate, 0))

    @cute.jit
    def put_k_and_decay(self, stage: TokenStage, k: list[Any], fetched: Any, gate: Gate) -> None:
        of_head = Float32(0.0)
        if cutlass.const_expr(self.spec.gk_dtype != "none"):
            of_head = self.log_decay(fetched, gate, 0)
        for i in cutlass.range_constexpr(self.of_k):
            if cutlass.const_expr(self.spec.one_decay):
                stage.k[self.channel(i)] = k[i]
            elif cutlass.const_expr(self.spec.head_gate):
                stage.k[self.channel(i)] = k[i]
                stage.decay[self.channel(i)] = decay_exp(of_head + Float32(fetched.gk[i]))
            else:
                g = self.log_decay(fetched, gate, i)
                stage.k[self.channel(i)] = k[i]
                stage.decay[self.channel(i)] = decay_exp(g)

    def log_decay(self, fetched: Any, gate: Gate, i: int) -> Any:
        """Return the natural logarithm of the decay of this thread's i-th gate."""
        g = Float32(fetched.g[i])
        return log_decay(self.spec.gate, g, gate.rate, gate.bias[i], gate.lower_bound)

    @cute.jit
    def put_sums(self, stage: TokenStage, products: cutlass.Constexpr) -> None:
        """Store this warp's share of each sum of products."""
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
        totals = warp_sums([x for values in products.values() for x in values])
        if lane == 0:
            for n, which in enumerate(products):
                for i in cutlass.range_constexpr(self.of_k):
                    group = which * groups_of_k(self.spec) + i * self.spec.num_warps
                    stage.sums[group + warp] = totals[n * self.of_k + i]

    @cute.jit
    def put_v(self, stage: TokenStage, v: cute.Tensor) -> None:
        for i in cutlass.range_constexpr(self.of_v):
            if self.column(i) >= 0:
                stage.v[self.column(i)] = Float32(v[i])

    # -- from shared memory -----------------------------------------------------------------

    def total(self, stage: TokenStage, which: int) -> Any:
        """Return the sum QQ, KK or KQ over all of K."""
        groups = groups_of_k(self.spec)
        total = stage.sums[which * groups]
        for group in range(1, groups):
            total = total + stage.sums[which * groups + group]
        return total

    @cute.jit
    def write(self, result: cute.Tensor, row: cute.Tensor, tile_index: Int32) -> None:
        """Write a stage's o or u to its row in global memory."""
        for i in cutlass.range_constexpr(self.of_v):
            if self.column(i) >= 0:
                value = result[self.column(i)].to(row.element_type)
                row[tile_index * self.spec.tile_v + self.column(i)] = value

    @cute.jit
    def write_zeros(self, row: cute.Tensor, tile_index: Int32) -> None:
        """Write zeros, the output of a padded sequence."""
        for i in cutlass.range_constexpr(self.of_v):
            if self.column(i) >= 0:
                row[tile_index * self.spec.tile_v + self.column(i)] = row.element_type(0.0)


def reciprocal_norm(sum_of_squares: Any) -> Any:
    x = sum_of_squares + Float32(L2NORM_EPSILON)
    inverse = reciprocal_sqrt(x)
    error = cute.math.fma(-x * inverse, inverse, Float32(1.0))
    return cute.math.fma(0.5 * inverse, error, inverse)


def times(a: list[Any], b: list[Any]) -> list[Any]:
    return [x * y for x, y in zip(a, b, strict=True)]


def warp_sums(values: list[Any]) -> list[Any]:
    """Return the sum of each value over the lanes of a warp, in all lanes."""
    distance = WARP_SIZE // 2
    while distance:
        values = [x + cute.arch.shuffle_sync_bfly(x, offset=distance) for x in values]
        distance //= 2
    return values
