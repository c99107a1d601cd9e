"""Kimi Delta Attention decode: the public function and its plan."""

from __future__ import annotations

from torch import Tensor

from ... import launch
from ..operator import PLAIN, dispatch_mode_depth, forward_ad, is_dynamo_compiling
from .decode_operator import Decode, decode_requests, is_plain_convolution

__all__ = ["kda_decode", "plan_kda_decode"]


class _KdaDecode(Decode):
    name = "kda_decode"
    decays = "channel"


_decode = _KdaDecode()
_forward = _decode.forward  # bound once: this saves time per call


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
    conv_state: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    draft_windows: Tensor | None = None,
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
        v: `[B, HV, V]` or `[B, T, HV, V]`, dtype of q. K and V are 64, 128 or 256, V also 192. HV
            is a multiple of HQK, and value head h uses query and key head h // (HV // HQK).
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
        conv_state: `[N, D, W]`, dtype of q, any strides, written in place: the pool of a causal
            convolution, see below. D is 2 HQK K + HV V.
        conv_weight: `[D, 4]`, bfloat16, float16 or float32, contiguous; goes with conv_state.
        conv_bias: `[D]`, dtype of conv_weight, contiguous; None is 0.
        draft_windows: `[M, S, D, 3]`, dtype of q, any strides, written: goes with conv_state and
            draft_states, see below.

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

    With conv_state, q, k and v first go through a causal convolution of 4 taps and a SiLU, for each
    channel:

        silu(conv_bias + sum over i of conv_weight[i] x[t - 3 + i])

    The channels of conv_state, conv_weight and conv_bias are those of q, then of k, then of v, head
    after head. A slot's first W = 3 inputs are those before the call's first token; the call
    replaces them by the last three inputs. The slot is state_indices[b], or b. Where
    has_initial_state is False, the inputs before the first token are 0. With a slot for each
    position, the slot is state_indices[b, 0], W is at least 3 + S, and the inputs begin at position
    num_accepted_tokens[b] - 1. The call then stores the last two of these inputs and all of its
    own. With records, W is at least 3 + S, and the slot holds the three inputs before the recorded
    tokens, then the recorded tokens' inputs. The call moves on by the accepted tokens, and stores
    its own inputs after the three inputs before them. With a tensor for drafts, conv_state stays as
    it is. The window after token t goes to draft_windows[draft_indices[b], t], and the caller
    copies the window after the last accepted token to the slot. The windows of successive tokens
    may share memory: draft_windows[m, t + 1, :, i] may be draft_windows[m, t, :, i + 1].

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
        and (conv_weight is None or is_plain_convolution(conv_state, conv_weight, conv_bias))
        and (draft_windows is None or type(draft_windows) is Tensor)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
        else _decode.routed
    )
    o: Tensor = call(
        q, k, v, g, beta, state, out, scale, A_log, dt_bias, lower_bound,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, state_indices, num_accepted_tokens, record_k, record_g, record_u,
        cu_seqlens, has_initial_state, pad_slot_id, draft_states, draft_indices,
        conv_state, conv_weight, conv_bias, draft_windows,
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
    conv_dtype: str = "none",
    conv_bias: bool = False,
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
        conv_dtype: dtype of conv_weight; "none" without a convolution.
        conv_bias: whether conv_bias is given; ignored without a convolution.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
    """
    return decode_requests("channel", **locals())
