"""Kimi Delta Attention by stages, as training stacks call them: each a function of its own.

    G                         = kda_gate_cumsum(g, ...)
    Aqk, Akk, w, u, qg, kg    = kda_chunk_intra(q, k, v, G, beta)
    w, u, qg, kg              = kda_recompute_w_u(q, k, v, G, beta, Akk)       for a backward pass
    h, v_new, final_state     = kda_chunk_delta_h(kg, w, u, G, initial_state)
    o                         = kda_chunk_output(q, v_new, G, Aqk, h)

Formulas are those of DeltaNet's parallel form (arXiv 2406.06484) with a decay for each channel
(Kimi Linear, arXiv 2510.26692); `cute_attn.reference.kda` has each in plain PyTorch.
Chunks have 64 tokens, counted from the start of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.kda import table
from ...kernels.kda.chunk.heuristics import delta_h_config, output_config
from ...kernels.kda.chunk.spec import (
    CHUNK,
    DeltaHSpec,
    GateSpec,
    IntraSpec,
    OutputSpec,
    RecomputeSpec,
)
from ..checks import (
    DTYPE_NAMES,
    check_autograd,
    check_dtype,
    check_flags,
    check_number,
    check_tangents,
    check_tensors,
)
from ..operator import (
    _intercepted as intercepted,
)
from ..operator import (
    _overridden as overridden,
)
from ..operator import (
    forward_ad,
    is_compiling,
    plain,
)
from .arguments import (
    Sizes,
    check_dtypes,
    check_gate,
    check_gate_and_beta_dtypes,
    check_offsets_on_the_host,
    check_state,
    contiguous,
    gate_kind,
    index_dtype,
    readable,
    readable_parameter,
    readable_state,
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
    """What `kda_chunk_intra` gives."""

    Aqk: Tensor  # [B, T, HV, 64], the scale included
    Akk: Tensor  # [B, T, HV, 64]
    w: Tensor  # [B, T, HV, K]
    u: Tensor  # [B, T, HV, V]
    qg: Tensor | None  # [B, T, HV, K], the scale not included
    kg: Tensor  # [B, T, HV, K]


class KdaRecomputed(NamedTuple):
    """What `kda_recompute_w_u` gives."""

    w: Tensor  # [B, T, HV, K]
    u: Tensor  # [B, T, HV, V]
    qg: Tensor | None  # [B, T, HV, K]
    kg: Tensor | None  # [B, T, HV, K]


class KdaChunkStates(NamedTuple):
    """What `kda_chunk_delta_h` gives."""

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
    """The gates' sums from the start of each chunk, in base 2: G = cumsum(gate) / ln 2.

    The gate is g itself, or with use_gate_in_kernel (Kimi Linear, arXiv 2510.26692, and its bounded
    successor)

        -exp(A_log) softplus(g + dt_bias)                    without a lower bound
        lower_bound sigmoid(exp(A_log) (g + dt_bias))        with one; exp(A_log) is 1 without A_log

    A gate below -128 counts as -128, of which nothing is left in float32.

    Args:
        g: `[B, T, HV, K]`, float32, bfloat16 or float16; K is 64 or 128. Read in place where rows
            are contiguous and 16-byte aligned, as every tensor here.
        A_log: HV numbers of any shape. Ignored, as dt_bias and lower_bound are, without
            use_gate_in_kernel.
        dt_bias: HV * K numbers of any shape; None is 0.
        lower_bound: of the gate; None is none.
        use_gate_in_kernel: compute the gate from g, as above.
        cu_seqlens: as for `chunk_kda`.

    Returns:
        G, `[B, T, HV, K]` float32, contiguous; undefined for tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    result: Tensor = _stage(
        "kda_gate_cumsum", _gate_cumsum, _check_gate_cumsum,
        g, A_log, dt_bias, lower_bound, use_gate_in_kernel, cu_seqlens,
    )  # fmt: skip
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
    """All of a chunk that needs no state. With i and j its tokens and e its last:

        Aqk_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)                         for j <= i
        L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd)                        for j < i
        Akk    = (I + L)^-1
        w = Akk Diag(beta) (exp2(G) * k)          qg = exp2(G) * q
        u = Akk Diag(beta) v                      kg = exp2(G_e - G) * k

    No factor of a product exceeds 1 as long as gates are at most 0, however small these are.

    Args:
        q: `[B, T, HQK, K]`, bfloat16 or float16; normalised already, if it is to be.
        k: of q's shape and dtype; likewise.
        v: `[B, T, HV, V]`, dtype of q. Value head h uses query and key head h // (HV // HQK).
        g: G, `[B, T, HV, K]` float32, from `kda_gate_cumsum`.
        beta: `[B, T, HV]`, float32, bfloat16 or float16; any strides.
        scale: of Aqk; None is K ** -0.5.
        cu_seqlens: as for `chunk_kda`.
        output_qg: whether qg is wanted; None is given otherwise.

    Returns:
        Aqk and Akk are 0 above the diagonal, and in the columns past a short chunk's length. All
        are in the dtype of q, contiguous, and undefined for tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    results = _stage(
        "kda_chunk_intra", _chunk_intra, _check_chunk_intra,
        q, k, v, g, beta, scale, cu_seqlens, output_qg,
    )  # fmt: skip
    Aqk, Akk, w, u, qg, kg = results
    return KdaIntra(Aqk, Akk, w, u, qg if output_qg else None, kg)


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
    """The second half of `kda_chunk_intra`, from the Akk that it gave:

        w = Akk Diag(beta) (exp2(G) * k)          qg = exp2(G) * q
        u = Akk Diag(beta) v                      kg = exp2(G_e - G) * k

    Args:
        q: or None, where qg is not wanted.
        k: as for `kda_chunk_intra`.
        v: as for `kda_chunk_intra`.
        g: as for `kda_chunk_intra`.
        beta: as for `kda_chunk_intra`.
        Akk: `[B, T, HV, 64]`, dtype of k.
        cu_seqlens: as for `chunk_kda`.
        output_kg: whether kg is wanted.

    Returns:
        In the dtype of k, contiguous, and undefined for tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    w, u, qg, kg = _stage(
        "kda_recompute_w_u", _recompute_w_u, _check_recompute_w_u,
        q, k, v, g, beta, Akk, cu_seqlens, output_kg,
    )  # fmt: skip
    return KdaRecomputed(w, u, None if q is None else qg, kg if output_kg else None)


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
        w: of kg's shape and dtype, likewise.
        u: `[B, T, HV, V]`, likewise.
        g: G, `[B, T, HV, K]` float32.
        initial_state: `[N, HV, K, V]`, float32 (or bfloat16, which is converted); None is 0.
        output_final_state: whether it is wanted.
        output_v_new: whether v_new is wanted.
        state_v_first: states are `[..., V, K]` rather than `[..., K, V]`, those given and those
            that come back.
        cu_seqlens: as for `chunk_kda`.
        cu_seqlens_cpu: as for `chunk_kda`.

    Returns:
        h, the state before every chunk, in the dtype of u: `[B, ceil(T / 64), HV, K, V]`, or with
        cu_seqlens `[1, chunks, HV, K, V]`, the chunks of the sequences one after another. There are
        as many as these have with cu_seqlens_cpu, and T // 64 + N without (or under torch.compile),
        of which those behind the last chunk are undefined. v_new is `[B, T, HV, V]`, the final
        state as the initial one, float32.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    num_chunks = None
    if cu_seqlens_cpu is not None and not is_compiling():
        tokens = _tokens(u)
        if tokens is not None:
            num_chunks = check_offsets_on_the_host(cu_seqlens_cpu, cu_seqlens, tokens)
    h, v_new, final_state = _stage(
        "kda_chunk_delta_h", _chunk_delta_h, _check_chunk_delta_h,
        kg, w, u, g, initial_state, output_final_state, output_v_new, state_v_first, cu_seqlens,
        num_chunks,
    )  # fmt: skip
    return KdaChunkStates(
        h, v_new if output_v_new else None, final_state if output_final_state else None
    )


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
        Aqk: `[B, T, HV, 64]`, dtype of q, from `kda_chunk_intra`: its scale is included.
        h: from `kda_chunk_delta_h`, dtype of q.
        scale: of q; None is K ** -0.5.
        state_v_first: whether h is `[..., V, K]`.
        cu_seqlens: as for `chunk_kda`.

    Returns:
        o, `[B, T, HV, V]`, dtype of q, contiguous; undefined for tokens of no sequence.

    Raises:
        TypeError: as `chunk_kda`.
        ValueError: as `chunk_kda`.
        NotImplementedError: as `chunk_kda`.
    """
    result: Tensor = _stage(
        "kda_chunk_output", _chunk_output, _check_chunk_output,
        q, v_new, g, Aqk, h, scale, state_v_first, cu_seqlens,
    )  # fmt: skip
    return result


def _tokens(u: Any) -> Any:
    """T of `[B, T, HV, V]`, or None where u is no such tensor, which a later check refuses."""
    if not isinstance(u, Tensor) or u.is_nested or u.dim() != 4:
        return None
    return u.shape[1]


# -- launching ----------------------------------------------------------------------------------

# All that a kernel is chosen by, and all numbers, which are checked once -> the loaded kernel.
_ready: dict[tuple[Any, ...], Callable[..., None]] = {}
_MOST_READY = 4096


def _stage(
    name: str, implementation: Callable[..., Any], check: Callable[..., Any], *arguments: Any
) -> Any:
    """The implementation itself, or where torch traces or intercepts, the registered operator."""
    check_autograd(name, *arguments)
    if not intercepted(*arguments):
        return _on_memory(name, implementation, check, *arguments)
    if not is_compiling() and not overridden(*arguments):  # else the fake implementation checks
        check(*arguments)
    return getattr(torch.ops.cute_attn, name)(*arguments)


def _on_memory(
    name: str, implementation: Callable[..., Any], check: Callable[..., Any], *arguments: Any
) -> Any:
    """The implementation, on tensors that are what they hold; where it fails, why."""
    if forward_ad._current_level >= 0:
        schema = getattr(torch.ops.cute_attn, name).default._schema
        check_tangents(**{a.name: x for a, x in zip(schema.arguments, arguments, strict=True)})
    try:
        return implementation(*arguments)
    except Exception:
        check(*arguments)
        raise


def _run(
    key: tuple[Any, ...],
    x: Tensor,
    cu_seqlens: Tensor | None,
    check: Callable[[], Any],
    request: Callable[[str], launch.Request],
    call: Callable[[Callable[..., None]], Any],
) -> Any:
    """`call` with the kernel for these arguments, which are checked where it is new.

    Args:
        x: one of the tensors; there is nothing to launch where it has no elements.
        request: from an architecture, the kernel.
    """
    function = _ready.get(key)
    if not x.numel() or (cu_seqlens is not None and cu_seqlens.shape[0] == 1):
        check()
        return call(_nothing)
    if function is None:
        check()
        launch.check_device("the first tensor", x.device)
        function = launch.get_for(x.device, *request(launch.arch_for(x.device)))
        if may_remember(x):
            if len(_ready) >= _MOST_READY:
                _ready.clear()
            _ready[key] = function
    return call(function)


def may_remember(x: Tensor) -> bool:
    """Which emulator runs a CPU tensor depends on where the call is made."""
    return x.is_cuda


def _nothing(*arguments: Any) -> None:
    del arguments


def _packing(x: Tensor, cu_seqlens: Tensor | None) -> Any:
    """What cu_seqlens has to do with the choice of a kernel, and with x, `[B, ...]`."""
    if cu_seqlens is None:
        return None
    return cu_seqlens.dtype, cu_seqlens.dim(), x.shape[0] == 1


def _indices(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else contiguous(cu_seqlens)


# -- gate and cumsum


def _check_gate_cumsum(
    g: Any, A_log: Any, dt_bias: Any, lower_bound: Any, use_gate_in_kernel: Any, cu_seqlens: Any
) -> Sizes:
    given = check_tensors({"g": g}, {"A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens})
    check_flags(use_gate_in_kernel=use_gate_in_kernel)
    check_number("lower_bound", lower_bound)
    check_gate_and_beta_dtypes(given)
    sizes = Sizes()
    sizes.take("g", g, "B T HV K")
    sizes.check_grid()
    sizes.check_dims()
    sizes.check_sequences(cu_seqlens)
    check_gate(given, sizes, use_gate_in_kernel, False, lower_bound)
    return sizes


def _gate_cumsum(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    use_gate_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> Tensor:
    kind = gate_kind(use_gate_in_kernel, lower_bound)
    if kind == "none":
        A_log = dt_bias = None
    key = (
        "gate_cumsum", g.shape[2:], g.dtype, g.get_device(), kind, lower_bound, type(lower_bound),
        A_log is None,
        dt_bias is None, _packing(g, cu_seqlens),
    )  # fmt: skip

    def call(function: Callable[..., None]) -> Tensor:
        heads, dim = g.shape[2:]
        out = _empty(g.shape, dtype=torch.float32, device=g.device)
        function(
            readable(g),
            readable_parameter(A_log, heads),
            readable_parameter(dt_bias, heads, dim),
            _indices(cu_seqlens),
            out,
            0.0 if lower_bound is None else float(lower_bound),
        )
        return out

    result: Tensor = _run(
        key,
        g,
        cu_seqlens,
        lambda: _check_gate_cumsum(g, A_log, dt_bias, lower_bound, use_gate_in_kernel, cu_seqlens),
        lambda arch: (
            table.GATE_CUMSUM,
            GateSpec(
                head_dim_k=g.shape[-1],
                gate_dtype=DTYPE_NAMES[g.dtype],
                gate=kind,
                has_A_log=A_log is not None,
                has_dt_bias=dt_bias is not None,
                index_dtype=index_dtype(cu_seqlens),
            ),
        ),
        call,
    )
    return result


def _fake_gate_cumsum(g: Tensor, *arguments: Any) -> Tensor:
    _check_gate_cumsum(g, *arguments)
    return g.new_empty(g.shape, dtype=torch.float32)


# -- within chunks


def _check_heads_of_a_chunk(
    given: dict[str, Tensor], names: tuple[str, ...], cu_seqlens: Tensor | None
) -> Sizes:
    """q (or only k), k, v and all that has a value head's shape."""
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


