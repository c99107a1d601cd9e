"""Kimi Delta Attention decode: the operator.

A model calls `kda_decode` for every layer and token, so a warm call only looks up the loaded kernel
and calls it. Before the launch, the compiled host code checks all that the look-up's key leaves
open: sizes, strides, overlaps, the other tensors' dtypes and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.common.spec import VECTOR_BYTES
from ...kernels.delta import table
from ...kernels.delta.step.heuristics import step_config
from ...kernels.delta.step.spec import (
    HEAD_DIMS,
    PARAMETER_DTYPES,
    STATE_DTYPES,
    DecodeSpec,
    RecordsSpec,
)
from ..checks import (
    DTYPE_NAMES,
    check_contiguous,
    check_dtype,
    check_flags,
    check_int32,
    check_not_expanded,
    check_number,
    check_rows,
    check_state_address,
    check_state_strides,
    exceeds,
    require_flags,
)
from ..memory import check_memory
from ..operator import (
    PLAIN,
    Operator,
    dispatch_mode_depth,
    forward_ad,
    increment_version,
    is_dynamo_compiling,
    is_grad_enabled,
)
from .arguments import (
    MAX_GRID_YZ,
    Sizes,
    check_beta_options,
    check_has_A_log,
    check_lower_bound,
    check_slots,
    check_step_dtypes,
    check_step_shapes,
    gate_kind,
    index_dtype,
    launch_scalars,
    slots_plan,
)

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
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    draft_states: Tensor | None = None,
    draft_indices: Tensor | None = None,
) -> Tensor:
    """One decode step of Kimi Delta Attention; the state is updated in place.

    For each token, where the state S of a value head is a K by V matrix (Kimi Linear, arXiv
    2510.26692):

        S <- Diag(exp(gate)) S
        u  = beta (v - S^T k)
        S <- S + k u^T
        o  = scale S^T q

    Arithmetic is float32 for all dtypes.

    Args:
        q: `[B, HQK, K]`, or `[B, T, HQK, K]` for T new tokens per sequence; bfloat16, float16 or
            float32. The last dimension of q, k, v and g must be contiguous. All other strides are
            free, so that views of one packed projection are read in place.
        k: of q's shape and dtype.
        v: `[B, HV, V]` or `[B, T, HV, V]`, dtype of q. K and V are 64, 128 or 256. HV is a multiple
            of HQK, and value head h uses query and key head h // (HV // HQK).
        g: `[B, HV, K]` or `[B, T, HV, K]`, bfloat16, float16 or float32: the input of the gate, or
            without use_gate_in_kernel the gate, which is the natural logarithm of the decay.
        beta: `[B, HV]` or `[B, T, HV]`, bfloat16, float16 or float32.
        state: `[N, HV, V, K]`, or `[N, HV, K, V]` without state_v_first; float32 or bfloat16; each
            head's matrix contiguous and 16-byte aligned. Read and written once a call, in place.
        scale: factor of q; None is K ** -0.5.
        A_log: HV numbers, float32 or bfloat16, contiguous; optional with a lower_bound.
        dt_bias: `[HV, K]` or `[HV * K]`, float32 or bfloat16, contiguous; None is 0. A_log, dt_bias
            and lower_bound are ignored without use_gate_in_kernel.
        lower_bound: lower bound of the gate, negative.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6).
        use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: use sigmoid(beta) instead of beta.
        allow_neg_eigval: use 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        state_v_first: whether the state is `[N, HV, V, K]`, the faster layout.
        state_indices: `[B]` int32 or int64: the slot of `state` that each sequence uses, for
            continuous batching; or `[B, 1 + S]`, see below. The dimension of sequences may have any
            stride, so that a column of a server's block table is read in place. None: sequence b
            uses slot b, and N must be B. A negative index marks padding: the sequence's output is
            0, and no slot is read or written. An index >= N is an error of the caller; the index is
            treated as padding, since a check would synchronise. No two sequences may have the same
            slot.
        num_accepted_tokens: `[B]` int32, contiguous: for speculative decoding, see below.
        record_k: `[N, S, HQK, K]`, dtype of k: records of drafted tokens, see below.
        record_g: `[N, S, HV, K]`, dtype of g, as record_k.
        record_u: `[N, S, HV, V]`, float32, as record_k. The last dimension of all three records is
            contiguous.
        out: tensor to write the output to, with the shape and dtype of the result. `out` must not
            overlap another argument.
        cu_seqlens: `[N + 1]` int32 or int64, for q `[1, T, HQK, K]`: sequences of different lengths
            in one call. Tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1 are sequence n. B is N in all
            shapes but those of tokens. A sequence may be empty, and then changes nothing. The
            output is undefined for tokens of no sequence. Not with records.
        has_initial_state: `[B]` bool, contiguous: where False, the sequence starts from a state of
            0, whatever its slot holds. None is True for all.
        pad_slot_id: with 0, slot 0 marks padding, as negative indices do. Any negative number is
            the default: only negative indices are padding.
        draft_states: `[M, S, HV, V, K]`, dtype of state, matrices as in state: see below.
        draft_indices: `[B]` int32, contiguous; goes with draft_states.

    Returns:
        o, `[B, HV, V]` or `[B, T, HV, V]`, dtype of q; `out` itself when given.

    Speculative decoding, with T drafted tokens in a call, works in one of three ways:
        A slot for each position: state_indices is `[B, 1 + S]`, and T at most 1 + S. The call
        stores the state after token t in slot state_indices[b, t], or nowhere if the pool has no
        such slot. num_accepted_tokens[b] is the number of the previous call's tokens that were
        accepted. This call starts from slot state_indices[b, num_accepted_tokens[b] - 1]; without
        num_accepted_tokens, from state_indices[b, 0]. Counts outside 1..1 + S are clamped.

        A checkpoint and records: record_k, record_g and record_u are given. The slot holds the
        state before the previous call's tokens, and the records hold those tokens. The call replays
        the first num_accepted_tokens[b] recorded tokens and stores the resulting state. Then the
        call computes its own tokens, at most S, and stores them in the records, not in the state.
        Counts outside 0..S are clamped. A replay repeats the draft's arithmetic exactly. A call
        reads and writes the state once; a sequence needs memory for one state and S small records.

        A tensor for drafts: draft_states and draft_indices are given, and T is at most S. The call
        starts from the state in the sequence's slot, and leaves the slot as it is. The state after
        token t goes to draft_states[draft_indices[b], t], or nowhere if there is no such row. The
        caller copies the state after the last accepted token to the slot.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, head counts, strides, devices, alignment or values, or an `out`
            that overlaps another argument.
        NotImplementedError: a head dimension or an architecture without a kernel, or a tensor that
            requires a gradient: there is no backward.
    """
    call = (
        _forward
        if not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is type(g) is type(beta) is type(state) is Tensor
        and (A_log is None or type(A_log) in PLAIN)
        and (dt_bias is None or type(dt_bias) in PLAIN)
        and (state_indices is None or type(state_indices) is Tensor)
        and (out is None or type(out) is Tensor)
        and (num_accepted_tokens is None or type(num_accepted_tokens) is Tensor)
        and (record_k is None or type(record_k) is type(record_g) is type(record_u) is Tensor)
        and (cu_seqlens is None or type(cu_seqlens) is Tensor)
        and (has_initial_state is None or type(has_initial_state) is Tensor)
        and (draft_states is None or type(draft_states) is type(draft_indices) is Tensor)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
        else _decode.routed
    )
    o: Tensor = call(
        q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, state_indices, num_accepted_tokens, record_k, record_g, record_u,
        cu_seqlens, has_initial_state, pad_slot_id, draft_states, draft_indices,
    )  # fmt: skip
    return o


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
    slot_dtype: str = "int32",
    strided_slots: bool = False,
    null_slot: bool = False,
    has_initial_state: bool = False,
    index_dtype: str = "none",
) -> list[launch.Request]:
    """The kernels that `kda_decode` uses for these tensors, for `cute_attn.warmup` and spec files.
    The choice does not depend on the numbers of sequences, heads and tokens.

    Args:
        arch: architecture, such as "sm_90a"; today one kernel serves all architectures from sm_80
            on.
        dtype: dtype of q, k and v.
        gate_dtype: dtype of g; None means q's dtype.
        beta_dtype: dtype of beta; None means q's dtype.
        state_dtype: dtype of the state.
        A_log_dtype: dtype of A_log; "none" without A_log.
        dt_bias_dtype: dtype of dt_bias; "none" without dt_bias.
        dt_bias_dims: dimensions of dt_bias, 1 or 2.
        head_dim_k: K, head dimension of q and k.
        head_dim_v: V, head dimension of v.
        state_v_first: as in the operator.
        lower_bound: whether lower_bound is given.
        use_qk_l2norm_in_kernel: as in the operator.
        use_gate_in_kernel: as in the operator.
        use_beta_sigmoid_in_kernel: as in the operator.
        multi_token: whether q is `[B, T, HQK, K]`, not `[B, HQK, K]`.
        slots: "indexed" (state_indices is `[B]`), "batch" (no state_indices), "positions"
            (state_indices is `[B, 1 + S]`), "records" (record_k, record_g and record_u) or "drafts"
            (draft_states).
        indexed: with "records" or "drafts": whether state_indices is given; ignored otherwise.
        accepted: with "positions": whether num_accepted_tokens is given; ignored otherwise.
        slot_dtype: dtype of state_indices.
        strided_slots: whether state_indices is not contiguous.
        null_slot: whether pad_slot_id is 0.
        has_initial_state: whether has_initial_state is given.
        index_dtype: dtype of cu_seqlens, "int32" or "int64"; "none" without cu_seqlens.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
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
    indexed = indexed if slots in ("records", "drafts") else slots != "batch"
    of_slots: dict[str, Any] = {"fresh": bool(has_initial_state)}
    if indexed:
        of_slots |= {
            "slot_dtype": slot_dtype,
            "strided_slots": bool(strided_slots),
            "null_slot": bool(null_slot),
        }
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
        indexed=indexed,
        accepted=accepted if slots == "positions" else slots == "records",
        index_dtype=index_dtype,
        **of_slots,
        **tuned,
        **step_config(
            **tuned,
            in_place=slots not in ("positions", "drafts"),
            records=slots == "records",
        ),
    )
    requests: list[launch.Request] = [(table.DECODE, spec)]
    if slots == "records":
        records = RecordsSpec(
            dtype=dtype,
            gate_dtype=spec.gate_dtype,
            head_dim_k=head_dim_k,
            indexed=spec.indexed,
            **of_slots | {"fresh": False},
        )
        requests.append((table.DECODE_RECORDS, records))
    return requests


