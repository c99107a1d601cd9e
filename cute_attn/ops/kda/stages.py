"""The stages of chunked Kimi Delta Attention, each as a function of its own, for training stacks.

    G                         = kda_gate_cumsum(g, ...)
    Aqk, Akk, w, u, qg, kg    = kda_chunk_intra(q, k, v, G, beta)
    w, u, qg, kg              = kda_recompute_w_u(q, k, v, G, beta, Akk)       for a backward pass
    h, v_new, final_state     = kda_chunk_delta_h(kg, w, u, G, initial_state)
    o                         = kda_chunk_output(q, v_new, G, Aqk, h)

The formulas are DeltaNet's parallel form (arXiv 2406.06484) with a decay for each channel (Kimi
Linear, arXiv 2510.26692); `cute_attn.reference.kda` has each stage in plain PyTorch. Chunks have 64
tokens, counted from the start of a sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta import table
from ...kernels.delta.chunk.heuristics import delta_h_config, output_config
from ...kernels.delta.chunk.spec import (
    CHUNK,
    DeltaHSpec,
    GateSpec,
    IntraSpec,
    OutputSpec,
    RecomputeSpec,
)
from ..checks import DTYPE_NAMES, check_dtype, check_flags, check_number
from ..operator import Operator
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

__all__ = [
    "KdaChunkStates",
    "KdaIntra",
    "KdaRecomputed",
    "kda_chunk_delta_h",
    "kda_chunk_intra",
    "kda_chunk_output",
    "kda_gate_cumsum",
    "kda_recompute_w_u",
]

_empty = torch.empty


class KdaIntra(NamedTuple):
    """Results of `kda_chunk_intra`."""

    Aqk: Tensor  # [B, T, HV, 64], the scale included
    Akk: Tensor  # [B, T, HV, 64]
    w: Tensor  # [B, T, HV, K]
    u: Tensor  # [B, T, HV, V]
    qg: Tensor | None  # [B, T, HV, K], the scale not included
    kg: Tensor  # [B, T, HV, K]


class KdaRecomputed(NamedTuple):
    """Results of `kda_recompute_w_u`."""

    w: Tensor  # [B, T, HV, K]
    u: Tensor  # [B, T, HV, V]
    qg: Tensor | None  # [B, T, HV, K]
    kg: Tensor | None  # [B, T, HV, K]


class KdaChunkStates(NamedTuple):
    """Results of `kda_chunk_delta_h`."""

    h: Tensor  # [B, chunks, HV, K, V] or [B, chunks, HV, V, K]
    v_new: Tensor | None  # [B, T, HV, V]
    final_state: Tensor | None  # [N, HV, K, V] or [N, HV, V, K], float32


# -- the stages ---------------------------------------------------------------------------------


def kda_gate_cumsum(
    g: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The cumulative sum of the gates within each chunk, in base 2: G = cumsum(gate) / ln 2.

    The gate is g itself, or with use_gate_in_kernel (Kimi Linear, arXiv 2510.26692, and its bounded
    successor)

        -exp(A_log) softplus(g + dt_bias)                    without a lower bound
        lower_bound sigmoid(exp(A_log) (g + dt_bias))        with a lower bound

    Without A_log, exp(A_log) is 1.

    A gate below -128 counts as -128, whose decay is 0 in float32.

    Args:
        g: `[B, T, HV, K]`, float32, bfloat16 or float16; K is 64 or 128. All tensors are read in
            place if rows are contiguous and 16-byte aligned, and copied otherwise.
        A_log: HV numbers of any shape. A_log, dt_bias and lower_bound are ignored without
            use_gate_in_kernel.
        dt_bias: HV * K numbers of any shape; None is 0.
        lower_bound: lower bound of the gate, negative; None for no bound.
        use_gate_in_kernel: compute the gate from g, as above.
        cu_seqlens: as for `chunk_kda`.

    Returns:
        G, `[B, T, HV, K]` float32, contiguous; undefined for tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    result: Tensor = GATE_CUMSUM.routed(
        g, A_log, dt_bias, lower_bound, use_gate_in_kernel, cu_seqlens
    )
    return result


def kda_chunk_intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    output_qg: bool = False,
) -> KdaIntra:
    """The part of a chunk that needs no state. With tokens i and j, and the chunk's last token e:

        Aqk_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)                         for j <= i
        L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd)                        for j < i
        Akk    = (I + L)^-1
        w = Akk Diag(beta) (exp2(G) * k)          qg = exp2(G) * q
        u = Akk Diag(beta) v                      kg = exp2(G_e - G) * k

    No factor of a product exceeds 1 if all gates are at most 0.

    Args:
        q: `[B, T, HQK, K]`, bfloat16 or float16. q and k are not normalised here.
        k: of q's shape and dtype.
        v: `[B, T, HV, V]`, dtype of q. Value head h uses query and key head h // (HV // HQK).
        g: G, `[B, T, HV, K]` float32, from `kda_gate_cumsum`.
        beta: `[B, T, HV]`, float32, bfloat16 or float16; any strides.
        scale: factor of Aqk; None is K ** -0.5.
        cu_seqlens: as for `chunk_kda`.
        output_qg: whether to compute qg.

    Returns:
        Aqk, Akk, w, u, qg and kg: `[B, T, HV, 64]` Aqk and Akk, `[B, T, HV, K]` w, qg and kg,
        `[B, T, HV, V]` u, in the dtype of q, contiguous, undefined for tokens of no sequence. qg,
        which a backward needs, is None without output_qg. Aqk and Akk are 0 above the diagonal and
        in the columns past a short chunk's length.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    return KdaIntra(*CHUNK_INTRA.routed(q, k, v, g, beta, scale, cu_seqlens, output_qg))


