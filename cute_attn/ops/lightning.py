"""Lightning Attention decode: the operator.

A model calls `lightning_attn_decode` for every layer and token, so a warm call only looks up the
loaded kernel and calls it. Before the launch, the compiled host code checks all that the look-up's
key leaves open: sizes, strides, overlaps, the other tensors' dtypes and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import launch
from ..kernels.common.spec import VECTOR_BYTES
from ..kernels.lightning import table
from ..kernels.lightning.heuristics import decode_config
from ..kernels.lightning.spec import (
    DTYPES,
    HEAD_DIMS,
    STATE_DTYPES,
    STATE_LAYOUTS,
    DecodeSpec,
    check_operator,
)
from .checks import (
    DTYPE_NAMES,
    check_contiguous,
    check_dtype,
    check_dtypes_are,
    check_has_slots,
    check_int32,
    check_not_expanded,
    check_number,
    check_rows,
    check_shapes,
    check_state_address,
    check_state_strides,
    exceeds,
)
from .memory import check_memory
from .operator import (
    PLAIN,
    Operator,
    dispatch_mode_depth,
    forward_ad,
    increment_version,
    is_dynamo_compiling,
    is_grad_enabled,
)

__all__ = ["lightning_attn_decode", "plan_decode"]

_MAX_GRID_YZ = 65535  # sequences and heads are grid dimensions
_EMULATED_SMS = 132  # SMs of the emulated GPU; the emulator's own number is arbitrary


def lightning_attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    *,
    softmax_scale: float | None = None,
    state_indices: Tensor | None = None,
    out: Tensor | None = None,
    state_layout: str = "vk",
    num_accepted_tokens: Tensor | None = None,
    draft_k: Tensor | None = None,
    draft_v: Tensor | None = None,
) -> Tensor:
    """One decode step of Lightning Attention; the state is updated in place.

    For each token and head, where the state S is a V by K matrix (Lightning Attention-2, arXiv
    2401.04658, section 3):

        S <- exp(-decay) * S + v k^T            o = softmax_scale * S q

    Arithmetic is float32 for all dtypes.

    Args:
        q: `[B, H, K]`, or `[B, T, H, K]` for T new tokens per sequence; bfloat16, float16 or
            float32. The last dimension must be contiguous; the other strides are free, so that
            views of one packed projection are read in place.
        k: of q's shape and dtype.
        v: `[B, H, V]` or `[B, T, H, V]`, dtype of q. K and V are 64, 128 or 256.
        state: `[N, H, V, K]` for layout "vk", `[N, H, K, V]` for "kv"; float32 or bfloat16; each
            head's matrix contiguous and 16-byte aligned. Read and written once a call, in place.
        decay: `[H]` float32, contiguous; a head's state is multiplied by exp(-decay) per token.
        softmax_scale: factor of the output; None is K ** -0.5.
        state_indices: `[B]` int32, contiguous: the slot of `state` that each sequence uses, for
            continuous batching. None: sequence b uses slot b, and N must be B. A negative index
            marks a padded row: the row's output is 0, and no slot is read or written. An index >= N
            is an error of the caller; the row is treated as padded, since a check would
            synchronise. No two sequences may have the same slot.
        out: tensor to write the output to, with the shape and dtype of the result. `out` must not
            overlap another argument.
        state_layout: "vk" (K contiguous, the faster layout) or "kv" (V contiguous).
        num_accepted_tokens: `[B]` int32, contiguous: enables speculative decoding, see below.
        draft_k: `[N, S, H, K]`, with num_accepted_tokens: each slot's records of the keys that the
            previous call drafted; dtype of q, last dimension contiguous.
        draft_v: `[N, S, H, V]`: records of the values, as draft_k.

    Returns:
        o, `[B, H, V]` or `[B, T, H, V]`, dtype of q; `out` itself when given.

    Speculative decoding: With `num_accepted_tokens` the state is a checkpoint. The call advances
        the state by the first `num_accepted_tokens[b]` of the slot's draft records and stores the
        new state. From this state the call computes the outputs of its own T tokens. The state
        after these tokens is not stored, because the tokens are drafts until the next call says how
        many were accepted. After the call, write the call's k and v to the records: `draft_k[slots,
        :T] = k`. A call reads and writes the state once, for any number of drafted tokens; a
        sequence needs memory for one state and S small records. Counts outside 0..S are clamped.

    Raises:
        TypeError: an argument that is not a tensor, or of a wrong dtype.
        ValueError: wrong shapes, strides, devices, alignment or `state_layout`, or an `out` that
            overlaps another argument.
        NotImplementedError: a head dimension or an architecture without a kernel, or a tensor that
            requires a gradient: there is no backward.
    """
    call = (
        _forward
        if not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is type(state) is Tensor
        and type(decay) in PLAIN
        and (state_indices is None or type(state_indices) is Tensor)
        and (out is None or type(out) is Tensor)
        and (
            num_accepted_tokens is None
            or type(num_accepted_tokens) is type(draft_k) is type(draft_v) is Tensor
        )
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
        else _decode.routed
    )
    o: Tensor = call(
        q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
        num_accepted_tokens, draft_k, draft_v,
    )  # fmt: skip
    return o


@launch.planner
def plan_decode(
    arch: str,
    *,
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
    head_dim_k: int = 128,
    head_dim_v: int = 128,
    state_layout: str = "vk",
    multi_token: bool = False,
    indexed: bool = True,
    replay: bool = False,
    aligned: bool = True,
    num_sms: int = 132,
) -> list[launch.Request]:
    """The kernels that `lightning_attn_decode` uses for these tensors, for `cute_attn.warmup` and
    spec files. The choice does not depend on the numbers of sequences, heads and tokens.

    Args:
        arch: architecture, such as "sm_90a"; today there is one kernel for all architectures from
            sm_80 on.
        dtype: dtype of q, k and v.
        state_dtype: dtype of the state.
        head_dim_k: K, head dimension of q and k.
        head_dim_v: V, head dimension of v.
        state_layout: as in the operator.
        multi_token: whether q is `[B, T, H, K]`, not `[B, H, K]`.
        indexed: whether state_indices is given.
        replay: whether num_accepted_tokens is given.
        aligned: whether all rows of q, k and v start on 16-byte boundaries, as they usually do.
        num_sms: SMs of the GPU; below 100 (an H20 has 78) the kernel is tuned differently.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
    """
    del arch
    tensors: dict[str, Any] = {
        "state_dtype": state_dtype,
        "head_dim_k": head_dim_k,
        "head_dim_v": head_dim_v,
        "state_layout": state_layout,
        "multi_token": multi_token,
    }
    check_operator(dtype=dtype, **tensors)
    spec = DecodeSpec(
        dtype=dtype,
        indexed=indexed,
        replay=replay,
        aligned=aligned,
        **tensors,
        **decode_config(num_sms=num_sms, **tensors),
    )
    return [(table.DECODE, spec)]


# -- the operator -------------------------------------------------------------------------------

_empty_like = torch.empty_like


class _Arguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    decay: Tensor
    out: Tensor
    softmax_scale: float | None = None
    state_indices: Tensor | None = None
    state_layout: str = "vk"
    num_accepted_tokens: Tensor | None = None
    draft_k: Tensor | None = None
    draft_v: Tensor | None = None


class _Decode(Operator[_Arguments]):
    name = "lightning_attn_decode"
    arguments = _Arguments
    written = ("state", "out")

    def check(self, a: _Arguments, given: dict[str, Tensor]) -> None:
        q, v, state = a.q, a.v, a.state
        check_number("softmax_scale", a.softmax_scale)
        if a.state_layout not in STATE_LAYOUTS:
            raise ValueError(f"state_layout is {a.state_layout!r}, must be one of {STATE_LAYOUTS}")
        check_dtype("q", q, DTYPES)
        check_dtype("state", state, STATE_DTYPES)
        check_dtypes_are(given, ("k", "v", "out", "draft_k", "draft_v"), q.dtype)
        check_dtypes_are(given, ("decay",), torch.float32)
        check_int32(given, ("state_indices", "num_accepted_tokens"))

        if q.dim() not in (3, 4):
            raise ValueError(f"q has shape {_shape(q)}, must be [B, H, K] or [B, T, H, K]")
        if v.dim() != q.dim():
            raise ValueError(f"v has {v.dim()} dimensions, must have as many as q, {q.dim()}")
        batch, heads, head_dim_k, head_dim_v = q.shape[0], q.shape[-2], q.shape[-1], v.shape[-1]
        for name, dim in (("q", head_dim_k), ("v", head_dim_v)):
            if dim not in HEAD_DIMS:
                raise NotImplementedError(
                    f"head dimension of {name} is {dim}, supported: {HEAD_DIMS}"
                )
        if state.dim() != 4:
            raise ValueError(f"state has shape {_shape(state)}, must have 4 dimensions")
        slots = state.shape[0]
        matrix = (head_dim_v, head_dim_k) if a.state_layout == "vk" else (head_dim_k, head_dim_v)
        # The message names q where k and v agree with each other and not with q.
        rows = (a.k if a.k.shape[:-1] == v.shape[:-1] else q).shape[:-1]
        expected = {
            "q": (*rows, head_dim_k),
            "k": tuple(q.shape),
            "v": (*q.shape[:-1], head_dim_v),
            "out": (*q.shape[:-1], head_dim_v),
            "state": (slots if a.state_indices is not None else batch, heads, *matrix),
            "decay": (heads,),
            "state_indices": (batch,),
            "num_accepted_tokens": (batch,),
        }
        step = "B, H" if q.dim() == 3 else "B, T, H"
        matrix_of = "V, K" if a.state_layout == "vk" else "K, V"
        dimensions = {
            "q": f"{step}, K", "k": f"{step}, K", "v": f"{step}, V", "out": f"{step}, V",
            "state": f"{'B' if a.state_indices is None else 'slots'}, H, {matrix_of}",
            "decay": "H", "state_indices": "B", "num_accepted_tokens": "B",
        }  # fmt: skip
        check_shapes(given, expected, dimensions)
        if a.state_indices is not None:
            check_has_slots("state", state)
        if q.dim() == 4 and q.shape[1] == 0:
            raise ValueError("q has no tokens: T is 0, must be at least 1")
        for what, size in (("sequences", batch), ("heads", heads)):
            if exceeds(size, _MAX_GRID_YZ):
                raise ValueError(f"q has {size} {what}, at most {_MAX_GRID_YZ} fit one call")

        if a.num_accepted_tokens is None:
            for name in ("draft_k", "draft_v"):
                if name in given:
                    raise ValueError(f"{name} is given without num_accepted_tokens")
        else:
            if q.dim() != 4:
                raise ValueError(f"q has shape {_shape(q)}, num_accepted_tokens needs [B, T, H, K]")
            for name, dim in (("draft_k", head_dim_k), ("draft_v", head_dim_v)):
                if name not in given:
                    raise ValueError(f"{name} is missing, num_accepted_tokens needs it")
                shape = given[name].shape
                if len(shape) != 4 or (shape[0], *shape[2:]) != (slots, heads, dim):
                    raise ValueError(
                        f"{name} has shape {list(shape)}, must be [{slots}, S, {heads}, {dim}]"
                    )
            if given["draft_k"].shape[1] != given["draft_v"].shape[1]:
                raise ValueError(
                    f"draft_k holds {given['draft_k'].shape[1]} records and draft_v "
                    f"{given['draft_v'].shape[1]}"
                )

        check_rows(given, ("q", "k", "v", "out", "draft_k", "draft_v"))
        check_contiguous(given, ("decay", "state_indices", "num_accepted_tokens"))
        check_state_strides(state, VECTOR_BYTES)
        check_not_expanded(given, ("state", "out"))

    def check_memory(self, a: _Arguments) -> None:
        check_state_address(a.state, VECTOR_BYTES)
        tensors = self.tensors(a)
        written = {name: tensors.pop(name) for name in ("out", "state")}
        check_memory(written, tensors, pools=("state", "draft_k", "draft_v"))

    def nothing(self, a: _Arguments) -> Tensor | None:
        return None if a.v.numel() else a.out

    def prepare(self, a: _Arguments) -> tuple[Callable[..., None], float]:
        ((kernel, spec),) = plan_decode(
            launch.arch_for(a.q.device),
            dtype=DTYPE_NAMES[a.q.dtype],
            state_dtype=DTYPE_NAMES[a.state.dtype],
            head_dim_k=a.q.shape[-1],
            head_dim_v=a.v.shape[-1],
            state_layout=a.state_layout,
            multi_token=a.q.dim() == 4,
            indexed=a.state_indices is not None,
            replay=a.num_accepted_tokens is not None,
            aligned=_rows_aligned(a.q, a.k, a.v, a.draft_k, a.draft_v),
            num_sms=launch.num_sms(a.q.device) if a.q.is_cuda else _EMULATED_SMS,
        )
        scale = a.q.shape[-1] ** -0.5 if a.softmax_scale is None else float(a.softmax_scale)
        return launch.get_for(a.q.device, kernel, spec), scale

    def stale(self, ready: Any, a: _Arguments) -> bool:
        return bool(self.prepare(a) != ready)  # the key does not say whether rows are aligned

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        decay: Tensor,
        out: Tensor | None,
        softmax_scale: float | None,
        state_indices: Tensor | None,
        state_layout: str,
        num_accepted_tokens: Tensor | None,
        draft_k: Tensor | None,
        draft_v: Tensor | None,
        ready: Any = None,
    ) -> Tensor:
        key = None
        try:
            if ready is None:
                key = (
                    # The key has whole shapes: extracting the head dimensions would cost more.
                    q.shape, v.shape, q.dtype, state.dtype, q.get_device(), state_layout,
                    softmax_scale, type(softmax_scale), state_indices is None,
                    num_accepted_tokens is None,
                )  # fmt: skip
                ready = self.ready[key]
            function, scale = ready
            if is_grad_enabled() and (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or state.requires_grad
                or decay.requires_grad
                or (out is not None and out.requires_grad)
                or (draft_k is not None and (draft_k.requires_grad or draft_v.requires_grad))  # type: ignore[union-attr]
            ):
                self.refuse_gradient()
            o = _empty_like(v) if out is None else out
            function(
                q, k, v, o, state, decay, state_indices, draft_k, draft_v, num_accepted_tokens,
                scale,
            )  # fmt: skip
        except Exception as error:
            return self.failed(  # type: ignore[no-any-return]
                error, key, ready, q, k, v, state, decay, out, softmax_scale, state_indices,
                state_layout, num_accepted_tokens, draft_k, draft_v,
            )  # fmt: skip
        increment_version((state, o))
        return o


_decode = _Decode()
_forward = _decode.forward  # bound once, which saves time per call


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _rows_aligned(*tensors: Tensor | None) -> bool:
    """Whether every row of the tensors starts on a 16-byte boundary."""
    return all(
        x.data_ptr() % VECTOR_BYTES == 0
        and all(stride * x.element_size() % VECTOR_BYTES == 0 for stride in x.stride()[:-1])
        for x in tensors
        if x is not None
    )
