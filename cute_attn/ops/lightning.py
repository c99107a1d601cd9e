"""Lightning Attention decode: the operator.

`lightning_attn_decode` is called once a layer and token, so its warm path is kept to what it
must do: one look-up of the loaded kernel, and the call. Everything that the look-up does not pin
down (sizes, strides, the other tensors' dtypes and devices, overlaps) is checked by the compiled
host code before it launches; when that refuses, `_validate` says why in terms of the arguments.
Under torch.compile, FakeTensor and other dispatch modes the same call goes
through the registered operator `torch.ops.cute_attn.lightning_attn_decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import launch
from ..kernels.lightning import table
from ..kernels.lightning.heuristics import decode_config
from ..kernels.lightning.spec import (
    DTYPES,
    HEAD_DIMS,
    STATE_DTYPES,
    STATE_LAYOUTS,
    VECTOR_BYTES,
    DecodeSpec,
    check_operator,
)
from .checks import (
    DTYPE_NAMES,
    LARGEST,
    SMALLEST,
    check_autograd,
    check_number,
    check_tangents,
    check_tensors,
)
from .memory import check_memory
from .routing import (
    PLAIN,
    dispatch_mode_depth,
    forward_ad,
    intercepted,
    is_compiling,
    is_dynamo_compiling,
    is_grad_enabled,
    overridden,
    plain,
)

__all__ = ["lightning_attn_decode", "plan_decode"]

_MAX_GRID_YZ = 65535  # sequences and heads are grid dimensions
_EMULATED_SMS = 132  # an emulator's handful of SMs says nothing of the GPU that it stands for


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

    For each token and head, with the state as a V by K matrix S (Lightning Attention-2, arXiv
    2401.04658, section 3):

        S <- exp(-decay) * S + v k^T            o = softmax_scale * S q

    Arithmetic is float32 whatever the dtypes.

    Args:
        q: `[B, H, K]`, or `[B, T, H, K]` for T new tokens a sequence; bfloat16, float16 or
            float32. Any strides with the last dimension contiguous: views of one packed
            projection are read in place.
        k: of q's shape and dtype.
        v: `[B, H, V]` or `[B, T, H, V]`, dtype of q. K and V are 64, 128 or 256.
        state: `[N, H, V, K]` for layout "vk", `[N, H, K, V]` for "kv"; float32 or bfloat16; each
            head's matrix contiguous and 16-byte aligned. Read and written once a call, in place.
        decay: `[H]` float32, contiguous; a head's state is multiplied by exp(-decay) per token.
        softmax_scale: factor of the output; None is K ** -0.5.
        state_indices: `[B]` int32, contiguous: the slot of `state` that each sequence uses, for
            continuous batching. None: sequence b uses slot b, and N must be B. A negative index is
            a padded row: output 0, no slot touched. An index >= N is a caller's error that
            is treated like a padded row rather than checked, which would synchronise. No two
            sequences may name the same slot.
        out: where to write the output, like the result; the memory it spans must be its own.
        state_layout: "vk" (K contiguous, the fast one) or "kv" (V contiguous).
        num_accepted_tokens: `[B]` int32, contiguous; switches on speculative decoding, see below.
        draft_k: `[N, S, H, K]`, with num_accepted_tokens: each slot's records of the keys that the
            previous call drafted; dtype of q, last dimension contiguous.
        draft_v: `[N, S, H, V]`: likewise the values.

    Returns:
        o, `[B, H, V]` or `[B, T, H, V]`, dtype of q; `out` itself when given.

    Speculative decoding:
        With `num_accepted_tokens` the state is a checkpoint. The call first advances it by the
        first `num_accepted_tokens[b]` of the slot's draft records, stores it, then computes
        the outputs of its T tokens from there without storing: they are drafts until the next
        call says how many were accepted. After the call, write its k and v to the records:
        `draft_k[slots, :T] = k`. The state is read and written once a call however many tokens
        are drafted, and a sequence costs one state plus S small records. Counts outside
        0..S are clamped.

    Raises:
        TypeError: an argument that is not a tensor, or of a wrong dtype.
        ValueError: wrong shapes, strides, devices, alignment, overlapping `out`, or a
            `state_layout` that does not exist.
        NotImplementedError: head dimensions, architectures or autograd that have no kernel.
    """
    if (
        not is_dynamo_compiling()
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
    ):
        try:
            function, default_scale = _ready[
                q.shape,
                v.shape,
                q.dtype,
                state.dtype,
                q.get_device(),
                state_layout,
                state_indices is None,
                num_accepted_tokens is None,
            ]
            if softmax_scale is None:
                softmax_scale = default_scale
            elif not SMALLEST <= softmax_scale <= LARGEST or softmax_scale is True:
                raise KeyError
        except Exception:  # new, or a number that is checked first, or none that have a shape
            return _first_call(
                q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
                num_accepted_tokens, draft_k, draft_v,
            )  # fmt: skip
        tracked = is_grad_enabled()
        if tracked and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or state.requires_grad
            or decay.requires_grad
            or draft_k is not None
            or (out is not None and out.requires_grad)
        ):
            check_autograd("lightning_attn_decode", q, k, v, state, decay, out, draft_k, draft_v)
        o = torch.empty_like(v) if out is None else out
        try:
            function(
                q,
                k,
                v,
                o,
                state,
                decay,
                state_indices,
                draft_k,
                draft_v,
                num_accepted_tokens,
                softmax_scale,
            )
        except Exception as error:
            return _refused(
                error, q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
                num_accepted_tokens, draft_k, draft_v,
            )  # fmt: skip
        if tracked:
            _increment_version((state, o))
        return o

    tensors = (
        q, k, v, state, decay, out, state_indices, num_accepted_tokens, draft_k, draft_v,
    )  # fmt: skip
    if not intercepted(*tensors):
        return _first_call(
            q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
            num_accepted_tokens, draft_k, draft_v,
        )  # fmt: skip
    # Where it is traced, the fake implementation checks.
    if not is_compiling() and not overridden(*tensors):
        _validate_metadata(
            q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
            num_accepted_tokens, draft_k, draft_v,
        )  # fmt: skip
    check_autograd("lightning_attn_decode", q, k, v, state, decay, out, draft_k, draft_v)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    torch.ops.cute_attn.lightning_attn_decode(
        q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
        num_accepted_tokens, draft_k, draft_v,
    )  # fmt: skip
    return out


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
    """The kernels that `lightning_attn_decode` will use for such tensors, for
    `cute_attn.warmup` and spec files. Batch, heads and number of tokens do not matter.

    Args:
        arch: such as "sm_90a"; every architecture from sm_80 on takes the same kernel today.
        dtype: of q, k and v.
        state_dtype: of the state.
        head_dim_k: K, of q and k.
        head_dim_v: V, of v.
        state_layout: as the operator's.
        multi_token: q is `[B, T, H, K]` rather than `[B, H, K]`.
        indexed: with state_indices.
        replay: with num_accepted_tokens.
        aligned: q, k and v rows start on 16-byte boundaries, as nearly always.
        num_sms: of the GPU; fewer than 100 (an H20 has 78) is tuned differently.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter of another type.
        ValueError: no kernel is specialised so; the message names the parameter.
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


# -- launching ----------------------------------------------------------------------------------

# An operator that saved the state for its backward must see that it has changed.
_increment_version = torch._C._increment_version


# Everything that a kernel is chosen by -> the loaded kernel and the default of softmax_scale. Whole
# shapes rather than the head dimensions alone, because they cost a third of the time to get.
_ready: dict[tuple[Any, ...], tuple[Callable[..., None], float]] = {}


def _key(
    q: Tensor,
    v: Tensor,
    state: Tensor,
    state_layout: str,
    state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
) -> tuple[Any, ...]:
    """The key of `_ready`, as `lightning_attn_decode` writes it out."""
    return (
        q.shape,
        v.shape,
        q.dtype,
        state.dtype,
        q.get_device(),
        state_layout,
        state_indices is None,
        num_accepted_tokens is None,
    )


def _first_call(*arguments: Any) -> Tensor:
    """Validate, load the kernel and remember it, and call it."""
    (
        q, k, v, state, decay, out, softmax_scale, state_indices, _,
        num_accepted_tokens, draft_k, draft_v,
    ) = arguments  # fmt: skip
    _validate(*arguments)
    check_autograd("lightning_attn_decode", q, k, v, state, decay, out, draft_k, draft_v)
    o = torch.empty_like(v) if out is None else out
    if v.numel() == 0:
        return o
    aligned = _rows_aligned(q, k, v, draft_k, draft_v)
    function, default_scale = _prepare(*arguments, aligned=aligned)
    function(
        q, k, v, o, state, decay, state_indices, draft_k, draft_v, num_accepted_tokens,
        default_scale if softmax_scale is None else softmax_scale,
    )  # fmt: skip
    if is_grad_enabled():
        _increment_version((state, o))
    return o


def _refused(error: Exception, *arguments: Any) -> Tensor:
    """The compiled host code would not launch: say why in the operator's words, or mend it."""
    q, k, v, *_, draft_k, draft_v = arguments
    _validate(*arguments)
    if v.numel() and _rows_aligned(q, k, v, draft_k, draft_v):
        raise error
    # Nothing to do, or rows off their alignment: from now on the kernel that any alignment suits.
    return _first_call(*arguments)