# -- the operator -------------------------------------------------------------------------------

_empty_like = torch.empty_like
uint8 = torch.uint8


class _Arguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    out: Tensor
    scale: float | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    use_qk_l2norm_in_kernel: bool = True
    use_gate_in_kernel: bool = True
    use_beta_sigmoid_in_kernel: bool = True
    allow_neg_eigval: bool = False
    state_v_first: bool = True
    state_indices: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    record_k: Tensor | None = None
    record_g: Tensor | None = None
    record_u: Tensor | None = None
    cu_seqlens: Tensor | None = None
    has_initial_state: Tensor | None = None
    pad_slot_id: int = -1
    draft_states: Tensor | None = None
    draft_indices: Tensor | None = None


_RECORDS = ("record_k", "record_g", "record_u")

# (decode kernel, kernel that writes records, scale, lower_bound, factor of beta's sigmoid, whether
# A_log must be flattened)
_Ready = tuple[Callable[..., None], Callable[..., None] | None, float, float, float, bool]


class _Decode(Operator[_Arguments]):
    name = "kda_decode"
    arguments = _Arguments
    written = ("state", "out", *_RECORDS, "draft_states")

    def check(self, a: _Arguments, given: dict[str, Tensor]) -> None:
        check_number("scale", a.scale)
        check_number("lower_bound", a.lower_bound)
        check_flags(
            use_qk_l2norm_in_kernel=a.use_qk_l2norm_in_kernel,
            use_gate_in_kernel=a.use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=a.use_beta_sigmoid_in_kernel,
            allow_neg_eigval=a.allow_neg_eigval,
            state_v_first=a.state_v_first,
        )
        check_beta_options(a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval)
        check_step_dtypes(given)
        check_dtype("state", a.state, STATE_DTYPES)
        check_int32(given, ("num_accepted_tokens", "draft_indices"))
        check_slots(given, a.pad_slot_id)
        _check_shapes(a, given)
        check_rows(given, ("q", "k", "v", "g", "out", *_RECORDS))
        check_contiguous(
            given, ("num_accepted_tokens", "cu_seqlens", "has_initial_state", "draft_indices")
        )
        check_state_strides(a.state, VECTOR_BYTES)
        if a.draft_states is not None:
            check_state_strides(a.draft_states, VECTOR_BYTES, "draft_states")
        check_not_expanded(given, self.written)

    def check_memory(self, a: _Arguments) -> None:
        check_state_address(a.state, VECTOR_BYTES)
        if a.draft_states is not None:
            check_state_address(a.draft_states, VECTOR_BYTES, "draft_states")
        tensors = self.tensors(a)
        pools = ("state", *_RECORDS, "draft_states")
        written = {name: tensors.pop(name) for name in ("out", *pools)}
        check_memory(written, tensors, pools=pools)

    def nothing(self, a: _Arguments) -> Tensor | None:
        if a.v.numel() and (a.cu_seqlens is None or len(a.cu_seqlens) > 1):
            return None
        return a.out

    def readable(self, a: _Arguments) -> _Arguments:
        """Make state_indices `[B, 1]` into `[B]`, and insert the dimension of tokens that kernels
        with positions, records or drafts need."""
        indices = a.state_indices
        if indices is not None and indices.dim() == 2 and indices.shape[1] == 1:
            a = a._replace(state_indices=indices[:, 0])
            if a.record_k is None:
                a = a._replace(num_accepted_tokens=None)
        if a.q.dim() == 3 and (
            _has_positions(a.state_indices) or a.record_k is not None or a.draft_states is not None
        ):
            steps = {name: getattr(a, name).unsqueeze(1) for name in _OF_A_STEP}
            a = a._replace(**steps)
        return a

    def prepare(self, a: _Arguments) -> _Ready:
        if a.record_k is not None:
            slots = "records"
        elif a.draft_states is not None:
            slots = "drafts"
        elif a.state_indices is None:
            slots = "batch"
        else:
            slots = "positions" if _has_positions(a.state_indices) else "indexed"
        requests = plan_kda_decode(
            launch.arch_for(a.q.device),
            dtype=DTYPE_NAMES[a.q.dtype],
            gate_dtype=DTYPE_NAMES[a.g.dtype],
            beta_dtype=DTYPE_NAMES[a.beta.dtype],
            state_dtype=DTYPE_NAMES[a.state.dtype],
            # Without the gate, A_log and dt_bias may have any dtype.
            A_log_dtype="none" if a.A_log is None else DTYPE_NAMES.get(a.A_log.dtype, "none"),
            dt_bias_dtype="none" if a.dt_bias is None else DTYPE_NAMES.get(a.dt_bias.dtype, "none"),
            dt_bias_dims=0 if a.dt_bias is None else a.dt_bias.dim(),
            head_dim_k=a.q.shape[-1],
            head_dim_v=a.v.shape[-1],
            state_v_first=bool(a.state_v_first),
            lower_bound=a.lower_bound is not None,
            use_qk_l2norm_in_kernel=bool(a.use_qk_l2norm_in_kernel),
            use_gate_in_kernel=bool(a.use_gate_in_kernel),
            use_beta_sigmoid_in_kernel=bool(a.use_beta_sigmoid_in_kernel),
            multi_token=a.q.dim() == 4,
            slots=slots,
            indexed=a.state_indices is not None,
            accepted=a.num_accepted_tokens is not None,
            has_initial_state=a.has_initial_state is not None,
            index_dtype=index_dtype(a.cu_seqlens),
            **slots_plan(a),
        )
        function, *rest = (launch.get_for(a.q.device, *request) for request in requests)
        return (
            function,
            rest[0] if rest else None,
            *launch_scalars(a),
            bool(a.use_gate_in_kernel) and a.A_log is not None and a.A_log.dim() != 1,
        )

    def stale(self, ready: Any, a: _Arguments) -> bool:
        return bool(self.prepare(a) != ready)

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        out: Tensor | None,
        scale: float | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float | None,
        use_qk_l2norm_in_kernel: Any,
        use_gate_in_kernel: Any,
        use_beta_sigmoid_in_kernel: Any,
        allow_neg_eigval: Any,
        state_v_first: Any,
        state_indices: Tensor | None,
        num_accepted_tokens: Tensor | None,
        record_k: Tensor | None,
        record_g: Tensor | None,
        record_u: Tensor | None,
        cu_seqlens: Tensor | None,
        has_initial_state: Tensor | None,
        pad_slot_id: int,
        draft_states: Tensor | None,
        draft_indices: Tensor | None,
        ready: Any = None,
    ) -> Tensor:
        key = None
        try:
            if ready is None:
                # In the table's keys 1.0 == True, so a number could pass for a flag.
                if not (
                    (use_qk_l2norm_in_kernel is True or use_qk_l2norm_in_kernel is False)
                    and (use_gate_in_kernel is True or use_gate_in_kernel is False)
                    and (use_beta_sigmoid_in_kernel is True or use_beta_sigmoid_in_kernel is False)
                    and (allow_neg_eigval is True or allow_neg_eigval is False)
                    and (state_v_first is True or state_v_first is False)
                ):
                    require_flags(
                        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                        allow_neg_eigval, state_v_first,
                    )  # fmt: skip
                key = (
                    # The key has whole shapes: extracting the head dimensions would cost more.
                    q.shape, v.shape, q.dtype, g.dtype, beta.dtype, beta.is_neg(), state.dtype,
                    q.get_device(), scale, type(scale), A_log is None, dt_bias is None, lower_bound,
                    type(lower_bound), use_qk_l2norm_in_kernel, use_gate_in_kernel,
                    use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
                    None if state_indices is None else state_indices.dtype,
                    num_accepted_tokens is None, record_k is None,
                    None if cu_seqlens is None else cu_seqlens.dtype, has_initial_state is None,
                    pad_slot_id, type(pad_slot_id), draft_states is None,
                )  # fmt: skip
                ready = self.ready[key]
            function, write_records, q_scale, bound, beta_scale, flat_A_log = ready
            if is_grad_enabled() and (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or g.requires_grad
                or beta.requires_grad
                or state.requires_grad
                or (A_log is not None and A_log.requires_grad)
                or (dt_bias is not None and dt_bias.requires_grad)
                or (out is not None and out.requires_grad)
                or (record_k is not None and _any_requires_grad(record_k, record_g, record_u))
                or (draft_states is not None and draft_states.requires_grad)
            ):
                self.refuse_gradient()
            o = _empty_like(v) if out is None else out
            function(
                q, k, v, g, beta,
                (A_log.view(-1) if flat_A_log else A_log) if use_gate_in_kernel else None,  # type: ignore[union-attr]
                dt_bias if use_gate_in_kernel else None,
                o, state, state_indices, num_accepted_tokens, record_k, record_g, record_u,
                cu_seqlens,
                None if has_initial_state is None else has_initial_state.view(uint8),
                draft_states, draft_indices, q_scale, bound, beta_scale,
            )  # fmt: skip
            if write_records is not None:
                write_records(k, g, state_indices, record_k, record_g)
        except Exception as error:
            return self.failed(  # type: ignore[no-any-return]
                error, key, ready, q, k, v, g, beta, state, out, scale, A_log, dt_bias,
                lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, state_indices,
                num_accepted_tokens, record_k, record_g, record_u, cu_seqlens, has_initial_state,
                pad_slot_id, draft_states, draft_indices,
            )  # fmt: skip
        if draft_states is not None:
            increment_version((o, draft_states))
        elif record_k is None:
            increment_version((o, state))
        else:
            increment_version((o, state, record_k, record_g, record_u))  # type: ignore[arg-type]
        return o


