"""The Gated Delta Net over whole sequences: the operator.

`chunk_gated_delta_rule` shares records, passes, gradients and checks with `chunk_kda`, but g has
one number a token and value head. `chunk_forward` launches the forward. The operator for a server's
pool, `chunk_gated_delta_rule_in_pool`, is separate because it writes an argument.

A forward that needs a gradient keeps its arguments, the states at the start of each chunk and the
corrections v_new. The backward (`..kda.chunk_backward`) computes the records of `prepare` again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta.chunk.spec import CHUNK
from ..checks import DTYPE_NAMES, check_flags, require_flags
from ..kda.arguments import (
    Sizes,
    by_former_name,
    check_gate,
    count_chunks,
    launch_scalars,
    readable_sequences,
    readable_state,
    sequence_plan,
    slots_plan,
    unchanged,
)
from ..kda.chunk_arguments import (
    ChunkArguments,
    check_chunks_and_contexts,
    check_sequences,
    over_ranks,
)
from ..kda.chunk_backward import SAVED, Backward, BackwardArguments, Ready
from ..kda.chunk_passes import (
    empty_final_state,
    empty_records,
    empty_states,
    empty_v_new,
    num_slots,
)
from ..kda.chunk_plan import BackwardRequests
from ..kda.chunk_pool import Pool, PoolArguments, carried_states, check_has_pool
from ..operator import (
    PLAIN,
    Operator,
    dispatch_mode_depth,
    forward_ad,
    increment_version,
    is_dynamo_compiling,
)
from .chunk_forward import ChunkForward, prepare_heads
from .chunk_plan import gated_delta_backward_requests, plan_chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule"]

_empty = torch.empty
_empty_like = torch.empty_like
_new_empty = Tensor.new_empty
_contiguous = torch.contiguous_format


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
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
) -> tuple[Tensor, Tensor | None]:
    """The Gated Delta Net over sequences, a chunk of 64 tokens at a time (Qwen3-Next, Qwen3.5).

    For each token, where the state S of a value head is a K by V matrix (Gated Delta Networks,
    arXiv 2412.06464):

        S <- exp(g) S
        u  = beta (v - S^T k)
        S <- S + k u^T
        o  = scale S^T q

    Arguments, their order and their defaults match flash-linear-attention's function of this name,
    so that a user only changes the import.

    Args:
        q: `[B, T, HQK, K]`, bfloat16 or float16; K is 64 or 128. q, k and v are read in place if
            the last dimension is contiguous and every row 16-byte aligned, and copied otherwise.
        k: of q's shape and dtype.
        v: `[B, T, HV, V]`, dtype of q; V is 64, 128, 192 or 256. HV is a multiple of HQK, and value
            head h uses query and key head h // (HV // HQK).
        g: `[B, T, HV]`, float32, bfloat16 or float16, any strides: natural logarithms of the decay
            (less than -128 counts as -128), or with use_gate_in_kernel the input of the gate.
        beta: `[B, T, HV]`, float32, bfloat16 or float16; any strides. If a gradient is needed, a
            beta nearer to 0 than 2**-40 (2**-14 with float16 q) counts as this bound with beta's
            sign.
        scale: factor of q; None is K ** -0.5. 0, or 2**-60 to 2**60 in size (with float16 q and
            use_qk_l2norm_in_kernel, 2**-10 to 2**15).
        initial_state: `[N, HV, K, V]`, float32, or in 16 bits, then converted; None is 0. N, the
            number of sequences, is B without cu_seqlens. With state_indices: a pool, see below.
        output_final_state: whether to return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6).
        use_beta_sigmoid_in_kernel: use sigmoid(beta) instead of beta.
        allow_neg_eigval: use 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        state_v_first: states are `[..., V, K]` rather than `[..., K, V]`.
        cu_seqlens: `[N + 1]` int32 or int64, for B = 1: tokens cu_seqlens[n] to
            cu_seqlens[n + 1] - 1 are sequence n, which may be empty. Not decreasing, at most T;
            not checked, since that would synchronise.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, which is checked.
        chunk_indices: ignored: the kernels find the chunks of packed sequences.
        cp_context: must be None; see `cp`.
        use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias).
        A_log: HV numbers of any shape and floating-point dtype.
        dt_bias: HV numbers of any shape and floating-point dtype; None is 0. A_log and dt_bias are
            ignored without use_gate_in_kernel.
        chunk_size: 16, 32 or 64: no effect, since chunks have 64 tokens.
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
    `[slots, HV, K, V]`, float32 or bfloat16, which is updated in place. Indices, padding and
    checkpoints are those of `chunk_kda`.

    A few long sequences with few heads are split to fill the GPU, which may change the last bits of
    their results. Otherwise, and always with `CUTE_ATTN_KDA_SPLIT=0` in the environment (see
    `cute_attn.reload_settings`), a sequence's result does not depend on the call's other sequences.

    Returns:
        (o, final_state). o is `[B, T, HV, V]`, dtype of q, contiguous, undefined for tokens of no
        sequence. final_state is `[N, HV, K, V]` float32, or None without output_final_state; with
        state_indices, final_state is the pool itself.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, head counts, devices or values.
        NotImplementedError: a head dimension without a kernel (the message lists supported
            dimensions), a cp_context, a second derivative, or a tensor that
            requires a gradient with state_indices.
    """
    if chunk_size != CHUNK or cp_context is not None:
        check_chunks_and_contexts(chunk_size, cp_context, (16, 32, 64))
    if transpose_state_layout is not None:
        state_v_first = by_former_name(state_v_first, transpose_state_layout)
    if cp is not None:
        return over_ranks(  # type: ignore[no-any-return]
            cp, "gated_delta_rule.chunk_spans", "GATED_DELTA_SPANS",
            (q, k, v, g, beta, A_log, dt_bias), initial_state,
            {
                "scale": scale, "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
                "use_gate_in_kernel": use_gate_in_kernel,
                "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
                "allow_neg_eigval": allow_neg_eigval, "state_v_first": state_v_first,
            },
            {
                "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu,
                "state_indices": state_indices, "checkpoint_indices": checkpoint_indices,
                "has_initial_state": has_initial_state, "out": out,
            },
        )  # fmt: skip
    if cu_seqlens_cpu is not None:
        count_chunks(cu_seqlens_cpu, cu_seqlens, q)
    in_pool = (
        state_indices is not None
        or checkpoint_indices is not None
        or has_initial_state is not None
        or out is not None
    )
    if in_pool:
        check_has_pool(state_indices, initial_state, checkpoint_indices, has_initial_state, out)
        check_flags(output_final_state=output_final_state)
    plain = (
        not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor
        and (A_log is None or type(A_log) in PLAIN)
        and (dt_bias is None or type(dt_bias) in PLAIN)
        and (initial_state is None or type(initial_state) in PLAIN)
        and (cu_seqlens is None or type(cu_seqlens) is Tensor)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
    )
    if in_pool:
        plain = (
            plain
            and type(initial_state) is type(state_indices) is Tensor
            and (checkpoint_indices is None or type(checkpoint_indices) is Tensor)
            and (has_initial_state is None or type(has_initial_state) is Tensor)
            and (out is None or type(out) is Tensor)
        )
        o = (_pool_forward if plain else _pool.routed)(
            q, k, v, g, beta, initial_state, state_indices, out, scale, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, False, None,
            state_v_first, cu_seqlens, A_log, dt_bias, checkpoint_indices, checkpoint_interval,
            has_initial_state, pad_slot_id,
        )  # fmt: skip
        return o, initial_state if output_final_state else None
    results = (_forward if plain else _chunk.routed)(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        A_log, dt_bias, False,
    )  # fmt: skip
    return cast("tuple[Tensor, Tensor | None]", results[:2])


# -- the operator -------------------------------------------------------------------------------

# o, final_state, and results kept for the backward: states, v_new
_Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class GatedDeltaArguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    keep_states: bool = False  # set where a gradient is needed

    @property
    def lower_bound(self) -> None:
        """The gate has no lower bound."""


def check_gated_delta_rule(a: Any, given: dict[str, Tensor]) -> Sizes:
    """Raise the documented exception if no kernel can take these arguments; return their sizes."""
    sizes = check_sequences(a, given, gate="B T HV")
    check_gate(given, sizes, a.use_gate_in_kernel, False, None, head_gate=True)
    return sizes


def parameters(a: Any) -> tuple[Tensor | None, Tensor | None]:
    """The kernels' arguments A_log and dt_bias, `[HV]`, None if not used."""
    if not a.use_gate_in_kernel:
        return None, None
    bias = a.dt_bias
    return a.A_log.view(-1), None if bias is None else bias.view(-1)