def _check_chunk_intra(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, cu_seqlens: Any, output_qg: Any
) -> Sizes:
    given = check_tensors(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta}, {"cu_seqlens": cu_seqlens}
    )
    check_number("scale", scale)
    check_flags(output_qg=output_qg)
    return _check_heads_of_a_chunk(given, ("q", "k", "v"), cu_seqlens)


def _intra_outputs(q: Tensor, v: Tensor, output_qg: bool) -> tuple[Tensor, ...]:
    """Aqk, Akk, w, u, qg (without elements unless it is asked for), kg."""
    rows = v.shape[:3]
    dim_k = q.shape[-1]
    widths = (CHUNK, CHUNK, dim_k, v.shape[-1], dim_k, dim_k)
    return tuple(
        _empty((*rows, width) if i != 4 or output_qg else (0,), dtype=q.dtype, device=q.device)
        for i, width in enumerate(widths)
    )


def _chunk_intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    cu_seqlens: Tensor | None,
    output_qg: bool,
    l2norm: bool = False,
) -> tuple[Tensor, ...]:
    """`kda_chunk_intra`; with l2norm, of q and k that are yet to be normalised."""
    key = (
        "chunk_intra", q.shape[2:], v.shape[2:], q.dtype, beta.dtype, q.get_device(), scale,
        type(scale),         _packing(v, cu_seqlens), output_qg, l2norm,
    )  # fmt: skip

    def call(function: Callable[..., None]) -> tuple[Tensor, ...]:
        results = _intra_outputs(q, v, output_qg)
        Aqk, Akk, w, u, qg, kg = results
        function(
            readable(q), readable(k), readable(v), readable(g), beta, _indices(cu_seqlens),
            Aqk, Akk, w, u, qg if output_qg else None, kg,
            q.shape[-1] ** -0.5 if scale is None else float(scale),
        )  # fmt: skip
        return results

    result: tuple[Tensor, ...] = _run(
        key,
        v,
        cu_seqlens,
        lambda: _check_chunk_intra(q, k, v, g, beta, scale, cu_seqlens, output_qg),
        lambda arch: (
            table.CHUNK_INTRA,
            IntraSpec(
                dtype=DTYPE_NAMES[q.dtype],
                head_dim_k=q.shape[-1],
                head_dim_v=v.shape[-1],
                index_dtype=index_dtype(cu_seqlens),
                beta_dtype=DTYPE_NAMES[beta.dtype],
                l2norm=bool(l2norm),
                store_qg=bool(output_qg),
            ),
        ),
        call,
    )
    return result