def _prepare(
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
    *,
    aligned: bool,
) -> tuple[Callable[..., None], float]:
    """Load the kernel for these arguments, and remember it if they are on a GPU."""
    ((kernel, spec),) = plan_decode(
        launch.arch_for(q.device),
        dtype=DTYPE_NAMES[q.dtype],
        state_dtype=DTYPE_NAMES[state.dtype],
        head_dim_k=q.shape[-1],
        head_dim_v=v.shape[-1],
        state_layout=state_layout,
        multi_token=q.dim() == 4,
        indexed=state_indices is not None,
        replay=num_accepted_tokens is not None,
        aligned=aligned,
        num_sms=launch.num_sms(q.device) if q.is_cuda else _EMULATED_SMS,
    )
    ready = launch.get_for(q.device, kernel, spec), q.shape[-1] ** -0.5
    if q.is_cuda:  # which emulator runs a CPU tensor depends on where the call is made
        _ready[_key(q, v, state, state_layout, state_indices, num_accepted_tokens)] = ready
    return ready


# -- checks -------------------------------------------------------------------------------------


def _validate(
    q: Any,
    k: Any,
    v: Any,
    state: Any,
    decay: Any,
    out: Any,
    softmax_scale: Any,
    state_indices: Any,
    state_layout: Any,
    num_accepted_tokens: Any,
    draft_k: Any,
    draft_v: Any,
) -> None:
    """Raise the documented exception if the kernel cannot take these arguments."""
    _validate_metadata(
        q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
        num_accepted_tokens, draft_k, draft_v,
    )  # fmt: skip
    launch.check_device("q", q.device)
    if state.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"state starts at address {state.data_ptr():#x}, must be {VECTOR_BYTES}-byte aligned"
        )
    check_memory(
        {"out": out, "state": state},
        {
            "q": q,
            "k": k,
            "v": v,
            "decay": decay,
            "state_indices": state_indices,
            "num_accepted_tokens": num_accepted_tokens,
            "draft_k": draft_k,
            "draft_v": draft_v,
        },
        pools=("state", "draft_k", "draft_v"),
    )


