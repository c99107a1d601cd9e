"""Decode of KDA and the Gated Delta Net: the operator that both share.

A model calls decode for every layer and token, so a warm call only looks up the loaded kernel and
calls it. Before the launch, the compiled host code checks all that the look-up's key leaves open:
sizes, strides, overlaps, the other tensors' dtypes and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.common.spec import VECTOR_BYTES
from ...kernels.delta import table
from ...kernels.delta.step.heuristics import step_config
from ...kernels.delta.step.spec import (
    CONV_TAPS,
    HEAD_DIMS,
    HEAD_DIMS_V,
    PARAMETER_DTYPES,
    STATE_DTYPES,
    DecodeSpec,
    RecordsSpec,
)
from ...kernels.delta.step.spec import DTYPES as STEP_DTYPES
from ..checks import (
    DTYPE_NAMES,
    check_contiguous,
    check_dtype,
    check_dtypes_are,
    check_flags,
    check_has_slots,
    check_int32,
    check_not_expanded,
    check_number,
    check_rows,
    check_state_address,
    check_state_strides,
    exceeds,
    require_flags,
)
from ..counters import counters_of_pool
from ..memory import check_memory, check_windows
from ..operator import PLAIN, Operator, increment_version, is_grad_enabled
from .arguments import (
    MAX_GRID_YZ,
    Sizes,
    check_beta_options,
    check_has_A_log,
    check_lower_bound,
    check_slots,
    check_step_dtypes,
    check_step_shapes,
    gate_kind,
    index_dtype,
    launch_scalars,
    slots_plan,
)


def decode_requests(
    decays: str,
    *,
    arch: str,
    dtype: str,
    gate_dtype: str | None,
    beta_dtype: str | None,
    state_dtype: str,
    A_log_dtype: str,
    dt_bias_dtype: str,
    dt_bias_dims: int,
    head_dim_k: int,
    head_dim_v: int,
    state_v_first: bool,
    lower_bound: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    multi_token: bool,
    slots: str,
    indexed: bool,
    accepted: bool,
    slot_dtype: str = "int32",
    strided_slots: bool = False,
    null_slot: bool = False,
    has_initial_state: bool,
    index_dtype: str,
    conv_dtype: str,
    conv_bias: bool,
) -> list[launch.Request]:
    """The kernels of a plan; see `plan_kda_decode`. `decays` is as in `StepSpec`."""
    del arch
    tuned: dict[str, Any] = {
        "state_dtype": state_dtype,
        "head_dim_k": head_dim_k,
        "head_dim_v": head_dim_v,
        "state_v_first": state_v_first,
        "multi_token": multi_token,
    }
    for name, dim, dims in (
        ("head_dim_k", head_dim_k, HEAD_DIMS), ("head_dim_v", head_dim_v, HEAD_DIMS_V)
    ):  # fmt: skip
        if dim not in dims:
            raise ValueError(f"{name} is {dim}, must be one of {dims}")
    gated = use_gate_in_kernel
    indexed = indexed if slots in ("records", "drafts") else slots != "batch"
    of_slots: dict[str, Any] = {"fresh": bool(has_initial_state)}
    if indexed:
        of_slots |= {
            "slot_dtype": slot_dtype,
            "strided_slots": bool(strided_slots),
            "null_slot": bool(null_slot),
        }
    spec = DecodeSpec(
        dtype=dtype,
        gate_dtype=gate_dtype or dtype,
        beta_dtype=beta_dtype or dtype,
        A_log_dtype=A_log_dtype if gated else "none",
        dt_bias_dtype=dt_bias_dtype if gated else "none",
        dt_bias_dims=dt_bias_dims if gated and dt_bias_dtype != "none" else 0,
        gate=gate_kind(gated, 0.0 if lower_bound else None),
        l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        slots=slots,
        indexed=indexed,
        accepted=accepted if slots == "positions" else slots == "records",
        index_dtype=index_dtype,
        decays=decays,
        conv_dtype=conv_dtype,
        conv_bias=conv_bias and conv_dtype != "none",
        **of_slots,
        **tuned,
        **step_config(
            **tuned,
            in_place=slots not in ("positions", "drafts"),
            records=slots == "records",
            convolution=conv_dtype != "none",
        ),
    )
    requests: list[launch.Request] = [(table.DECODE, spec)]
    if slots == "records":
        records = RecordsSpec(
            dtype=dtype,
            gate_dtype=spec.gate_dtype,
            head_dim_k=head_dim_k,
            indexed=spec.indexed,
            decays=decays,
            **of_slots | {"fresh": False},
        )
        requests.append((table.DECODE_RECORDS, records))
    return requests


# -- the operator -------------------------------------------------------------------------------

_empty_like = torch.empty_like
uint8 = torch.uint8


class Arguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    out: Tensor
    scale: float | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    use_qk_l2norm_in_kernel: bool = True
    use_gate_in_kernel: bool = True
    use_beta_sigmoid_in_kernel: bool = True
    allow_neg_eigval: bool = False
    state_v_first: bool = True
    state_indices: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    record_k: Tensor | None = None
    record_g: Tensor | None = None
    record_u: Tensor | None = None
    cu_seqlens: Tensor | None = None
    has_initial_state: Tensor | None = None
    pad_slot_id: int = -1
    draft_states: Tensor | None = None
    draft_indices: Tensor | None = None
    conv_state: Tensor | None = None
    conv_weight: Tensor | None = None
    conv_bias: Tensor | None = None
    draft_windows: Tensor | None = None


_CONVOLUTION = ("conv_state", "conv_weight", "conv_bias")
_RECORDS = ("record_k", "record_g", "record_u")

# (decode kernel, kernel that writes records, scale, lower_bound, factor of beta's sigmoid, whether
# A_log must be flattened)
_Ready = tuple[Callable[..., None], Callable[..., None] | None, float, float, float, bool]


class Decode(Operator[Arguments]):
    """Base class of both operators.

    Class attribute of a subclass:
        decays: what has a decay of its own, "channel" or "head".
    """

    arguments = Arguments
    written = ("state", "out", *_RECORDS, "draft_states", "conv_state", "draft_windows")
    decays: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.head_gate = self.decays == "head"

    def check(self, a: Arguments, given: dict[str, Tensor]) -> None:
        check_number("scale", a.scale)
        check_number("lower_bound", a.lower_bound)
        check_flags(
            use_qk_l2norm_in_kernel=a.use_qk_l2norm_in_kernel,
            use_gate_in_kernel=a.use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=a.use_beta_sigmoid_in_kernel,
            allow_neg_eigval=a.allow_neg_eigval,
            state_v_first=a.state_v_first,
        )
        check_beta_options(a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval)
        check_step_dtypes(given)
        check_dtype("state", a.state, STATE_DTYPES)
        check_int32(given, ("num_accepted_tokens", "draft_indices"))
        check_slots(given, a.pad_slot_id)
        head_gate = self.head_gate
        _check_shapes(a, given, head_gate)
        rows = ("q", "k", "v", "out", "record_k", "record_u")
        check_rows(given, rows if head_gate else (*rows, "g", "record_g"))
        indices = ("num_accepted_tokens", "cu_seqlens", "has_initial_state", "draft_indices")
        check_contiguous(given, (*indices, "conv_weight", "conv_bias"))
        check_state_strides(a.state, VECTOR_BYTES)
        if a.draft_states is not None:
            check_state_strides(a.draft_states, VECTOR_BYTES, "draft_states")
        check_not_expanded(given, self.written)

    def check_memory(self, a: Arguments) -> None:
        check_state_address(a.state, VECTOR_BYTES)
        if a.draft_states is not None:
            check_state_address(a.draft_states, VECTOR_BYTES, "draft_states")
        if a.conv_weight is not None:
            row = CONV_TAPS * a.conv_weight.element_size()
            check_state_address(a.conv_weight, row, "conv_weight")
        tensors = self.tensors(a)
        pools = ("state", *_RECORDS, "draft_states", "conv_state")
        written = {name: tensors.pop(name) for name in ("out", *pools)}
        windows = tensors.pop("draft_windows")
        if windows is not None:
            written["draft_windows"] = check_windows("draft_windows", windows)
        check_memory(written, tensors, pools=pools)

    def nothing(self, a: Arguments) -> Tensor | None:
        if a.v.numel() and (a.cu_seqlens is None or len(a.cu_seqlens) > 1):
            return None
        return a.out

    def readable(self, a: Arguments) -> Arguments:
        """Make state_indices `[B, 1]` into `[B]`, and insert the dimension of tokens that kernels
        with positions, records or drafts need."""
        indices = a.state_indices
        if indices is not None and indices.dim() == 2 and indices.shape[1] == 1:
            a = a._replace(state_indices=indices[:, 0])
            if a.record_k is None:
                a = a._replace(num_accepted_tokens=None)
        if a.q.dim() == 3 and (
            _has_positions(a.state_indices) or a.record_k is not None or a.draft_states is not None
        ):
            steps = {name: getattr(a, name).unsqueeze(1) for name in _OF_A_STEP}
            a = a._replace(**steps)
        return a

    def prepare(self, a: Arguments) -> _Ready:
        if a.record_k is not None:
            slots = "records"
        elif a.draft_states is not None:
            slots = "drafts"
        elif a.state_indices is None:
            slots = "batch"
        else:
            slots = "positions" if _has_positions(a.state_indices) else "indexed"
        requests = decode_requests(
            self.decays,
            arch=launch.arch_for(a.q.device),
            dtype=DTYPE_NAMES[a.q.dtype],
            gate_dtype=DTYPE_NAMES[a.g.dtype],
            beta_dtype=DTYPE_NAMES[a.beta.dtype],
            state_dtype=DTYPE_NAMES[a.state.dtype],
            # Without the gate, A_log and dt_bias may have any dtype.
            A_log_dtype="none" if a.A_log is None else DTYPE_NAMES.get(a.A_log.dtype, "none"),
            dt_bias_dtype="none" if a.dt_bias is None else DTYPE_NAMES.get(a.dt_bias.dtype, "none"),
            dt_bias_dims=0 if a.dt_bias is None else a.dt_bias.dim(),
            head_dim_k=a.q.shape[-1],
            head_dim_v=a.v.shape[-1],
            state_v_first=bool(a.state_v_first),
            lower_bound=a.lower_bound is not None,
            use_qk_l2norm_in_kernel=bool(a.use_qk_l2norm_in_kernel),
            use_gate_in_kernel=bool(a.use_gate_in_kernel),
            use_beta_sigmoid_in_kernel=bool(a.use_beta_sigmoid_in_kernel),
            multi_token=a.q.dim() == 4,
            slots=slots,
            indexed=a.state_indices is not None,
            accepted=a.num_accepted_tokens is not None,
            has_initial_state=a.has_initial_state is not None,
            index_dtype=index_dtype(a.cu_seqlens),
            conv_dtype="none" if a.conv_weight is None else DTYPE_NAMES[a.conv_weight.dtype],
            conv_bias=a.conv_bias is not None,
            **slots_plan(a),
        )
        function, *rest = (launch.get_for(a.q.device, *request) for request in requests)
        return (
            function,
            rest[0] if rest else None,
            *launch_scalars(a),
            bool(a.use_gate_in_kernel) and a.A_log is not None and a.A_log.dim() != 1,
        )

    def stale(self, ready: Any, a: Arguments) -> bool:
        return bool(self.prepare(a) != ready)

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        out: Tensor | None,
        scale: float | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float | None,
        use_qk_l2norm_in_kernel: Any,
        use_gate_in_kernel: Any,
        use_beta_sigmoid_in_kernel: Any,
        allow_neg_eigval: Any,
        state_v_first: Any,
        state_indices: Tensor | None,
        num_accepted_tokens: Tensor | None,
        record_k: Tensor | None,
        record_g: Tensor | None,
        record_u: Tensor | None,
        cu_seqlens: Tensor | None,
        has_initial_state: Tensor | None,
        pad_slot_id: int,
        draft_states: Tensor | None,
        draft_indices: Tensor | None,
        conv_state: Tensor | None,
        conv_weight: Tensor | None,
        conv_bias: Tensor | None,
        draft_windows: Tensor | None,
        ready: Any = None,
    ) -> Tensor:
        key: tuple[Any, ...] | None = None
        try:
            if ready is None:
                # In the table's keys 1.0 == True, so a number could pass for a flag.
                if not (
                    (use_qk_l2norm_in_kernel is True or use_qk_l2norm_in_kernel is False)
                    and (use_gate_in_kernel is True or use_gate_in_kernel is False)
                    and (use_beta_sigmoid_in_kernel is True or use_beta_sigmoid_in_kernel is False)
                    and (allow_neg_eigval is True or allow_neg_eigval is False)
                    and (state_v_first is True or state_v_first is False)
                ):
                    require_flags(
                        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                        allow_neg_eigval, state_v_first,
                    )  # fmt: skip
                key = (
                    # The key has whole shapes: extracting the head dimensions would cost more.
                    q.shape, v.shape, q.dtype, g.dtype, beta.dtype, beta.is_neg(), state.dtype,
                    q.get_device(), scale, type(scale), A_log is None, dt_bias is None, lower_bound,
                    type(lower_bound), use_qk_l2norm_in_kernel, use_gate_in_kernel,
                    use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
                    None if state_indices is None else state_indices.dtype,
                    num_accepted_tokens is None, record_k is None,
                    None if cu_seqlens is None else cu_seqlens.dtype, has_initial_state is None,
                    pad_slot_id, type(pad_slot_id), draft_states is None,
                )  # fmt: skip
                if self.head_gate or not conv_state is conv_weight is conv_bias is None:
                    key = (
                        *key, self.head_gate and _any_is_neg(g, record_g),
                        conv_state is None or conv_state.is_neg(), conv_bias is None,
                        None if conv_weight is None else conv_weight.dtype,
                        draft_windows is not None and draft_windows.is_neg(),
                    )  # fmt: skip
                ready = self.ready[key]
            function, write_records, q_scale, bound, beta_scale, flat_A_log = ready
            if is_grad_enabled() and (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or g.requires_grad
                or beta.requires_grad
                or state.requires_grad
                or (A_log is not None and A_log.requires_grad)
                or (dt_bias is not None and dt_bias.requires_grad)
                or (out is not None and out.requires_grad)
                or (record_k is not None and _any_requires_grad(record_k, record_g, record_u))
                or (draft_states is not None and draft_states.requires_grad)
                or (
                    conv_state is not None
                    and _any_requires_grad(conv_state, conv_weight, conv_bias, draft_windows)
                )
            ):
                self.refuse_gradient()
            o = _empty_like(v) if out is None else out
            function(
                q, k, v, g, beta,
                (A_log.view(-1) if flat_A_log else A_log) if use_gate_in_kernel else None,  # type: ignore[union-attr]
                dt_bias if use_gate_in_kernel else None,
                o, state, state_indices, num_accepted_tokens, record_k, record_g, record_u,
                cu_seqlens,
                None if has_initial_state is None else has_initial_state.view(uint8),
                draft_states, draft_indices, conv_state, conv_weight, conv_bias,
                None
                if conv_state is None or draft_states is not None
                else counters_of_pool(conv_state, q.shape[-2]),
                draft_windows, q_scale, bound, beta_scale,
            )  # fmt: skip
            if write_records is not None:
                write_records(k, g, state_indices, record_k, record_g)
        except Exception as error:
            return self.failed(  # type: ignore[no-any-return]
                error, key, ready, q, k, v, g, beta, state, out, scale, A_log, dt_bias,
                lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, state_indices,
                num_accepted_tokens, record_k, record_g, record_u, cu_seqlens, has_initial_state,
                pad_slot_id, draft_states, draft_indices, conv_state, conv_weight, conv_bias,
                draft_windows,
            )  # fmt: skip
        if conv_state is not None:
            # With drafts, the convolution writes draft_windows only.
            increment_version((conv_state if draft_windows is None else draft_windows,))
        if draft_states is not None:
            increment_version((o, draft_states))
        elif record_k is None:
            increment_version((o, state))
        else:
            increment_version((o, state, record_k, record_g, record_u))  # type: ignore[arg-type]
        return o


_PLAIN_OR_NONE = PLAIN | {type(None)}
_OF_A_STEP = ("q", "k", "v", "g", "beta", "out")


def _any_requires_grad(*tensors: Any) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def is_plain_convolution(conv_state: Any, conv_weight: Any, conv_bias: Any) -> bool:
    """Whether these arguments of a convolution are tensors that cannot intercept a call."""
    return type(conv_state) is Tensor and {type(conv_weight), type(conv_bias)} <= _PLAIN_OR_NONE


def _any_is_neg(*tensors: Tensor | None) -> bool:
    """Whether a tensor is a negated view. Host code refuses such a view only where rows must be
    contiguous."""
    return any(x is not None and x.is_neg() for x in tensors)


def _has_positions(state_indices: Tensor | None) -> bool:
    return state_indices is not None and state_indices.dim() == 2


# -- checks -------------------------------------------------------------------------------------


def _check_shapes(a: Arguments, given: dict[str, Tensor], head_gate: bool) -> None:
    if a.q.dim() not in (3, 4):
        raise ValueError(f"q has shape {list(a.q.shape)}, must be [B, HQK, K] or [B, T, HQK, K]")
    step = "B" if a.q.dim() == 3 else "B T"
    sizes = Sizes()
    check_step_shapes(sizes, given, step, head_gate)
    if sizes.get("T") == 0:
        raise ValueError("q has no tokens: T is 0, must be at least 1")
    if "out" in given:
        sizes.take("out", a.out, f"{step} HV V")
    if a.cu_seqlens is not None:
        _check_packed(a, sizes)
    if a.state_indices is None:
        sizes["N"] = sizes["B"]
    matrix = "V K" if a.state_v_first else "K V"
    sizes.take("state", a.state, f"N HV {matrix}")
    if a.state_indices is not None:
        check_has_slots("state", a.state)
    if exceeds(sizes["B"], MAX_GRID_YZ):
        raise ValueError(f"there are {sizes['B']} sequences, at most {MAX_GRID_YZ} fit one call")
    if a.use_gate_in_kernel:
        _check_gate(given, sizes, a.lower_bound, head_gate)
    _check_slots(given, sizes, head_gate)
    if "has_initial_state" in given:
        sizes.take("has_initial_state", given["has_initial_state"], "B")
    _check_drafts(given, sizes, matrix)
    _check_convolution(a, given, sizes)
    _check_draft_windows(given, sizes)


def _check_packed(a: Arguments, sizes: Sizes) -> None:
    """Check cu_seqlens. From here on, the size B is the number of sequences."""
    if a.q.dim() != 4:
        raise ValueError(
            f"q has shape {list(a.q.shape)}, must be [1, T, HQK, K] where cu_seqlens is given"
        )
    if a.record_k is not None:
        raise ValueError("cu_seqlens is given, must be None with record_k, record_g and record_u")
    sizes.check_sequences(a.cu_seqlens)
    sizes["B"], sizes["packed"] = sizes.pop("N"), True


def _check_drafts(given: dict[str, Tensor], sizes: Sizes, matrix: str) -> None:
    """Check draft_states and draft_indices."""
    names = [name for name in ("draft_states", "draft_indices") if name in given]
    if not names:
        return
    if len(names) == 1:
        missing = "draft_indices" if names[0] == "draft_states" else "draft_states"
        raise ValueError(f"{names[0]} is given without {missing}, which it needs")
    if "record_k" in given or _has_positions(given.get("state_indices")):
        raise ValueError(
            "draft_states is given, must be None with records or with state_indices [B, 1 + S]"
        )
    if given["draft_states"].dtype != given["state"].dtype:
        raise TypeError(
            f"draft_states has dtype {given['draft_states'].dtype}, must be that of state, "
            f"{given['state'].dtype}"
        )
    sizes.take("draft_states", given["draft_states"], f"M S HV {matrix}")
    check_has_slots("draft_states", given["draft_states"])
    sizes.take("draft_indices", given["draft_indices"], "B")
    tokens = sizes.get("T", 1)
    if "packed" not in sizes and tokens > sizes["S"]:
        raise ValueError(
            f"q has {tokens} tokens (T), must be at most the {sizes['S']} states (S) of "
            "draft_states"
        )


def _check_convolution(a: Arguments, given: dict[str, Tensor], sizes: Sizes) -> None:
    """Check conv_state, conv_weight and conv_bias."""
    names = [name for name in _CONVOLUTION if name in given]
    if not names:
        return
    for name in ("conv_state", "conv_weight"):
        if name not in given:
            raise ValueError(f"{names[0]} is given without {name}, which it needs")
    check_dtypes_are(given, ("conv_state",), a.q.dtype)
    check_dtype("conv_weight", given["conv_weight"], STEP_DTYPES)
    check_dtypes_are(given, ("conv_bias",), given["conv_weight"].dtype)
    sizes["D"] = 2 * sizes["HQK"] * sizes["K"] + sizes["HV"] * sizes["V"]
    pool = given["conv_state"]
    sizes.take("conv_state", pool, "P D W" if a.state_indices is not None else "B D W")
    if a.state_indices is not None:
        check_has_slots("conv_state", pool)
    longest = CONV_TAPS - 1
    if _has_positions(a.state_indices):
        longest += a.state_indices.shape[1] - 1  # type: ignore[union-attr]
    if a.record_k is not None:
        longest += sizes["S"]
    if sizes["W"] < longest:
        drafted = "records" if a.record_k is not None else "positions"
        raise ValueError(
            f"conv_state has shape {list(pool.shape)}, must hold at least {longest} inputs (W)"
            + (f" for so many {drafted}" if longest >= CONV_TAPS else "")
        )
    sizes.take("conv_weight", given["conv_weight"], f"D {CONV_TAPS}")
    if "conv_bias" in given:
        sizes.take("conv_bias", given["conv_bias"], "D")


def _check_draft_windows(given: dict[str, Tensor], sizes: Sizes) -> None:
    """Check draft_windows, which goes with conv_state and draft_states."""
    both = "conv_state" in given and "draft_states" in given
    if "draft_windows" in given:
        if not both:
            missing = "draft_states" if "conv_state" in given else "conv_state"
            raise ValueError(f"draft_windows is given without {missing}, which it needs")
        check_dtypes_are(given, ("draft_windows",), given["q"].dtype)
        windows = given["draft_windows"]
        rows, states = given["draft_states"].shape[:2]
        expected = [rows, states, sizes["D"], CONV_TAPS - 1]
        if list(windows.shape) != expected:
            raise ValueError(
                f"draft_windows has shape {list(windows.shape)}, must be [M, S, D, 3], here "
                f"{expected}"
            )
    elif both:
        raise ValueError(
            "conv_state is given with draft_states, but without draft_windows, for the windows "
            "after drafted tokens"
        )


def _check_gate(
    given: dict[str, Tensor], sizes: Sizes, lower_bound: float | None, head_gate: bool
) -> None:
    """Check A_log, dt_bias and lower_bound, which are used with use_gate_in_kernel."""
    check_lower_bound(lower_bound)
    check_has_A_log(given, lower_bound)
    heads, dim = sizes["HV"], sizes["K"]
    for name in ("A_log", "dt_bias"):
        if name not in given:
            continue
        x = given[name]
        check_dtype(name, x, PARAMETER_DTYPES)
        if name == "A_log":
            fits, expected = x.numel() == heads, f"[{heads}]: [HV]"
        elif head_gate:
            fits, expected = list(x.shape) == [heads], f"[{heads}]: [HV]"
        else:
            fits = list(x.shape) in ([heads * dim], [heads, dim])
            expected = f"[{heads * dim}] or [{heads}, {dim}]: [HV * K] or [HV, K]"
        if not fits:
            raise ValueError(f"{name} has shape {list(x.shape)}, must be {expected}")
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}, must be contiguous")


def _check_slots(given: dict[str, Tensor], sizes: Sizes, head_gate: bool) -> None:
    """Check state_indices, num_accepted_tokens and the records."""
    state_indices = given.get("state_indices")
    records = [name for name in _RECORDS if name in given]
    tokens = sizes.get("T", 1)
    if state_indices is not None:
        shape = list(state_indices.shape)
        if len(shape) not in (1, 2) or shape[0] != sizes["B"] or shape[-1] == 0 < sizes["B"]:
            raise ValueError(
                f"state_indices has shape {shape}, must be [{sizes['B']}] or "
                f"[{sizes['B']}, 1 + S]: [B] or [B, 1 + S]"
            )
    positions = shape[1] if _has_positions(state_indices) else 1
    if "num_accepted_tokens" in given:
        sizes.take("num_accepted_tokens", given["num_accepted_tokens"], "B")
        if not records and not _has_positions(state_indices):
            raise ValueError(
                "num_accepted_tokens needs state_indices [B, 1 + S], or record_k, record_g and "
                "record_u"
            )
    if not records:
        if 1 < positions < tokens and "packed" not in sizes:
            raise ValueError(
                f"q has {tokens} tokens (T), must be at most the {positions} positions (1 + S) of "
                "state_indices"
            )
        return
    if len(records) < 3:
        missing = " and ".join(name for name in _RECORDS if name not in given)
        raise ValueError(f"{records[0]} is given without {missing}, which it needs")
    if "num_accepted_tokens" not in given:
        raise ValueError("num_accepted_tokens is missing, records need it")
    if positions > 1:
        raise ValueError(
            f"state_indices has shape {shape}, must be [{sizes['B']}] with records: they go with "
            "one slot for each sequence"
        )
    sizes.take("record_k", given["record_k"], "N S HQK K")
    sizes.take("record_g", given["record_g"], "N S HV" if head_gate else "N S HV K")
    sizes.take("record_u", given["record_u"], "N S HV V")
    if tokens > sizes["S"]:
        raise ValueError(f"q has {tokens} tokens (T), must be at most the {sizes['S']} records (S)")
    for name, like in (("record_k", "k"), ("record_g", "g")):
        if given[name].dtype != given[like].dtype:
            raise TypeError(
                f"{name} has dtype {given[name].dtype}, must be that of {like}, {given[like].dtype}"
            )
    check_dtype("record_u", given["record_u"], ("float32",))
