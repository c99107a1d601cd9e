"""Kimi Delta Attention decode: the operator.

`kda_decode` is called once a layer and token, so its warm path is kept to what it must do: one
look-up of the loaded kernel, and the call. Everything that the look-up does not pin down (sizes,
strides, the other tensors' dtypes and devices, overlaps) is checked by the compiled host code
before it launches; when that refuses, `_check` says why in terms of the arguments. Under
torch.compile, FakeTensor and other dispatch modes the same call goes through the registered
operator `torch.ops.cute_attn.kda_decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.common.spec import VECTOR_BYTES
from ...kernels.kda import table
from ...kernels.kda.step.heuristics import step_config
from ...kernels.kda.step.spec import (
    DTYPES,
    HEAD_DIMS,
    PARAMETER_DTYPES,
    STATE_DTYPES,
    DecodeSpec,
    RecordsSpec,
)
from ..checks import (
    DTYPE_NAMES,
    LARGEST,
    SMALLEST,
    check_autograd,
    check_dtype,
    check_flags,
    check_number,
    check_tangents,
    check_tensors,
)
from ..memory import check_memory
from ..operator import (
    PLAIN,
    dispatch_mode_depth,
    forward_ad,
    is_compiling,
    is_dynamo_compiling,
    is_grad_enabled,
    plain,
)
from ..operator import (
    _intercepted as intercepted,
)
from ..operator import (
    _overridden as overridden,
)
from .arguments import MAX_GRID_YZ, Sizes, check_lower_bound, gate_kind

__all__ = ["kda_decode", "plan_kda_decode"]


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    record_k: Tensor | None = None,
    record_g: Tensor | None = None,
    record_u: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One decode step of Kimi Delta Attention; the state is updated in place.

    With the state of a value head a K by V matrix S, for each token (Kimi Linear, arXiv
    2510.26692):

        S <- Diag(exp(gate)) S
        u  = beta (v - S^T k)
        S <- S + k u^T
        o  = scale S^T q

    Arithmetic is float32 whatever the dtypes.

    Args:
        q: `[B, HQK, K]`, or `[B, T, HQK, K]` for T new tokens a sequence; bfloat16, float16 or
            float32. q, k, v and g may have any strides with the last dimension contiguous, and
            beta any: views of one packed projection are read in place.
        k: of q's shape and dtype.
        v: `[B, HV, V]` or `[B, T, HV, V]`, dtype of q. K and V are 64, 128 or 256. HV is a multiple
            of HQK, and value head h uses query and key head h // (HV // HQK).
        g: `[B, HV, K]` or `[B, T, HV, K]`, bfloat16, float16 or float32: what the gate is computed
            from, or the gate itself, the natural logarithm of the decay, without
            use_gate_in_kernel.
        beta: `[B, HV]` or `[B, T, HV]`, any of these dtypes.
        state: `[N, HV, V, K]`, or `[N, HV, K, V]` without state_v_first; float32 or bfloat16; each
            head's matrix contiguous and 16-byte aligned, with any strides between. Read and written
            once a call, in place.
        scale: of q; None is K ** -0.5.
        A_log: HV numbers, float32 or bfloat16, contiguous; may be left out with a lower_bound.
        dt_bias: `[HV, K]` or `[HV * K]`, likewise; None is 0. Both, and lower_bound, are ignored
            without use_gate_in_kernel.
        lower_bound: of the gate.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6).
        use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: beta is the input of a sigmoid.
        allow_neg_eigval: beta is twice the sigmoid; needs use_beta_sigmoid_in_kernel.
        state_v_first: the layout of the state; True, K contiguous, is the fast one.
        state_indices: `[B]` int32, contiguous: the slot of `state` that each sequence uses, for
            continuous batching; or `[B, 1 + S]`, see below. None: sequence b uses slot b, and N
            must be B. A negative index is padding: output 0, nothing touched. An index >= N is a
            caller's error that is treated like padding rather than checked, which would
            synchronise. No two sequences may name the same slot.
        num_accepted_tokens: `[B]` int32, contiguous: for speculative decoding, see below.
        record_k: `[N, S, HQK, K]`, dtype of k: records of drafted tokens, see below.
        record_g: `[N, S, HV, K]`, dtype of g, likewise.
        record_u: `[N, S, HV, V]`, float32, likewise. The last dimension of each is contiguous.
        out: where to write the output, like the result; the memory it spans must be its own.

    Returns:
        o, `[B, HV, V]` or `[B, T, HV, V]`, dtype of q; `out` itself when given.

    Speculative decoding, with T drafted tokens in a call, in either of two ways:
        A slot for each position: state_indices is `[B, 1 + S]`, and T at most 1 + S. The state
        after token t is left in slot state_indices[b, t] (nowhere if that is not in the pool). Of
        the previous call's tokens the first num_accepted_tokens[b] were right, so that this one
        starts from slot state_indices[b, num_accepted_tokens[b] - 1]; without num_accepted_tokens,
        from the first. Counts outside 1..1 + S are clamped.

        A checkpoint and records: record_k, record_g and record_u are given. The slot holds the
        state before the previous call's tokens, and the records those tokens. The call replays the
        first num_accepted_tokens[b] of them, stores that state, and goes on to its own tokens, at
        most S, which it leaves in the records and not in the state. Counts outside 0..S are
        clamped. A replay repeats the draft's arithmetic exactly. The state is read and written once
        a call, and a sequence costs one state plus S small records.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: head counts that do not fit, wrong shapes, strides, devices, alignment or
            values, or an overlapping `out`.
        NotImplementedError: head dimensions, architectures or autograd that have no kernel.
    """
    if (
        not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is type(g) is type(beta) is type(state) is Tensor
        and (A_log is None or type(A_log) in PLAIN)
        and (dt_bias is None or type(dt_bias) in PLAIN)
        and (state_indices is None or type(state_indices) is Tensor)
        and (out is None or type(out) is Tensor)
        and (num_accepted_tokens is None or type(num_accepted_tokens) is Tensor)
        and (record_k is None or type(record_k) is type(record_g) is type(record_u) is Tensor)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
    ):
        try:
            ready = _ready[
                q.shape,
                v.shape,
                q.dtype,
                g.dtype,
                beta.dtype,
                state.dtype,
                q.get_device(),
                A_log is None,
                dt_bias is None,
                lower_bound is None,
                use_qk_l2norm_in_kernel,
                use_gate_in_kernel,
                use_beta_sigmoid_in_kernel,
                allow_neg_eigval,
                state_v_first,
                state_indices is None,
                num_accepted_tokens is None,
                record_k is None,
            ]
            if scale is None:
                scale = ready.scale
            elif not SMALLEST <= scale <= LARGEST or scale is True:
                raise KeyError
            if lower_bound is None:
                bound = 0.0
            elif -LARGEST <= lower_bound <= -SMALLEST:
                bound = lower_bound
            else:
                raise KeyError
        except Exception:  # new, or a number that is checked first, or none that have a shape
            return _first_call(
                q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
                use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                allow_neg_eigval, state_v_first, state_indices, num_accepted_tokens, record_k,
                record_g, record_u,
            )  # fmt: skip
        tracked = is_grad_enabled()
        if tracked and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or g.requires_grad
            or beta.requires_grad
            or state.requires_grad
            or A_log is not None
            or record_u is not None
            or (out is not None and out.requires_grad)
        ):
            check_autograd(
                "kda_decode", q, k, v, g, beta, state, A_log, dt_bias, out, record_k, record_g,
                record_u,
            )  # fmt: skip
        o = torch.empty_like(v) if out is None else out
        try:
            if not use_gate_in_kernel:
                A_log = dt_bias = None
            elif ready.flat_A_log:
                A_log = A_log.view(-1)  # type: ignore[union-attr]
            ready.function(
                q,
                k,
                v,
                g,
                beta,
                A_log,
                dt_bias,
                o,
                state,
                state_indices,
                num_accepted_tokens,
                record_k,
                record_g,
                record_u,
                scale,
                bound,
                ready.beta_scale,
            )
            if ready.write_records is not None:
                ready.write_records(k, g, state_indices, record_k, record_g)
        except Exception as error:
            return _refused(
                error, ready, q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
                use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                allow_neg_eigval, state_v_first, state_indices, num_accepted_tokens, record_k,
                record_g, record_u,
            )  # fmt: skip
        if tracked:
            _written(o, state, record_k, record_g, record_u)
        return o

    tensors = (
        q, k, v, g, beta, state, out, A_log, dt_bias, state_indices, num_accepted_tokens, record_k,
        record_g, record_u,
    )  # fmt: skip
    if not intercepted(*tensors):
        return _first_call(
            q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, state_v_first, state_indices, num_accepted_tokens, record_k,
            record_g, record_u,
        )  # fmt: skip
    # Where it is traced, the fake implementation checks.
    if not is_compiling() and not overridden(*tensors):
        _check(
            q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, state_v_first, state_indices, num_accepted_tokens, record_k,
            record_g, record_u,
        )  # fmt: skip
    check_autograd("kda_decode", *tensors)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    torch.ops.cute_attn.kda_decode(
        q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, state_indices, num_accepted_tokens, record_k, record_g,
        record_u,
    )  # fmt: skip
    return out