def _fake_chunk_intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    cu_seqlens: Tensor | None,
    output_qg: bool,
) -> tuple[Tensor, ...]:
    _check_chunk_intra(q, k, v, g, beta, scale, cu_seqlens, output_qg)
    return _intra_outputs(q, v, output_qg)


# -- w and u again


def _check_recompute_w_u(
    q: Any, k: Any, v: Any, g: Any, beta: Any, Akk: Any, cu_seqlens: Any, output_kg: Any
) -> Sizes:
    given = check_tensors(
        {"k": k, "v": v, "g": g, "beta": beta, "Akk": Akk}, {"q": q, "cu_seqlens": cu_seqlens}
    )
    check_flags(output_kg=output_kg)
    return _check_heads_of_a_chunk(given, ("k", "q", "v", "Akk"), cu_seqlens)


def _recomputed_outputs(k: Tensor, v: Tensor, qg: bool, kg: bool) -> tuple[Tensor, ...]:
    rows, dim_k = v.shape[:3], k.shape[-1]
    shapes = (
        (*rows, dim_k),
        (*rows, v.shape[-1]),
        (*rows, dim_k) if qg else (0,),
        (*rows, dim_k) if kg else (0,),
    )
    return tuple(_empty(shape, dtype=k.dtype, device=k.device) for shape in shapes)


