"""`chunk_kda` on a server's pool of states: the operator.

This is a separate operator because it writes one of its arguments, the pool. The operator runs only
the fused path, on whole sequences or in segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ... import launch
from ...kernels.common.spec import VECTOR_BYTES
from ...kernels.delta.chunk.heuristics import pass_kind
from ...kernels.delta.chunk.spec import CHUNK, record_elements
from ..checks import (
    DTYPE_NAMES,
    check_contiguous,
    check_dtype,
    check_dtypes_are,
    check_flags,
    check_has_slots,
    check_int32,
    check_not_expanded,
    check_state_address,
    check_state_strides,
    is_int,
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
)
from .arguments import (
    MAX_TOKENS,
    STATE_DTYPES,
    Sizes,
    check_slots,
    count_chunks,
    launch_scalars,
    readable_sequences,
    sequence_plan,
    slots_plan,
)
from .chunk_arguments import ChunkArguments, check
from .chunk_passes import run_in_segments, segment_length
from .chunk_plan import plan_chunk_kda

_empty = torch.empty
_empty_like = torch.empty_like
_new_empty = Tensor.new_empty
_contiguous = torch.contiguous_format

_WRITTEN = ("initial_state", "out")


def chunk_kda_in_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    safe_gate: bool,
    lower_bound: float | None,
    disable_recompute: bool,
    return_intermediate_states: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state_indices: Tensor | None,
    checkpoint_indices: Tensor | None,
    checkpoint_interval: int,
    has_initial_state: Tensor | None,
    pad_slot_id: int,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` with state_indices; see `chunk_kda`."""
    check_has_pool(state_indices, initial_state, checkpoint_indices, has_initial_state, out)
    check_flags(
        output_final_state=output_final_state,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
    )
    if return_intermediate_states:
        raise ValueError(
            "return_intermediate_states is True, must be False with state_indices: give "
            "checkpoint_indices for states between chunks"
        )
    if cu_seqlens_cpu is not None:
        count_chunks(cu_seqlens_cpu, cu_seqlens, q)
    call = (
        _forward
        if not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor
        and type(initial_state) is type(state_indices) is Tensor
        and (A_log is None or type(A_log) in PLAIN)
        and (dt_bias is None or type(dt_bias) in PLAIN)
        and (cu_seqlens is None or type(cu_seqlens) is Tensor)
        and (checkpoint_indices is None or type(checkpoint_indices) is Tensor)
        and (has_initial_state is None or type(has_initial_state) is Tensor)
        and (out is None or type(out) is Tensor)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
        else _pool.routed
    )
    o: Tensor = call(
        q, k, v, g, beta, initial_state, state_indices, out, scale, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound,
        state_v_first, cu_seqlens, A_log, dt_bias, checkpoint_indices, checkpoint_interval,
        has_initial_state, pad_slot_id,
    )  # fmt: skip
    return o, initial_state if output_final_state else None


def check_has_pool(
    state_indices: Tensor | None,
    initial_state: Tensor | None,
    checkpoint_indices: Tensor | None,
    has_initial_state: Tensor | None,
    out: Tensor | None,
) -> None:
    """Raise ValueError for a call without state_indices, or without a pool."""
    if state_indices is None:
        named = {
            "checkpoint_indices": checkpoint_indices,
            "has_initial_state": has_initial_state,
            "out": out,
        }
        first = next(name for name, x in named.items() if x is not None)
        raise ValueError(f"{first} is given without state_indices, which it needs")
    if initial_state is None:
        raise ValueError("initial_state is None, must be the pool of states with state_indices")


_BOOL = frozenset({bool})


class PoolArguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    state_indices: Tensor
    out: Tensor
    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    checkpoint_indices: Tensor | None = None
    checkpoint_interval: int = CHUNK
    has_initial_state: Tensor | None = None
    pad_slot_id: int = -1

    @property
    def output_final_state(self) -> bool:
        return True


_OF_CHUNK_KDA = tuple(
    name
    for name in PoolArguments._fields
    if name in ChunkArguments._fields and name != "initial_state"
)


class _Ready(NamedTuple):
    """The kernels, and the arguments that are equal in every call; see `chunk._Ready`."""

    prepare: Callable[..., None]
    pool_pass: Callable[..., None]
    scale: float
    lower_bound: float
    beta_scale: float
    num_sms: int  # 0 if sequences may not be split
    split: tuple[launch.Request, ...]