@launch.planner
def plan_kda_decode(
    arch: str,
    *,
    dtype: str = "bfloat16",
    gate_dtype: str | None = None,
    beta_dtype: str | None = None,
    state_dtype: str = "float32",
    A_log_dtype: str = "float32",
    dt_bias_dtype: str = "float32",
    dt_bias_dims: int = 1,
    head_dim_k: int = 128,
    head_dim_v: int = 128,
    state_v_first: bool = True,
    lower_bound: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    multi_token: bool = False,
    slots: str = "indexed",
    indexed: bool = True,
    accepted: bool = True,
) -> list[launch.Request]:
    """The kernels that `kda_decode` will use for such tensors, for `cute_attn.warmup` and spec
    files. Batch, heads and number of tokens do not matter.

    Args:
        arch: such as "sm_90a"; every architecture from sm_80 on takes the same kernel today.
        dtype: of q, k and v.
        gate_dtype: of g; None is that of q.
        beta_dtype: of beta; None is that of q.
        state_dtype: of the state.
        A_log_dtype: of A_log; "none" where it is left out.
        dt_bias_dtype: of dt_bias; "none" where it is left out.
        dt_bias_dims: dimensions of dt_bias, 1 or 2.
        head_dim_k: K, of q and k.
        head_dim_v: V, of v.
        state_v_first: as the operator's.
        lower_bound: whether there is one.
        use_qk_l2norm_in_kernel: as the operator's.
        use_gate_in_kernel: as the operator's.
        use_beta_sigmoid_in_kernel: as the operator's.
        multi_token: q is `[B, T, HQK, K]` rather than `[B, HQK, K]`.
        slots: "indexed" or "batch" (with state_indices `[B]`, or without), "positions" (with
            state_indices `[B, 1 + S]`) or "records".
        indexed: with "records": whether there are state_indices.
        accepted: with "positions": whether there is num_accepted_tokens.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter of another type.
        ValueError: no kernel is specialised so; the message names the parameter.
    """
    del arch
    tuned: dict[str, Any] = {
        "state_dtype": state_dtype,
        "head_dim_k": head_dim_k,
        "head_dim_v": head_dim_v,
        "state_v_first": state_v_first,
        "multi_token": multi_token,
    }
    if head_dim_k not in HEAD_DIMS or head_dim_v not in HEAD_DIMS:
        raise ValueError(f"head_dim_k and head_dim_v must be of {HEAD_DIMS}")
    gated = use_gate_in_kernel
    spec = DecodeSpec(
        dtype=dtype,
        gate_dtype=gate_dtype or dtype,
        beta_dtype=beta_dtype or dtype,
        A_log_dtype=A_log_dtype if gated else "none",
        dt_bias_dtype=dt_bias_dtype if gated else "none",
        dt_bias_dims=dt_bias_dims if gated and dt_bias_dtype != "none" else 0,
        gate=gate_kind(gated, 0.0 if lower_bound else None),
        l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        slots=slots,
        indexed=indexed if slots == "records" else slots != "batch",
        accepted=accepted if slots == "positions" else slots == "records",
        **tuned,
        **step_config(**tuned),
    )
    requests: list[launch.Request] = [(table.DECODE, spec)]
    if slots == "records":
        records = RecordsSpec(
            dtype=dtype, gate_dtype=spec.gate_dtype, head_dim_k=head_dim_k, indexed=spec.indexed
        )
        requests.append((table.DECODE_RECORDS, records))
    return requests


