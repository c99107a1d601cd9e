"""Kimi Delta Attention token by token over whole sequences: the operator.

The warm path is a look-up of the loaded kernel, the allocations, and the call. The look-up pins
down all that the kernel is chosen by; the rest is checked by the compiled host code before it
launches, and when that refuses, `_check` says why in terms of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import launch
from ...kernels.kda import table
from ...kernels.kda.step.heuristics import step_config
from ...kernels.kda.step.spec import RecurrentSpec
from ..checks import (
    DTYPE_NAMES,
    LARGEST,
    SMALLEST,
    check_autograd,
    check_flags,
    check_number,
    check_tangents,
    check_tensors,
)
from ..operator import (
    PLAIN,
    dispatch_mode_depth,
    forward_ad,
    is_compiling,
    is_dynamo_compiling,
    is_grad_enabled,
    plain,
)
from ..operator import (
    _intercepted as intercepted,
)
from ..operator import (
    _overridden as overridden,
)
from .arguments import (
    MAX_GRID_YZ,
    Sizes,
    check_gate,
    check_state,
    contiguous,
    gate_kind,
    index_dtype,
    readable_parameter,
    readable_state,
)
from .decode import check_step_dtypes, check_step_options, check_step_shapes

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
    if (
        not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor
        and (A_log is None or type(A_log) in PLAIN)
        and (dt_bias is None or type(dt_bias) in PLAIN)
        and (initial_state is None or type(initial_state) in PLAIN)
        and (cu_seqlens is None or type(cu_seqlens) is Tensor)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
    ):
        return _forward(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
        )  # fmt: skip
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    if not intercepted(*tensors):
        check_tangents(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state
        )
        return _forward(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
        )  # fmt: skip
    # Where it is traced, the fake implementation checks.
    if not is_compiling() and not overridden(*tensors):
        _check(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
        )  # fmt: skip
    check_autograd("fused_recurrent_kda", q, k, v, g, beta, initial_state, A_log, dt_bias)
    o, final_state = torch.ops.cute_attn.fused_recurrent_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        lower_bound, state_v_first, cu_seqlens,
    )  # fmt: skip
    return o, final_state if output_final_state else None


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


# -- launching ----------------------------------------------------------------------------------

_empty = torch.empty

# The kernel, scale where none is given, and factor of beta's sigmoid.
_Ready = tuple[Callable[..., None], float, float]

# Everything that a kernel is chosen by -> the loaded kernel.
_ready: dict[tuple[Any, ...], _Ready] = {}


def _forward(
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
) -> tuple[Tensor, Tensor | None]:
    """fused_recurrent_kda, where no check is due but what the kernel's host code does."""
    arguments = (
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        lower_bound, state_v_first, cu_seqlens,
    )  # fmt: skip
    try:
        ready = _ready[_key(*arguments)]
        if not v.numel():
            raise KeyError
        if scale is not None and (not SMALLEST <= scale <= LARGEST or scale is True):
            raise KeyError
        if lower_bound is not None and not -LARGEST <= lower_bound <= -SMALLEST:
            raise KeyError
    except Exception:  # new, or nothing to do, or a number that is checked first, or not tensors
        return _first_call(*arguments)
    if is_grad_enabled():
        check_autograd("fused_recurrent_kda", q, k, v, g, beta, initial_state, A_log, dt_bias)
    try:
        if not use_gate_in_kernel:
            A_log = dt_bias = None
        else:
            if A_log is not None and A_log.dim() != 1:
                A_log = A_log.view(-1)
            if dt_bias is not None and dt_bias.dim() != 2:
                dt_bias = dt_bias.view(-1, q.shape[-1])
        return _launch(
            ready, q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
            lower_bound, state_v_first, cu_seqlens,
        )  # fmt: skip
    except Exception as error:
        return _refused(error, *arguments)


