"""The Gated Delta Net token by token over whole sequences: the public function and its plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import launch
from ..checks import check_dtype, check_shapes, check_tensor
from ..kda.arguments import by_former_name
from ..kda.limits import GATE_DTYPES
from ..kda.recurrent import Recurrent, recurrent_kda, recurrent_requests
from ..operator import PLAIN, dispatch_mode_depth, forward_ad, is_dynamo_compiling

__all__ = ["fused_recurrent_gated_delta_rule", "plan_fused_recurrent_gated_delta_rule"]


class _RecurrentGatedDeltaRule(Recurrent):
    name = "fused_recurrent_gated_delta_rule"
    decays, dt_bias_dims = "head", 1


_recurrent = _RecurrentGatedDeltaRule()
_forward = _recurrent.forward  # bound once: this saves time per call


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The Gated Delta Net over sequences, token by token: for short sequences, and as a check.

    The formula is `gated_delta_rule_decode`'s. Names, order and defaults of the arguments match
    flash-linear-attention's function of this name. Arithmetic is float32 for all dtypes. States are
    not updated in place; use `gated_delta_rule_decode` for updates in place.

    Args:
        q: `[B, T, HQK, K]`, bfloat16, float16 or float32; K is 64, 128 or 256. q, k and v are read
            in place if the last dimension is contiguous, and copied otherwise.
        k: of q's shape and dtype.
        v: `[B, T, HV, V]`, dtype of q; V is 64, 128, 192 or 256. HV is a multiple of HQK, and value
            head h uses query and key head h // (HV // HQK).
        g: `[B, T, HV]`, float32, bfloat16 or float16, any strides: natural logarithms of the decay,
            or with use_gate_in_kernel the input of the gate. None is no decay.
        gk: `[B, T, HV, K]`, dtypes as g: natural logarithms of one decay for each channel of K, in
            addition to g. g alone is the input of the gate of use_gate_in_kernel.
        gv: `[B, T, HV, V]`, dtypes as g: natural logarithms of one decay for each column of V, in
            addition to g and gk. gk and gv are copied unless the last dimension is contiguous.
        beta: `[B, T, HV]`, or `[B, T, HV, V]` for a beta of each column of V; float32, bfloat16 or
            float16, any strides. None is 1.
        scale: factor of q; None is K ** -0.5.
        initial_state: `[N, HV, K, V]`, float32, or in 16 bits, then converted; None is 0. N, the
            number of sequences, is B without cu_seqlens.
        output_final_state: whether to return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6).
        use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias).
        A_log: HV numbers of any shape and floating-point dtype.
        dt_bias: HV numbers of any shape and floating-point dtype; None is 0. A_log and dt_bias are
            ignored without use_gate_in_kernel.
        use_beta_sigmoid_in_kernel: use sigmoid(beta) instead of beta.
        allow_neg_eigval: use 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
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
    if gk is not None and g is None and not use_gate_in_kernel:
        # KDA's kernel has the same formula, and no gate of the head.
        _check_channels(q, v, gk)
        _, beta = _defaults(v, gk, beta, False, use_beta_sigmoid_in_kernel)
        call, g, gk = recurrent_kda, gk, None
        A_log = dt_bias = None
    else:
        if g is None or beta is None:
            g, beta = _defaults(v, g, beta, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
        call = (
            _forward
            if not is_dynamo_compiling()
            and type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor
            and (A_log is None or type(A_log) in PLAIN)
            and (dt_bias is None or type(dt_bias) in PLAIN)
            and (initial_state is None or type(initial_state) in PLAIN)
            and (cu_seqlens is None or type(cu_seqlens) is Tensor)
            and (gk is None or type(gk) is Tensor)
            and (gv is None or type(gv) is Tensor)
            and forward_ad._current_level < 0
            and not dispatch_mode_depth()
            else _recurrent.routed
        )
    result: tuple[Tensor, Tensor | None] = call(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        None, state_v_first, cu_seqlens, gk, gv,
    )  # fmt: skip
    return result


def _check_channels(q: Any, v: Any, gk: Any) -> None:
    """Check gk, which the kernel takes as g.

    Raises:
        TypeError, ValueError: gk has a wrong type, dtype or shape.
    """
    for name, x in (("q", q), ("v", v), ("gk", gk)):
        check_tensor(name, x)
    check_dtype("gk", gk, GATE_DTYPES)
    check_shapes({"gk": gk}, {"gk": (*v.shape[:-1], q.shape[-1])})


def _defaults(
    v: Any, g: Tensor | None, beta: Tensor | None, gated: Any, sigmoid: Any
) -> tuple[Tensor, Tensor]:
    """g and beta, with a value for each that is None.

    Raises:
        ValueError: a value is missing that is to go through the gate or the sigmoid.
    """
    for name, x, flag, used in (
        ("g", g, "use_gate_in_kernel", gated),
        ("beta", beta, "use_beta_sigmoid_in_kernel", sigmoid),
    ):
        if x is None and used:
            raise ValueError(f"{name} is None, must be given with {flag}")
    if not isinstance(v, Tensor):
        raise TypeError(f"v must be a torch.Tensor, got {type(v).__name__}")
    shape = v.shape[:-1]
    g = v.new_zeros(()).expand(shape) if g is None else g
    return g, v.new_ones(()).expand(shape) if beta is None else beta


@launch.planner
def plan_fused_recurrent_gated_delta_rule(
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
    state_v_first: bool = False,
    index_dtype: str = "none",
    dt_bias: bool = True,
    gk_dtype: str = "none",
    gv_dtype: str = "none",
    beta_columns: bool = False,
) -> list[launch.Request]:
    """The kernel that `fused_recurrent_gated_delta_rule` uses for these arguments, for
    `cute_attn.warmup` and spec files. The choice does not depend on batch, lengths and numbers of
    heads.

    Args:
        arch: architecture, such as "sm_90a"; today there is one kernel for all architectures from
            sm_80 on.
        dtype: dtype of q, k and v.
        gate_dtype: dtype of g; None means q's dtype, "none" a call with gk and without g.
        beta_dtype: dtype of beta; None means q's dtype.
        head_dim_k: K, head dimension of q and k.
        head_dim_v: V, head dimension of v.
        initial_state: whether initial_state is given.
        output_final_state: as in the operator.
        use_qk_l2norm_in_kernel: as in the operator.
        use_gate_in_kernel: as in the operator.
        use_beta_sigmoid_in_kernel: as in the operator.
        state_v_first: as in the operator.
        index_dtype: dtype of cu_seqlens, "int32" or "int64"; "none" without cu_seqlens.
        dt_bias: whether dt_bias is given; ignored without use_gate_in_kernel.
        gk_dtype: dtype of gk; "none" without gk.
        gv_dtype: dtype of gv; "none" without gv.
        beta_columns: whether beta is `[B, T, HV, V]`.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
    """
    plan = {**locals(), "lower_bound": False, "A_log": True}
    if gate_dtype == "none":
        plan |= {"gate_dtype": gk_dtype, "gk_dtype": "none"}
    return recurrent_requests("channel" if gate_dtype == "none" else "head", **plan)