# -- launching ----------------------------------------------------------------------------------

# An operator that saved the state for its backward must see that it has changed.
_increment_version = torch._C._increment_version


class _Ready(NamedTuple):
    """A loaded kernel, and what its calls need besides their arguments."""

    requests: list[launch.Request]  # what is loaded
    function: Callable[..., None]
    write_records: Callable[..., None] | None
    scale: float  # where none is given
    beta_scale: float
    flat_A_log: bool  # A_log has more dimensions than the kernel takes


# Everything that a kernel is chosen by -> the loaded kernel. Whole shapes rather than the head
# dimensions alone, because they cost a third of the time to get.
_ready: dict[tuple[Any, ...], _Ready] = {}

# q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound, use_qk_l2norm_in_kernel,
# use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, state_indices,
# num_accepted_tokens, record_k, record_g, record_u
_Arguments = tuple[Any, ...]


def _key(arguments: _Arguments) -> tuple[Any, ...]:
    """The key of `_ready`, as `kda_decode` writes it out."""
    (
        q, _, v, g, beta, state, _, _, A_log, dt_bias, lower_bound, l2norm, gate, beta_sigmoid,
        allow_neg_eigval, state_v_first, state_indices, num_accepted_tokens, record_k, _, _,
    ) = arguments  # fmt: skip
    return (
        q.shape, v.shape, q.dtype, g.dtype, beta.dtype, state.dtype, q.get_device(),
        A_log is None, dt_bias is None, lower_bound is None, l2norm, gate, beta_sigmoid,
        allow_neg_eigval, state_v_first, state_indices is None, num_accepted_tokens is None,
        record_k is None,
    )  # fmt: skip


