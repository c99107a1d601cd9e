"""Kimi Delta Attention token by token over whole sequences: the operator.

A warm call looks up the loaded kernel, allocates the results and calls the kernel. The look-up's
key holds everything that the choice of kernel depends on; the compiled host code checks the rest
before it launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta import table
from ...kernels.delta.step.heuristics import step_config
from ...kernels.delta.step.spec import DTYPES as STEP_DTYPES
from ...kernels.delta.step.spec import RecurrentSpec
from ..checks import DTYPE_NAMES, check_dtype, check_flags, check_number, require_flags
from ..operator import (
    PLAIN,
    Operator,
    dispatch_mode_depth,
    forward_ad,
    is_dynamo_compiling,
    is_grad_enabled,
)
from .arguments import (
    Sizes,
    by_former_name,
    check_beta_options,
    check_gate,
    check_state,
    check_step_dtypes,
    check_step_shapes,
    contiguous,
    gate_kind,
    launch_scalars,
    readable_parameters,
    readable_state,
    sequence_plan,
    unchanged,
)

__all__ = ["fused_recurrent_kda", "plan_fused_recurrent_kda"]


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over sequences, token by token: for short sequences, and as a check.

    The formula is `chunk_kda`'s. Names, order and defaults of the arguments match
    flash-linear-attention's function of this name. Arithmetic is float32 for all dtypes. States are
    not updated in place; use `kda_decode` for updates in place.

    Args:
        q: `[B, T, HQK, K]`, bfloat16, float16 or float32; K is 64, 128 or 256. q, k, v and g are
            read in place if the last dimension is contiguous, and copied otherwise.
        k: of q's shape and dtype.
        v: `[B, T, HV, V]`, dtype of q; V is 64, 128, 192 or 256. HV is a multiple of HQK, and value
            head h uses query and key head h // (HV // HQK).
        g: `[B, T, HV, K]`, float32, bfloat16 or float16: natural logarithms of the decay, or with
            use_gate_in_kernel the input of the gate.
        beta: `[B, T, HV]`, or `[B, T, HV, V]` for a beta of each column of V; float32, bfloat16 or
            float16, any strides.
        A_log: HV numbers of any shape and floating-point dtype; optional with a lower_bound.
        dt_bias: HV * K numbers of any shape and floating-point dtype; None is 0. A_log and dt_bias
            are ignored without use_gate_in_kernel.
        scale: factor of q; None is K ** -0.5.
        initial_state: `[N, HV, K, V]`, float32, or in 16 bits, then converted; None is 0. N, the
            number of sequences, is B without cu_seqlens.
        output_final_state: whether to return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6).
        use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: use sigmoid(beta) instead of beta.
        allow_neg_eigval: use 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        lower_bound: lower bound of the gate, negative; ignored without use_gate_in_kernel.
        state_v_first: states are `[..., V, K]` rather than `[..., K, V]`.
        cu_seqlens: `[N + 1]` int32 or int64, for B = 1: tokens cu_seqlens[n] to
            cu_seqlens[n + 1] - 1 are sequence n, which may be empty. Not decreasing, at most T;
            not checked, since that would synchronise.
        transpose_state_layout: the former name of state_v_first, which warns.

    Returns:
        (o, final_state). o is `[B, T, HV, V]`, dtype of q, contiguous, undefined for tokens of no
        sequence. final_state is `[N, HV, K, V]` float32, or None without output_final_state.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, head counts, devices or values.
        NotImplementedError: a head dimension without a kernel, or a tensor that requires a
            gradient: there is no backward.
    """
    if transpose_state_layout is not None:
        state_v_first = by_former_name(state_v_first, transpose_state_layout)
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
        else _recurrent.routed
    )
    result: tuple[Tensor, Tensor | None] = call(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        lower_bound, state_v_first, cu_seqlens, None, None,
    )  # fmt: skip
    return result


@launch.planner
def plan_fused_recurrent_kda(
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
    state_v_first: bool = False,
    index_dtype: str = "none",
    A_log: bool = True,
    dt_bias: bool = True,
    beta_columns: bool = False,
) -> list[launch.Request]:
    """The kernel that `fused_recurrent_kda` uses for these arguments, for `cute_attn.warmup` and
    spec files. The choice does not depend on batch, lengths and numbers of heads.

    Args:
        arch: architecture, such as "sm_90a"; today there is one kernel for all architectures from
            sm_80 on.
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
        state_v_first: as in the operator.
        index_dtype: dtype of cu_seqlens, "int32" or "int64"; "none" without cu_seqlens.
        A_log: whether A_log is given; ignored without use_gate_in_kernel.
        dt_bias: whether dt_bias is given; ignored without use_gate_in_kernel.
        beta_columns: whether beta is `[B, T, HV, V]`.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
    """
    return recurrent_requests("channel", **locals())


