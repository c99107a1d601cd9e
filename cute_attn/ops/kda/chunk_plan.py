"""The kernels of `chunk_kda` and of its gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from ... import launch
from ...cache import KernelDef
from ...kernels.common.sum_partials_spec import SumPartialsSpec
from ...kernels.common.table import SUM_PARTIALS, ZERO_UNUSED
from ...kernels.common.zero_unused_spec import ZeroUnusedSpec
from ...kernels.delta import table
from ...kernels.delta.chunk.heuristics import (
    delta_h_config,
    gradients_config,
    has_dependent_launch,
    head_gradients_config,
    output_config,
    segments_config,
    segments_pass_config,
    state_pass_config,
)
from ...kernels.delta.chunk.spec import (
    AdjointPassSpec,
    ChainSpec,
    DeltaHSpec,
    GateSpec,
    GradientsSpec,
    HeadGradientsSpec,
    IntraSpec,
    OutputSpec,
    PassSpec,
    PoolPassSpec,
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
    gradient: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    state_indices: bool = False,
    state_dtype: str = "float32",
    checkpoint_indices: bool = False,
    has_initial_state: bool = False,
    slot_dtype: str = "int32",
    strided_slots: bool = False,
    null_slot: bool = False,
    index_dtype: str = "none",
    A_log: bool = True,
    dt_bias: bool = True,
    split: bool | None = None,
    decays: str = "channel",
    over_ranks: bool = False,
) -> list[launch.Request]:
    """The kernels that `chunk_kda` uses for these arguments, for `cute_attn.warmup` and spec files.
    The choice does not depend on batch, lengths or numbers of heads, except through `split`.

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
        use_gate_in_kernel: as in the operator.
        use_beta_sigmoid_in_kernel: as in the operator.
        lower_bound: whether lower_bound is given.
        gradient: whether the call needs a gradient; disable_recompute has no effect on the plan.
        return_intermediate_states: as in the operator.
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
        A_log: whether A_log is given; ignored without use_gate_in_kernel.
        dt_bias: whether dt_bias is given; ignored without use_gate_in_kernel.
        split: whether to include the kernels that split a few long sequences with few heads
            among the SMs. None follows `CUTE_ATTN_KDA_SPLIT`.
        decays: what has a decay of its own: "channel", or "head" as in a Gated Delta Net. With
            "head", g is `[B, T, HV]` and dt_bias `[HV]`, and there are no intermediate states.
        over_ranks: whether cp is given. The parameters initial_state, output_final_state and
            state_v_first are ignored then. index_dtype is "none" if a rank has one span of each
            sequence of a batch, otherwise "int32".

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
    """
    if decays == "head" and return_intermediate_states:
        raise ValueError('return_intermediate_states is True, must be False with decays="head"')
    check_over_ranks(over_ranks, state_indices, return_intermediate_states)
    check_pool(
        state_indices,
        without={"gradient": gradient, "return_intermediate_states": return_intermediate_states},
        needed={"checkpoint_indices": checkpoint_indices, "has_initial_state": has_initial_state},
    )
    call = ChunkCall(
        arch,
        dtype=dtype,
        gate_dtype=gate_dtype,
        beta_dtype=beta_dtype,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        has_initial_state=initial_state or state_indices or over_ranks,
        has_final_state=output_final_state or state_indices or over_ranks,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        lower_bound=lower_bound,
        state_v_first=state_v_first or over_ranks,
        index_dtype=index_dtype,
        A_log=A_log,
        dt_bias=dt_bias,
        split=split,
        decays=decays,
    )
    if return_intermediate_states:
        return call.stages()
    if state_indices:
        passes = call.pool_pass(
            state_dtype=state_dtype,
            checkpoints=checkpoint_indices,
            fresh=bool(has_initial_state),
            slot_dtype=slot_dtype,
            strided_slots=bool(strided_slots),
            null_slot=bool(null_slot),
        )
        return call.with_prepare(passes, for_backward=False)
    keeps = bool(gradient)
    found = call.with_prepare(call.state_pass(store_states=keeps), for_backward=keeps)
    return forward_over_ranks(found) if over_ranks else found


def check_over_ranks(
    over_ranks: bool, state_indices: bool, return_intermediate_states: bool = False
) -> None:
    """Raise ValueError if a call over ranks has a pool or returns intermediate states."""
    for name, value in (
        ("state_indices", state_indices),
        ("return_intermediate_states", return_intermediate_states),
    ):
        if over_ranks and value:
            raise ValueError(f"{name} is True, must be False with over_ranks")


def forward_over_ranks(requests: list[launch.Request]) -> list[launch.Request]:
    """`prepare`, the pass over whole sequences, its transitions of spans, the two kernels of
    `chain_requests`, and where sequences may be split the kernels of the pass in segments.
    `requests` are a call's on one GPU."""
    prepare, whole, *split = requests
    # No segment starts from zero: `prepare` for whole sequences computes no bounds.
    exact = [(kernel, dataclasses.replace(spec, short_starts=False)) for kernel, spec in split[1:]]
    return [prepare, whole, spans_request(whole), *chain_requests(whole), *exact]