def _plan(a: Any) -> dict[str, Any]:
    """The parameters of the plan, from a call's arguments."""
    plan = sequence_plan(a)
    del plan["lower_bound"], plan["A_log"]
    return plan


_BOOL = frozenset({bool})


class _Ready(NamedTuple):
    """The kernels, and the arguments that are equal in every call."""

    kernels: ChunkForward
    scale: float
    lower_bound: float
    beta_scale: float


class _Chunk(Operator[GatedDeltaArguments]):
    name = "chunk_gated_delta_rule"
    arguments = GatedDeltaArguments
    results = (
        ("o", ""),
        ("final_state", "output_final_state"),
        ("states", "keep_states"),
        ("v_new", "keep_states"),
    )
    saved = tuple(
        name for name in SAVED if name in (*GatedDeltaArguments._fields, "states", "v_new")
    )
    kept: ClassVar[Mapping[str, Any]] = {"keep_states": True}

    def check(self, a: GatedDeltaArguments, given: dict[str, Tensor]) -> None:
        check_gated_delta_rule(a, given)

    def prepare(self, a: GatedDeltaArguments) -> _Ready:
        device = a.q.device
        requests = plan_chunk_gated_delta_rule(
            launch.arch_for(device), **_plan(a), gradient=bool(a.keep_states)
        )
        return _Ready(ChunkForward.load(device, requests), *launch_scalars(a))

    def key(self, a: GatedDeltaArguments) -> tuple[Any, ...]:
        flags = (
            a.output_final_state, a.use_qk_l2norm_in_kernel, a.use_gate_in_kernel,
            a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval, a.state_v_first, a.keep_states,
        )  # fmt: skip
        # In the table's keys 1.0 == True, so a number could pass for a flag.
        if not _BOOL.issuperset(map(type, flags)):
            require_flags(*flags)
        q, v, cu_seqlens, state = a.q, a.v, a.cu_seqlens, a.initial_state
        batch, tokens, heads_qk, dim_k = q.shape
        batch_v, tokens_v, heads, dim_v = v.shape
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return (
            heads_qk, dim_k, heads, dim_v, q.dtype, a.g.dtype, a.beta.dtype, a.beta.is_neg(),
            a.g.is_neg(), q.get_device(), a.scale, type(a.scale), state is None, *flags,
            None if cu_seqlens is None else cu_seqlens.dtype, a.A_log is None, a.dt_bias is None,
            # No kernel's host code compares v with q, or a state with cu_seqlens.
            batch == batch_v
            and tokens == tokens_v
            and batch > 0 < tokens
            and sequences > 0
            and (cu_seqlens is None or (batch == 1 and cu_seqlens.dim() == 1))
            and (state is None or state.shape[0] == sequences),
        )  # fmt: skip

    def launch(self, ready: _Ready, a: GatedDeltaArguments) -> _Results:
        o = _empty_like(a.v, memory_format=_contiguous)
        states = v_new = records = None
        if a.keep_states:
            given = a.q, a.v, a.cu_seqlens
            states, v_new = empty_states(*given), empty_v_new(*given)
            if not ready.kernels.per_head:
                records = empty_records(*given, a.use_qk_l2norm_in_kernel)
        final_state = _final_state(a)
        ready.kernels.run(
            a.q, a.k, a.v, a.g, a.beta, *parameters(a), a.cu_seqlens, ready.scale,
            ready.beta_scale, (o, states, v_new), (a.initial_state, final_state), records,
        )  # fmt: skip
        return o, final_state, states, v_new

    def outputs(self, a: GatedDeltaArguments) -> _Results:
        o = _empty(a.v.shape, dtype=a.v.dtype, device=a.v.device)
        if not a.keep_states:
            return o, _final_state(a), None, None
        given = a.q, a.v, a.cu_seqlens
        return o, _final_state(a), empty_states(*given), empty_v_new(*given)

    def readable(self, a: GatedDeltaArguments) -> GatedDeltaArguments:
        read: GatedDeltaArguments = readable_sequences(a, "qkv")
        return read._replace(initial_state=readable_state(a.initial_state))

    def nothing(self, a: GatedDeltaArguments) -> _Results | None:
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


