"""A backend for flash-linear-attention: its `chunk_kda` and `chunk_gated_delta_rule` run on the
kernels of this package.

    from cute_attn.integrations.fla import register

    register()
    o, state = fla.ops.kda.chunk_kda(...)      # or a layer or model that calls it

At each call flash-linear-attention asks its registered backends, in order of priority, whether they
take the call. A backend's verifier may decline with a reason; then the next backend is asked, and
finally the library's own Triton kernels run. `fla.backends` logs, at level info, the first call
that is declined and the first call that is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.checks import check_state_address, check_state_strides, dtype_name
from ..ops.devices import runs_on
from ..ops.kda.limits import (
    BETA_DTYPES,
    CHUNK,
    DTYPES,
    GATE_DTYPES,
    HEAD_DIMS,
    INITIAL_STATE_DTYPES,
    STEP_DTYPES,
    STEP_HEAD_DIMS,
    STEP_PARAMETER_DTYPES,
    STEP_STATE_DTYPES,
    VECTOR_BYTES,
    why_no_gradients,
)

__all__ = ["register"]

NAME = "cute_attn"
ENVIRONMENT_VARIABLE = "FLA_CUTE_ATTN"
PRIORITY = 2  # lower is earlier: before FlashKDA (3) and TileLang (5)

LN2_RECIPROCAL = 1.4426950408889634  # converts G to base 2


def register() -> None:
    """Make this package a backend of flash-linear-attention, for Kimi Delta Attention and the Gated
    Delta Net.

    The backend takes calls of `chunk_kda`, with gradients and without. Without gradients the
    backend also takes `fused_recurrent_kda` and `fused_recurrent_kda_fwd`, which servers call with
    states in slots that are updated in place. Speculative decoding and any number of value heads
    per query head (GVA) are included. If the backend declines a `chunk_kda` that needs gradients,
    the backend still takes stages of the forward, which the backward runs again:
    `kda_gate_chunk_cumsum`, `chunk_kda_fwd_intra` and `recompute_w_u_fwd`. The backend also takes
    calls of `chunk_gated_delta_rule`, with gradients and without.

    The backend declines calls, with a reason in the log of `fla.backends`, for: context parallelism
    (`cp_context`), head dimensions and dtypes without a kernel, gradients at a K without a kernel
    on the GPU's architecture, intermediate states of chunks of 32 or of packed sequences without
    `cu_seqlens_cpu`, a beta for each channel (`fused_recurrent_kda` with a state in place), a
    `scale` or `lower_bound` that is a tensor, a `lower_bound` that is not negative, initial states
    of other dtypes than float32, bfloat16 and float16 or of another number than the sequences,
    in-place states of packed sequences, or that are not contiguous and aligned, and gradients of
    the recurrent functions. Keywords that the library ignores are ignored.

    Two results differ: with cu_seqlens, outputs of tokens that belong to no sequence are undefined,
    not 0; and the chunked functions convert an initial state in 16 bits, which the library's
    `chunk_kda` refuses.

    The environment variable FLA_CUTE_ATTN=0 disables the backend at any time; a call that the
    backend has taken keeps the backend's gradient. FLA_DISABLE_BACKEND_DISPATCH=1, set before the
    import, disables all backends. The backend needs flash-linear-attention 0.6 or later.
    Registering again changes nothing.
    """
    from fla.backends import BaseBackend
    from fla.backends import register as register_backend
    from fla.ops.kda import chunk_kda

    class CuteAttnBackend(BaseBackend):  # type: ignore[misc]
        backend_type = NAME
        env_var = ENVIRONMENT_VARIABLE
        priority = PRIORITY

        chunk_kda = staticmethod(_chunk_kda)
        chunk_kda_verifier = _verifier(_CHUNK_KDA, _declines_chunk_kda)
        chunk_gated_delta_rule = staticmethod(_chunk_gated_delta_rule)
        chunk_gated_delta_rule_verifier = _verifier(_CHUNK_GDN, _declines_chunk_gated_delta_rule)
        fused_recurrent_kda_fwd = staticmethod(_fused_recurrent_kda)
        fused_recurrent_kda_fwd_verifier = _verifier(_RECURRENT, _declines_recurrent)
        kda_gate_chunk_cumsum = staticmethod(_gate_cumsum)
        kda_gate_chunk_cumsum_verifier = _verifier(_GATE, _declines_gate)
        chunk_kda_fwd_intra = staticmethod(_intra)
        chunk_kda_fwd_intra_verifier = _verifier(_INTRA, _declines_intra)
        recompute_w_u_fwd = staticmethod(_recompute)
        recompute_w_u_fwd_verifier = _verifier(_RECOMPUTE, _declines_recompute)

    register_backend(chunk_kda)(CuteAttnBackend)
    for operation in ("kda", "gated_delta_rule"):
        register_backend(operation)(CuteAttnBackend)


# The names of positional arguments, in their order.
_CHUNK_KDA = (
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state",
    "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "safe_gate", "lower_bound", "disable_recompute",
    "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "cp_context",
    "use_graph", "max_num_seqs",
)  # fmt: skip
_CHUNK_GDN = (
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state",
    "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
    "cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context",
)  # fmt: skip
_RECURRENT = (
    "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "scale", "output_final_state",
    "inplace_final_state", "state_v_first", "cu_seqlens", "ssm_state_indices",
    "num_accepted_tokens", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "out",
)  # fmt: skip
_GATE = (
    "g", "A_log", "chunk_size", "scale", "dt_bias", "cu_seqlens", "output_dtype", "chunk_indices",
    "lower_bound", "use_graph",
)  # fmt: skip
_INTRA = (
    "q", "k", "v", "gk", "beta", "scale", "cu_seqlens", "chunk_size", "chunk_indices", "safe_gate",
    "lower_bound", "disable_recompute", "use_graph",
)  # fmt: skip
_RECOMPUTE = ("k", "v", "beta", "A", "gk", "q", "cu_seqlens", "chunk_indices", "use_graph")

# Arguments of `chunk_kda` that are passed on. use_graph and max_num_seqs are left out: the kernels
# find the chunks on the device anyway.
_HANDED_ON = (
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate",
    "lower_bound", "disable_recompute", "return_intermediate_states", "state_v_first",
    "cu_seqlens", "A_log", "dt_bias",
)  # fmt: skip

# Arguments of `chunk_gated_delta_rule` that are passed on.
_HANDED_ON_GDN = (
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
    "cu_seqlens", "A_log", "dt_bias",
)  # fmt: skip

# Arguments of `fused_recurrent_kda_fwd` that both `fused_recurrent_kda` and `kda_decode` take.
_OF_BOTH_STEPS = (
    "A_log", "dt_bias", "scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "state_v_first",
)  # fmt: skip

_FLAGS = frozenset({
    "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "disable_recompute",
    "return_intermediate_states", "state_v_first",
})  # fmt: skip
_NUMBERS = ("scale", "lower_bound")

Arguments = dict[str, Any]
Reason = str | None  # why a call is declined


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _taken(given: Arguments, names: Iterable[str]) -> Arguments:
    """The given arguments, converted for our operators. The library takes any true or false value
    for a flag, None included, and NumPy's numbers."""
    found = {name: given[name] for name in names if name in given}
    for name, x in found.items():
        if name in _FLAGS:
            found[name] = bool(x)
        elif name in _NUMBERS and x is not None:
            found[name] = float(x)
    return found