_decode = _Decode()
_forward = _decode.forward  # bound once: this saves time per call
_OF_A_STEP = ("q", "k", "v", "g", "beta", "out")


def _any_requires_grad(*tensors: Any) -> bool:
    return any(x.requires_grad for x in tensors)


def _has_positions(state_indices: Tensor | None) -> bool:
    return state_indices is not None and state_indices.dim() == 2


# -- checks -------------------------------------------------------------------------------------


def _check_shapes(a: _Arguments, given: dict[str, Tensor]) -> None:
    if a.q.dim() not in (3, 4):
        raise ValueError(f"q has shape {list(a.q.shape)}, must be [B, HQK, K] or [B, T, HQK, K]")
    step = "B" if a.q.dim() == 3 else "B T"
    sizes = Sizes()
    check_step_shapes(sizes, given, step)
    if sizes.get("T") == 0:
        raise ValueError("q has no tokens: T is 0, must be at least 1")
    if "out" in given:
        sizes.take("out", a.out, f"{step} HV V")
    if a.cu_seqlens is not None:
        _check_packed(a, sizes)
    if a.state_indices is None:
        sizes["N"] = sizes["B"]
    matrix = "V K" if a.state_v_first else "K V"
    sizes.take("state", a.state, f"N HV {matrix}")
    if exceeds(sizes["B"], MAX_GRID_YZ):
        raise ValueError(f"there are {sizes['B']} sequences, at most {MAX_GRID_YZ} fit one call")
    if a.use_gate_in_kernel:
        _check_gate(given, sizes, a.lower_bound)
    _check_slots(given, sizes)
    if "has_initial_state" in given:
        sizes.take("has_initial_state", given["has_initial_state"], "B")
    _check_drafts(given, sizes, matrix)