def chain_requests(request: launch.Request) -> list[launch.Request]:
    """The kernels for chains of transitions, from given matrices and from 0, from the request of
    the pass over whole sequences."""
    spec = request[1]
    return [chain_request(spec.head_dim_k, spec.head_dim_v, start) for start in (True, False)]


@functools.lru_cache(maxsize=64)
def chain_request(dim_k: int, dim_v: int, has_start: bool) -> launch.Request:
    """The kernel for chains of transitions."""
    return table.CHAIN, ChainSpec(dim_k, dim_v, has_start)


@functools.lru_cache(maxsize=1024)
def spans_request(request: launch.Request) -> launch.Request:
    """The kernel of a pass's transitions of spans, from the request of the pass over whole
    sequences."""
    kernel, spec = request
    changes: dict[str, Any] = {
        "segments": "spans", "has_initial_state": False, "has_final_state": False,
        "state_v_first": False,
    }  # fmt: skip
    if isinstance(spec, StatePassSpec):
        changes["store_states"] = False
    return kernel, dataclasses.replace(spec, **changes)


def check_pool(state_indices: bool, *, without: dict[str, bool], needed: dict[str, bool]) -> None:
    """Raise ValueError if a plan's parameter in `without` is given with a pool, or a parameter in
    `needed` without a pool."""
    for name, value in without.items():
        if state_indices and value:
            raise ValueError(f"{name} is True, must be False with state_indices")
    for name, value in needed.items():
        if value and not state_indices:
            raise ValueError(f"{name} is True, must be False without state_indices")


@launch.planner
def plan_chunk_kda_backward(
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
    lower_bound: bool = False,
    disable_recompute: bool = False,
    state_v_first: bool = False,
    index_dtype: str = "none",
    A_log: bool = True,
    dt_bias: bool = True,
    inputs: bool = True,
    grouped: bool = False,
    split: bool | None = None,
    over_ranks: bool = False,
) -> list[launch.Request]:
    """The kernels that the gradient of `chunk_kda` uses. `plan_chunk_kda` gives the forward's
    kernels.

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
        lower_bound: whether lower_bound is given.
        disable_recompute: as in the operator.
        state_v_first: as in the operator.
        index_dtype: dtype of cu_seqlens, "int32" or "int64"; "none" without cu_seqlens.
        A_log: whether A_log is given; ignored without use_gate_in_kernel.
        dt_bias: whether dt_bias is given; ignored without use_gate_in_kernel.
        inputs: whether any other argument than initial_state requires a gradient.
        grouped: whether there are more value heads than heads of q and k.
        split: as for `plan_chunk_kda`.
        over_ranks: whether cp is given. The parameters dfinal_state, dinitial_state and
            state_v_first are ignored then.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
        NotImplementedError: there is no kernel for this K on this architecture.
    """
    found = backward_requests(
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
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        state_v_first=state_v_first or over_ranks,
        index_dtype=index_dtype,
        A_log=A_log,
        dt_bias=dt_bias,
        inputs=inputs,
        grouped=grouped,
        split=split,
    )
    return found.listed(over_ranks)


SUM_A_LOG = SUM_PARTIALS, SumPartialsSpec("float32", vector=1, slices=32)
SUM_DT_BIAS = SUM_PARTIALS, SumPartialsSpec("float32", vector=4, slices=8)
_ZERO_UNUSED = ZERO_UNUSED, ZeroUnusedSpec(varlen=True, seqused=False)