def _verifier(
    names: tuple[str, ...], declines: Callable[[Arguments], Reason]
) -> staticmethod[..., tuple[bool, Reason]]:
    def verify(*args: Any, **kwargs: Any) -> tuple[bool, Reason]:
        reason = declines(_named(names, args, kwargs))
        return reason is None, reason

    return staticmethod(verify)


# -- reasons to decline a call ------------------------------------------------------------------


def _declines_dtypes_and_sizes(
    given: Arguments,
    dtypes: tuple[str, ...] = DTYPES,
    head_dims: Mapping[str, tuple[int, ...]] = HEAD_DIMS,
    beta_columns: bool = False,
) -> Reason:
    """Why no kernel has the dtypes or sizes of k, v, beta, g or gk, and of q and A if given."""
    first = given["k"]
    if not runs_on(first.device):
        return f"the tensors are on {first.device}, and {NAME} runs on CUDA devices"
    if dtype_name(first.dtype) not in dtypes:
        return f"k has dtype {first.dtype}, and {NAME} has kernels for {dtypes}"
    for name in ("q", "v", "A"):
        x = given.get(name)
        if x is not None and x.dtype != first.dtype:
            return f"{name} has dtype {x.dtype} and k {first.dtype}"
    gate, beta = given["gk" if "gk" in given else "g"], given["beta"]
    if dtype_name(gate.dtype) not in GATE_DTYPES or dtype_name(beta.dtype) not in BETA_DTYPES:
        return f"{NAME} has no kernel for gates of {gate.dtype} and betas of {beta.dtype}"
    for letter, x in (("K", first), ("V", given["v"])):
        dim = x.shape[-1]
        if dim not in head_dims[letter]:
            return f"{letter} is {dim}, and {NAME} has kernels for {head_dims[letter]}"
    if beta.dim() != 3 and not beta_columns:
        return f"{NAME} has one beta a head, and this one has {beta.dim()} dimensions"
    return _declines_numbers(given)