def _check_packed(a: _Arguments, sizes: Sizes) -> None:
    """Check cu_seqlens. From here on, the size B is the number of sequences."""
    if a.q.dim() != 4:
        raise ValueError(
            f"q has shape {list(a.q.shape)}, must be [1, T, HQK, K] where cu_seqlens is given"
        )
    if a.record_k is not None:
        raise ValueError("cu_seqlens is given, must be None with record_k, record_g and record_u")
    sizes.check_sequences(a.cu_seqlens)
    sizes["B"], sizes["packed"] = sizes.pop("N"), True


def _check_drafts(given: dict[str, Tensor], sizes: Sizes, matrix: str) -> None:
    """Check draft_states and draft_indices."""
    names = [name for name in ("draft_states", "draft_indices") if name in given]
    if not names:
        return
    if len(names) == 1:
        raise ValueError(f"{names[0]} is given without both of draft_states and draft_indices")
    if "record_k" in given or _has_positions(given.get("state_indices")):
        raise ValueError(
            "draft_states is given, must be None with records or with state_indices [B, 1 + S]"
        )
    if given["draft_states"].dtype != given["state"].dtype:
        raise TypeError(
            f"draft_states has dtype {given['draft_states'].dtype}, must be that of state, "
            f"{given['state'].dtype}"
        )
    sizes.take("draft_states", given["draft_states"], f"M S HV {matrix}")
    sizes.take("draft_indices", given["draft_indices"], "B")
    tokens = sizes.get("T", 1)
    if "packed" not in sizes and tokens > sizes["S"]:
        raise ValueError(
            f"q has {tokens} tokens (T), must be at most the {sizes['S']} states (S) of "
            "draft_states"
        )