def _first_call(*arguments: Any) -> Tensor:
    """Check, load the kernel and remember it, and call it."""
    v, out = arguments[2], arguments[6]
    _check_all(*arguments)
    check_autograd("kda_decode", *arguments)
    o = torch.empty_like(v) if out is None else out
    if v.numel() == 0:
        return o
    plain = _plainer(arguments, o)
    if plain is not None:
        _first_call(*plain)
        return o
    _launch(_prepare(arguments), arguments, o)
    return o


def _launch(ready: _Ready, arguments: _Arguments, o: Tensor) -> None:
    (
        q, k, v, g, beta, state, _, scale, A_log, dt_bias, lower_bound, _, use_gate_in_kernel, _,
        _, _, state_indices, num_accepted_tokens, record_k, record_g, record_u,
    ) = arguments  # fmt: skip
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    elif ready.flat_A_log:
        A_log = A_log.view(-1)
    ready.function(
        q, k, v, g, beta, A_log, dt_bias, o, state, state_indices, num_accepted_tokens, record_k,
        record_g, record_u,
        ready.scale if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
        ready.beta_scale,
    )  # fmt: skip
    if ready.write_records is not None:
        ready.write_records(k, g, state_indices, record_k, record_g)
    if is_grad_enabled():
        _written(o, state, record_k, record_g, record_u)


def _refused(error: Exception, ready: _Ready, *arguments: Any) -> Tensor:
    """The compiled host code would not launch: say why in the operator's words, or mend it."""
    _check_all(*arguments)
    v, out = arguments[2], arguments[6]
    if v.numel() and _plainer(arguments, v if out is None else out) is None:
        A_log = arguments[8]
        flat = A_log is not None and A_log.dim() != 1
        if _plan(arguments) == ready.requests and flat == ready.flat_A_log:
            raise error
    # Nothing to do, or what only the kernels' choice, but not the look-up, tells apart.
    return _first_call(*arguments)


def _plainer(arguments: _Arguments, o: Tensor) -> _Arguments | None:
    """The same call as kernels take it, or None where it is that already: one slot for each
    sequence needs no second dimension, and positions and records take tokens in the second."""
    (
        q, k, v, g, beta, state, _, *others, state_indices, num_accepted_tokens, record_k,
        record_g, record_u,
    ) = arguments  # fmt: skip
    changed = False
    if state_indices is not None and state_indices.dim() == 2 and state_indices.shape[1] == 1:
        changed = True
        state_indices = state_indices.view(-1)
        if record_k is None:
            num_accepted_tokens = None
    if q.dim() == 3 and (_positions(state_indices) or record_k is not None):
        changed = True
        q, k, v, g, beta, o = (x.unsqueeze(1) for x in (q, k, v, g, beta, o))
    if not changed:
        return None
    return (
        q, k, v, g, beta, state, o, *others, state_indices, num_accepted_tokens, record_k,
        record_g, record_u,
    )  # fmt: skip


def _positions(state_indices: Tensor | None) -> bool:
    return state_indices is not None and state_indices.dim() == 2