def _declines_numbers(given: Arguments) -> Reason:
    for name in _NUMBERS:
        if isinstance(given.get(name), Tensor):
            return f"{name} is a tensor, and {NAME} takes numbers"
    bound = given.get("lower_bound")
    gated = given.get("use_gate_in_kernel") or "k" not in given  # a call of the gate alone has no k
    if bound is not None and gated and not bound < 0:
        return f"lower_bound is {bound}, and {NAME} takes negative ones"
    return None


def _declines_state(given: Arguments, dtypes: tuple[str, ...]) -> Reason:
    """Why an initial state has no kernel. A state must have one of these dtypes; there must be a
    state per sequence."""
    state, cu_seqlens = given.get("initial_state"), given.get("cu_seqlens")
    if state is None:
        return None
    if dtype_name(state.dtype) not in dtypes:
        return f"initial_state has dtype {state.dtype}, {NAME} has {dtypes}"
    sequences = given["k"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if given.get("ssm_state_indices") is None and state.shape[0] != sequences:
        return f"initial_state has {state.shape[0]} states for {sequences} sequences"
    return None


def _needs_gradients(given: Arguments) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in given.values()
    )


def _declines_gradients(given: Arguments) -> Reason:
    if _needs_gradients(given):
        return f"{NAME} has no backward for it: call it under torch.no_grad() or inference_mode()"
    return None


def _declines_gradients_of_chunks(given: Arguments, *, decays: str) -> Reason:
    """Why no kernel computes gradients for a call whose forward has kernels."""
    if not _needs_gradients(given):
        return None
    k, v = given["k"], given["v"]
    reason = why_no_gradients(
        k.device, head_dim_k=k.shape[-1], head_dim_v=v.shape[-1], decays=decays
    )
    return reason and f"{NAME} has no gradients here: {reason}"


def _declines_chunks_and_contexts(given: Arguments, sizes: tuple[int, ...]) -> Reason:
    """Why a call is declined for its context, or for a chunk_size that is not one of `sizes`, which
    the library takes too. Only intermediate states depend on the size."""
    if given.get("cp_context") is not None:
        return f"{NAME} has no context parallelism (cp_context)"
    size = given.get("chunk_size", CHUNK)
    if size not in sizes:
        return f"chunk_size is {size}, and {NAME} takes {sizes}"
    if size != CHUNK and given.get("return_intermediate_states"):
        return f"chunk_size is {size}, and {NAME} has states of chunks of {CHUNK}"
    if "transpose_state_layout" in given:
        return f"{NAME} takes state_v_first, not its former name"
    return None


def _declines_chunk_gated_delta_rule(given: Arguments) -> Reason:
    if "head_first" in given:
        return f"{NAME} has no head_first"
    heads, heads_v = given["q"].shape[2], given["v"].shape[2]
    if given["k"].shape[2] != heads or heads_v % max(heads, 1):
        return f"{NAME} leaves it to the library to refuse {heads} heads of q and {heads_v} of v"
    if given.get("use_gate_in_kernel") and given.get("A_log") is None:
        return f"{NAME} needs A_log with use_gate_in_kernel"
    return (
        _declines_chunks_and_contexts(given, (16, 32, CHUNK))
        or _declines_dtypes_and_sizes(given)
        or _declines_state(given, INITIAL_STATE_DTYPES)
        or _declines_gradients_of_chunks(given, decays="head")
    )