class BackwardRequests(NamedTuple):
    """The kernels of a backward, None where there is nothing to compute. `adjoint_pass` lists the
    kernel for whole sequences, then the three kernels for split sequences."""

    prepare: launch.Request | None
    adjoint_pass: list[launch.Request]
    gradients: launch.Request | None
    sum_A_log: launch.Request | None
    sum_dt_bias: launch.Request | None
    zero_unused: launch.Request | None

    def listed(self, over_ranks: bool = False) -> list[launch.Request]:
        """All kernels, those for the state's gradient first."""
        more = []
        if over_ranks:
            whole = self.adjoint_pass[0]
            more = [spans_request(whole), *chain_requests(whole)]
        single = (
            self.prepare, self.gradients, self.sum_A_log, self.sum_dt_bias, self.zero_unused
        )  # fmt: skip
        return [*self.adjoint_pass, *more, *filter(None, single)]


def backward_requests(
    arch: str,
    *,
    dfinal_state: bool,
    dinitial_state: bool,
    disable_recompute: bool,
    inputs: bool,
    grouped: bool,
    **options: Any,
) -> BackwardRequests:
    """The kernels of `plan_chunk_kda_backward` by their part; arguments and errors are equal."""
    call = ChunkCall(
        arch, has_initial_state=dinitial_state, has_final_state=dfinal_state, **options
    )
    gate = call.gate_fields
    return BackwardRequests(
        prepare=None if disable_recompute else call.prepare(for_backward=True),
        adjoint_pass=call.adjoint_pass(),
        gradients=call.gradients(grouped=grouped) if inputs else None,
        sum_A_log=SUM_A_LOG if inputs and gate["has_A_log"] else None,
        sum_dt_bias=(SUM_A_LOG if call.decays == "head" else SUM_DT_BIAS)
        if inputs and gate["has_dt_bias"]
        else None,
        zero_unused=_ZERO_UNUSED if inputs and call.base["index_dtype"] != "none" else None,
    )


