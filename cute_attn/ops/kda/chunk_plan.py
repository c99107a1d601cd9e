"""The kernels of `chunk_kda`."""

from __future__ import annotations

import dataclasses
from typing import Any

from ... import launch
from ...kernels.kda import table
from ...kernels.kda.chunk.heuristics import (
    delta_h_config,
    fused,
    output_config,
    segments_config,
    state_pass_config,
)
from ...kernels.kda.chunk.spec import (
    DeltaHSpec,
    GateSpec,
    IntraSpec,
    OutputSpec,
    PrepareSpec,
    SegmentsSpec,
    StatePassSpec,
)
from ...settings import settings
from .arguments import gate_kind


@launch.planner
def plan_chunk_kda(
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
    lower_bound: bool = False,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    index_dtype: str = "none",
    A_log: bool = True,
    dt_bias: bool = True,
    split: bool | None = None,
) -> list[launch.Request]:
    """The kernels that `chunk_kda` uses for such arguments, for `cute_attn.warmup` and spec files.
    Except for `split`, they do not depend on batch, lengths and numbers of heads.

    Args:
        arch: such as "sm_90a".
        dtype: of q, k and v.
        gate_dtype: of g; None is that of q.
        beta_dtype: of beta; None is that of q.
        head_dim_k: K, of q and k.
        head_dim_v: V, of v.
        initial_state: whether initial_state is given.
        output_final_state: as the operator's.
        use_qk_l2norm_in_kernel: as the operator's.
        use_gate_in_kernel: as the operator's.
        use_beta_sigmoid_in_kernel: as the operator's.
        lower_bound: whether lower_bound is given.
        disable_recompute: as the operator's.
        return_intermediate_states: as the operator's.
        state_v_first: as the operator's.
        index_dtype: of cu_seqlens, "int32" or "int64"; "none" without cu_seqlens.
        A_log: whether A_log is given; ignored without use_gate_in_kernel.
        dt_bias: likewise.
        split: whether to include the three kernels that split a few long sequences with few heads
            among the SMs. None follows `CUTE_ATTN_KDA_SPLIT`.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names it.
    """
    gate = gate_kind(use_gate_in_kernel, 0.0 if lower_bound else None)
    if gate == "softplus" and not A_log:
        raise ValueError("A_log is False, must be True with use_gate_in_kernel without lower_bound")
    base: dict[str, Any] = {
        "dtype": dtype,
        "head_dim_k": head_dim_k,
        "head_dim_v": head_dim_v,
        "index_dtype": index_dtype,
    }
    dims: dict[str, Any] = {"arch": arch, "head_dim_k": head_dim_k, "head_dim_v": head_dim_v}
    gate_fields: dict[str, Any] = {
        "gate_dtype": gate_dtype or dtype,
        "gate": gate,
        "has_A_log": bool(A_log and use_gate_in_kernel),
        "has_dt_bias": bool(dt_bias and use_gate_in_kernel),
    }
    state_fields: dict[str, Any] = {
        "state_v_first": bool(state_v_first),
        "has_initial_state": bool(initial_state),
        "has_final_state": bool(output_final_state),
    }
    if fused(
        disable_recompute=bool(disable_recompute),
        return_intermediate_states=bool(return_intermediate_states),
    ):
        prepare = PrepareSpec(
            **base,
            **gate_fields,
            beta_dtype=beta_dtype or dtype,
            l2norm=bool(use_qk_l2norm_in_kernel),
            beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
        )
        state_pass = StatePassSpec(**base, **state_fields, **state_pass_config(**dims))
        combine = SegmentsSpec(
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_v,
            index_dtype=index_dtype,
            **segments_config(**dims),
        )
        if split is None:
            split = settings().kda_split
        return [(table.PREPARE, prepare), (table.STATE_PASS, state_pass)] + split * [
            (table.STATE_PASS, dataclasses.replace(state_pass, segments="transitions")),
            (table.SEGMENTS, combine),
            (table.STATE_PASS, dataclasses.replace(state_pass, segments="outputs")),
        ]

    gates = GateSpec(head_dim_k=head_dim_k, index_dtype=index_dtype, **gate_fields)
    l2norm = bool(use_qk_l2norm_in_kernel)
    intra = IntraSpec(
        **base,
        beta_dtype="float32" if use_beta_sigmoid_in_kernel else beta_dtype or dtype,
        l2norm=l2norm,
        store_qg=False,
    )
    delta_h = DeltaHSpec(**base, **state_fields, store_v_new=True, **delta_h_config(**dims))
    output = OutputSpec(
        **base, l2norm=l2norm, state_v_first=bool(state_v_first), **output_config(**dims)
    )
    return [
        (table.GATE_CUMSUM, gates),
        (table.CHUNK_INTRA, intra),
        (table.DELTA_H, delta_h),
        (table.OUTPUT, output),
    ]