def _recompute_w_u(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    Akk: Tensor,
    cu_seqlens: Tensor | None,
    output_kg: bool,
) -> tuple[Tensor, ...]:
    key = (
        "recompute_w_u", k.shape[2:], v.shape[2:], k.dtype, beta.dtype, k.get_device(), q is None,
        _packing(v, cu_seqlens), output_kg,
    )  # fmt: skip

    def call(function: Callable[..., None]) -> tuple[Tensor, ...]:
        results = _recomputed_outputs(k, v, q is not None, output_kg)
        w, u, qg, kg = results
        function(
            None if q is None else readable(q), readable(k), readable(v), readable(g), beta,
            readable(Akk), _indices(cu_seqlens), w, u, None if q is None else qg,
            kg if output_kg else None,
        )  # fmt: skip
        return results

    result: tuple[Tensor, ...] = _run(
        key,
        v,
        cu_seqlens,
        lambda: _check_recompute_w_u(q, k, v, g, beta, Akk, cu_seqlens, output_kg),
        lambda arch: (
            table.RECOMPUTE_W_U,
            RecomputeSpec(
                dtype=DTYPE_NAMES[k.dtype],
                head_dim_k=k.shape[-1],
                head_dim_v=v.shape[-1],
                index_dtype=index_dtype(cu_seqlens),
                beta_dtype=DTYPE_NAMES[beta.dtype],
                store_qg=q is not None,
                store_kg=bool(output_kg),
            ),
        ),
        call,
    )
    return result


