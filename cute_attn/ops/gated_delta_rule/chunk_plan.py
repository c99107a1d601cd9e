"""The kernels of `chunk_gated_delta_rule` and of its gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import launch
from ...kernels.delta import table
from ...kernels.delta.chunk.heuristics import (
    has_head_path,
    head_forward_config,
    head_pass_config,
)
from ...kernels.delta.chunk.spec import (
    HeadAdjointSpec,
    HeadForwardSpec,
    HeadPassSpec,
    HeadPoolForwardSpec,
    HeadPoolPassSpec,
    HeadPrepareSpec,
    PassSpec,
)
from ..kda.chunk_plan import (
    BackwardRequests,
    ChunkCall,
    backward_requests,
    check_over_ranks,
    check_pool,
    forward_over_ranks,
    plan_chunk_kda,
)


@launch.planner
def plan_chunk_gated_delta_rule(
    arch: str,
    *,
    dtype: str = "bfloat16",
    gate_dtype: str | None = None,
    beta_dtype: str | None = None,
    head_dim_k: int = 128,
    head_dim_v: int = 128,
    initial_state: bool = False,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    gradient: bool = False,
    state_v_first: bool = False,
    state_indices: bool = False,
    state_dtype: str = "float32",
    checkpoint_indices: bool = False,
    has_initial_state: bool = False,
    slot_dtype: str = "int32",
    strided_slots: bool = False,
    null_slot: bool = False,
    index_dtype: str = "none",
    dt_bias: bool = True,
    split: bool | None = None,
    over_ranks: bool = False,
) -> list[launch.Request]:
    """The kernels that `chunk_gated_delta_rule` uses for these arguments, for `cute_attn.warmup`
    and spec files. The choice does not depend on batch, lengths or numbers of heads, except through
    `split`. `ChunkForward` launches these kernels.

    Args:
        arch: architecture, such as "sm_90a".
        dtype: dtype of q, k and v.
        gate_dtype: dtype of g; None means q's dtype.
        beta_dtype: dtype of beta; None means q's dtype.
        head_dim_k: K, head dimension of q and k.
        head_dim_v: V, head dimension of v.
        initial_state: whether initial_state is given.
        output_final_state: as in the operator.
        use_qk_l2norm_in_kernel: as in the operator.
        use_gate_in_kernel: whether the gate is -exp(A_log) softplus(g + dt_bias).
        use_beta_sigmoid_in_kernel: as in the operator.
        gradient: whether the call needs a gradient.
        state_v_first: as in the operator.
        state_indices: whether state_indices is given: initial_state is a pool. The parameters
            initial_state and output_final_state are ignored then.
        state_dtype: dtype of the pool; ignored without state_indices.
        checkpoint_indices: whether checkpoint_indices is given.
        has_initial_state: whether has_initial_state is given.
        slot_dtype: dtype of state_indices.
        strided_slots: whether state_indices is not contiguous.
        null_slot: whether pad_slot_id is 0.
        index_dtype: dtype of cu_seqlens, "int32" or "int64"; "none" without cu_seqlens.
        dt_bias: whether dt_bias is given; ignored without use_gate_in_kernel.
        split: whether to include the kernels that split a few long sequences with few heads
            among the SMs. None follows `CUTE_ATTN_KDA_SPLIT`.
        over_ranks: as for `plan_chunk_kda`.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
    """
    check_over_ranks(over_ranks, state_indices)
    check_pool(
        state_indices,
        without={"gradient": gradient},
        needed={"checkpoint_indices": checkpoint_indices, "has_initial_state": has_initial_state},
    )
    options: dict[str, Any] = {
        "dtype": dtype,
        "gate_dtype": gate_dtype,
        "beta_dtype": beta_dtype,
        "head_dim_k": head_dim_k,
        "head_dim_v": head_dim_v,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "state_v_first": state_v_first or over_ranks,
        "index_dtype": index_dtype,
        "dt_bias": dt_bias,
        "split": split,
    }
    pool: dict[str, Any] = {
        "state_dtype": state_dtype,
        "checkpoints": checkpoint_indices,
        "fresh": bool(has_initial_state),
        "slot_dtype": slot_dtype,
        "strided_slots": bool(strided_slots),
        "null_slot": bool(null_slot),
    }
    # With float16, KDA's backward takes corrections that have another share of beta.
    if has_head_path(arch) and not (gradient and dtype == "float16"):
        call = ChunkCall(
            arch,
            decays="head",
            has_initial_state=initial_state or state_indices or over_ranks,
            has_final_state=output_final_state or state_indices or over_ranks,
            lower_bound=False,
            A_log=True,
            **options,
        )
        found = _head_path(call, pool if state_indices else None, gradient)
        if over_ranks:
            return forward_over_ranks(found)
        return [_in_one_kernel(call, pool if state_indices else None, gradient), *found]
    return plan_chunk_kda(
        arch,
        decays="head",
        initial_state=initial_state,
        output_final_state=output_final_state,
        gradient=gradient,
        state_indices=state_indices,
        state_dtype=state_dtype,
        checkpoint_indices=checkpoint_indices,
        has_initial_state=has_initial_state,
        slot_dtype=slot_dtype,
        strided_slots=strided_slots,
        null_slot=null_slot,
        over_ranks=over_ranks,
        **options,
    )


def _head_path(
    call: ChunkCall, pool: dict[str, Any] | None, gradient: bool
) -> list[launch.Request]:
    """The kernels of `kernels.delta.chunk.per_head`."""
    fields = call.base | call.state_fields | head_pass_config(**call.dims)
    # With float16, the inverse of exact products takes more than the 80 registers of three CTAs.
    ctas_per_sm = 2 if call.base["dtype"] == "float16" else 3
    prepare = HeadPrepareSpec(**call.inputs, ctas_per_sm=ctas_per_sm)
    if pool is not None:
        spec: PassSpec = HeadPoolPassSpec(**fields, **pool)
        whole, *split = call.with_segments(table.HEAD_POOL_PASS, spec)
    else:
        spec = HeadPassSpec(**fields, store_states=bool(gradient))
        whole, *split = call.with_segments(table.HEAD_STATE_PASS, spec)
    if split:
        of_pass = split[0][1]
        in_segments = replace(prepare, starts_next=of_pass.dependent)
        if of_pass.short_starts:  # the bounds take more than 80 registers
            in_segments = replace(in_segments, bounds=True, ctas_per_sm=2)
        split = [(table.HEAD_PREPARE, in_segments), *split]
    return [(table.HEAD_PREPARE, prepare), whole, *split]


def _in_one_kernel(call: ChunkCall, pool: dict[str, Any] | None, gradient: bool) -> launch.Request:
    """The kernel that does all for whole sequences (`heuristics.in_one_kernel`)."""
    fields = call.inputs | call.base | call.state_fields | head_forward_config(**call.dims)
    if pool is not None:
        return table.HEAD_POOL_FORWARD, HeadPoolForwardSpec(**fields, **pool)
    return table.HEAD_FORWARD, HeadForwardSpec(**fields, store_states=bool(gradient))


def gated_delta_backward_requests(arch: str, **options: Any) -> BackwardRequests:
    """The kernels of `plan_chunk_gated_delta_rule_backward` by their part. `options` are those of
    `backward_requests`."""
    found = backward_requests(arch, **options)
    if not has_head_path(arch) or options["dtype"] != "bfloat16":
        return found
    of_states = options["dinitial_state"], options["dfinal_state"]
    names = ("inputs", "grouped", "disable_recompute", "dinitial_state", "dfinal_state")
    call = ChunkCall(
        arch,
        has_initial_state=of_states[0],
        has_final_state=of_states[1],
        **{name: x for name, x in options.items() if name not in names},
    )
    spec = HeadAdjointSpec(
        **call.base, **call.state_fields, **head_pass_config(**call.dims), store_states=True
    )
    return found._replace(
        prepare=(
            table.HEAD_PREPARE,
            HeadPrepareSpec(**call.inputs, for_backward=True, last_first=False),
        ),
        adjoint_pass=call.with_segments(table.HEAD_ADJOINT_PASS, spec),
    )


@launch.planner
def plan_chunk_gated_delta_rule_backward(
    arch: str,
    *,
    dtype: str = "bfloat16",
    gate_dtype: str | None = None,
    beta_dtype: str | None = None,
    head_dim_k: int = 128,
    head_dim_v: int = 128,
    dfinal_state: bool = False,
    dinitial_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    index_dtype: str = "none",
    dt_bias: bool = True,
    inputs: bool = True,
    grouped: bool = False,
    split: bool | None = None,
    over_ranks: bool = False,
) -> list[launch.Request]:
    """The kernels that the gradient of `chunk_gated_delta_rule` uses. `plan_chunk_gated_delta_rule`
    gives the forward's kernels.

    Args:
        arch: architecture, such as "sm_90a".
        dtype: dtype of q, k and v.
        gate_dtype: dtype of g; None means q's dtype.
        beta_dtype: dtype of beta; None means q's dtype.
        head_dim_k: K, head dimension of q and k.
        head_dim_v: V, head dimension of v.
        dfinal_state: whether final_state has a gradient.
        dinitial_state: whether initial_state requires a gradient.
        use_qk_l2norm_in_kernel: as in the operator.
        use_gate_in_kernel: as in the operator.
        use_beta_sigmoid_in_kernel: as in the operator.
        state_v_first: as in the operator.
        index_dtype: dtype of cu_seqlens, "int32" or "int64"; "none" without cu_seqlens.
        dt_bias: whether dt_bias is given; ignored without use_gate_in_kernel.
        inputs: whether any other argument than initial_state requires a gradient.
        grouped: whether there are more value heads than heads of q and k.
        split: as for `plan_chunk_gated_delta_rule`.
        over_ranks: as for `plan_chunk_kda_backward`.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
        NotImplementedError: there is no kernel for this K on this architecture.
    """
    found = gated_delta_backward_requests(
        arch,
        dtype=dtype,
        gate_dtype=gate_dtype,
        beta_dtype=beta_dtype,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        dfinal_state=dfinal_state or over_ranks,
        dinitial_state=dinitial_state or over_ranks,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        lower_bound=False,
        disable_recompute=False,
        state_v_first=state_v_first or over_ranks,
        index_dtype=index_dtype,
        A_log=True,
        dt_bias=dt_bias,
        inputs=inputs,
        grouped=grouped,
        split=split,
        decays="head",
    )
    return found.listed(over_ranks)