def kda_recompute_w_u(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    Akk: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    output_kg: bool = True,
) -> KdaRecomputed:
    """The second half of `kda_chunk_intra`, from its result Akk:

        w = Akk Diag(beta) (exp2(G) * k)          qg = exp2(G) * q
        u = Akk Diag(beta) v                      kg = exp2(G_e - G) * k

    Args:
        q: as for `kda_chunk_intra`; None if qg is not needed.
        k: as for `kda_chunk_intra`.
        v: as for `kda_chunk_intra`.
        g: as for `kda_chunk_intra`.
        beta: as for `kda_chunk_intra`.
        Akk: `[B, T, HV, 64]`, dtype of k.
        cu_seqlens: as for `chunk_kda`.
        output_kg: whether to compute kg.

    Returns:
        w, u, qg and kg with the shapes of `kda_chunk_intra`, in the dtype of k, contiguous,
        undefined for tokens of no sequence. qg is None without q, kg without output_kg.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    return KdaRecomputed(*RECOMPUTE_W_U.routed(q, k, v, g, beta, Akk, cu_seqlens, output_kg))


def kda_chunk_delta_h(
    kg: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    *,
    output_final_state: bool = False,
    output_v_new: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> KdaChunkStates:
    """The state from chunk to chunk; with e a chunk's last token:

        h = S        v_new = u - w S        S <- Diag(exp2(G_e)) S + kg^T v_new

    Args:
        kg: `[B, T, HV, K]`, bfloat16 or float16, from `kda_chunk_intra`.
        w: of kg's shape and dtype, from `kda_chunk_intra`.
        u: `[B, T, HV, V]`, dtype of kg, from `kda_chunk_intra`.
        g: G, `[B, T, HV, K]` float32.
        initial_state: `[N, HV, K, V]`, float32 (or bfloat16, which is converted); None is 0.
        output_final_state: whether to return final_state.
        output_v_new: whether to return v_new.
        state_v_first: initial_state, h and final_state are `[..., V, K]`, not `[..., K, V]`.
        cu_seqlens: as for `chunk_kda`.
        cu_seqlens_cpu: as for `chunk_kda`.

    Returns:
        h, the state before every chunk, in the dtype of u: `[B, ceil(T / 64), HV, K, V]`, or with
            cu_seqlens `[1, chunks, HV, K, V]`, the chunks of the sequences one after another. With
            cu_seqlens_cpu, `chunks` is the number of chunks. Without cu_seqlens_cpu, or under
            torch.compile, `chunks` is T // 64 + N, and h is undefined past the last chunk. v_new is
            `[B, T, HV, V]`, or None
        without output_v_new. final_state has the shape of initial_state, in float32, or is None
        without output_final_state.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    num_chunks = count_chunks(cu_seqlens_cpu, cu_seqlens, u)
    return KdaChunkStates(
        *DELTA_H.routed(
            kg, w, u, g, initial_state, output_final_state, output_v_new, state_v_first,
            cu_seqlens, num_chunks,
        )
    )  # fmt: skip