def _plan(arguments: _Arguments) -> list[launch.Request]:
    (
        q, _, v, g, beta, state, _, _, A_log, dt_bias, lower_bound, l2norm, gate, beta_sigmoid,
        _, state_v_first, state_indices, num_accepted_tokens, record_k, _, _,
    ) = arguments  # fmt: skip
    if record_k is not None:
        slots = "records"
    elif state_indices is None:
        slots = "batch"
    else:
        slots = "positions" if _positions(state_indices) else "indexed"
    return plan_kda_decode(
        launch.arch_for(q.device),
        dtype=DTYPE_NAMES[q.dtype],
        gate_dtype=DTYPE_NAMES[g.dtype],
        beta_dtype=DTYPE_NAMES[beta.dtype],
        state_dtype=DTYPE_NAMES[state.dtype],
        A_log_dtype="none" if A_log is None else DTYPE_NAMES[A_log.dtype],
        dt_bias_dtype="none" if dt_bias is None else DTYPE_NAMES[dt_bias.dtype],
        dt_bias_dims=0 if dt_bias is None else dt_bias.dim(),
        head_dim_k=q.shape[-1],
        head_dim_v=v.shape[-1],
        state_v_first=bool(state_v_first),
        lower_bound=lower_bound is not None,
        use_qk_l2norm_in_kernel=bool(l2norm),
        use_gate_in_kernel=bool(gate),
        use_beta_sigmoid_in_kernel=bool(beta_sigmoid),
        multi_token=q.dim() == 4,
        slots=slots,
        indexed=state_indices is not None,
        accepted=num_accepted_tokens is not None,
    )


def _prepare(arguments: _Arguments) -> _Ready:
    """Load the kernel for these arguments, and remember it if they are on a GPU."""
    q, A_log, use_gate_in_kernel, allow_neg_eigval = (arguments[i] for i in (0, 8, 12, 14))
    requests = _plan(arguments)
    function, *rest = (launch.get_for(q.device, *request) for request in requests)
    ready = _Ready(
        requests,
        function,
        rest[0] if rest else None,
        q.shape[-1] ** -0.5,
        2.0 if allow_neg_eigval else 1.0,
        bool(use_gate_in_kernel) and A_log is not None and A_log.dim() != 1,
    )
    if q.is_cuda:  # which emulator runs a CPU tensor depends on where the call is made
        _ready[_key(arguments)] = ready
    return ready


def _written(*tensors: Tensor | None) -> None:
    _increment_version([x for x in tensors if x is not None])


# -- checks -------------------------------------------------------------------------------------


def _check_all(*arguments: Any) -> None:
    """Raise the documented exception if the kernel cannot take these arguments."""
    _check(*arguments)
    (
        q, k, v, g, beta, state, out, _, A_log, dt_bias, _, _, _, _, _, _, state_indices,
        num_accepted_tokens, record_k, record_g, record_u,
    ) = arguments  # fmt: skip
    launch.check_device("q", q.device)
    if state.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"state starts at address {state.data_ptr():#x}, must be {VECTOR_BYTES}-byte aligned"
        )
    records = {"record_k": record_k, "record_g": record_g, "record_u": record_u}
    check_memory(
        {"out": out, "state": state, **records},
        {
            "q": q,
            "k": k,
            "v": v,
            "g": g,
            "beta": beta,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "state_indices": state_indices,
            "num_accepted_tokens": num_accepted_tokens,
        },
        pools=("state", *records),
    )


