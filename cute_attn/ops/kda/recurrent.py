"""Kimi Delta Attention token by token over whole sequences: the operator.

The warm path is a look-up of the loaded kernel, the allocations, and the call. The look-up pins
down all that the kernel is chosen by; the compiled host code checks the rest before it launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.kda import table
from ...kernels.kda.step.heuristics import step_config
from ...kernels.kda.step.spec import RecurrentSpec
from ..checks import DTYPE_NAMES, check_flags, check_number
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
    check_beta_options,
    check_gate,
    check_state,
    check_step_dtypes,
    check_step_shapes,
    contiguous,
    gate_kind,
    index_dtype,
    readable_parameters,
    readable_state,
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
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over sequences, token by token: for short ones, and as a check.

    The formula, and arguments by name, order and default, are `chunk_kda`'s but for those that do
    not apply here; arithmetic is float32 whatever the dtypes. The states are not updated in place,
    see `kda_decode` for that.

    Args:
        q: `[B, T, HQK, K]`, bfloat16, float16 or float32; K is 64, 128 or 256. Read in place, as
            k, v and g are, where the last dimension is contiguous; copied otherwise.
        k: of q's shape and dtype.
        v: `[B, T, HV, V]`, dtype of q; V is 64, 128 or 256. HV is a multiple of HQK, and value head
            h uses query and key head h // (HV // HQK).
        g: `[B, T, HV, K]`, float32, bfloat16 or float16: natural logarithms of the decay, or with
            use_gate_in_kernel what they are computed from.
        beta: `[B, T, HV]`, float32, bfloat16 or float16; any strides.
        A_log: HV numbers of any shape and floating-point dtype; may be left out with a lower_bound.
        dt_bias: HV * K numbers, likewise; None is 0. Ignored, as A_log is, without
            use_gate_in_kernel.
        scale: of q; None is K ** -0.5.
        initial_state: `[N, HV, K, V]`, float32 (or bfloat16, which is converted); None is 0. N is
            the number of sequences: B, or as cu_seqlens has it.
        output_final_state: whether to give the states after the last tokens.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6).
        use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: beta is the input of a sigmoid.
        allow_neg_eigval: beta is twice the sigmoid; needs use_beta_sigmoid_in_kernel.
        lower_bound: of the gate; ignored without use_gate_in_kernel.
        state_v_first: states are `[..., V, K]` rather than `[..., K, V]`.
        cu_seqlens: `[N + 1]` int32 or int64: sequence n has the tokens from element n up to element
            n + 1, of which there may be none; B is 1. Not decreasing, at most T; this is not
            checked, since it would synchronise.

    Returns:
        (o, final_state). o is `[B, T, HV, V]`, dtype of q, contiguous, undefined for tokens of no
        sequence. final_state is `[N, HV, K, V]` float32, or None unless asked for.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: head counts that do not fit, wrong shapes, devices or values.
        NotImplementedError: head dimensions without a kernel, or autograd, which has no backward.
    """
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
        lower_bound, state_v_first, cu_seqlens,
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
) -> list[launch.Request]:
    """The kernel that `fused_recurrent_kda` will use for such arguments, for `cute_attn.warmup`
    and spec files. Batch, lengths and numbers of heads do not matter.

    Args:
        arch: such as "sm_90a"; every architecture from sm_80 on takes the same kernel today.
        dtype: of q, k and v.
        gate_dtype: of g; None is that of q.
        beta_dtype: of beta; None is that of q.
        head_dim_k: K, of q and k.
        head_dim_v: V, of v.
        initial_state: whether there is one.
        output_final_state: as the operator's.
        use_qk_l2norm_in_kernel: as the operator's.
        use_gate_in_kernel: as the operator's.
        use_beta_sigmoid_in_kernel: as the operator's.
        lower_bound: whether there is one.
        state_v_first: as the operator's.
        index_dtype: of cu_seqlens, "int32" or "int64"; "none" without.
        A_log: whether it is given; counts only with use_gate_in_kernel.
        dt_bias: likewise.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter of another type.
        ValueError: no kernel is specialised so; the message names the parameter.
    """
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
        dt_bias_dims=2 if gated and dt_bias else 0,
        gate=gate_kind(gated, 0.0 if lower_bound else None),
        l2norm=bool(use_qk_l2norm_in_kernel),
        beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
        index_dtype=index_dtype,
        has_initial_state=bool(initial_state),
        has_final_state=bool(output_final_state),
        **tuned,
        **step_config(**tuned, multi_token=True),
    )
    return [(table.RECURRENT, spec)]


# -- the operator -------------------------------------------------------------------------------

_empty = torch.empty

# The kernel, scale, lower_bound, and the factor of beta's sigmoid.
_Ready = tuple[Callable[..., None], float, float, float]


class _Arguments(NamedTuple):
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


