"""The backward of the stages of chunked Kimi Delta Attention, each as a function of its own.

    dAqk, dv                         = kda_chunk_output_backward(v_new, Aqk, do, scale)
    dh, dinitial_state, dv           = kda_chunk_delta_h_backward(qg, kg, w, G, do, dv, ...)
    dq, dk, dv, dbeta, dg, dAkk      = kda_recompute_w_u_backward(q, k, v, v_new, G, beta, Akk, h,
                                                                  do, dh, dv)
    dq, dk, dbeta, dg                = kda_chunk_intra_backward(q, k, G, beta, dAqk, dAkk,
                                                                dq, dk, dbeta, dg)
    dg, dA_log, ddt_bias             = kda_gate_cumsum_backward(dg, g, ...)

In this order the functions compute the gradient of the stages in `stages`, from do, the gradient of
o, and from the gradient of the final state. Each function returns what flash-linear-attention's
function for its stage returns, in the same shapes and dtypes. One difference: the kernel sums dq
and dk over the value heads of a group. In the tensors that the functions pass on,

    dAqk    is the gradient of the unscaled product of q and k, Aqk / scale
    dv      is the gradient of v_new, then of u, then of v
    dh      is the gradient of the state after every chunk
    dAkk    is the gradient of L, of which Akk is (I + L)^-1
    dg      is the gradient of the sums of gates in natural units, ln(2) G
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta import table
from ...kernels.delta.chunk.heuristics import delta_h_backward_config
from ...kernels.delta.chunk.spec import (
    CHUNK,
    DeltaHBackwardSpec,
    GateSpec,
    IntraBackwardSpec,
    OutputBackwardSpec,
    RecomputeBackwardSpec,
)
from ..checks import DTYPE_NAMES, check_dtype, check_dtypes_are, check_flags, check_number
from .arguments import (
    Sizes,
    check_dtypes,
    check_gate,
    check_gate_and_beta_dtypes,
    check_state,
    contiguous,
    count_chunks,
    gate_kind,
    index_dtype,
    readable,
    readable_parameter,
    readable_state,
    unchanged,
)
from .chunk_passes import num_slots
from .chunk_plan import SUM_A_LOG, SUM_DT_BIAS
from .stages import Stage, check_heads_of_a_chunk, delta_h_outputs, indices, packing

__all__ = [
    "KdaGateGradients",
    "KdaIntraGradients",
    "KdaOutputGradients",
    "KdaRecomputedGradients",
    "KdaStateGradients",
    "kda_chunk_delta_h_backward",
    "kda_chunk_intra_backward",
    "kda_chunk_output_backward",
    "kda_gate_cumsum_backward",
    "kda_recompute_w_u_backward",
]

_empty = torch.empty
_float32 = torch.float32


class KdaOutputGradients(NamedTuple):
    """Results of `kda_chunk_output_backward`."""

    dAqk: Tensor  # [B, T, HV, 64], float32
    dv: Tensor  # [B, T, HV, V], gradient of v_new


class KdaStateGradients(NamedTuple):
    """Results of `kda_chunk_delta_h_backward`."""

    dh: Tensor  # [B, chunks, HV, K, V] or [B, chunks, HV, V, K]
    dinitial_state: Tensor | None  # [N, HV, K, V] or [N, HV, V, K], float32
    dv: Tensor  # [B, T, HV, V], gradient of u


class KdaRecomputedGradients(NamedTuple):
    """Results of `kda_recompute_w_u_backward`."""

    dq: Tensor  # [B, T, HV, K], float32
    dk: Tensor  # [B, T, HV, K], float32
    dv: Tensor  # [B, T, HV, V]
    dbeta: Tensor  # [B, T, HV], float32
    dg: Tensor  # [B, T, HV, K], float32
    dAkk: Tensor  # [B, T, HV, 64], float32


class KdaIntraGradients(NamedTuple):
    """Results of `kda_chunk_intra_backward`."""

    dq: Tensor  # [B, T, HQK, K], float32
    dk: Tensor  # [B, T, HQK, K], float32
    dbeta: Tensor  # [B, T, HV], float32
    dg: Tensor  # [B, T, HV, K], float32


class KdaGateGradients(NamedTuple):
    """Results of `kda_gate_cumsum_backward`."""

    dg: Tensor  # [B, T, HV, K]
    dA_log: Tensor | None  # shape and dtype of A_log
    ddt_bias: Tensor | None  # shape and dtype of dt_bias


# -- the functions ------------------------------------------------------------------------------


def kda_chunk_output_backward(
    v_new: Tensor,
    Aqk: Tensor,
    do: Tensor,
    scale: float,
    *,
    cu_seqlens: Tensor | None = None,
) -> KdaOutputGradients:
    """The gradients of `kda_chunk_output` through Aqk v_new, chunk by chunk:

        dAqk = scale do v_new^T    on and below the diagonal
        dv   = Aqk^T do

    dAqk is the gradient of the unscaled product of q and k; Aqk is that product times the scale.
    `kda_recompute_w_u_backward` and `kda_chunk_delta_h_backward` compute the gradients through q
    and h.

    Args:
        v_new: `[B, T, HV, V]`, bfloat16 or float16, from `kda_chunk_delta_h`.
        Aqk: `[B, T, HV, 64]`, dtype of v_new. Elements above the diagonal are not used.
        do: the gradient of o, of v_new's shape and dtype.
        scale: the forward's scale.
        cu_seqlens: as for `chunk_kda`.

    Returns:
        dAqk, `[B, T, HV, 64]` float32, 0 above the diagonal and in the columns past a short chunk's
        length; dv, the gradient of v_new, in v_new's shape and dtype. dAqk and dv are contiguous,
        and undefined for tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    return KdaOutputGradients(*OUTPUT_BACKWARD.routed(v_new, Aqk, do, scale, cu_seqlens))