def _check_gate(given: dict[str, Tensor], sizes: Sizes, lower_bound: float | None) -> None:
    """Check A_log, dt_bias and lower_bound, which are used with use_gate_in_kernel."""
    check_lower_bound(lower_bound)
    check_has_A_log(given, lower_bound)
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


def _check_slots(given: dict[str, Tensor], sizes: Sizes) -> None:
    """Check state_indices, num_accepted_tokens and the records."""
    state_indices = given.get("state_indices")
    records = [name for name in ("record_k", "record_g", "record_u") if name in given]
    tokens = sizes.get("T", 1)
    if state_indices is not None:
        shape = list(state_indices.shape)
        if len(shape) not in (1, 2) or shape[0] != sizes["B"] or shape[-1] == 0 < sizes["B"]:
            raise ValueError(
                f"state_indices has shape {shape}, must be [{sizes['B']}] or [{sizes['B']}, 1 + S]"
            )
    positions = shape[1] if _has_positions(state_indices) else 1
    if "num_accepted_tokens" in given:
        sizes.take("num_accepted_tokens", given["num_accepted_tokens"], "B")
        if not records and not _has_positions(state_indices):
            raise ValueError(
                "num_accepted_tokens needs state_indices [B, 1 + S], or record_k, record_g and "
                "record_u"
            )
    if not records:
        if 1 < positions < tokens and "packed" not in sizes:
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