def _validate_metadata(
    q: Any,
    k: Any,
    v: Any,
    state: Any,
    decay: Any,
    out: Any,
    softmax_scale: Any,
    state_indices: Any,
    state_layout: Any,
    num_accepted_tokens: Any,
    draft_k: Any,
    draft_v: Any,
) -> None:
    """The checks that need no memory, and so hold for fake tensors too."""
    required = {"q": q, "k": k, "v": v, "state": state, "decay": decay}
    optional = {
        "out": out,
        "state_indices": state_indices,
        "num_accepted_tokens": num_accepted_tokens,
        "draft_k": draft_k,
        "draft_v": draft_v,
    }
    given = check_tensors(required, optional)
    check_number("softmax_scale", softmax_scale)
    if state_layout not in STATE_LAYOUTS:
        raise ValueError(f"state_layout is {state_layout!r}, must be one of {STATE_LAYOUTS}")

    if DTYPE_NAMES.get(q.dtype) not in DTYPES:
        raise TypeError(f"q has dtype {q.dtype}, must be one of {DTYPES}")
    if DTYPE_NAMES.get(state.dtype) not in STATE_DTYPES:
        raise TypeError(f"state has dtype {state.dtype}, must be one of {STATE_DTYPES}")
    for names, dtype in (
        (("k", "v", "out", "draft_k", "draft_v"), q.dtype),
        (("decay",), torch.float32),
        (("state_indices", "num_accepted_tokens"), torch.int32),
    ):
        for name in names:
            if name in given and given[name].dtype != dtype:
                raise TypeError(f"{name} has dtype {given[name].dtype}, must be {dtype}")

    if q.dim() not in (3, 4):
        raise ValueError(f"q has shape {_shape(q)}, must be [B, H, K] or [B, T, H, K]")
    if v.dim() != q.dim():
        raise ValueError(f"v has {v.dim()} dimensions, must have as many as q, {q.dim()}")
    batch, heads, head_dim_k, head_dim_v = q.shape[0], q.shape[-2], q.shape[-1], v.shape[-1]
    for name, dim in (("q", head_dim_k), ("v", head_dim_v)):
        if dim not in HEAD_DIMS:
            raise NotImplementedError(f"head dimension of {name} is {dim}, supported: {HEAD_DIMS}")
    if state.dim() != 4:
        raise ValueError(f"state has shape {_shape(state)}, must have 4 dimensions")
    slots = state.shape[0]
    matrix = (head_dim_v, head_dim_k) if state_layout == "vk" else (head_dim_k, head_dim_v)
    expected = {
        "k": tuple(q.shape),
        "v": (*q.shape[:-1], head_dim_v),
        "out": (*q.shape[:-1], head_dim_v),
        "state": (slots if state_indices is not None else batch, heads, *matrix),
        "decay": (heads,),
        "state_indices": (batch,),
        "num_accepted_tokens": (batch,),
    }
    for name, shape in expected.items():
        if name in given and tuple(given[name].shape) != shape:
            hint = f" for layout {state_layout!r}" if name == "state" else ""
            raise ValueError(f"{name} has shape {_shape(given[name])}, must be {list(shape)}{hint}")
    if q.dim() == 4 and q.shape[1] == 0:
        raise ValueError("q has no tokens: T is 0, must be at least 1")
    for what, size in (("sequences", batch), ("heads", heads)):
        if size > _MAX_GRID_YZ:
            raise ValueError(f"q has {size} {what}, at most {_MAX_GRID_YZ} fit one call")

    if num_accepted_tokens is None:
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
                    f"{name} has shape {_shape(given[name])}, must be [{slots}, S, {heads}, {dim}]"
                )
        if draft_k.shape[1] != draft_v.shape[1]:
            raise ValueError(
                f"draft_k holds {draft_k.shape[1]} records and draft_v {draft_v.shape[1]}"
            )

    for name in ("q", "k", "v", "out", "draft_k", "draft_v"):
        if name in given and given[name].stride(-1) != 1:
            raise ValueError(
                f"{name} has strides {given[name].stride()}, the last dimension must be contiguous"
            )
    for name in ("decay", "state_indices", "num_accepted_tokens"):
        if name in given and not given[name].is_contiguous():
            raise ValueError(f"{name} has strides {given[name].stride()}, must be contiguous")
    vector = VECTOR_BYTES // state.element_size()
    strides = state.stride()
    if strides[3] != 1 or strides[2] != matrix[1] or strides[0] % vector or strides[1] % vector:
        raise ValueError(
            f"state has strides {strides}: a head's matrix must be contiguous, and slots and heads "
            f"start on {VECTOR_BYTES}-byte boundaries"
        )
    for name in ("state", "out"):
        if name in given and any(
            stride == 0 and size > 1
            for size, stride in zip(given[name].shape, given[name].stride(), strict=True)
        ):
            raise ValueError(f"{name} is expanded: it is written, so its elements must be distinct")


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