def _final_state(a: GatedDeltaArguments) -> Tensor | None:
    if not a.output_final_state:
        return None
    return empty_final_state(a.q, a.v, a.cu_seqlens, a.state_v_first)


class _Backward(Backward):
    name = "chunk_gated_delta_rule_backward"
    of = "chunk_gated_delta_rule"
    decays = "head"

    def check_forward(self, a: ChunkArguments, given: dict[str, Tensor]) -> None:
        check_gated_delta_rule(a, given)

    def requests(self, arch: str, **options: Any) -> BackwardRequests:
        return gated_delta_backward_requests(arch, **options)

    def prepared(
        self, ready: Ready, a: BackwardArguments
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if not ready.per_head:
            return super().prepared(ready, a)
        assert ready.prepare is not None
        q, norms = a.q, None
        if a.use_qk_l2norm_in_kernel:
            shape = (num_slots(a.v, a.cu_seqlens), q.shape[2], 2 * CHUNK)
            norms = _new_empty(q, shape, dtype=torch.float32)
        scale, _, beta_scale = ready.scalars
        inputs = q, a.k, a.g, a.beta, *a.of_gate, a.cu_seqlens
        records = prepare_heads(
            ready.prepare, inputs, a.v, norms, scale, beta_scale, launch.num_sms(q.device)
        )
        return (q, a.k, a.do, *records), norms


class _Pool(Pool):
    name = "chunk_gated_delta_rule_in_pool"
    public_name = "chunk_gated_delta_rule with state_indices"
    rows = "qkv"

    def check_sequences(self, a: ChunkArguments, given: dict[str, Tensor]) -> Sizes:
        return check_gated_delta_rule(a, given)

    def prepare(self, a: PoolArguments) -> _Ready:  # type: ignore[override]
        device = a.q.device
        requests = plan_chunk_gated_delta_rule(
            launch.arch_for(device),
            **_plan(a),
            state_indices=True,
            state_dtype=DTYPE_NAMES[a.initial_state.dtype],
            checkpoint_indices=a.checkpoint_indices is not None,
            has_initial_state=a.has_initial_state is not None,
            **slots_plan(a),
        )
        return _Ready(ChunkForward.load(device, requests), *launch_scalars(a))

    def key(self, a: PoolArguments) -> tuple[Any, ...]:
        return *super().key(a), a.g.is_neg()  # no copy of g is made, which would look

    def launch(self, ready: _Ready, a: PoolArguments) -> Tensor:  # type: ignore[override]
        A, bias = parameters(a)
        inputs = {"q": a.q, "k": a.k, "g": a.g, "beta": a.beta, "A_log": A, "dt_bias": bias}
        self.check_inputs("initial_state", a.initial_state, inputs)
        o = cast("Tensor | None", a.out)
        if o is None:
            o = _empty_like(a.v, memory_format=_contiguous)
        else:
            self.check_inputs("out", o, inputs)
        ready.kernels.run(
            a.q, a.k, a.v, a.g, a.beta, A, bias, a.cu_seqlens, ready.scale, ready.beta_scale, (o,),
            carried_states(a),
        )  # fmt: skip
        increment_version((o, a.initial_state))
        return o


_chunk = _Chunk()
BACKWARD = _Backward()
_pool = _Pool()
_forward, _pool_forward = _chunk.forward, _pool.forward  # bound once: this saves time per call