def _fake_recompute_w_u(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    Akk: Tensor,
    cu_seqlens: Tensor | None,
    output_kg: bool,
) -> tuple[Tensor, ...]:
    _check_recompute_w_u(q, k, v, g, beta, Akk, cu_seqlens, output_kg)
    return _recomputed_outputs(k, v, q is not None, output_kg)


# -- from chunk to chunk


def _check_chunk_delta_h(
    kg: Any,
    w: Any,
    u: Any,
    g: Any,
    initial_state: Any,
    output_final_state: Any,
    output_v_new: Any,
    state_v_first: Any,
    cu_seqlens: Any,
    num_chunks: Any,
) -> Sizes:
    given = check_tensors(
        {"kg": kg, "w": w, "u": u, "g": g},
        {"initial_state": initial_state, "cu_seqlens": cu_seqlens},
    )
    check_flags(
        output_final_state=output_final_state,
        output_v_new=output_v_new,
        state_v_first=state_v_first,
    )
    check_dtypes(given, ("kg", "w", "u"))
    check_dtype("g", g, ("float32",))
    sizes = Sizes()
    sizes.take("kg", kg, "B T HV K")
    sizes.take("w", w, "B T HV K")
    sizes.take("u", u, "B T HV V")
    sizes.take("g", g, "B T HV K")
    sizes.check_grid()
    sizes.check_dims()
    sizes.check_sequences(cu_seqlens)
    check_state(sizes, initial_state, state_v_first)
    return sizes