class Pool(Operator[PoolArguments]):
    """`chunk_kda` with state_indices; a subclass serves `chunk_gated_delta_rule`."""

    name = "chunk_kda_in_pool"
    public_name = "chunk_kda with state_indices"
    rows = "qkvg"  # arguments that kernels read in place where rows are aligned
    arguments = PoolArguments
    written = _WRITTEN

    def check(self, a: PoolArguments, given: dict[str, Tensor]) -> None:
        of_chunk_kda = ChunkArguments(**{name: getattr(a, name) for name in _OF_CHUNK_KDA})
        sizes = self.check_sequences(of_chunk_kda, given)
        check_dtype("initial_state", a.initial_state, STATE_DTYPES)
        matrix = "V K" if a.state_v_first else "K V"
        sizes.take("initial_state", a.initial_state, f"slots HV {matrix}")
        check_has_slots("initial_state", a.initial_state)
        check_slots(given, a.pad_slot_id)
        check_int32(given, ("checkpoint_indices",))
        for name, shape in (
            ("state_indices", "N"),
            ("checkpoint_indices", "N C"),
            ("has_initial_state", "N"),
        ):
            if name in given:
                sizes.take(name, given[name], shape)
        interval = a.checkpoint_interval
        if not is_int(interval):
            raise TypeError(f"checkpoint_interval must be an int, got {type(interval).__name__}")
        if a.checkpoint_indices is not None and (
            not 0 < interval <= MAX_TOKENS or interval % CHUNK
        ):
            raise ValueError(
                f"checkpoint_interval is {interval}, must be a multiple of {CHUNK} from {CHUNK} to "
                f"{MAX_TOKENS}"
            )
        check_contiguous(given, ("checkpoint_indices", "has_initial_state", "out"))
        check_state_strides(a.initial_state, VECTOR_BYTES, "initial_state")
        check_not_expanded(given, _WRITTEN)
        if "out" in given:
            check_dtypes_are(given, ("out",), a.q.dtype)
            sizes.take("out", a.out, "B T HV V")

    def check_sequences(self, a: ChunkArguments, given: dict[str, Tensor]) -> Sizes:
        return check(a, given)

    def check_memory(self, a: PoolArguments) -> None:
        check_state_address(a.initial_state, VECTOR_BYTES, "initial_state")
        tensors = self.tensors(a)
        if a.out is not None:
            address = a.out.data_ptr()
            if address % VECTOR_BYTES:
                raise ValueError(
                    f"out starts at address {address:#x}, must be {VECTOR_BYTES}-byte aligned"
                )
        written = {name: tensors.pop(name) for name in _WRITTEN}
        check_memory(written, tensors)

    def check_inputs(self, name: str, written: Tensor, inputs: dict[str, Tensor | None]) -> None:
        """Refuse inputs of `prepare` that overlap a written tensor: the host code of `prepare` does
        not see this tensor."""
        memory = written.untyped_storage().data_ptr()
        for x in inputs.values():
            if x is not None and x.untyped_storage().data_ptr() == memory:
                check_memory({name: written}, inputs)
                return

    def nothing(self, a: PoolArguments) -> Tensor | None:
        """The result for no tokens; the states stay unchanged."""
        if a.v.numel() and (a.cu_seqlens is None or len(a.cu_seqlens) > 1):
            return None
        return a.out

    def readable(self, a: PoolArguments) -> PoolArguments:
        read: PoolArguments = readable_sequences(a, self.rows)
        return read

    def prepare(self, a: PoolArguments) -> _Ready:
        device = a.q.device
        prepare, pool_pass, *split = plan_chunk_kda(
            launch.arch_for(device),
            **sequence_plan(a),
            state_indices=True,
            state_dtype=DTYPE_NAMES[a.initial_state.dtype],
            checkpoint_indices=a.checkpoint_indices is not None,
            has_initial_state=a.has_initial_state is not None,
            **slots_plan(a),
        )
        return _Ready(
            launch.get_for(device, *prepare),
            launch.get_for(device, *pool_pass),
            *launch_scalars(a),
            launch.num_sms(device) if split else 0,
            tuple(split),
        )

    def key(self, a: PoolArguments) -> tuple[Any, ...]:
        flags = (
            a.use_qk_l2norm_in_kernel, a.use_gate_in_kernel, a.use_beta_sigmoid_in_kernel,
            a.allow_neg_eigval, a.safe_gate, a.state_v_first,
        )  # fmt: skip
        # The table would find 1.0, or another number that is 1, for True.
        if not _BOOL.issuperset(map(type, flags)):
            require_flags(*flags)
        batch, tokens, heads_qk, dim_k = a.q.shape
        batch_v, tokens_v, heads, dim_v = a.v.shape
        sequences = batch if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1
        return (
            heads_qk, dim_k, heads, dim_v, a.q.dtype, a.g.dtype, a.beta.dtype, a.beta.is_neg(),
            a.initial_state.dtype, a.q.get_device(), a.scale, type(a.scale),
            a.use_qk_l2norm_in_kernel, a.use_gate_in_kernel, a.use_beta_sigmoid_in_kernel,
            a.allow_neg_eigval, a.safe_gate, a.lower_bound, type(a.lower_bound), a.state_v_first,
            None if a.cu_seqlens is None else a.cu_seqlens.dtype, a.A_log is None,
            a.dt_bias is None, a.checkpoint_indices is None, a.checkpoint_interval,
            type(a.checkpoint_interval), a.state_indices.dtype, a.state_indices.is_contiguous(),
            a.has_initial_state is None, a.pad_slot_id, type(a.pad_slot_id),
            # No kernel's host code compares v with q, or the indices with cu_seqlens.
            batch == batch_v
            and tokens == tokens_v
            and batch > 0 < tokens
            and sequences > 0
            and (a.cu_seqlens is None or (batch == 1 and a.cu_seqlens.dim() == 1))
            and a.state_indices.shape[0] == sequences
            and (a.has_initial_state is None or a.has_initial_state.shape[0] == sequences),
        )  # fmt: skip

    def launch(self, ready: _Ready, a: PoolArguments) -> Tensor:
        batch, tokens, heads = a.v.shape[:3]
        dim_k, device = a.q.shape[3], a.q.device
        if a.cu_seqlens is None:
            sequences = batch
            slots = batch * ((tokens + CHUNK - 1) // CHUNK)
        else:
            sequences = a.cu_seqlens.shape[0] - 1
            slots = tokens // CHUNK + sequences
        A, bias = (a.A_log, a.dt_bias) if a.use_gate_in_kernel else (None, None)
        if bias is not None and bias.dim() != 2:
            bias = bias.view(-1, dim_k)
        if A is not None and A.dim() != 1:
            A = A.view(-1)
        inputs = {"q": a.q, "k": a.k, "g": a.g, "beta": a.beta, "A_log": A, "dt_bias": bias}
        self.check_inputs("initial_state", a.initial_state, inputs)
        tiles = _new_empty(a.q, (slots, heads, record_elements(dim_k)))
        decay = _empty((slots, heads, dim_k), dtype=torch.float32, device=device)
        given = cast("Tensor | None", a.out)
        if given is None:
            o = _empty_like(a.v, memory_format=_contiguous)
        else:
            o = given
            self.check_inputs("out", o, inputs)
        length = 0
        if ready.split:
            kind = pass_kind(ready.split[1][1])
            length = segment_length(
                kind, a.v, dim_k, a.cu_seqlens, ready.num_sms, starts=ready.split[0][1].bounds
            )
        states = carried_states(a)
        read = a.q, a.k, a.g, a.beta, A, bias, a.cu_seqlens
        scalars = ready.scale, ready.lower_bound, ready.beta_scale
        records = tiles, decay, None
        if length:
            run_in_segments(ready.split, length, read, records, scalars, a.v, (o,), states)
        else:
            ready.prepare(*read, *records, *scalars, None, None)
            ready.pool_pass(
                a.v, tiles, decay, o, *states, a.cu_seqlens, None, None, 0, 1, None, None
            )
        increment_version((o, a.initial_state))
        return o

    def _with_out(self, a: Any, memory_format: torch.memory_format) -> Any:
        """o is contiguous, whatever the layout of v."""
        if a.out is not None:
            return a
        return a._replace(out=_empty_like(a.v, memory_format=_contiguous))


def carried_states(a: PoolArguments) -> tuple[Any, ...]:
    """The arguments of a pass for states in a pool."""
    chunks = 0 if a.checkpoint_indices is None else a.checkpoint_interval // CHUNK
    flags = a.has_initial_state
    return (
        a.initial_state, a.state_indices, a.checkpoint_indices, chunks,
        None if flags is None else flags.view(torch.uint8),
    )  # fmt: skip


_pool = Pool()
_forward = _pool.forward  # bound once: this saves time per call