def _declines_chunk_kda(given: Arguments) -> Reason:
    reason = _declines_chunks_and_contexts(given, (32, CHUNK))
    if reason is not None:
        return reason
    if given.get("cu_seqlens") is not None and given.get("return_intermediate_states"):
        if given.get("cu_seqlens_cpu") is None:
            return "the number of chunks is not known without cu_seqlens_cpu"
        if given.get("use_graph"):
            return "the number of chunks may change from replay to replay (use_graph)"
    return (
        _declines_dtypes_and_sizes(given)
        or _declines_state(given, INITIAL_STATE_DTYPES)
        or _declines_gradients_of_chunks(given, decays="channel")
    )


def _declines_recurrent(given: Arguments) -> Reason:
    in_place = given.get("inplace_final_state", True)
    if in_place:
        reason = _declines_in_place(given)
    elif given.get("ssm_state_indices") is not None:
        reason = f"{NAME} has states in slots in place only"
    elif given.get("out") is not None:
        reason = f"{NAME} takes an out with a state in place only"
    else:
        reason = _declines_state(given, INITIAL_STATE_DTYPES)
    return (
        reason
        or _declines_gradients(given)
        or _declines_dtypes_and_sizes(given, STEP_DTYPES, STEP_HEAD_DIMS, not in_place)
    )


def _declines_in_place(given: Arguments) -> Reason:
    """Why `kda_decode` cannot take a call with in-place states."""
    state, indices = given.get("initial_state"), given.get("ssm_state_indices")
    if state is None:
        return "initial_state is None, and the state is to be updated in place"
    if given.get("cu_seqlens") is not None:
        return f"{NAME} has no packed sequences with a state in place"
    reason = _declines_state(given, STEP_STATE_DTYPES)
    if reason is not None:
        return reason
    try:
        check_state_strides(state, VECTOR_BYTES, "initial_state")
        check_state_address(state, VECTOR_BYTES, "initial_state")
    except ValueError as error:
        return f"{NAME} takes no such state in place: {error}"
    for name in ("A_log", "dt_bias"):
        x = given.get(name)
        if x is None or not given.get("use_gate_in_kernel"):
            continue
        if dtype_name(x.dtype) not in STEP_PARAMETER_DTYPES:
            return f"{name} has dtype {x.dtype}, {NAME} has {STEP_PARAMETER_DTYPES} in place"
        if not x.is_contiguous():
            return f"{name} has strides {x.stride()}, and {NAME} takes contiguous ones in place"
    if indices is None:
        return None
    if indices.dtype != torch.int32 or not indices.is_contiguous():
        return f"{NAME} takes indices of slots as contiguous int32"
    tokens = given["k"].shape[1]
    places = indices.shape[1] if indices.dim() == 2 else 1
    if tokens > places:
        return f"there are {tokens} tokens for each sequence and a slot for {places}"
    accepted = given.get("num_accepted_tokens")
    if accepted is not None and (accepted.dtype != torch.int32 or indices.dim() != 2):
        return f"{NAME} takes num_accepted_tokens as int32, with a slot for each position"
    return None


def _declines_gate(given: Arguments) -> Reason:
    g = given["g"]
    if not runs_on(g.device):
        return f"g is on {g.device}, and {NAME} runs on CUDA devices"
    fits = g.dim() == 4 and g.shape[-1] in HEAD_DIMS["K"]
    if not fits or dtype_name(g.dtype) not in GATE_DTYPES:
        return f"{NAME} has no kernel for a g of shape {list(g.shape)} and {g.dtype}"
    if given["chunk_size"] != CHUNK:
        return f"chunk_size is {given['chunk_size']}, and {NAME} has chunks of {CHUNK}"
    if given.get("output_dtype", torch.float32) != torch.float32:
        return f"{NAME} sums in float32"
    reason = _declines_numbers(given)
    if reason is None and abs((given.get("scale") or 0.0) - LN2_RECIPROCAL) > 1e-6:
        reason = f"scale is {given.get('scale')}, and {NAME} sums in base 2"
    return reason


def _declines_intra(given: Arguments) -> Reason:
    if given.get("chunk_size", CHUNK) != CHUNK:
        return f"chunk_size is {given['chunk_size']}, and {NAME} has chunks of {CHUNK}"
    return _declines_stage(given)


def _declines_recompute(given: Arguments) -> Reason:
    if given["A"].shape[-1] != CHUNK:
        return f"A has chunks of {given['A'].shape[-1]}, and {NAME} of {CHUNK}"
    return _declines_stage(given)