def kda_chunk_output(
    q: Tensor,
    v_new: Tensor,
    g: Tensor,
    Aqk: Tensor,
    h: Tensor,
    scale: float | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """o = scale (exp2(G) * q) h + Aqk v_new, chunk by chunk.

    Args:
        q: `[B, T, HQK, K]`, bfloat16 or float16.
        v_new: `[B, T, HV, V]`, dtype of q, from `kda_chunk_delta_h`.
        g: G, `[B, T, HV, K]` float32.
        Aqk: `[B, T, HV, 64]`, dtype of q, from `kda_chunk_intra`, which includes the scale.
        h: from `kda_chunk_delta_h`, dtype of q.
        scale: factor of q; None is K ** -0.5.
        state_v_first: h is `[..., V, K]`, not `[..., K, V]`.
        cu_seqlens: as for `chunk_kda`.

    Returns:
        o, `[B, T, HV, V]`, dtype of q, contiguous; undefined for tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    result: Tensor = OUTPUT.routed(q, v_new, g, Aqk, h, scale, state_v_first, cu_seqlens)
    return result


# -- the operators ------------------------------------------------------------------------------


class Stage(Operator[Any]):
    """Base class of the stages. `launch` copies tensors that a kernel cannot read in place;
    `nothing` allocates the results if there are no tokens."""

    values: str  # the argument with a value head's shape

    def nothing(self, a: Any) -> Any:
        if getattr(a, self.values).numel() and (a.cu_seqlens is None or len(a.cu_seqlens) != 1):
            return None
        return self.outputs(a)


def packing(x: Tensor, cu_seqlens: Tensor | None) -> Any:
    """The part of a key that depends on cu_seqlens, whether x, `[B, ...]`, fits cu_seqlens, and
    whether x is empty."""
    if cu_seqlens is None:
        return x.numel() == 0
    shape = cu_seqlens.shape
    return cu_seqlens.dtype, len(shape), shape[0] == 1, x.shape[0] == 1, x.numel() == 0


def indices(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else contiguous(cu_seqlens)


# -- gate and cumsum


class _GateArguments(NamedTuple):
    g: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float | None
    use_gate_in_kernel: bool
    cu_seqlens: Tensor | None


class _GateCumsum(Stage):
    name = "kda_gate_cumsum"
    arguments = _GateArguments
    results = (("G", ""),)
    values = "g"

    def check(self, a: _GateArguments, given: dict[str, Tensor]) -> None:
        check_flags(use_gate_in_kernel=a.use_gate_in_kernel)
        check_number("lower_bound", a.lower_bound)
        check_gate_and_beta_dtypes(given)
        sizes = Sizes()
        sizes.take("g", a.g, "B T HV K")
        sizes.check_grid()
        sizes.check_dims()
        sizes.check_sequences(a.cu_seqlens)
        check_gate(given, sizes, a.use_gate_in_kernel, False, a.lower_bound)

    def key(self, a: _GateArguments) -> tuple[Any, ...]:
        g, A_log, dt_bias, lower_bound, use_gate_in_kernel, cu_seqlens = a
        return (
            g.shape[2:], g.dtype, g.get_device(), use_gate_in_kernel, type(use_gate_in_kernel),
            lower_bound, type(lower_bound), A_log is None, dt_bias is None, packing(g, cu_seqlens),
        )  # fmt: skip

    def prepare(self, a: _GateArguments) -> Any:
        gated = bool(a.use_gate_in_kernel)
        spec = GateSpec(
            head_dim_k=a.g.shape[-1],
            gate_dtype=DTYPE_NAMES[a.g.dtype],
            gate=gate_kind(gated, a.lower_bound),
            has_A_log=gated and a.A_log is not None,
            has_dt_bias=gated and a.dt_bias is not None,
            index_dtype=index_dtype(a.cu_seqlens),
        )
        return launch.get_for(a.g.device, table.GATE_CUMSUM, spec)

    def launch(self, ready: Any, a: _GateArguments) -> Tensor:
        g, A_log, dt_bias, lower_bound, use_gate_in_kernel, cu_seqlens = a
        if not use_gate_in_kernel:
            A_log = dt_bias = None
        heads, dim = g.shape[2:]
        G = _empty(g.shape, dtype=torch.float32, device=g.device)
        ready(
            readable(g), readable_parameter(A_log, heads), readable_parameter(dt_bias, heads, dim),
            indices(cu_seqlens), G, 0.0 if lower_bound is None else float(lower_bound),
        )  # fmt: skip
        return G

    def outputs(self, a: _GateArguments) -> Tensor:
        return _empty(a.g.shape, dtype=torch.float32, device=a.g.device)


# -- within chunks


def check_heads_of_a_chunk(
    given: dict[str, Tensor], names: tuple[str, ...], cu_seqlens: Tensor | None
) -> Sizes:
    """Check dtypes and shapes of a stage's tensors; all have the dtype of the first of `names`."""
    check_dtypes(given, names)
    check_gate_and_beta_dtypes(given)
    check_dtype("g", given["g"], ("float32",))
    sizes = Sizes()
    for name, shape in (
        ("q", "B T HQK K"),
        ("k", "B T HQK K"),
        ("v", "B T HV V"),
        ("v_new", "B T HV V"),
    ):
        if name in given:
            sizes.take(name, given[name], shape)
    sizes.check_heads()
    sizes.check_dims()
    for name, shape in (("g", "B T HV K"), ("beta", "B T HV")):
        if name in given:
            sizes.take(name, given[name], shape)
    for name in ("Aqk", "Akk"):
        if name in given:
            sizes.take(name, given[name], f"B T HV {CHUNK}")
    sizes.check_sequences(cu_seqlens)
    return sizes


class _IntraArguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None
    cu_seqlens: Tensor | None
    output_qg: bool
    l2norm: bool = False  # the kernel normalises q and k


class _ChunkIntra(Stage):
    name = "kda_chunk_intra"
    arguments = _IntraArguments
    results = (("Aqk", ""), ("Akk", ""), ("w", ""), ("u", ""), ("qg", "output_qg"), ("kg", ""))
    values = "v"

    def check(self, a: _IntraArguments, given: dict[str, Tensor]) -> None:
        check_number("scale", a.scale)
        check_flags(output_qg=a.output_qg)
        check_heads_of_a_chunk(given, ("q", "k", "v"), a.cu_seqlens)

    def key(self, a: _IntraArguments) -> tuple[Any, ...]:
        q, _k, v, _g, beta, scale, cu_seqlens, output_qg, l2norm = a
        return (
            q.shape[2:], v.shape[2:], q.dtype, beta.dtype, beta.is_neg(), q.get_device(), scale,
            type(scale), packing(v, cu_seqlens), output_qg, type(output_qg), l2norm,
        )  # fmt: skip

    def prepare(self, a: _IntraArguments) -> Any:
        spec = IntraSpec(
            dtype=DTYPE_NAMES[a.q.dtype],
            head_dim_k=a.q.shape[-1],
            head_dim_v=a.v.shape[-1],
            index_dtype=index_dtype(a.cu_seqlens),
            beta_dtype=DTYPE_NAMES[a.beta.dtype],
            l2norm=bool(a.l2norm),
            store_qg=bool(a.output_qg),
        )
        return launch.get_for(a.q.device, table.CHUNK_INTRA, spec)

    def launch(self, ready: Any, a: _IntraArguments) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, scale, cu_seqlens, output_qg, _l2norm = a
        results = _intra_outputs(q, v, output_qg)
        ready(
            readable(q), readable(k), readable(v), readable(g), beta, indices(cu_seqlens),
            *results, q.shape[-1] ** -0.5 if scale is None else float(scale),
        )  # fmt: skip
        return results

    def outputs(self, a: _IntraArguments) -> tuple[Tensor | None, ...]:
        return _intra_outputs(a.q, a.v, a.output_qg)


def _intra_outputs(q: Tensor, v: Tensor, output_qg: bool) -> tuple[Tensor | None, ...]:
    """Aqk, Akk, w, u, qg, kg."""
    rows, dim_k = v.shape[:3], q.shape[-1]
    widths = (CHUNK, CHUNK, dim_k, v.shape[-1], dim_k if output_qg else None, dim_k)
    return tuple(
        None if width is None else _empty((*rows, width), dtype=q.dtype, device=q.device)
        for width in widths
    )


# -- w and u recomputed


class _RecomputeArguments(NamedTuple):
    q: Tensor | None
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    Akk: Tensor
    cu_seqlens: Tensor | None
    output_kg: bool


class _RecomputeWU(Stage):
    name = "kda_recompute_w_u"
    arguments = _RecomputeArguments
    results = (("w", ""), ("u", ""), ("qg", "q"), ("kg", "output_kg"))
    values = "v"

    def check(self, a: _RecomputeArguments, given: dict[str, Tensor]) -> None:
        check_flags(output_kg=a.output_kg)
        check_heads_of_a_chunk(given, ("k", "q", "v", "Akk"), a.cu_seqlens)

    def key(self, a: _RecomputeArguments) -> tuple[Any, ...]:
        q, k, v, _g, beta, _Akk, cu_seqlens, output_kg = a
        return (
            k.shape[2:], v.shape[2:], k.dtype, beta.dtype, beta.is_neg(), k.get_device(), q is None,
            packing(v, cu_seqlens), output_kg, type(output_kg),
        )  # fmt: skip

    def prepare(self, a: _RecomputeArguments) -> Any:
        spec = RecomputeSpec(
            dtype=DTYPE_NAMES[a.k.dtype],
            head_dim_k=a.k.shape[-1],
            head_dim_v=a.v.shape[-1],
            index_dtype=index_dtype(a.cu_seqlens),
            beta_dtype=DTYPE_NAMES[a.beta.dtype],
            store_qg=a.q is not None,
            store_kg=bool(a.output_kg),
        )
        return launch.get_for(a.k.device, table.RECOMPUTE_W_U, spec)

    def launch(self, ready: Any, a: _RecomputeArguments) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, Akk, cu_seqlens, output_kg = a
        results = _recomputed_outputs(k, v, q is not None, output_kg)
        ready(
            None if q is None else readable(q), readable(k), readable(v), readable(g), beta,
            readable(Akk), indices(cu_seqlens), *results,
        )  # fmt: skip
        return results

    def outputs(self, a: _RecomputeArguments) -> tuple[Tensor | None, ...]:
        return _recomputed_outputs(a.k, a.v, a.q is not None, a.output_kg)


def _recomputed_outputs(k: Tensor, v: Tensor, qg: bool, kg: bool) -> tuple[Tensor | None, ...]:
    rows, dim_k = v.shape[:3], k.shape[-1]
    widths = (dim_k, v.shape[-1], dim_k if qg else None, dim_k if kg else None)
    return tuple(
        None if width is None else _empty((*rows, width), dtype=k.dtype, device=k.device)
        for width in widths
    )


# -- from chunk to chunk


class _DeltaHArguments(NamedTuple):
    kg: Tensor
    w: Tensor
    u: Tensor
    g: Tensor
    initial_state: Tensor | None
    output_final_state: bool
    output_v_new: bool
    state_v_first: bool
    cu_seqlens: Tensor | None
    num_chunks: int | None


class _DeltaH(Stage):
    name = "kda_chunk_delta_h"
    arguments = _DeltaHArguments
    results = (("h", ""), ("v_new", "output_v_new"), ("final_state", "output_final_state"))
    values = "u"

    def check(self, a: _DeltaHArguments, given: dict[str, Tensor]) -> None:
        check_flags(
            output_final_state=a.output_final_state,
            output_v_new=a.output_v_new,
            state_v_first=a.state_v_first,
        )
        check_dtypes(given, ("kg", "w", "u"))
        check_dtype("g", a.g, ("float32",))
        sizes = Sizes()
        sizes.take("kg", a.kg, "B T HV K")
        sizes.take("w", a.w, "B T HV K")
        sizes.take("u", a.u, "B T HV V")
        sizes.take("g", a.g, "B T HV K")
        sizes.check_grid()
        sizes.check_dims()
        sizes.check_sequences(a.cu_seqlens)
        check_state(sizes, a.initial_state, a.state_v_first)

    def key(self, a: _DeltaHArguments) -> tuple[Any, ...]:
        _kg, w, u, _g, initial_state, final, v_new, state_v_first, cu_seqlens, _ = a
        # The kernel's host code does not check that there is a state for each sequence.
        sequences = w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        states = None if initial_state is None else initial_state.shape[0] == sequences
        return (
            w.shape[2:], u.shape[-1], u.dtype, u.get_device(), states, final, type(final),
            v_new, type(v_new), state_v_first, type(state_v_first), packing(u, cu_seqlens),
        )  # fmt: skip

    def prepare(self, a: _DeltaHArguments) -> Any:
        dims: dict[str, Any] = {"head_dim_k": a.w.shape[-1], "head_dim_v": a.u.shape[-1]}
        spec = DeltaHSpec(
            dtype=DTYPE_NAMES[a.u.dtype],
            index_dtype=index_dtype(a.cu_seqlens),
            state_v_first=bool(a.state_v_first),
            has_initial_state=a.initial_state is not None,
            has_final_state=bool(a.output_final_state),
            store_v_new=bool(a.output_v_new),
            **dims,
            **delta_h_config(arch=launch.arch_for(a.u.device), **dims),
        )
        return launch.get_for(a.u.device, table.DELTA_H, spec)

    def launch(self, ready: Any, a: _DeltaHArguments) -> tuple[Tensor | None, ...]:
        h, v_new, final_state = results = self.outputs(a)
        ready(
            readable(a.kg), readable(a.w), readable(a.u), readable(a.g),
            readable_state(a.initial_state), indices(a.cu_seqlens), h, v_new, final_state,
        )  # fmt: skip
        return results

    def outputs(self, a: _DeltaHArguments) -> tuple[Tensor | None, ...]:
        return delta_h_outputs(a.w, a.u, *a[5:])

    def nothing(self, a: _DeltaHArguments) -> Any:
        results = super().nothing(a)
        if results is not None:
            unchanged(results[2], a.initial_state)
        return results


def delta_h_outputs(
    w: Tensor,
    u: Tensor,
    output_final_state: bool,
    output_v_new: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    num_chunks: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h, v_new, final_state."""
    (batch, tokens, heads, dim_k), dim_v = w.shape, u.shape[-1]
    matrix = (dim_v, dim_k) if state_v_first else (dim_k, dim_v)
    if cu_seqlens is None:
        sequences, chunks = batch, (tokens + CHUNK - 1) // CHUNK
    else:
        sequences = cu_seqlens.shape[0] - 1
        chunks = tokens // CHUNK + sequences if num_chunks is None else num_chunks
    h = _empty((batch, chunks, heads, *matrix), dtype=u.dtype, device=u.device)
    v_new = final_state = None
    if output_v_new:
        v_new = _empty(u.shape, dtype=u.dtype, device=u.device)
    if output_final_state:
        final_state = _empty((sequences, heads, *matrix), dtype=torch.float32, device=u.device)
    return h, v_new, final_state


# -- output


class _OutputArguments(NamedTuple):
    q: Tensor
    v_new: Tensor
    g: Tensor
    Aqk: Tensor
    h: Tensor
    scale: float | None
    state_v_first: bool
    cu_seqlens: Tensor | None
    l2norm: bool = False  # the kernel normalises q


class _Output(Stage):
    name = "kda_chunk_output"
    arguments = _OutputArguments
    results = (("o", ""),)
    values = "v_new"

    def check(self, a: _OutputArguments, given: dict[str, Tensor]) -> None:
        check_number("scale", a.scale)
        check_flags(state_v_first=a.state_v_first)
        sizes = check_heads_of_a_chunk(given, ("q", "v_new", "Aqk", "h"), a.cu_seqlens)
        if a.cu_seqlens is None:
            sizes["chunks"] = sizes.num_chunks(None)
        sizes.take("h", a.h, "B chunks HV V K" if a.state_v_first else "B chunks HV K V")

    def key(self, a: _OutputArguments) -> tuple[Any, ...]:
        q, v_new, _g, _Aqk, h, scale, state_v_first, cu_seqlens, l2norm = a
        return (
            q.shape[2:], v_new.shape[2:], q.dtype, q.get_device(), scale, type(scale),
            state_v_first, type(state_v_first), packing(v_new, cu_seqlens), l2norm,
            # The kernel's host code does not check that h has as many chunks as T needs.
            cu_seqlens is not None or h.shape[1] == (q.shape[1] + CHUNK - 1) // CHUNK,
        )  # fmt: skip

    def prepare(self, a: _OutputArguments) -> Any:
        dims: dict[str, Any] = {"head_dim_k": a.q.shape[-1], "head_dim_v": a.v_new.shape[-1]}
        spec = OutputSpec(
            dtype=DTYPE_NAMES[a.q.dtype],
            index_dtype=index_dtype(a.cu_seqlens),
            l2norm=bool(a.l2norm),
            state_v_first=bool(a.state_v_first),
            **dims,
            **output_config(arch=launch.arch_for(a.q.device), **dims),
        )
        return launch.get_for(a.q.device, table.OUTPUT, spec)

    def launch(self, ready: Any, a: _OutputArguments) -> Tensor:
        q, v_new, g, Aqk, h, scale, _state_v_first, cu_seqlens, _l2norm = a
        o = _empty(v_new.shape, dtype=q.dtype, device=q.device)
        ready(
            readable(q), readable(v_new), readable(g), readable(Aqk), contiguous(h),
            indices(cu_seqlens), o, q.shape[-1] ** -0.5 if scale is None else float(scale),
        )  # fmt: skip
        return o

    def outputs(self, a: _OutputArguments) -> Tensor:
        return _empty(a.v_new.shape, dtype=a.v_new.dtype, device=a.v_new.device)


GATE_CUMSUM, CHUNK_INTRA, RECOMPUTE_W_U = _GateCumsum(), _ChunkIntra(), _RecomputeWU()
DELTA_H, OUTPUT = _DeltaH(), _Output()
