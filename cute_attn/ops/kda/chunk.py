"""Kimi Delta Attention over whole sequences: the operator.

`chunk_kda` has two paths, which compute the same function:

    fused      prepare, state_pass                        the default: moves half of the bytes
    modular    gate_cumsum, chunk_intra, delta_h, output  has the intermediate states

If few long sequences would leave SMs idle, the fused path splits the sequences. Three kernels then
replace state_pass, and the last bits of a sequence's result may depend on the rest of the call.

A warm call of the fused path looks up the loaded kernels, allocates the results and calls the
kernels. The look-up's key holds everything that the choice of kernels depends on, every number and
every flag. The compiled host code checks the rest before it launches: lengths, strides, alignment,
the other tensors' dtypes and devices.

The host neither reads device memory nor waits for the device: the kernels find the chunks of packed
sequences themselves, see `kernels/delta/chunk/chunks.py`.

A forward that needs a gradient keeps its arguments, the states at the start of each chunk and the
corrections v_new. With disable_recompute the forward also keeps the records of `prepare`, which the
backward (`chunk_backward`) otherwise computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta.chunk.heuristics import pass_kind
from ...kernels.delta.chunk.spec import CHUNK, record_elements
from ..checks import check_flags, require_flags
from ..operator import (
    PLAIN,
    Operator,
    dispatch_mode_depth,
    forward_ad,
    is_dynamo_compiling,
    is_grad_enabled,
)
from . import stages
from .arguments import (
    by_former_name,
    count_chunks,
    launch_scalars,
    readable_sequences,
    readable_state,
    sequence_plan,
    unchanged,
)
from .chunk_arguments import (
    ChunkArguments,
    check,
    check_chunks_and_contexts,
    check_disable_recompute,
    over_ranks,
)
from .chunk_backward import BACKWARD, RECORDS, SAVED
from .chunk_passes import (
    empty_final_state,
    empty_records,
    empty_states,
    empty_v_new,
    matrix_of_state,
    run_in_segments,
    segment_length,
)
from .chunk_plan import plan_chunk_kda
from .chunk_pool import chunk_kda_in_pool

__all__ = ["chunk_kda"]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    state_indices: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoint_interval: int = CHUNK,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    cp: Any = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over sequences, a chunk of 64 tokens at a time.

    For each token, where the state S of a value head is a K by V matrix (Kimi Linear, arXiv
    2510.26692; the chunked form is from arXiv 2406.06484):

        S <- Diag(exp(g)) S
        u  = beta (v - S^T k)
        S <- S + k u^T
        o  = scale S^T q

    Arguments, their order and their defaults match flash-linear-attention's function of this name,
    so that a user only changes the import.

    Args:
        q: `[B, T, HQK, K]`, bfloat16 or float16; K is 64 or 128. q, k, v and g are read in place
            if the last dimension is contiguous and every row 16-byte aligned, and copied otherwise.
        k: of q's shape and dtype.
        v: `[B, T, HV, V]`, dtype of q; V is 64, 128, 192 or 256. HV is a multiple of HQK, and value
            head h uses query and key head h // (HV // HQK).
        g: `[B, T, HV, K]`, float32, bfloat16 or float16: natural logarithms of the decay (less
            than -128 counts as -128), or with use_gate_in_kernel the input of the gate.
        beta: `[B, T, HV]`, float32, bfloat16 or float16; any strides. If a gradient is needed, a
            beta nearer to 0 than 2**-40 (2**-14 with float16 q) counts as this bound with beta's
            sign.
        scale: factor of q; None is K ** -0.5. 0, or 2**-60 to 2**60 in size (with float16 q and
            use_qk_l2norm_in_kernel, 2**-10 to 2**15).
        initial_state: `[N, HV, K, V]`, float32, or in 16 bits, then converted; None is 0. N, the
            number of sequences, is B without cu_seqlens. With state_indices: a pool, see below.
        output_final_state: whether to return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6).
        use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: use sigmoid(beta) instead of beta.
        allow_neg_eigval: use 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        safe_gate: the gates are bounded; with use_gate_in_kernel it needs a lower_bound in [-5, 0).
            The flag changes no result, since the kernels take gates of any size.
        lower_bound: lower bound of the gate, negative; ignored without use_gate_in_kernel.
        disable_recompute: keep all intermediate results for the backward, which is then faster; no
            effect without a gradient.
        return_intermediate_states: also return h, the state at the start of every chunk. Only
            under `torch.inference_mode()`.
        state_v_first: states are `[..., V, K]` rather than `[..., K, V]`.
        cu_seqlens: `[N + 1]` int32 or int64, for B = 1: tokens cu_seqlens[n] to
            cu_seqlens[n + 1] - 1 are sequence n, which may be empty. Not decreasing, at most T;
            not checked, since that would synchronise.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, which is checked. With this copy h has no
            unused chunks at its end.
        cp_context: must be None; see `cp`.
        use_graph: ignored: every call can be captured in a CUDA graph.
        max_num_seqs: ignored.
        A_log: HV numbers of any shape and floating-point dtype; optional with a lower_bound.
        dt_bias: HV * K numbers of any shape and floating-point dtype; None is 0. A_log and dt_bias
            are ignored without use_gate_in_kernel.
        chunk_size: 32 or 64: no effect, since chunks have 64 tokens; 64 with
            return_intermediate_states.
        state_indices: `[N]` int32 or int64, with any stride: the slot of the pool that each
            sequence uses, see below.
        checkpoint_indices: `[N, C]` int32, contiguous: the slots of each sequence's checkpoints;
            needs state_indices.
        checkpoint_interval: tokens from one checkpoint to the next, a multiple of 64; ignored
            without checkpoint_indices.
        has_initial_state: `[N]` bool, contiguous: where False, the sequence starts from a state of
            0, whatever its slot holds; needs state_indices. None is True for all.
        pad_slot_id: with 0, slot 0 marks padding, as negative indices do. Any negative number is
            the default: only negative indices are padding.
        out: `[B, T, HV, V]`, dtype of q, contiguous and 16-byte aligned: memory for o; needs
            state_indices. `out` must not overlap another argument.
        transpose_state_layout: the former name of state_v_first, which warns.
        cp: a plan of `cute_attn.distributed.context_parallel`, for context parallelism. q, k, v, g
            and beta have this rank's tokens. States are of all sequences of the plan, and every
            rank passes and gets all of them. The plan has the lengths, so the call takes no
            cu_seqlens, and no pool.

    A server's pool, for inference only: with state_indices, initial_state is a pool of states
    `[slots, HV, K, V]`, float32 or bfloat16, each head's matrix contiguous and 16-byte aligned. A
    sequence starts from the state in its slot, and its final state is written to the same slot, in
    place. A new sequence's slot must hold 0, unless has_initial_state is False for the sequence. A
    negative index marks padding: the sequence starts
    from a state of 0, and its final state is written nowhere. An index >= slots is an error of the
    caller; the index is treated as padding, since a check would synchronise. Slots that no index
    names are neither read nor written. Two indices must not name one slot: the results and the slot
    would be undefined.

    Checkpoints, for prefix caches: checkpoint i of sequence n is the state after (i + 1) *
    checkpoint_interval tokens of this call. The call also writes this state to slot
    checkpoint_indices[n, i] of the pool, if the sequence has as many tokens and the index names a
    slot. Other states are not stored.

    A few long sequences with few heads are split to fill the GPU, which may change the last bits of
    their results. Otherwise, and always with `CUTE_ATTN_KDA_SPLIT=0` in the environment (see
    `cute_attn.reload_settings`), a sequence's result does not depend on the call's other sequences.

    Returns:
        (o, final_state), or (o, final_state, h) with return_intermediate_states. o is
        `[B, T, HV, V]`, dtype of q, contiguous, undefined for tokens of no sequence. final_state is
        `[N, HV, K, V]` float32, or None without output_final_state; with state_indices, final_state
        is the pool itself. h is as `kda_chunk_delta_h` returns it.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, head counts, devices or values.
        NotImplementedError: a head dimension without a kernel (the message lists supported
            dimensions), a cp_context, a second derivative, or a tensor that
            requires a gradient with state_indices.
    """
    if chunk_size != CHUNK or cp_context is not None:
        check_chunks_and_contexts(
            chunk_size, cp_context, (32, 64), returns_chunks=return_intermediate_states
        )
    if transpose_state_layout is not None:
        state_v_first = by_former_name(state_v_first, transpose_state_layout)
    if cp is not None:
        return over_ranks(  # type: ignore[no-any-return]
            cp, "kda.chunk_spans", "KDA_SPANS", (q, k, v, g, beta, A_log, dt_bias), initial_state,
            {
                "scale": scale, "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
                "use_gate_in_kernel": use_gate_in_kernel,
                "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
                "allow_neg_eigval": allow_neg_eigval, "state_v_first": state_v_first,
                "safe_gate": safe_gate, "lower_bound": lower_bound,
            },
            {
                "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu,
                "state_indices": state_indices, "checkpoint_indices": checkpoint_indices,
                "has_initial_state": has_initial_state, "out": out,
                "disable_recompute": disable_recompute,
                "return_intermediate_states": return_intermediate_states,
            },
        )  # fmt: skip
    if (
        state_indices is not None
        or checkpoint_indices is not None
        or has_initial_state is not None
        or out is not None
    ):
        return chunk_kda_in_pool(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate,
            lower_bound, disable_recompute, return_intermediate_states, state_v_first, cu_seqlens,
            cu_seqlens_cpu, A_log, dt_bias, state_indices, checkpoint_indices,
            checkpoint_interval, has_initial_state, pad_slot_id, out,
        )  # fmt: skip
    num_chunks = None
    if cu_seqlens_cpu is not None:
        num_chunks = count_chunks(cu_seqlens_cpu, cu_seqlens, q)
    if return_intermediate_states is not False:
        check_flags(return_intermediate_states=return_intermediate_states)
    if return_intermediate_states and (
        # Dynamo cannot trace a test for inference mode; grad mode is off in inference mode.
        is_grad_enabled() if is_dynamo_compiling() else not torch.is_inference_mode_enabled()
    ):
        raise ValueError(
            "return_intermediate_states is True, must be False outside of torch.inference_mode(): "
            "no gradient goes through these states"
        )
    if disable_recompute is not False:
        check_disable_recompute(disable_recompute, return_intermediate_states)
        disable_recompute = bool(disable_recompute)
    call = (
        _forward
        if not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor
        and (A_log is None or type(A_log) in PLAIN)
        and (dt_bias is None or type(dt_bias) in PLAIN)
        and (initial_state is None or type(initial_state) in PLAIN)
        and (cu_seqlens is None or type(cu_seqlens) is Tensor)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
        else _chunk.routed
    )
    results: _Results = call(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound,
        disable_recompute, return_intermediate_states, state_v_first, cu_seqlens, num_chunks,
        A_log, dt_bias, False,
    )  # fmt: skip
    return results[:3] if return_intermediate_states else results[:2]  # type: ignore[return-value]