def _check(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    out: Any,
    scale: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    use_qk_l2norm_in_kernel: Any,
    use_gate_in_kernel: Any,
    use_beta_sigmoid_in_kernel: Any,
    allow_neg_eigval: Any,
    state_v_first: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    record_k: Any,
    record_g: Any,
    record_u: Any,
) -> None:
    """The checks that need no memory, and so hold for fake tensors too."""
    given = check_tensors(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state},
        {
            "out": out,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "state_indices": state_indices,
            "num_accepted_tokens": num_accepted_tokens,
            "record_k": record_k,
            "record_g": record_g,
            "record_u": record_u,
        },
    )
    check_number("scale", scale)
    check_number("lower_bound", lower_bound)
    check_flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    check_step_options(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_step_dtypes(given)
    check_dtype("state", state, STATE_DTYPES)
    for name in ("state_indices", "num_accepted_tokens"):
        if name in given:
            check_dtype(name, given[name], ("int32",))

    if q.dim() not in (3, 4):
        raise ValueError(f"q has shape {list(q.shape)}, must be [B, HQK, K] or [B, T, HQK, K]")
    step = "B" if q.dim() == 3 else "B T"
    sizes = Sizes()
    check_step_shapes(sizes, given, step)
    if sizes.get("T") == 0:
        raise ValueError("q has no tokens: T is 0, must be at least 1")
    if out is not None:
        sizes.take("out", out, f"{step} HV V")
    if state_indices is None:
        sizes["N"] = sizes["B"]
    sizes.take("state", state, "N HV V K" if state_v_first else "N HV K V")
    if sizes["B"] > MAX_GRID_YZ:
        raise ValueError(f"q has {sizes['B']} sequences, at most {MAX_GRID_YZ} fit one call")
    if use_gate_in_kernel:
        check_step_gate(given, sizes, lower_bound)
    _check_slots(given, sizes)

    for name in ("q", "k", "v", "g", "out", "record_k", "record_g", "record_u"):
        check_last_stride(given, name)
    for name in ("state_indices", "num_accepted_tokens"):
        if name in given and not given[name].is_contiguous():
            raise ValueError(f"{name} has strides {given[name].stride()}, must be contiguous")
    vector = VECTOR_BYTES // state.element_size()
    strides = state.stride()
    if (
        strides[3] != 1
        or strides[2] != state.shape[3]
        or strides[0] % vector
        or strides[1] % vector
    ):
        raise ValueError(
            f"state has strides {strides}: a head's matrix must be contiguous, and slots and heads "
            f"start on {VECTOR_BYTES}-byte boundaries"
        )
    for name in ("state", "out", "record_k", "record_g", "record_u"):
        if name in given and any(
            stride == 0 and size > 1
            for size, stride in zip(given[name].shape, given[name].stride(), strict=True)
        ):
            raise ValueError(f"{name} is expanded: it is written, so its elements must be distinct")


def _check_slots(given: dict[str, Tensor], sizes: Sizes) -> None:
    """state_indices, num_accepted_tokens and the records, for either way of speculating."""
    state_indices = given.get("state_indices")
    records = [name for name in ("record_k", "record_g", "record_u") if name in given]
    tokens = sizes.get("T", 1)
    if state_indices is not None:
        shape = list(state_indices.shape)
        if len(shape) not in (1, 2) or shape[0] != sizes["B"] or shape[-1] == 0 < sizes["B"]:
            raise ValueError(
                f"state_indices has shape {shape}, must be [{sizes['B']}] or [{sizes['B']}, 1 + S]"
            )
    positions = shape[1] if _positions(state_indices) else 1
    if "num_accepted_tokens" in given:
        sizes.take("num_accepted_tokens", given["num_accepted_tokens"], "B")
        if not records and not _positions(state_indices):
            raise ValueError(
                "num_accepted_tokens needs state_indices [B, 1 + S], or record_k, record_g and "
                "record_u"
            )
    if not records:
        if 1 < positions < tokens:
            raise ValueError(
                f"q has {tokens} tokens (T), must be at most the {positions} positions (1 + S) of "
                "state_indices"
            )
        return
    if len(records) < 3:
        raise ValueError(f"{records[0]} is given without all of record_k, record_g and record_u")
    if "num_accepted_tokens" not in given:
        raise ValueError("num_accepted_tokens is missing, records need it")
    if positions > 1:
        raise ValueError(
            f"state_indices has shape {shape}, must be [{sizes['B']}] with records: they go with "
            "one slot for each sequence"
        )
    sizes.take("record_k", given["record_k"], "N S HQK K")
    sizes.take("record_g", given["record_g"], "N S HV K")
    sizes.take("record_u", given["record_u"], "N S HV V")
    if tokens > sizes["S"]:
        raise ValueError(f"q has {tokens} tokens (T), must be at most the {sizes['S']} records (S)")
    for name, like in (("record_k", "k"), ("record_g", "g")):
        if given[name].dtype != given[like].dtype:
            raise TypeError(
                f"{name} has dtype {given[name].dtype}, must be that of {like}, {given[like].dtype}"
            )
    check_dtype("record_u", given["record_u"], ("float32",))


# -- what all that goes token by token asks of its arguments


def check_step_options(use_beta_sigmoid_in_kernel: Any, allow_neg_eigval: Any) -> None:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval is True, must be False without use_beta_sigmoid_in_kernel: a beta "
            "that is given is used as it is"
        )