def recurrent_requests(
    decays: str,
    *,
    arch: str,
    dtype: str,
    gate_dtype: str | None,
    beta_dtype: str | None,
    head_dim_k: int,
    head_dim_v: int,
    initial_state: bool,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    lower_bound: bool,
    state_v_first: bool,
    index_dtype: str,
    A_log: bool,
    dt_bias: bool,
    gk_dtype: str = "none",
    gv_dtype: str = "none",
    beta_columns: bool,
) -> list[launch.Request]:
    """The kernel of a plan; see `plan_fused_recurrent_kda`. `decays` is as in `StepSpec`."""
    del arch
    tuned: dict[str, Any] = {
        "state_dtype": "float32",
        "head_dim_k": head_dim_k,
        "head_dim_v": head_dim_v,
        "state_v_first": bool(state_v_first),
    }
    gated = bool(use_gate_in_kernel)
    spec = RecurrentSpec(
        dtype=dtype,
        gate_dtype=gate_dtype or dtype,
        beta_dtype=beta_dtype or dtype,
        A_log_dtype="float32" if gated and A_log else "none",
        dt_bias_dtype="float32" if gated and dt_bias else "none",
        dt_bias_dims=0 if not (gated and dt_bias) else 1 if decays == "head" else 2,
        decays=decays,
        gk_dtype=gk_dtype,
        gv_dtype=gv_dtype,
        beta_columns=bool(beta_columns),
        gate=gate_kind(gated, 0.0 if lower_bound else None),
        l2norm=bool(use_qk_l2norm_in_kernel),
        beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
        index_dtype=index_dtype,
        has_initial_state=bool(initial_state),
        has_final_state=bool(output_final_state),
        **tuned,
        **step_config(**tuned, multi_token=True, in_place=False),
    )
    return [(table.RECURRENT, spec)]


# -- the operator -------------------------------------------------------------------------------

_empty = torch.empty

# (kernel, scale, lower_bound, factor of beta's sigmoid)
_Ready = tuple[Callable[..., None], float, float, float]


class Arguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    lower_bound: float | None = None
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    gk: Tensor | None = None
    gv: Tensor | None = None