# -- the operator -------------------------------------------------------------------------------

_empty = torch.empty
_empty_like = torch.empty_like
_new_empty = Tensor.new_empty
_contiguous = torch.contiguous_format

# o, final_state, h, and results kept for the backward: states, v_new, and with disable_recompute
# tiles, decay, inverse_norms
_Results = tuple[
    Tensor,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
]

BY_STAGES = "by stages"


class _Ready(NamedTuple):
    """The kernels of the fused path, and the arguments that are equal in every call."""

    prepare: Callable[..., None]
    state_pass: Callable[..., None]
    elements: int  # elements of the tiles of a chunk and head
    scale: float
    lower_bound: float
    beta_scale: float
    num_sms: int  # 0 if sequences may not be split
    # prepare, transitions, segments, outputs; loaded when a call first splits sequences
    split: tuple[launch.Request, ...]


class _Chunk(Operator[ChunkArguments]):
    name = "chunk_kda"
    arguments = ChunkArguments
    results = (
        ("o", ""),
        ("final_state", "output_final_state"),
        ("h", "return_intermediate_states"),
        ("states", "keep_states"),
        ("v_new", "keep_states"),
        *((name, "disable_recompute") for name in RECORDS),
    )
    saved = SAVED
    kept: ClassVar[Mapping[str, Any]] = {"keep_states": True}

    def check(self, a: ChunkArguments, given: dict[str, Tensor]) -> None:
        check(a, given)

    def prepare(self, a: ChunkArguments) -> _Ready | str:
        """The kernels of the fused path. BY_STAGES stands for the modular path, whose stages look
        up their own kernels."""
        device = a.q.device
        if a.return_intermediate_states:
            return BY_STAGES
        prepare, state_pass, *split = plan_chunk_kda(
            launch.arch_for(device),
            **sequence_plan(a),
            gradient=bool(a.keep_states),
        )
        return _Ready(
            launch.get_for(device, *prepare),
            launch.get_for(device, *state_pass),
            record_elements(a.q.shape[-1]),
            *launch_scalars(a),
            launch.num_sms(device) if split else 0,
            tuple(split),
        )

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None,
        initial_state: Tensor | None,
        output_final_state: Any,
        use_qk_l2norm_in_kernel: Any,
        use_gate_in_kernel: Any,
        use_beta_sigmoid_in_kernel: Any,
        allow_neg_eigval: Any,
        safe_gate: Any,
        lower_bound: float | None,
        disable_recompute: bool,
        return_intermediate_states: Any,
        state_v_first: Any,
        cu_seqlens: Tensor | None,
        num_chunks: int | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        keep_states: bool,
        ready: Any = None,
    ) -> _Results:
        key = None
        if is_grad_enabled() and self.takes_gradient(
            q, k, v, g, beta, initial_state, A_log, dt_bias
        ):
            return self.recorded(  # type: ignore[no-any-return]
                q, k, v, g, beta, scale, initial_state, output_final_state,
                use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                allow_neg_eigval, safe_gate, lower_bound, disable_recompute,
                return_intermediate_states, state_v_first, cu_seqlens, num_chunks, A_log,
                dt_bias, keep_states,
            )  # fmt: skip
        try:
            batch, tokens, heads_qk, dim_k = q.shape
            batch_v, tokens_v, heads, dim_v = v.shape
            if ready is None:
                # In the table's keys 1.0 == True, so a number could pass for a flag.
                if not (
                    (output_final_state is True or output_final_state is False)
                    and (use_qk_l2norm_in_kernel is True or use_qk_l2norm_in_kernel is False)
                    and (use_gate_in_kernel is True or use_gate_in_kernel is False)
                    and (use_beta_sigmoid_in_kernel is True or use_beta_sigmoid_in_kernel is False)
                    and (allow_neg_eigval is True or allow_neg_eigval is False)
                    and (safe_gate is True or safe_gate is False)
                    and (return_intermediate_states is True or return_intermediate_states is False)
                    and (state_v_first is True or state_v_first is False)
                ):
                    require_flags(
                        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                        use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate,
                        return_intermediate_states, state_v_first,
                    )  # fmt: skip
                sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
                key = (
                    heads_qk, dim_k, heads, dim_v, q.dtype, g.dtype, beta.dtype, beta.is_neg(),
                    q.get_device(), scale, type(scale), initial_state is None, output_final_state,
                    use_qk_l2norm_in_kernel, use_gate_in_kernel,
                    use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate,
                    lower_bound, type(lower_bound), keep_states, return_intermediate_states,
                    state_v_first, None if cu_seqlens is None else cu_seqlens.dtype, A_log is None,
                    dt_bias is None,
                    # No kernel's host code compares v with q, or a state with cu_seqlens.
                    batch == batch_v
                    and tokens == tokens_v
                    and batch > 0 < tokens
                    and sequences > 0
                    and (cu_seqlens is None or (batch == 1 and cu_seqlens.dim() == 1))
                    and (initial_state is None or initial_state.shape[0] == sequences),
                )  # fmt: skip
                ready = self.ready[key]
            A, bias = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
            if bias is not None and bias.dim() != 2:
                bias = bias.view(-1, dim_k)
            if A is not None and A.dim() != 1:
                A = A.view(-1)
            if ready is BY_STAGES:
                final_beta = beta
                if use_beta_sigmoid_in_kernel:
                    final_beta = torch.sigmoid(beta.to(torch.float32))
                    if allow_neg_eigval:
                        final_beta = 2.0 * final_beta
                return _by_stages(
                    q, k, v, g, final_beta, scale, initial_state, output_final_state,
                    bool(use_qk_l2norm_in_kernel), use_gate_in_kernel, lower_bound,
                    return_intermediate_states, state_v_first, cu_seqlens, num_chunks, A, bias,
                )  # fmt: skip
            prepare, state_pass, elements, q_scale, bound, beta_scale, num_sms, split = ready
            device = q.device
            if cu_seqlens is None:
                sequences = batch
                slots = batch * ((tokens + CHUNK - 1) // CHUNK)
            else:
                sequences = cu_seqlens.shape[0] - 1
                slots = tokens // CHUNK + sequences
            tiles = _new_empty(q, (slots, heads, elements))
            decay = _empty((slots, heads, dim_k), dtype=torch.float32, device=device)
            o = _empty_like(v, memory_format=_contiguous)
            inverse_norms = states = v_new = final_state = None
            if keep_states:
                if use_qk_l2norm_in_kernel:
                    inverse_norms = _empty(
                        (slots, heads_qk, 2 * CHUNK), dtype=torch.float32, device=device
                    )
                states = _new_empty(q, (slots, heads, dim_v * dim_k))
                v_new = _new_empty(q, (slots, heads, CHUNK * dim_v))
            if output_final_state:
                matrix = (dim_v, dim_k) if state_v_first else (dim_k, dim_v)
                final_state = _empty(
                    (sequences, heads, *matrix), dtype=torch.float32, device=device
                )
            length = 0
            if split:
                kind = pass_kind(split[1][1])
                length = segment_length(
                    kind, v, dim_k, cu_seqlens, num_sms, starts=split[0][1].bounds
                )
            if length:
                run_in_segments(
                    split, length, (q, k, g, beta, A, bias, cu_seqlens),
                    (tiles, decay, inverse_norms), (q_scale, bound, beta_scale), v,
                    (o, states, v_new), (initial_state, final_state),
                )  # fmt: skip
            else:
                prepare(
                    q, k, g, beta, A, bias, cu_seqlens, tiles, decay, inverse_norms, q_scale,
                    bound, beta_scale, None, None,
                )  # fmt: skip
                state_pass(
                    v, tiles, decay, o, states, v_new, initial_state, final_state, cu_seqlens,
                    None, None, 0, 1, None, None,
                )  # fmt: skip
            if keep_states and disable_recompute:
                return o, final_state, None, states, v_new, tiles, decay, inverse_norms
            return o, final_state, None, states, v_new, None, None, None
        except Exception as error:
            return self.failed(  # type: ignore[no-any-return]
                error, key, ready, q, k, v, g, beta, scale, initial_state, output_final_state,
                use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                allow_neg_eigval, safe_gate, lower_bound, disable_recompute,
                return_intermediate_states, state_v_first, cu_seqlens, num_chunks, A_log, dt_bias,
                keep_states,
            )  # fmt: skip

    def outputs(self, a: ChunkArguments) -> _Results:
        batch, tokens, heads, _ = a.v.shape
        chunks = (tokens + CHUNK - 1) // CHUNK
        if a.cu_seqlens is not None:
            chunks = tokens // CHUNK + a.cu_seqlens.shape[0] - 1
        if a.num_chunks is not None:
            chunks = a.num_chunks
        final_state = h = None
        o = _empty(a.v.shape, dtype=a.v.dtype, device=a.v.device)
        if a.output_final_state:
            final_state = empty_final_state(a.q, a.v, a.cu_seqlens, a.state_v_first)
        if a.return_intermediate_states:
            matrix = matrix_of_state(a.q, a.v, a.state_v_first)
            h = _empty((batch, chunks, heads, *matrix), dtype=a.v.dtype, device=a.v.device)
        if not a.keep_states:
            return o, final_state, h, None, None, None, None, None
        given = a.q, a.v, a.cu_seqlens
        states, v_new = empty_states(*given), empty_v_new(*given)
        if not a.disable_recompute:
            return o, final_state, h, states, v_new, None, None, None
        return o, final_state, h, states, v_new, *empty_records(*given, a.use_qk_l2norm_in_kernel)

    def readable(self, a: ChunkArguments) -> ChunkArguments:
        read: ChunkArguments = readable_sequences(a, "qkvg")
        return read._replace(initial_state=readable_state(a.initial_state))

    def nothing(self, a: ChunkArguments) -> _Results | None:
        if a.v.numel() and (a.cu_seqlens is None or len(a.cu_seqlens) > 1):
            return None
        o, final_state, *rest = self.outputs(a)
        return o, unchanged(final_state, a.initial_state), *rest  # type: ignore[return-value]

    def backward(
        self,
        saved: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        needed: frozenset[str],
    ) -> Mapping[str, Tensor]:
        return BACKWARD.of_forward(saved, gradients["o"], gradients["final_state"], needed)


_chunk = _Chunk()
_forward = _chunk.forward  # bound once: this saves time per call


def _by_stages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    return_intermediate_states: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    num_chunks: int | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> _Results:
    """Run the modular path; beta's sigmoid, if requested, is already applied."""
    G = stages.GATE_CUMSUM.forward(g, A_log, dt_bias, lower_bound, use_gate_in_kernel, cu_seqlens)
    Aqk, _, w, u, _, kg = stages.CHUNK_INTRA.forward(
        q, k, v, G, beta, scale, cu_seqlens, False, l2norm
    )
    h, v_new, final_state = stages.DELTA_H.forward(
        kg, w, u, G, initial_state, output_final_state, True, state_v_first, cu_seqlens, num_chunks
    )
    o = stages.OUTPUT.forward(q, v_new, G, Aqk, h, scale, state_v_first, cu_seqlens, l2norm)
    return o, final_state, h if return_intermediate_states else None, *(None,) * 5