def check_step_dtypes(given: dict[str, Tensor]) -> None:
    q = given["q"]
    for name in ("q", "g", "beta"):
        check_dtype(name, given[name], DTYPES)
    for name in ("k", "v", "out"):
        if name in given and given[name].dtype != q.dtype:
            raise TypeError(f"{name} has dtype {given[name].dtype}, must be {q.dtype}")


def check_step_shapes(sizes: Sizes, given: dict[str, Tensor], step: str) -> None:
    """Of q, k, v, g and beta; `step` is "B" or "B T"."""
    sizes.take("q", given["q"], f"{step} HQK K")
    sizes.take("k", given["k"], f"{step} HQK K")
    sizes.take("v", given["v"], f"{step} HV V")
    sizes.check_heads()
    for letter, of in (("K", "queries and keys"), ("V", "values")):
        if sizes[letter] not in HEAD_DIMS:
            raise NotImplementedError(
                f"the head dimension of {of} ({letter}) is {sizes[letter]}, there are kernels for: "
                f"{HEAD_DIMS}"
            )
    sizes.take("g", given["g"], f"{step} HV K")
    sizes.take("beta", given["beta"], f"{step} HV")


def check_step_gate(given: dict[str, Tensor], sizes: Sizes, lower_bound: float | None) -> None:
    """A_log and dt_bias, where the gate is left to the kernel."""
    check_lower_bound(lower_bound)
    if "A_log" not in given and lower_bound is None:
        raise ValueError(
            "A_log is None, must be given with use_gate_in_kernel unless there is a lower_bound"
        )
    heads, dim = sizes["HV"], sizes["K"]
    for name in ("A_log", "dt_bias"):
        if name not in given:
            continue
        x = given[name]
        check_dtype(name, x, PARAMETER_DTYPES)
        if name == "A_log":
            fits, expected = x.numel() == heads, f"[{heads}]"
        else:
            fits = list(x.shape) in ([heads * dim], [heads, dim])
            expected = f"[{heads * dim}] or [{heads}, {dim}]"
        if not fits:
            raise ValueError(f"{name} has shape {list(x.shape)}, must be {expected}")
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}, must be contiguous")


def check_last_stride(given: dict[str, Tensor], name: str) -> None:
    if name in given and given[name].stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {given[name].stride()}, the last dimension must be contiguous"
        )


# -- the registered operator --------------------------------------------------------------------

_library = torch.library.Library("cute_attn", "FRAGMENT")
_library.define(
    "kda_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, "
    "Tensor(b!) out, float? scale=None, Tensor? A_log=None, Tensor? dt_bias=None, "
    "float? lower_bound=None, bool use_qk_l2norm_in_kernel=True, bool use_gate_in_kernel=True, "
    "bool use_beta_sigmoid_in_kernel=True, bool allow_neg_eigval=False, bool state_v_first=True, "
    "Tensor? state_indices=None, Tensor? num_accepted_tokens=None, Tensor(c!)? record_k=None, "
    "Tensor(d!)? record_g=None, Tensor(e!)? record_u=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    out: Tensor,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    record_k: Tensor | None = None,
    record_g: Tensor | None = None,
    record_u: Tensor | None = None,
) -> None:
    arguments: _Arguments = tuple(map(plain, (
        q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, state_indices, num_accepted_tokens, record_k, record_g,
        record_u,
    )))  # fmt: skip
    check_tangents(q=q, k=k, v=v, g=g, beta=beta, state=state, A_log=A_log, dt_bias=dt_bias)
    check_tangents(out=out, record_k=record_k, record_g=record_g, record_u=record_u)
    check_autograd("kda_decode", *arguments)
    ready = _ready.get(_key(arguments))
    if (
        ready is None
        or not (scale is None or SMALLEST <= scale <= LARGEST)
        or not (lower_bound is None or -LARGEST <= lower_bound <= -SMALLEST)
    ):
        _first_call(*arguments)
        return
    try:
        _launch(ready, arguments, arguments[6])
    except Exception as error:
        _refused(error, ready, *arguments)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    out: Tensor,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    record_k: Tensor | None = None,
    record_g: Tensor | None = None,
    record_u: Tensor | None = None,
) -> None:
    _check(
        q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, state_indices, num_accepted_tokens, record_k, record_g,
        record_u,
    )  # fmt: skip


_library.impl("kda_decode", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("cute_attn::kda_decode", _fake, lib=_library)