def _key(
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
) -> tuple[Any, ...]:
    del k, scale
    return (
        q.shape[-1], v.shape[-1], q.dtype, g.dtype, beta.dtype, q.get_device(), A_log is None,
        dt_bias is None, initial_state is None, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound is None,
        state_v_first, None if cu_seqlens is None else cu_seqlens.dtype,
    )  # fmt: skip


def _launch(
    ready: _Ready,
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
    lower_bound: float | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    function, default_scale, beta_scale = ready
    shape = v.shape
    o = _empty(shape, dtype=v.dtype, device=v.device)
    final_state = None
    if output_final_state:
        matrix = (shape[3], q.shape[3]) if state_v_first else (q.shape[3], shape[3])
        sequences = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final_state = _empty((sequences, shape[2], *matrix), dtype=torch.float32, device=v.device)
    function(
        q, k, v, g, beta, A_log, dt_bias, o, initial_state, final_state, cu_seqlens,
        default_scale if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
        beta_scale,
    )  # fmt: skip
    return o, final_state


def _first_call(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Check, load the kernel and remember it, and call it."""
    (
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, _,
        use_gate_in_kernel, _, _, lower_bound, state_v_first, cu_seqlens,
    ) = arguments  # fmt: skip
    sizes = _check_all(*arguments)
    check_autograd("fused_recurrent_kda", q, k, v, g, beta, initial_state, A_log, dt_bias)
    if v.numel() == 0 or sizes["N"] == 0:
        o, final_state = _outputs(sizes, v, output_final_state, state_v_first)
        if not output_final_state:
            return o, None
        if initial_state is None:
            return o, final_state.zero_()
        return o, final_state.copy_(initial_state)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    return _launch(
        _prepare(*arguments),
        _readable(q),
        _readable(k),
        _readable(v),
        _readable(g),
        beta,
        readable_parameter(A_log, sizes["HV"]),
        readable_parameter(dt_bias, sizes["HV"], sizes["K"]),
        scale,
        readable_state(initial_state),
        output_final_state,
        lower_bound,
        state_v_first,
        None if cu_seqlens is None else contiguous(cu_seqlens),
    )


def _readable(x: Tensor) -> Tensor:
    """x itself where its rows are contiguous, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _refused(error: Exception, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    """The compiled host code would not launch: say why in the operator's words, or mend it."""
    q, k, v, g, _, A_log, dt_bias, _, initial_state, *_, cu_seqlens = arguments
    use_gate_in_kernel = arguments[11]
    sizes = _check_all(*arguments)
    mended = [
        *(_readable(x) is not x for x in (q, k, v, g)),
        readable_state(initial_state) is not initial_state,
        cu_seqlens is not None and contiguous(cu_seqlens) is not cu_seqlens,
    ]
    if use_gate_in_kernel:
        mended += [
            readable_parameter(A_log, sizes["HV"]) is not A_log,
            readable_parameter(dt_bias, sizes["HV"], sizes["K"]) is not dt_bias,
        ]
    if any(mended) or sizes["N"] == 0:
        return _first_call(*arguments)
    raise error


def _outputs(
    sizes: Sizes, v: Tensor, output_final_state: bool, state_v_first: bool
) -> tuple[Tensor, Tensor]:
    """o and final_state, the second without elements where it is not asked for."""
    matrix = (sizes["V"], sizes["K"]) if state_v_first else (sizes["K"], sizes["V"])
    return (
        _empty(v.shape, dtype=v.dtype, device=v.device),
        _empty(
            (sizes["N"], sizes["HV"], *matrix) if output_final_state else (0,),
            dtype=torch.float32,
            device=v.device,
        ),
    )


def _prepare(*arguments: Any) -> _Ready:
    """Load the kernel for these arguments, and remember it if they are on a GPU."""
    (
        q, _, v, g, beta, A_log, dt_bias, _, initial_state, output_final_state, l2norm, gate,
        beta_sigmoid, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
    ) = arguments  # fmt: skip
    (request,) = plan_fused_recurrent_kda(
        launch.arch_for(q.device),
        dtype=DTYPE_NAMES[q.dtype],
        gate_dtype=DTYPE_NAMES[g.dtype],
        beta_dtype=DTYPE_NAMES[beta.dtype],
        head_dim_k=q.shape[-1],
        head_dim_v=v.shape[-1],
        initial_state=initial_state is not None,
        output_final_state=bool(output_final_state),
        use_qk_l2norm_in_kernel=bool(l2norm),
        use_gate_in_kernel=bool(gate),
        use_beta_sigmoid_in_kernel=bool(beta_sigmoid),
        lower_bound=lower_bound is not None,
        state_v_first=bool(state_v_first),
        index_dtype=index_dtype(cu_seqlens),
        A_log=A_log is not None,
        dt_bias=dt_bias is not None,
    )
    ready = (
        launch.get_for(q.device, *request),
        q.shape[-1] ** -0.5,
        2.0 if allow_neg_eigval else 1.0,
    )
    if q.is_cuda:  # which emulator runs a CPU tensor depends on where the call is made
        _ready[_key(*arguments)] = ready
    return ready


# -- checks -------------------------------------------------------------------------------------


def _check_all(*arguments: Any) -> Sizes:
    """Raise the documented exception if no kernel can take these arguments."""
    sizes = _check(*arguments)
    launch.check_device("q", arguments[0].device)
    return sizes


def _check(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    scale: Any,
    initial_state: Any,
    output_final_state: Any,
    use_qk_l2norm_in_kernel: Any,
    use_gate_in_kernel: Any,
    use_beta_sigmoid_in_kernel: Any,
    allow_neg_eigval: Any,
    lower_bound: Any,
    state_v_first: Any,
    cu_seqlens: Any,
) -> Sizes:
    """The checks that need no memory, and so hold for fake tensors too."""
    given = check_tensors(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        {
            "A_log": A_log,
            "dt_bias": dt_bias,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
        },
    )
    check_number("scale", scale)
    check_number("lower_bound", lower_bound)
    check_flags(
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    check_step_options(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_step_dtypes(given)
    sizes = Sizes()
    check_step_shapes(sizes, given, "B T")
    sizes.check_sequences(cu_seqlens)
    if sizes["N"] > MAX_GRID_YZ:
        raise ValueError(f"there are {sizes['N']} sequences, at most {MAX_GRID_YZ} fit one call")
    check_state(sizes, initial_state, state_v_first)
    check_gate(given, sizes, use_gate_in_kernel, False, lower_bound)
    return sizes


# -- the registered operator --------------------------------------------------------------------

_library = torch.library.Library("cute_attn", "FRAGMENT")
_library.define(
    "fused_recurrent_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "Tensor? A_log=None, Tensor? dt_bias=None, float? scale=None, Tensor? initial_state=None, "
    "bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
    "bool use_gate_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, "
    "bool allow_neg_eigval=False, float? lower_bound=None, bool state_v_first=False, "
    "Tensor? cu_seqlens=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _operator(
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
) -> tuple[Tensor, Tensor]:
    """o and final_state, the second without elements where it is not asked for."""
    q, k, v, g, beta = map(plain, (q, k, v, g, beta))
    A_log, dt_bias = plain(A_log), plain(dt_bias)
    initial_state, cu_seqlens = plain(initial_state), plain(cu_seqlens)
    check_tangents(
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state
    )
    with torch.no_grad():  # whoever calls it by its own name gets no gradient, as its schema says
        o, final_state = _forward(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
        )  # fmt: skip
    return o, o.new_empty(0, dtype=torch.float32) if final_state is None else final_state


def _fake(
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
) -> tuple[Tensor, Tensor]:
    sizes = _check(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        lower_bound, state_v_first, cu_seqlens,
    )  # fmt: skip
    return _outputs(sizes, v, output_final_state, state_v_first)


_library.impl("fused_recurrent_kda", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("cute_attn::fused_recurrent_kda", _fake, lib=_library)