def _declines_stage(given: Arguments) -> Reason:
    for name in ("gk", "beta"):
        if given.get(name) is None:
            return f"{name} is None"
    if given["gk"].dtype != torch.float32:
        return f"gk has dtype {given['gk'].dtype}, and {NAME} takes sums in float32"
    return _declines_gradients(given) or _declines_dtypes_and_sizes(given)


# -- the calls ----------------------------------------------------------------------------------


def _chunk_kda(*args: Any, **kwargs: Any) -> Any:
    from ..ops.kda import chunk_kda

    given = _named(_CHUNK_KDA, args, kwargs)
    rest = _taken(given, _HANDED_ON)
    # Only the shape of the intermediate states depends on cu_seqlens_cpu.
    if given.get("return_intermediate_states"):
        rest["cu_seqlens_cpu"] = given.get("cu_seqlens_cpu")
    return chunk_kda(*(given[name] for name in ("q", "k", "v", "g", "beta")), **rest)


def _chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
    from ..ops.gated_delta_rule import chunk_gated_delta_rule

    given = _named(_CHUNK_GDN, args, kwargs)
    rest = _taken(given, _HANDED_ON_GDN)
    return chunk_gated_delta_rule(*(given[name] for name in ("q", "k", "v", "g", "beta")), **rest)


def _fused_recurrent_kda(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    from ..ops.kda import fused_recurrent_kda, kda_decode

    given = _named(_RECURRENT, args, kwargs)
    q, k, v, g, beta = (given[name] for name in ("q", "k", "v", "g", "beta"))
    rest = _taken(given, _OF_BOTH_STEPS)
    # The library ignores allow_neg_eigval without the sigmoid, and the gate's parameters without
    # the gate.
    if not rest.get("use_beta_sigmoid_in_kernel"):
        rest["allow_neg_eigval"] = False
    if not rest.get("use_gate_in_kernel"):
        rest["A_log"] = rest["dt_bias"] = None
    if not given.get("inplace_final_state", True):
        rest |= _taken(given, ("initial_state", "output_final_state", "cu_seqlens"))
        return fused_recurrent_kda(q, k, v, g, beta, **rest)
    # `kda_decode` and the library's function have different defaults.
    activations = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    for name in (*activations, "state_v_first"):
        rest.setdefault(name, False)
    if rest.get("dt_bias") is not None:
        rest["dt_bias"] = rest["dt_bias"].view(-1)
    state, indices = given["initial_state"], given.get("ssm_state_indices")
    o = kda_decode(
        q,
        k,
        v,
        g,
        beta,
        state,
        **rest,
        state_indices=indices,
        # Without indices of slots, the library ignores num_accepted_tokens.
        num_accepted_tokens=None if indices is None else given.get("num_accepted_tokens"),
        out=given.get("out"),
    )
    return o, state


def _gate_cumsum(*args: Any, **kwargs: Any) -> Tensor:
    from ..ops.kda import kda_gate_cumsum

    given = _named(_GATE, args, kwargs)
    return kda_gate_cumsum(
        given["g"],
        A_log=given.get("A_log"),
        dt_bias=given.get("dt_bias"),
        **_taken(given, ("lower_bound",)),
        use_gate_in_kernel=True,
        cu_seqlens=given.get("cu_seqlens"),
    )


def _intra(
    *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """(w, u, qg, kg, Aqk, Akk); qg is None without disable_recompute."""
    from ..ops.kda import kda_chunk_intra

    given = _named(_INTRA, args, kwargs)
    found = kda_chunk_intra(
        given["q"],
        given["k"],
        given["v"],
        given["gk"],
        given["beta"],
        **_taken(given, ("scale",)),
        cu_seqlens=given.get("cu_seqlens"),
        output_qg=bool(given.get("disable_recompute")),
    )
    return found.w, found.u, found.qg, found.kg, found.Aqk, found.Akk


def _recompute(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(w, u, qg, kg)"""
    from ..ops.kda import kda_recompute_w_u

    given = _named(_RECOMPUTE, args, kwargs)
    found = kda_recompute_w_u(
        given.get("q"),
        given["k"],
        given["v"],
        given["gk"],
        given["beta"],
        given["A"],
        cu_seqlens=given.get("cu_seqlens"),
    )
    return found.w, found.u, found.qg, found.kg