def _delta_h_outputs(
    w: Tensor,
    u: Tensor,
    output_final_state: bool,
    output_v_new: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    num_chunks: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """h, v_new, final_state; the last two without elements unless they are asked for."""
    (batch, tokens, heads, dim_k), dim_v = w.shape, u.shape[-1]
    matrix = (dim_v, dim_k) if state_v_first else (dim_k, dim_v)
    if cu_seqlens is None:
        sequences, chunks = batch, (tokens + CHUNK - 1) // CHUNK
    else:
        sequences = cu_seqlens.shape[0] - 1
        chunks = tokens // CHUNK + sequences if num_chunks is None else num_chunks
    return (
        _empty((batch, chunks, heads, *matrix), dtype=u.dtype, device=u.device),
        _empty(u.shape if output_v_new else (0,), dtype=u.dtype, device=u.device),
        _empty(
            (sequences, heads, *matrix) if output_final_state else (0,),
            dtype=torch.float32,
            device=u.device,
        ),
    )


def _chunk_delta_h(
    kg: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    output_v_new: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    num_chunks: int | None,
) -> tuple[Tensor, ...]:
    # That there is a state for each sequence is for no host code of a kernel to see.
    sequences = w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = None if initial_state is None else initial_state.shape[0] == sequences
    key = (
        "delta_h", w.shape[2:], u.shape[-1], u.dtype, u.get_device(), states, output_final_state,
        output_v_new, state_v_first, _packing(u, cu_seqlens),
    )  # fmt: skip

    def call(function: Callable[..., None]) -> tuple[Tensor, ...]:
        results = _delta_h_outputs(
            w, u, output_final_state, output_v_new, state_v_first, cu_seqlens, num_chunks
        )
        h, v_new, final_state = results
        if function is _nothing and output_final_state:
            unchanged(final_state, initial_state)
        function(
            readable(kg), readable(w), readable(u), readable(g), readable_state(initial_state),
            _indices(cu_seqlens), h, v_new if output_v_new else None,
            final_state if output_final_state else None,
        )  # fmt: skip
        return results

    def request(arch: str) -> launch.Request:
        dims: dict[str, Any] = {"head_dim_k": w.shape[-1], "head_dim_v": u.shape[-1]}
        return (
            table.DELTA_H,
            DeltaHSpec(
                dtype=DTYPE_NAMES[u.dtype],
                index_dtype=index_dtype(cu_seqlens),
                state_v_first=bool(state_v_first),
                has_initial_state=initial_state is not None,
                has_final_state=bool(output_final_state),
                store_v_new=bool(output_v_new),
                **dims,
                **delta_h_config(arch=arch, **dims),
            ),
        )

    result: tuple[Tensor, ...] = _run(
        key,
        u,
        cu_seqlens,
        lambda: _check_chunk_delta_h(
            kg,
            w,
            u,
            g,
            initial_state,
            output_final_state,
            output_v_new,
            state_v_first,
            cu_seqlens,
            num_chunks,
        ),
        request,
        call,
    )
    return result


def unchanged(final_state: Tensor, initial_state: Tensor | None) -> None:
    """The states of sequences without tokens."""
    if initial_state is None:
        final_state.zero_()
    else:
        final_state.copy_(initial_state)


def _fake_chunk_delta_h(
    kg: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    output_v_new: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    num_chunks: int | None,
) -> tuple[Tensor, ...]:
    _check_chunk_delta_h(
        kg, w, u, g, initial_state, output_final_state, output_v_new, state_v_first, cu_seqlens,
        num_chunks,
    )  # fmt: skip
    return _delta_h_outputs(
        w, u, output_final_state, output_v_new, state_v_first, cu_seqlens, num_chunks
    )


# -- output


def _check_chunk_output(
    q: Any, v_new: Any, g: Any, Aqk: Any, h: Any, scale: Any, state_v_first: Any, cu_seqlens: Any
) -> Sizes:
    given = check_tensors(
        {"q": q, "v_new": v_new, "g": g, "Aqk": Aqk, "h": h}, {"cu_seqlens": cu_seqlens}
    )
    check_number("scale", scale)
    check_flags(state_v_first=state_v_first)
    sizes = _check_heads_of_a_chunk(given, ("q", "v_new", "Aqk", "h"), cu_seqlens)
    if cu_seqlens is None:
        sizes["chunks"] = sizes.num_chunks(None)
    sizes.take("h", h, "B chunks HV V K" if state_v_first else "B chunks HV K V")
    return sizes


def _chunk_output(
    q: Tensor,
    v_new: Tensor,
    g: Tensor,
    Aqk: Tensor,
    h: Tensor,
    scale: float | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    l2norm: bool = False,
) -> Tensor:
    """`kda_chunk_output`; with l2norm, of a q that is yet to be normalised."""
    # That h has as many chunks as T needs is for no host code of a kernel to see.
    chunks = None if cu_seqlens is not None else (h.shape[1], (q.shape[1] + CHUNK - 1) // CHUNK)
    key = (
        "output", q.shape[2:], v_new.shape[2:], q.dtype, q.get_device(), scale, type(scale),
        state_v_first,
        _packing(v_new, cu_seqlens), chunks is None or chunks[0] == chunks[1], l2norm,
    )  # fmt: skip

    def call(function: Callable[..., None]) -> Tensor:
        o = _empty(v_new.shape, dtype=q.dtype, device=q.device)
        function(
            readable(q), readable(v_new), readable(g), readable(Aqk), contiguous(h),
            _indices(cu_seqlens), o, q.shape[-1] ** -0.5 if scale is None else float(scale),
        )  # fmt: skip
        return o

    def request(arch: str) -> launch.Request:
        dims: dict[str, Any] = {"head_dim_k": q.shape[-1], "head_dim_v": v_new.shape[-1]}
        return (
            table.OUTPUT,
            OutputSpec(
                dtype=DTYPE_NAMES[q.dtype],
                index_dtype=index_dtype(cu_seqlens),
                l2norm=bool(l2norm),
                state_v_first=bool(state_v_first),
                **dims,
                **output_config(arch=arch, **dims),
            ),
        )

    result: Tensor = _run(
        key,
        v_new,
        cu_seqlens,
        lambda: _check_chunk_output(q, v_new, g, Aqk, h, scale, state_v_first, cu_seqlens),
        request,
        call,
    )
    return result


def _fake_chunk_output(
    q: Tensor,
    v_new: Tensor,
    g: Tensor,
    Aqk: Tensor,
    h: Tensor,
    scale: float | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> Tensor:
    _check_chunk_output(q, v_new, g, Aqk, h, scale, state_v_first, cu_seqlens)
    return v_new.new_empty(v_new.shape)


# -- the registered operators -------------------------------------------------------------------

_library = torch.library.Library("cute_attn", "FRAGMENT")


def _register(
    schema: str,
    implementation: Callable[..., Any],
    check: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    @torch.no_grad()  # whoever calls it by its own name gets no gradient, as its schema says
    def operator(*arguments: Any) -> Any:
        return _on_memory(name, implementation, check, *map(plain, arguments))

    _library.impl(name, operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cute_attn::{name}", fake, lib=_library)


_register(
    "kda_gate_cumsum(Tensor g, Tensor? A_log, Tensor? dt_bias, float? lower_bound, "
    "bool use_gate_in_kernel, Tensor? cu_seqlens) -> Tensor",
    _gate_cumsum,
    _check_gate_cumsum,
    _fake_gate_cumsum,
)
_register(
    "kda_chunk_intra(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale, "
    "Tensor? cu_seqlens, bool output_qg) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _chunk_intra,
    _check_chunk_intra,
    _fake_chunk_intra,
)
_register(
    "kda_recompute_w_u(Tensor? q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor Akk, "
    "Tensor? cu_seqlens, bool output_kg) -> (Tensor, Tensor, Tensor, Tensor)",
    _recompute_w_u,
    _check_recompute_w_u,
    _fake_recompute_w_u,
)
_register(
    "kda_chunk_delta_h(Tensor kg, Tensor w, Tensor u, Tensor g, Tensor? initial_state, "
    "bool output_final_state, bool output_v_new, bool state_v_first, Tensor? cu_seqlens, "
    "SymInt? num_chunks) -> (Tensor, Tensor, Tensor)",
    _chunk_delta_h,
    _check_chunk_delta_h,
    _fake_chunk_delta_h,
)
_register(
    "kda_chunk_output(Tensor q, Tensor v_new, Tensor g, Tensor Aqk, Tensor h, float? scale, "
    "bool state_v_first, Tensor? cu_seqlens) -> Tensor",
    _chunk_output,
    _check_chunk_output,
    _fake_chunk_output,
)