class _Recurrent(Operator[_Arguments]):
    name = "fused_recurrent_kda"
    arguments = _Arguments
    results = (("o", ""), ("final_state", "output_final_state"))

    def check(self, a: _Arguments, given: dict[str, Tensor]) -> None:
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
        check_step_shapes(sizes, given, "B T")
        sizes.check_sequences(a.cu_seqlens)
        check_state(sizes, a.initial_state, a.state_v_first)
        check_gate(given, sizes, a.use_gate_in_kernel, False, a.lower_bound)

    def prepare(self, a: _Arguments) -> _Ready:
        (request,) = plan_fused_recurrent_kda(
            launch.arch_for(a.q.device),
            dtype=DTYPE_NAMES[a.q.dtype],
            gate_dtype=DTYPE_NAMES[a.g.dtype],
            beta_dtype=DTYPE_NAMES[a.beta.dtype],
            head_dim_k=a.q.shape[-1],
            head_dim_v=a.v.shape[-1],
            initial_state=a.initial_state is not None,
            output_final_state=bool(a.output_final_state),
            use_qk_l2norm_in_kernel=bool(a.use_qk_l2norm_in_kernel),
            use_gate_in_kernel=bool(a.use_gate_in_kernel),
            use_beta_sigmoid_in_kernel=bool(a.use_beta_sigmoid_in_kernel),
            lower_bound=a.lower_bound is not None,
            state_v_first=bool(a.state_v_first),
            index_dtype=index_dtype(a.cu_seqlens),
            A_log=a.A_log is not None,
            dt_bias=a.dt_bias is not None,
        )
        return (
            launch.get_for(a.q.device, *request),
            a.q.shape[-1] ** -0.5 if a.scale is None else float(a.scale),
            0.0 if a.lower_bound is None else float(a.lower_bound),
            2.0 if a.allow_neg_eigval else 1.0,
        )

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
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        use_gate_in_kernel: bool,
        use_beta_sigmoid_in_kernel: bool,
        allow_neg_eigval: bool,
        lower_bound: float | None,
        state_v_first: bool,
        cu_seqlens: Tensor | None,
        ready: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        key = None
        if is_grad_enabled():
            self.takes_gradient(q, k, v, g, beta, A_log, dt_bias, initial_state)
        try:
            if ready is None:
                key = (
                    q.shape[-1], v.shape[-1], q.dtype, g.dtype, beta.dtype, q.get_device(),
                    A_log is None, dt_bias is None, scale, type(scale), initial_state is None,
                    output_final_state, use_qk_l2norm_in_kernel,
                    use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                    allow_neg_eigval, lower_bound, type(lower_bound), state_v_first,
                    None if cu_seqlens is None else cu_seqlens.dtype,
                    not v.numel(),  # for which nothing is ever loaded
                )  # fmt: skip
                ready = self.ready[key]
            function, q_scale, bound, beta_scale = ready
            A, bias = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
            if A is not None and A.dim() != 1:
                A = A.view(-1)
            if bias is not None and bias.dim() != 2:
                bias = bias.view(-1, q.shape[-1])
            o, final_state = _outputs(q, v, output_final_state, state_v_first, cu_seqlens)
            function(
                q, k, v, g, beta, A, bias, o, initial_state, final_state, cu_seqlens, q_scale,
                bound, beta_scale,
            )  # fmt: skip
            return o, final_state
        except Exception as error:
            return self.failed(  # type: ignore[no-any-return]
                error, key, ready, q, k, v, g, beta, A_log, dt_bias, scale, initial_state,
                output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first,
                cu_seqlens,
            )  # fmt: skip

    def outputs(self, a: _Arguments) -> tuple[Tensor, Tensor | None]:
        return _outputs(a.q, a.v, a.output_final_state, a.state_v_first, a.cu_seqlens)

    def readable(self, a: _Arguments) -> _Arguments:
        changed: dict[str, Any] = {name: _with_rows(getattr(a, name)) for name in "qkvg"}
        if a.use_gate_in_kernel:
            changed |= readable_parameters(a)
        return a._replace(
            **changed,
            initial_state=readable_state(a.initial_state),
            cu_seqlens=None if a.cu_seqlens is None else contiguous(a.cu_seqlens),
        )

    def nothing(self, a: _Arguments) -> tuple[Tensor, Tensor | None] | None:
        if a.v.numel() and (a.cu_seqlens is None or len(a.cu_seqlens) > 1):
            return None
        o, final_state = self.outputs(a)
        return o, unchanged(final_state, a.initial_state)


_recurrent = _Recurrent()
_forward = _recurrent.forward  # bound once


def _outputs(
    q: Tensor, v: Tensor, output_final_state: bool, state_v_first: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    shape = v.shape
    o = _empty(shape, dtype=v.dtype, device=v.device)
    if not output_final_state:
        return o, None
    matrix = (shape[3], q.shape[3]) if state_v_first else (q.shape[3], shape[3])
    sequences = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return o, _empty((sequences, shape[2], *matrix), dtype=torch.float32, device=v.device)


def _with_rows(x: Tensor) -> Tensor:
    """x itself where its rows are contiguous, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