def kda_chunk_delta_h_backward(
    qg: Tensor,
    kg: Tensor,
    w: Tensor,
    g: Tensor,
    do: Tensor,
    dv: Tensor,
    dfinal_state: Tensor | None = None,
    scale: float | None = None,
    *,
    output_dinitial_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> KdaStateGradients:
    """The gradient of the state from chunk to chunk, from the last chunk to the first; with e a
    chunk's last token:

        dh = dS        du = dv + kg dS        dS <- Diag(exp2(G_e)) dS + scale qg^T do - w^T du

    Args:
        qg: `[B, T, HV, K]`, bfloat16 or float16, from `kda_recompute_w_u` or `kda_chunk_intra`.
        kg: of qg's shape and dtype, from the same function.
        w: of qg's shape and dtype, from the same function.
        g: G, `[B, T, HV, K]` float32.
        do: the gradient of o, `[B, T, HV, V]`, dtype of qg.
        dv: the gradient of v_new from `kda_chunk_output_backward`, of do's shape and dtype.
        dfinal_state: the gradient of the final state, `[N, HV, K, V]`, float32 (or bfloat16, which
            is converted); None is 0.
        scale: the forward's scale; None is K ** -0.5.
        output_dinitial_state: whether to return dinitial_state.
        state_v_first: dfinal_state, dh and dinitial_state are `[..., V, K]`, not `[..., K, V]`.
        cu_seqlens: as for `chunk_kda`.
        cu_seqlens_cpu: as for `chunk_kda`.

    Returns:
        dh, the gradient of the state after every chunk, in the dtype of do, with chunks laid out
        like h of `kda_chunk_delta_h`; dinitial_state, of dfinal_state's shape, in float32, or None
        without output_dinitial_state; dv, the gradient of u, of the argument dv's shape and dtype,
        undefined for tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    num_chunks = count_chunks(cu_seqlens_cpu, cu_seqlens, do)
    return KdaStateGradients(
        *DELTA_H_BACKWARD.routed(
            qg, kg, w, g, do, dv, dfinal_state, scale, output_dinitial_state, state_v_first,
            cu_seqlens, num_chunks,
        )
    )  # fmt: skip


def kda_recompute_w_u_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    Akk: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> KdaRecomputedGradients:
    """Gradients of q, k, v, g, beta and L. They come through qg, kg, w and u, including the
    products of qg, kg and w with chunk states, and through the decay of the states. With e a
    chunk's last token, and du the argument dv:

        dy   = Akk^T du                         dv    = Diag(beta) dy
        dq   = scale exp2(G) * (do h^T)         dAkk  = -dy v_new^T    below the diagonal
        dks  = -exp2(G) * (dy h^T)              dbeta = sum_V (dy * v) + sum_K (dks * k)
        dke  = exp2(G_e - G) * (v_new dh^T)     dk    = Diag(beta) dks + dke
        dg   = q * dq + k * (Diag(beta) dks - dke)
        dg_e += sum_i (k_i * dke_i) + exp2(G_e) * sum_V (h * dh)

    dAkk is the gradient of L, of which Akk is (I + L)^-1. The formula of dAkk uses v_new = u - w h,
    so that no gradient of Akk has to pass through the inverse.

    Args:
        q: `[B, T, HQK, K]`, bfloat16 or float16.
        k: of q's shape and dtype.
        v: `[B, T, HV, V]`, dtype of q.
        v_new: of v's shape and dtype, from `kda_chunk_delta_h`.
        g: G, `[B, T, HV, K]` float32.
        beta: `[B, T, HV]`, float32, bfloat16 or float16; any strides.
        Akk: `[B, T, HV, 64]`, dtype of q. Elements above the diagonal are not used.
        h: from `kda_chunk_delta_h`, dtype of q.
        do: the gradient of o, of v's shape and dtype.
        dh: from `kda_chunk_delta_h_backward`, of h's shape and dtype.
        dv: the gradient of u from `kda_chunk_delta_h_backward`, of v's shape and dtype.
        scale: the forward's scale; None is K ** -0.5.
        state_v_first: h and dh are `[..., V, K]`, not `[..., K, V]`.
        cu_seqlens: as for `chunk_kda`.

    Returns:
        dq, dk and dg `[B, T, HV, K]`, dbeta `[B, T, HV]` and dAkk `[B, T, HV, 64]` in float32, and
        dv `[B, T, HV, V]` in the dtype of v, all contiguous, undefined for tokens of no sequence.
        dq and dk are not yet summed over value heads. dAkk is 0 on and above the diagonal.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    return KdaRecomputedGradients(
        *RECOMPUTE_W_U_BACKWARD.routed(
            q, k, v, v_new, g, beta, Akk, h, do, dh, dv, scale, state_v_first, cu_seqlens
        )
    )


def kda_chunk_intra_backward(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    dAqk: Tensor,
    dAkk: Tensor,
    dq: Tensor,
    dk: Tensor,
    dbeta: Tensor,
    dg: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> KdaIntraGradients:
    """The gradients through the products within chunks, added to the gradients through later
    stages. With i and j tokens of a chunk, and D_ij = exp2(G_i - G_j):

        a_i = sum_j dAqk_ij D_ij * k_j    b_i = sum_j dAkk_ij D_ij * k_j                 for j < i
        c_i = sum_j D_ji * (dAqk_ji q_j + beta_j dAkk_ji k_j)                            for j > i

        dq_i += a_i + dAqk_ii k_i         dk_i += beta_i b_i + c_i + dAqk_ii q_i
        dbeta_i += b_i . k_i              dg_i += q_i * a_i + k_i * (beta_i b_i - c_i)

    All arithmetic is float32, and no factor exceeds 1 if all gates are at most 0.

    Args:
        q: `[B, T, HQK, K]`, bfloat16 or float16.
        k: of q's shape and dtype.
        g: G, `[B, T, HV, K]` float32.
        beta: `[B, T, HV]`, float32, bfloat16 or float16; any strides.
        dAqk: `[B, T, HV, 64]` float32, from `kda_chunk_output_backward`.
        dAkk: `[B, T, HV, 64]` float32, from `kda_recompute_w_u_backward`.
        dq: `[B, T, HV, K]` float32, from `kda_recompute_w_u_backward`.
        dk: `[B, T, HV, K]` float32, from `kda_recompute_w_u_backward`.
        dbeta: `[B, T, HV]` float32, from `kda_recompute_w_u_backward`.
        dg: `[B, T, HV, K]` float32, from `kda_recompute_w_u_backward`.
        cu_seqlens: as for `chunk_kda`.

    Returns:
        dq and dk, `[B, T, HQK, K]`, the sums over the value heads that share q and k; dbeta,
        `[B, T, HV]`; dg, `[B, T, HV, K]`. All results are float32, contiguous, and undefined for
        tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    return KdaIntraGradients(
        *INTRA_BACKWARD.routed(q, k, g, beta, dAqk, dAkk, dq, dk, dbeta, dg, cu_seqlens)
    )


def kda_gate_cumsum_backward(
    dg: Tensor,
    g: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> KdaGateGradients:
    """The gradients of `kda_gate_cumsum`: sums of dg from each token to the end of its chunk, then
    with use_gate_in_kernel the gradient of the gate. This gradient is 0 for a gate that counts as
    -128.

    Args:
        dg: `[B, T, HV, K]` float32, from `kda_chunk_intra_backward`: the gradient of ln(2) G.
        g: as for `kda_gate_cumsum`.
        A_log: as for `kda_gate_cumsum`.
        dt_bias: as for `kda_gate_cumsum`.
        lower_bound: as for `kda_gate_cumsum`.
        use_gate_in_kernel: whether the forward computed the gate from g.
        cu_seqlens: as for `chunk_kda`.

    Returns:
        dg, of g's shape and dtype, contiguous, undefined for tokens of no sequence; dA_log and
        ddt_bias, of the shape and dtype of A_log and dt_bias. dA_log is None without A_log,
        ddt_bias without dt_bias, and both are None without use_gate_in_kernel. dA_log and ddt_bias
        are summed in float32, in a fixed order.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    check_flags(use_gate_in_kernel=use_gate_in_kernel)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    return KdaGateGradients(
        *GATE_CUMSUM_BACKWARD.routed(
            dg, g, A_log, dt_bias, lower_bound, use_gate_in_kernel, cu_seqlens
        )
    )


# -- the operators ------------------------------------------------------------------------------


def _scale(scale: float | None, x: Tensor) -> float:
    return float(x.shape[-1] ** -0.5) if scale is None else float(scale)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a contiguous tensor of x's shape."""
    return _empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _scores_like(x: Tensor) -> Tensor:
    """Memory for `[B, T, HV, 64]` in float32."""
    return _empty((*x.shape[:3], CHUNK), dtype=_float32, device=x.device)


# -- output


class _OutputArguments(NamedTuple):
    v_new: Tensor
    Aqk: Tensor
    do: Tensor
    scale: float
    cu_seqlens: Tensor | None


class _OutputBackward(Stage):
    name = "kda_chunk_output_backward"
    arguments = _OutputArguments
    results = (("dAqk", ""), ("dv", ""))
    values = "v_new"

    def check(self, a: _OutputArguments, given: dict[str, Tensor]) -> None:
        if a.scale is None:
            raise TypeError("scale must be a float, got NoneType")
        check_number("scale", a.scale)
        check_dtypes(given, ("v_new", "Aqk", "do"))
        sizes = Sizes()
        sizes.take("v_new", a.v_new, "B T HV V")
        sizes.take("Aqk", a.Aqk, f"B T HV {CHUNK}")
        sizes.take("do", a.do, "B T HV V")
        sizes.check_grid()
        sizes.check_dims()
        sizes.check_sequences(a.cu_seqlens)

    def key(self, a: _OutputArguments) -> tuple[Any, ...]:
        v_new, _Aqk, _do, scale, cu_seqlens = a
        return (
            v_new.shape[2:], v_new.dtype, v_new.get_device(), scale, type(scale),
            packing(v_new, cu_seqlens),
        )  # fmt: skip

    def prepare(self, a: _OutputArguments) -> Any:
        spec = OutputBackwardSpec(
            dtype=DTYPE_NAMES[a.v_new.dtype],
            head_dim_v=a.v_new.shape[-1],
            index_dtype=index_dtype(a.cu_seqlens),
        )
        return launch.get_for(a.v_new.device, table.OUTPUT_BACKWARD, spec)

    def launch(self, ready: Any, a: _OutputArguments) -> tuple[Tensor, ...]:
        v_new, Aqk, do, scale, cu_seqlens = a
        results = _scores_like(v_new), _like(v_new)
        ready(
            readable(v_new), readable(Aqk), readable(do), indices(cu_seqlens), *results,
            float(scale),
        )  # fmt: skip
        return results

    def outputs(self, a: _OutputArguments) -> tuple[Tensor, ...]:
        return _scores_like(a.v_new), _like(a.v_new)


# -- delta_h


class _DeltaHArguments(NamedTuple):
    qg: Tensor
    kg: Tensor
    w: Tensor
    g: Tensor
    do: Tensor
    dv: Tensor
    dfinal_state: Tensor | None
    scale: float | None
    output_dinitial_state: bool
    state_v_first: bool
    cu_seqlens: Tensor | None
    num_chunks: int | None


class _DeltaHBackward(Stage):
    name = "kda_chunk_delta_h_backward"
    arguments = _DeltaHArguments
    results = (("dh", ""), ("dinitial_state", "output_dinitial_state"), ("dv", ""))
    values = "do"

    def check(self, a: _DeltaHArguments, given: dict[str, Tensor]) -> None:
        check_number("scale", a.scale)
        check_flags(output_dinitial_state=a.output_dinitial_state, state_v_first=a.state_v_first)
        check_dtypes(given, ("qg", "kg", "w", "do", "dv"))
        check_dtype("g", a.g, ("float32",))
        sizes = Sizes()
        for name in ("qg", "kg", "w", "g"):
            sizes.take(name, given[name], "B T HV K")
        for name in ("do", "dv"):
            sizes.take(name, given[name], "B T HV V")
        sizes.check_grid()
        sizes.check_dims()
        sizes.check_sequences(a.cu_seqlens)
        check_state(sizes, a.dfinal_state, a.state_v_first, "dfinal_state")

    def key(self, a: _DeltaHArguments) -> tuple[Any, ...]:
        qg, _kg, _w, _g, do, _dv, state, scale, initial, state_v_first, cu_seqlens, _ = a
        # The kernel's host code does not check that there is a state for each sequence.
        sequences = do.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        states = None if state is None else state.shape[0] == sequences
        return (
            qg.shape[2:], do.shape[-1], do.dtype, do.get_device(), states, scale, type(scale),
            initial, type(initial), state_v_first, type(state_v_first), packing(do, cu_seqlens),
        )  # fmt: skip

    def prepare(self, a: _DeltaHArguments) -> Any:
        dims: dict[str, Any] = {"head_dim_k": a.qg.shape[-1], "head_dim_v": a.do.shape[-1]}
        spec = DeltaHBackwardSpec(
            dtype=DTYPE_NAMES[a.do.dtype],
            index_dtype=index_dtype(a.cu_seqlens),
            state_v_first=bool(a.state_v_first),
            has_initial_state=bool(a.output_dinitial_state),
            has_final_state=a.dfinal_state is not None,
            **dims,
            **delta_h_backward_config(arch=launch.arch_for(a.do.device), **dims),
        )
        return launch.get_for(a.do.device, table.DELTA_H_BACKWARD, spec)

    def launch(self, ready: Any, a: _DeltaHArguments) -> tuple[Tensor | None, ...]:
        dh, dinitial_state, dv = results = self.outputs(a)
        ready(
            *map(readable, a[:6]), readable_state(a.dfinal_state), indices(a.cu_seqlens), dh,
            dinitial_state, dv, _scale(a.scale, a.qg),
        )  # fmt: skip
        return results

    def outputs(self, a: _DeltaHArguments) -> tuple[Tensor, Tensor | None, Tensor]:
        dh, _, dinitial_state = delta_h_outputs(
            a.qg, a.do, a.output_dinitial_state, False, a.state_v_first, a.cu_seqlens, a.num_chunks
        )
        return dh, dinitial_state, _like(a.dv)

    def nothing(self, a: _DeltaHArguments) -> Any:
        results = super().nothing(a)
        if results is not None:
            unchanged(results[1], a.dfinal_state)
        return results


# -- recompute_w_u


class _RecomputeArguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    v_new: Tensor
    g: Tensor
    beta: Tensor
    Akk: Tensor
    h: Tensor
    do: Tensor
    dh: Tensor
    dv: Tensor
    scale: float | None
    state_v_first: bool
    cu_seqlens: Tensor | None


class _RecomputeWUBackward(Stage):
    name = "kda_recompute_w_u_backward"
    arguments = _RecomputeArguments
    results = (("dq", ""), ("dk", ""), ("dv", ""), ("dbeta", ""), ("dg", ""), ("dAkk", ""))
    values = "v"

    def check(self, a: _RecomputeArguments, given: dict[str, Tensor]) -> None:
        check_number("scale", a.scale)
        check_flags(state_v_first=a.state_v_first)
        names = ("q", "k", "v", "v_new", "Akk", "h", "do", "dh", "dv")
        sizes = check_heads_of_a_chunk(given, names, a.cu_seqlens)
        for name in ("do", "dv"):
            sizes.take(name, given[name], "B T HV V")
        if a.cu_seqlens is None:
            sizes["chunks"] = sizes.num_chunks(None)
        for name in ("h", "dh"):
            shape = "B chunks HV V K" if a.state_v_first else "B chunks HV K V"
            sizes.take(name, given[name], shape)

    def key(self, a: _RecomputeArguments) -> tuple[Any, ...]:
        return (
            a.q.shape[2:], a.v.shape[2:], a.q.dtype, a.beta.dtype, a.beta.is_neg(),
            a.q.get_device(), a.scale, type(a.scale), a.state_v_first, type(a.state_v_first),
            packing(a.v, a.cu_seqlens),
            # The kernel's host code does not check that h has as many chunks as T needs.
            a.cu_seqlens is not None or a.h.shape[1] == (a.v.shape[1] + CHUNK - 1) // CHUNK,
        )  # fmt: skip

    def prepare(self, a: _RecomputeArguments) -> Any:
        spec = RecomputeBackwardSpec(
            dtype=DTYPE_NAMES[a.q.dtype],
            head_dim_k=a.q.shape[-1],
            head_dim_v=a.v.shape[-1],
            index_dtype=index_dtype(a.cu_seqlens),
            beta_dtype=DTYPE_NAMES[a.beta.dtype],
            state_v_first=bool(a.state_v_first),
        )
        return launch.get_for(a.q.device, table.RECOMPUTE_W_U_BACKWARD, spec)

    def launch(self, ready: Any, a: _RecomputeArguments) -> tuple[Tensor, ...]:
        results = self.outputs(a)
        ready(
            *map(readable, a[:5]), a.beta, readable(a.Akk), contiguous(a.h), readable(a.do),
            contiguous(a.dh), readable(a.dv), indices(a.cu_seqlens), *results,
            _scale(a.scale, a.q),
        )  # fmt: skip
        return results

    def outputs(self, a: _RecomputeArguments) -> tuple[Tensor, ...]:
        return (
            _like(a.g), _like(a.g), _like(a.v), _like(a.beta, _float32), _like(a.g),
            _scores_like(a.v),
        )  # fmt: skip


# -- within chunks


class _IntraArguments(NamedTuple):
    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor
    dAqk: Tensor
    dAkk: Tensor
    dq: Tensor
    dk: Tensor
    dbeta: Tensor
    dg: Tensor
    cu_seqlens: Tensor | None


def _near_rows(x: Tensor) -> Tensor:
    """x for a kernel that computes offsets within a chunk in 32 bits."""
    x = readable(x)
    return x if x.stride(1) * CHUNK < 2**31 else x.contiguous()


class _ChunkIntraBackward(Stage):
    name = "kda_chunk_intra_backward"
    arguments = _IntraArguments
    results = (("dq", ""), ("dk", ""), ("dbeta", ""), ("dg", ""))
    values = "g"

    def check(self, a: _IntraArguments, given: dict[str, Tensor]) -> None:
        check_dtypes(given, ("q", "k"))
        check_gate_and_beta_dtypes(given)
        check_dtypes_are(given, ("g", "dAqk", "dAkk", "dq", "dk", "dbeta", "dg"), _float32)
        sizes = Sizes()
        sizes.take("q", a.q, "B T HQK K")
        sizes.take("k", a.k, "B T HQK K")
        sizes.take("g", a.g, "B T HV K")
        sizes.check_heads()
        sizes.check_dims()
        for names, shape in (
            (("beta", "dbeta"), "B T HV"),
            (("dAqk", "dAkk"), f"B T HV {CHUNK}"),
            (("dq", "dk", "dg"), "B T HV K"),
        ):
            for name in names:
                sizes.take(name, given[name], shape)
        sizes.check_sequences(a.cu_seqlens)

    def key(self, a: _IntraArguments) -> tuple[Any, ...]:
        q, _k, g, beta, *_rest, dbeta, _dg, cu_seqlens = a
        return (
            q.shape[2:], g.shape[2], q.dtype, beta.dtype, beta.is_neg(), dbeta.is_neg(),
            q.get_device(), packing(g, cu_seqlens),
        )  # fmt: skip

    def prepare(self, a: _IntraArguments) -> Any:
        spec = IntraBackwardSpec(
            dtype=DTYPE_NAMES[a.q.dtype],
            head_dim_k=a.q.shape[-1],
            index_dtype=index_dtype(a.cu_seqlens),
            beta_dtype=DTYPE_NAMES[a.beta.dtype],
            grouped=a.q.shape[2] != a.g.shape[2],
        )
        return launch.get_for(a.q.device, table.INTRA_BACKWARD, spec)

    def launch(self, ready: Any, a: _IntraArguments) -> tuple[Tensor, ...]:
        results = self.outputs(a)
        q, k, g, dq, dk, dg = map(_near_rows, (a.q, a.k, a.g, a.dq, a.dk, a.dg))
        ready(
            q, k, g, a.beta, readable(a.dAqk), readable(a.dAkk), dq, dk, a.dbeta, dg,
            indices(a.cu_seqlens), *results,
        )  # fmt: skip
        return results

    def outputs(self, a: _IntraArguments) -> tuple[Tensor, ...]:
        return _like(a.q, _float32), _like(a.k, _float32), _like(a.dbeta), _like(a.dg)


# -- gate and cumsum


class _GateArguments(NamedTuple):
    dg: Tensor
    g: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float | None
    use_gate_in_kernel: bool
    cu_seqlens: Tensor | None


class _GateCumsumBackward(Stage):
    name = "kda_gate_cumsum_backward"
    arguments = _GateArguments
    results = (("dg", ""), ("dA_log", "A_log"), ("ddt_bias", "dt_bias"))
    values = "g"

    def check(self, a: _GateArguments, given: dict[str, Tensor]) -> None:
        check_flags(use_gate_in_kernel=a.use_gate_in_kernel)
        check_number("lower_bound", a.lower_bound)
        check_dtype("dg", a.dg, ("float32",))
        check_gate_and_beta_dtypes(given)
        sizes = Sizes()
        sizes.take("g", a.g, "B T HV K")
        sizes.take("dg", a.dg, "B T HV K")
        sizes.check_grid()
        sizes.check_dims()
        sizes.check_sequences(a.cu_seqlens)
        if not a.use_gate_in_kernel:
            for name in ("A_log", "dt_bias"):
                if name in given:
                    raise ValueError(f"{name} is given, it needs use_gate_in_kernel")
        check_gate(given, sizes, a.use_gate_in_kernel, False, a.lower_bound)

    def key(self, a: _GateArguments) -> tuple[Any, ...]:
        _dg, g, A_log, dt_bias, lower_bound, use_gate_in_kernel, cu_seqlens = a
        return (
            g.shape[2:], g.dtype, g.get_device(), use_gate_in_kernel, type(use_gate_in_kernel),
            lower_bound, type(lower_bound), A_log is None, dt_bias is None, packing(g, cu_seqlens),
        )  # fmt: skip

    def prepare(self, a: _GateArguments) -> Any:
        spec = GateSpec(
            head_dim_k=a.g.shape[-1],
            gate_dtype=DTYPE_NAMES[a.g.dtype],
            gate=gate_kind(bool(a.use_gate_in_kernel), a.lower_bound),
            has_A_log=a.A_log is not None,
            has_dt_bias=a.dt_bias is not None,
            index_dtype=index_dtype(a.cu_seqlens),
        )

        def load(*request: Any) -> Any:
            return launch.get_for(a.g.device, *request)

        return (
            load(table.GATE_CUMSUM_BACKWARD, spec),
            None if a.A_log is None else load(*SUM_A_LOG),
            None if a.dt_bias is None else load(*SUM_DT_BIAS),
        )

    def launch(self, ready: Any, a: _GateArguments) -> tuple[Tensor | None, ...]:
        dG, g, A_log, dt_bias, lower_bound, _use_gate_in_kernel, cu_seqlens = a
        kernel, sum_A_log, sum_dt_bias = ready
        heads, dim = g.shape[2:]
        slots, device = num_slots(g, cu_seqlens), g.device
        dg, dA_log, ddt_bias = _like(g), None, None
        A_parts = bias_parts = None
        if A_log is not None:
            A_parts = _empty((slots, 1, heads), dtype=_float32, device=device)
        if dt_bias is not None:
            bias_parts = _empty((slots, heads, dim), dtype=_float32, device=device)
        kernel(
            readable(dG), readable(g), readable_parameter(A_log, heads),
            readable_parameter(dt_bias, heads, dim), indices(cu_seqlens), dg, A_parts, bias_parts,
            0.0 if lower_bound is None else float(lower_bound),
        )  # fmt: skip
        if A_log is not None:
            dA_log = _empty((1, heads), dtype=_float32, device=device)
            sum_A_log(A_parts, dA_log)
            dA_log = dA_log.to(A_log.dtype).view(A_log.shape)
        if dt_bias is not None:
            ddt_bias = _empty((heads, dim), dtype=_float32, device=device)
            sum_dt_bias(bias_parts, ddt_bias)
            ddt_bias = ddt_bias.to(dt_bias.dtype).view(dt_bias.shape)
        return dg, dA_log, ddt_bias

    def outputs(self, a: _GateArguments) -> tuple[Tensor | None, ...]:
        return _like(a.g), *(None if x is None else _like(x) for x in (a.A_log, a.dt_bias))

    def nothing(self, a: _GateArguments) -> Any:
        results = super().nothing(a)
        for x in () if results is None else results[1:]:
            if x is not None:
                x.zero_()
        return results


OUTPUT_BACKWARD, DELTA_H_BACKWARD = _OutputBackward(), _DeltaHBackward()
RECOMPUTE_W_U_BACKWARD, INTRA_BACKWARD = _RecomputeWUBackward(), _ChunkIntraBackward()
GATE_CUMSUM_BACKWARD = _GateCumsumBackward()