class ChunkCall:
    """The requests of a call with these parameters; see `plan_chunk_kda`.

    Args:
        has_initial_state, has_final_state: whether the call's passes have these tensors.
    """

    def __init__(
        self,
        arch: str,
        *,
        dtype: str,
        gate_dtype: str | None,
        beta_dtype: str | None,
        head_dim_k: int,
        head_dim_v: int,
        has_initial_state: bool,
        has_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        use_gate_in_kernel: bool,
        use_beta_sigmoid_in_kernel: bool,
        lower_bound: bool,
        state_v_first: bool,
        index_dtype: str,
        A_log: bool,
        dt_bias: bool,
        split: bool | None,
        decays: str = "channel",
    ) -> None:
        gate = gate_kind(use_gate_in_kernel, 0.0 if lower_bound else None)
        if gate == "softplus" and not A_log:
            raise ValueError(
                "A_log is False, must be True with use_gate_in_kernel without lower_bound"
            )
        self.base: dict[str, Any] = {
            "dtype": dtype,
            "head_dim_k": head_dim_k,
            "head_dim_v": head_dim_v,
            "index_dtype": index_dtype,
        }
        self.dims: dict[str, Any] = {
            "arch": arch, "head_dim_k": head_dim_k, "head_dim_v": head_dim_v,
        }  # fmt: skip
        self.gate_fields: dict[str, Any] = {
            "gate_dtype": gate_dtype or dtype,
            "gate": gate,
            "has_A_log": bool(A_log and use_gate_in_kernel),
            "has_dt_bias": bool(dt_bias and use_gate_in_kernel),
        }
        self.decays = decays
        self.state_fields: dict[str, Any] = {
            "state_v_first": bool(state_v_first),
            "has_initial_state": bool(has_initial_state),
            "has_final_state": bool(has_final_state),
        }
        self.beta_dtype = beta_dtype or dtype
        self.l2norm = bool(use_qk_l2norm_in_kernel)
        self.beta_sigmoid = bool(use_beta_sigmoid_in_kernel)
        self.split = settings().kda_split if split is None else split

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            **self.base,
            **self.gate_fields,
            "beta_dtype": self.beta_dtype,
            "l2norm": self.l2norm,
            "beta_sigmoid": self.beta_sigmoid,
            "decays": self.decays,
        }

    def prepare(
        self, *, for_backward: bool, bounds: bool = False, starts_next: bool = False
    ) -> launch.Request:
        spec = PrepareSpec(
            **self.inputs, for_backward=for_backward, bounds=bounds, starts_next=starts_next
        )
        return table.PREPARE, spec

    def with_prepare(
        self, passes: list[launch.Request], *, for_backward: bool
    ) -> list[launch.Request]:
        """The requests of a forward: `prepare`, the pass over whole sequences, and for split
        sequences `prepare` again and the kernels of `with_segments`."""
        whole, *split = passes
        prepare = self.prepare(for_backward=for_backward)
        if split:
            of_pass = split[0][1]
            first = self.prepare(
                for_backward=for_backward,
                bounds=of_pass.short_starts,
                starts_next=of_pass.dependent,
            )
            split = [first, *split]
        return [prepare, whole, *split]

    def state_pass(self, *, store_states: bool) -> list[launch.Request]:
        spec = StatePassSpec(
            **self.base,
            **self.state_fields,
            **state_pass_config(**self.dims),
            store_states=store_states,
        )
        return self.with_segments(table.STATE_PASS, spec)

    def pool_pass(self, **of_pool: Any) -> list[launch.Request]:
        """The requests of a pass in a pool; `of_pool` are the fields that only its spec has."""
        spec = PoolPassSpec(
            **self.base,
            **self.state_fields,
            **state_pass_config(**self.dims),
            **of_pool,
        )
        return self.with_segments(table.POOL_PASS, spec)

    def adjoint_pass(self) -> list[launch.Request]:
        spec = AdjointPassSpec(**self.base, **self.state_fields, **state_pass_config(**self.dims))
        return self.with_segments(table.ADJOINT_PASS, spec)

    def with_segments(self, kernel: KernelDef, spec: PassSpec) -> list[launch.Request]:
        """The pass over whole sequences, then the kernels transitions, segments and outputs. For
        starts from zero without exact transitions there may be other `outputs`."""
        # A call that stores states for a backward has no warm-ups: two CTAs would store one state.
        short = self.l2norm and isinstance(spec, StatePassSpec) and not spec.store_states
        dependent = has_dependent_launch(self.dims["arch"])
        combine = SegmentsSpec(
            head_dim_k=spec.head_dim_k,
            head_dim_v=spec.head_dim_v,
            index_dtype=spec.index_dtype,
            **segments_config(**self.dims),
            short_starts=short,
            dependent=dependent,
        )
        outputs = dataclasses.replace(
            spec, segments="outputs", short_starts=short, dependent=dependent
        )
        if isinstance(spec, StatePassSpec):
            outputs = dataclasses.replace(outputs, **segments_pass_config(**self.dims))
        transitions = dataclasses.replace(outputs, segments="transitions")
        if isinstance(transitions, StatePassSpec):  # a pass without results
            transitions = dataclasses.replace(transitions, store_states=False)
        found = [(kernel, transitions), (table.SEGMENTS, combine), (kernel, outputs)]
        if short and outputs.cluster != spec.cluster:
            found.append((kernel, dataclasses.replace(outputs, cluster=spec.cluster)))
        return [(kernel, spec)] + self.split * found

    def gradients(self, *, grouped: bool) -> launch.Request:
        if self.decays == "head":
            of_head = head_gradients_config(**self.dims, grouped=grouped)
            return table.HEAD_GRADIENTS, HeadGradientsSpec(
                **self.inputs, grouped=grouped, **of_head
            )
        config = gradients_config(**self.dims)
        spec = GradientsSpec(**self.inputs, grouped=grouped, **config)
        return table.GRADIENTS, spec

    def stages(self) -> list[launch.Request]:
        gates = GateSpec(
            head_dim_k=self.base["head_dim_k"],
            index_dtype=self.base["index_dtype"],
            **self.gate_fields,
        )
        intra = IntraSpec(
            **self.base,
            beta_dtype="float32" if self.beta_sigmoid else self.beta_dtype,
            l2norm=self.l2norm,
            store_qg=False,
        )
        delta_h = DeltaHSpec(
            **self.base, **self.state_fields, store_v_new=True, **delta_h_config(**self.dims)
        )
        output = OutputSpec(
            **self.base,
            l2norm=self.l2norm,
            state_v_first=self.state_fields["state_v_first"],
            **output_config(**self.dims),
        )
        return [
            (table.GATE_CUMSUM, gates),
            (table.CHUNK_INTRA, intra),
            (table.DELTA_H, delta_h),
            (table.OUTPUT, output),
        ]