class Recurrent(Operator[Arguments]):
    """Base class of the operators of KDA and the Gated Delta Net.

    Class attribute of a subclass:
        decays: what has a decay of its own, "channel" or "head".
        dt_bias_dims: dimensions of dt_bias in the kernel.
    """

    arguments = Arguments
    decays: ClassVar[str]
    dt_bias_dims: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.head_gate = self.decays == "head"

    results = (("o", ""), ("final_state", "output_final_state"))

    def check(self, a: Arguments, given: dict[str, Tensor]) -> None:
        check_number("scale", a.scale)
        check_number("lower_bound", a.lower_bound)
        check_flags(
            output_final_state=a.output_final_state,
            use_qk_l2norm_in_kernel=a.use_qk_l2norm_in_kernel,
            use_gate_in_kernel=a.use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=a.use_beta_sigmoid_in_kernel,
            allow_neg_eigval=a.allow_neg_eigval,
            state_v_first=a.state_v_first,
        )
        check_beta_options(a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval)
        check_step_dtypes(given)
        sizes = Sizes()
        check_step_shapes(sizes, given, "B T", self.head_gate, a.beta.dim() == 4)
        self._check_more_gates(given, sizes)
        sizes.check_sequences(a.cu_seqlens)
        check_state(sizes, a.initial_state, a.state_v_first)
        check_gate(given, sizes, a.use_gate_in_kernel, False, a.lower_bound, self.head_gate)

    def _check_more_gates(self, given: dict[str, Tensor], sizes: Sizes) -> None:
        """Check gk and gv."""
        if "gk" in given and not self.head_gate:
            raise ValueError("gk is given, must be None where g has a number for each channel")
        for name, shape in (("gk", "B T HV K"), ("gv", "B T HV V")):
            if name in given:
                check_dtype(name, given[name], STEP_DTYPES)
                sizes.take(name, given[name], shape)

    def prepare(self, a: Arguments) -> _Ready:
        arch = launch.arch_for(a.q.device)
        (request,) = recurrent_requests(
            self.decays,
            arch=arch,
            gk_dtype="none" if a.gk is None else DTYPE_NAMES[a.gk.dtype],
            gv_dtype="none" if a.gv is None else DTYPE_NAMES[a.gv.dtype],
            beta_columns=a.beta.dim() == 4,
            **sequence_plan(a),
        )
        return (launch.get_for(a.q.device, *request), *launch_scalars(a))

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        scale: float | None,
        initial_state: Tensor | None,
        output_final_state: Any,
        use_qk_l2norm_in_kernel: Any,
        use_gate_in_kernel: Any,
        use_beta_sigmoid_in_kernel: Any,
        allow_neg_eigval: Any,
        lower_bound: float | None,
        state_v_first: Any,
        cu_seqlens: Tensor | None,
        gk: Tensor | None,
        gv: Tensor | None,
        ready: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        key = None
        if is_grad_enabled():
            self.takes_gradient(q, k, v, g, beta, A_log, dt_bias, initial_state, gk, gv)
        try:
            dim_k, shape = q.shape[-1], v.shape
            if ready is None:
                # In the table's keys 1.0 == True, so a number could pass for a flag.
                if not (
                    (output_final_state is True or output_final_state is False)
                    and (use_qk_l2norm_in_kernel is True or use_qk_l2norm_in_kernel is False)
                    and (use_gate_in_kernel is True or use_gate_in_kernel is False)
                    and (use_beta_sigmoid_in_kernel is True or use_beta_sigmoid_in_kernel is False)
                    and (allow_neg_eigval is True or allow_neg_eigval is False)
                    and (state_v_first is True or state_v_first is False)
                ):
                    require_flags(
                        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
                    )  # fmt: skip
                key = (
                    dim_k, shape[-1], q.dtype, g.dtype, beta.dtype, beta.is_neg(), q.get_device(),
                    self.head_gate and g.is_neg(),
                    A_log is None, dt_bias is None, scale, type(scale), initial_state is None,
                    output_final_state, use_qk_l2norm_in_kernel,
                    use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                    allow_neg_eigval, lower_bound, type(lower_bound), state_v_first,
                    None if cu_seqlens is None else cu_seqlens.dtype, beta.dim(),
                    None if gk is None else gk.dtype, None if gv is None else gv.dtype,
                    not v.numel(),  # keys with True are never in the table
                )  # fmt: skip
                ready = self.ready[key]
            function, q_scale, bound, beta_scale = ready
            A, bias = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
            if A is not None and A.dim() != 1:
                A = A.view(-1)
            if bias is not None and bias.dim() != self.dt_bias_dims:
                bias = bias.view(-1) if self.dt_bias_dims == 1 else bias.view(-1, dim_k)
            o, final_state = _outputs(
                v, shape, dim_k, output_final_state, state_v_first, cu_seqlens
            )
            function(
                q, k, v, g, beta, A, bias, o, initial_state, final_state, cu_seqlens, gk, gv,
                q_scale, bound, beta_scale,
            )  # fmt: skip
            return o, final_state
        except Exception as error:
            return self.failed(  # type: ignore[no-any-return]
                error, key, ready, q, k, v, g, beta, A_log, dt_bias, scale, initial_state,
                output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first,
                cu_seqlens, gk, gv,
            )  # fmt: skip

    def outputs(self, a: Arguments) -> tuple[Tensor, Tensor | None]:
        shape, dim_k = a.v.shape, a.q.shape[-1]
        return _outputs(a.v, shape, dim_k, a.output_final_state, a.state_v_first, a.cu_seqlens)

    def readable(self, a: Arguments) -> Arguments:
        rows = [*(("q", "k", "v") if self.head_gate else ("q", "k", "v", "g")), "gk", "gv"]
        changed: dict[str, Any] = {
            name: _with_rows(x) for name in rows if (x := getattr(a, name)) is not None
        }
        if a.use_gate_in_kernel:
            changed |= readable_parameters(a)
        return a._replace(
            **changed,
            initial_state=readable_state(a.initial_state),
            cu_seqlens=None if a.cu_seqlens is None else contiguous(a.cu_seqlens),
        )

    def nothing(self, a: Arguments) -> tuple[Tensor, Tensor | None] | None:
        if a.v.numel() and (a.cu_seqlens is None or len(a.cu_seqlens) > 1):
            return None
        o, final_state = self.outputs(a)
        return o, unchanged(final_state, a.initial_state)


class _RecurrentKda(Recurrent):
    name = "fused_recurrent_kda"
    decays, dt_bias_dims = "channel", 2


_recurrent = _RecurrentKda()
_forward = _recurrent.forward  # bound once: this saves time per call
recurrent_kda = _recurrent.routed  # with gk and gv


def _outputs(
    v: Tensor,
    shape: torch.Size,  # v's shape
    dim_k: int,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    o = _empty(shape, dtype=v.dtype, device=v.device)
    if not output_final_state:
        return o, None
    matrix = (shape[3], dim_k) if state_v_first else (dim_k, shape[3])
    sequences = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return o, _empty((sequences, shape[2], *matrix), dtype=torch.float32, device=v.device)


def _with_rows(x: Tensor) -> Tensor:
    """x if x has contiguous rows, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