# -- the registered operator --------------------------------------------------------------------

_library = torch.library.Library("cute_attn", "FRAGMENT")
_library.define(
    "lightning_attn_decode(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor decay, "
    "Tensor(b!) out, float? softmax_scale=None, Tensor? state_indices=None, "
    "str state_layout='vk', Tensor? num_accepted_tokens=None, Tensor? draft_k=None, "
    "Tensor? draft_v=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    out: Tensor,
    softmax_scale: float | None = None,
    state_indices: Tensor | None = None,
    state_layout: str = "vk",
    num_accepted_tokens: Tensor | None = None,
    draft_k: Tensor | None = None,
    draft_v: Tensor | None = None,
) -> None:
    q, k, v, state, decay, out = map(plain, (q, k, v, state, decay, out))
    state_indices, num_accepted_tokens = plain(state_indices), plain(num_accepted_tokens)
    draft_k, draft_v = plain(draft_k), plain(draft_v)
    check_tangents(
        q=q, k=k, v=v, state=state, decay=decay, out=out, draft_k=draft_k, draft_v=draft_v
    )
    arguments = (
        q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
        num_accepted_tokens, draft_k, draft_v,
    )  # fmt: skip
    check_autograd("lightning_attn_decode", q, k, v, state, decay, out, draft_k, draft_v)
    ready = _ready.get(_key(q, v, state, state_layout, state_indices, num_accepted_tokens))
    if ready is None or not (softmax_scale is None or SMALLEST <= softmax_scale <= LARGEST):
        _first_call(*arguments)
        return
    function, default_scale = ready
    try:
        function(
            q, k, v, out, state, decay, state_indices, draft_k, draft_v, num_accepted_tokens,
            default_scale if softmax_scale is None else softmax_scale,
        )  # fmt: skip
    except Exception as error:
        _refused(error, *arguments)
    if is_grad_enabled():
        _increment_version((state, out))


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    out: Tensor,
    softmax_scale: float | None = None,
    state_indices: Tensor | None = None,
    state_layout: str = "vk",
    num_accepted_tokens: Tensor | None = None,
    draft_k: Tensor | None = None,
    draft_v: Tensor | None = None,
) -> None:
    _validate_metadata(
        q, k, v, state, decay, out, softmax_scale, state_indices, state_layout,
        num_accepted_tokens, draft_k, draft_v,
    )  # fmt: skip


_library.impl("lightning_attn_decode", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("cute_attn::lightning_attn_decode", _fake, lib=_library)
