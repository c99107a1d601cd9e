"""Softmax attention: the operators.

`flash_attn_func` and `flash_attn_varlen_func` are one function underneath. Its warm path is one
look-up of the loaded kernel, the allocation of the output, and the call. The look-up pins down all
that a kernel is chosen by, and every batch size; the rest (lengths, strides, alignment, the other
tensors' dtypes and devices) is checked by the compiled host code before it launches, and when that
refuses, `_validate` says why in terms of the arguments. Nothing here reads device memory.
Under torch.compile, FakeTensor and other dispatch modes the same call goes through the registered
operator `torch.ops.cute_attn.flash_attn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import launch
from ..kernels.attention import table
from ..kernels.attention.heuristics import SHORT_SEQLEN_Q, packed_heads
from ..kernels.attention.spec import (
    DTYPES,
    LARGEST_SCALE,
    LARGEST_SOFTCAP,
    SINK_DTYPES,
    Hd256ForwardSpec,
)
from ..settings import on_reload, settings
from .checks import (
    DTYPE_NAMES,
    check_autograd,
    check_flags,
    check_is_number,
    check_tangents,
    check_tensors,
    is_int,
)
from .operator import (
    PLAIN,
    dispatch_mode_depth,
    forward_ad,
    is_compiling,
    is_dynamo_compiling,
    is_grad_enabled,
    plain,
)
from .operator import (
    _intercepted as intercepted,
)
from .operator import (
    _overridden as overridden,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "plan_attention"]

SCHEDULERS = ("static", "clc")
_NAMES = "flash_attn_func, as flash_attn_varlen_func,"  # as what refuses autograd calls them

_ALIGNMENT = 16  # bytes: of addresses and strides, as TMA has it
_VECTOR = _ALIGNMENT // 2  # elements
_MAX_SEQLEN = 2**30  # positions and their distances are int32 in a kernel
_MAX_TILES = 2**31
_SMALLEST_SCALE = 2.0**-126

Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    scheduler: str | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention over a batch of sequences of one length.

    Arguments, their defaults and their meaning are those of FlashAttention-4's function of this
    name, so that a user changes the import; those after v go by name, as FlashAttention's versions
    differ in what comes fourth. The last query stands at the last key: with `causal`, query i sees
    the keys up to i + seqlen_k - seqlen_q.

    Args:
        q: `[batch, seqlen_q, heads, 256]`, bfloat16 or float16. Read in place, as k and v are:
            any strides that are multiples of 8 elements, the last dimension contiguous.
        k: `[batch, seqlen_k, heads_k, 256]`, dtype of q. heads_k divides heads (MHA, GQA, MQA):
            query head h uses head h // (heads // heads_k).
        v: of k's shape and dtype.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: hide the keys behind a query's position.
        window_size: how many keys to the left and to the right of its position a query sees; None
            or -1 is all. With `causal` the right one is 0.
        learnable_sink: `[heads]`, bfloat16, float16 or float32: for each head the score of one more
            key, whose value is 0. It is not scaled.
        softcap: scores become softcap * tanh(score / softcap); 0 is no cap.
        scheduler: "static" (each cluster's tiles are fixed) or "clc" (tiles are taken from the
            hardware's queue, which balances uneven ones); results are the same bit for bit. None
            follows the environment variable `FA_CLC`, see `cute_attn.reload_settings`.
        return_lse: whether to compute the log-sum-exp.

    Returns:
        The pair (o, lse). o is contiguous, of q's shape and dtype. lse is float32
        `[batch, heads, seqlen_q]`, natural logarithm, or None unless asked for. A query that sees
        no key gets o = 0, and as lse -inf or its sink.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, strides, alignment, devices or values.
        NotImplementedError: a head dimension or an architecture without a kernel, or autograd,
            which has no backward yet; the message says what there is.
    """
    if (
        not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and (learnable_sink is None or type(learnable_sink) in PLAIN)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
    ):
        return _forward(
            q, k, v, None, None, None, None, None, softmax_scale, causal, window_size,
            learnable_sink, softcap, scheduler, return_lse,
        )  # fmt: skip
    return _routed(
        q, k, v, None, None, None, None, None, softmax_scale, causal, window_size, learnable_sink,
        softcap, scheduler, return_lse,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    scheduler: str | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention over sequences of different lengths, packed one after another.

    Args:
        q: `[total_q, heads, 256]` with cu_seqlens_q, else `[batch, seqlen_q, heads, 256]`.
        k: `[total_k, heads_k, 256]` with cu_seqlens_k, else `[batch, seqlen_k, heads_k, 256]`:
            a KV cache, of which seqused_k says how much is filled.
        v: of k's shape and dtype.
        cu_seqlens_q: `[batch + 1]` int32: sequence b has the rows of q from element b up to element
            b + 1. Not decreasing, at most the number of rows; this is not checked, since it would
            synchronise.
        cu_seqlens_k: likewise for the rows of k and v.
        max_seqlen_q: the longest sequence's length. A hint: short ones let heads share tiles. An
            int, or a tensor, which is not read; None and a tensor stand for the mean length.
        max_seqlen_k: as FlashAttention has it; not used.
        seqused_q: `[batch]` int32: only so many of a sequence's rows of q count; all of them where
            it has fewer, and none below 0. Needs cu_seqlens_q.
        seqused_k: `[batch]` int32: only so many of a sequence's rows of k and v count, likewise.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`; positions count in each sequence by itself.
        window_size: as for `flash_attn_func`, in each sequence by itself.
        learnable_sink: as for `flash_attn_func`.
        softcap: as for `flash_attn_func`.
        scheduler: as for `flash_attn_func`.
        return_lse: as for `flash_attn_func`.

    Returns:
        The pair (o, lse). o is contiguous, of q's shape and dtype. lse is float32
        `[heads, total_q]` (or `[batch, heads, seqlen_q]`), or None unless asked for. Rows of q that
        belong to no sequence are undefined in both.

    Raises:
        TypeError: as `flash_attn_func`.
        ValueError: as `flash_attn_func`.
        NotImplementedError: as `flash_attn_func`.
    """
    if max_seqlen_k is not None:
        _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    if (
        not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and (cu_seqlens_q is None or type(cu_seqlens_q) is Tensor)
        and (cu_seqlens_k is None or type(cu_seqlens_k) is Tensor)
        and (seqused_q is None or type(seqused_q) is Tensor)
        and (seqused_k is None or type(seqused_k) is Tensor)
        and (learnable_sink is None or type(learnable_sink) in PLAIN)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
    ):
        return _forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, softmax_scale,
            causal, window_size, learnable_sink, softcap, scheduler, return_lse,
        )  # fmt: skip
    return _routed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, softmax_scale,
        causal, window_size, learnable_sink, softcap, scheduler, return_lse,
    )  # fmt: skip


@launch.planner
def plan_attention(
    arch: str,
    *,
    head_dim: int = 256,
    dtype: str = "bfloat16",
    heads: int = 1,
    heads_k: int = 1,
    causal: bool = False,
    window_left: bool = False,
    window_right: bool = False,
    sink: str | None = None,
    softcap: bool = False,
    varlen_q: bool = False,
    varlen_k: bool = False,
    seqused_q: bool = False,
    seqused_k: bool = False,
    scheduler: str | None = None,
    return_lse: bool = False,
    short: bool | None = None,
) -> list[launch.Request]:
    """The kernels that the attention functions will use for such tensors, for `cute_attn.warmup`
    and spec files. Batch and lengths do not matter, nor do the numbers of heads but for their
    ratio.

    Args:
        arch: such as "sm_100a".
        head_dim: of q, k and v.
        dtype: of q, k and v.
        heads: of q; only its ratio to heads_k counts.
        heads_k: of k and v.
        causal: as the operator's.
        window_left: whether window_size has a bound to the left.
        window_right: whether window_size has a bound to the right.
        sink: dtype of learnable_sink; None without one.
        softcap: whether there is one.
        varlen_q: whether there is cu_seqlens_q.
        varlen_k: whether there is cu_seqlens_k.
        seqused_q: whether there is seqused_q.
        seqused_k: whether there is seqused_k.
        scheduler: as the operator's; None follows `FA_CLC`.
        return_lse: as the operator's.
        short: for at most 128 queries a sequence (decode), or for more (prefill); None is both,
            which are two kernels where heads_k < heads.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter of another type.
        ValueError: no kernel is specialised so; the message names the parameter.
        NotImplementedError: there is no kernel for this head_dim on this architecture.
    """
    kernel = table.find("forward", arch, head_dim).kernel
    if heads_k < 1 or heads < 1 or heads % heads_k:
        raise ValueError(f"heads is {heads}, must be a positive multiple of heads_k, {heads_k}")
    chosen = settings().scheduler if scheduler is None else scheduler
    if chosen not in SCHEDULERS:
        raise ValueError(f"scheduler is {scheduler!r}, must be one of {SCHEDULERS} or None")
    packings = [
        packed_heads(heads=heads, heads_k=heads_k, short=case)
        for case in ((False, True) if short is None else (short,))
    ]
    return [
        (
            kernel,
            Hd256ForwardSpec(
                dtype=dtype,
                scheduler=chosen,
                packed_heads=packing,
                window_left=window_left,
                window_right=window_right or causal,
                softcap=softcap,
                sink_dtype=sink or "none",
                varlen_q=varlen_q,
                varlen_k=varlen_k,
                seqused_q=seqused_q,
                seqused_k=seqused_k,
                lse=return_lse,
            ),
        )
        for packing in dict.fromkeys(packings)
    ]


# -- launching ----------------------------------------------------------------------------------

_empty_like = torch.empty_like
_contiguous = torch.contiguous_format

# A kernel, and the arguments that it takes at each call beside tensors and a given softmax_scale:
# (function, default scale, softcap, window to the left, to the right, resident clusters).
_Ready = tuple[Callable[..., None], float, float, int, int, int]

# Everything that a kernel is chosen by, and the batch sizes, which must agree -> the loaded kernel.
_ready: dict[tuple[Any, ...], _Ready] = {}
on_reload(_ready.clear)  # a scheduler of None in a key may mean another one from then on


def _key(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    causal: bool,
    window_size: Window,
    learnable_sink: Tensor | None,
    softcap: float,
    scheduler: str | None,
    return_lse: bool,
) -> tuple[Any, ...]:
    q_shape, k_shape = q.shape, k.shape
    return (
        len(q_shape),
        q_shape[-2],
        k_shape[-2],
        q_shape[0] if cu_seqlens_q is None else None,
        k_shape[0] if cu_seqlens_k is None else None,
        None if cu_seqlens_q is None else cu_seqlens_q.shape,
        None if cu_seqlens_k is None else cu_seqlens_k.shape,
        None if seqused_q is None else seqused_q.shape,
        None if seqused_k is None else seqused_k.shape,
        _is_short(q_shape, cu_seqlens_q, max_seqlen_q),
        q.dtype,
        q.get_device(),
        None if learnable_sink is None else learnable_sink.dtype,
        causal,
        window_size if type(window_size) is tuple else tuple(window_size),
        softcap,
        scheduler,
        return_lse,
    )


def _is_short(
    q_shape: Sequence[int], cu_seqlens_q: Tensor | None, max_seqlen_q: int | Tensor | None
) -> bool:
    """Whether sequences have so few queries that heads share tiles, as far as the host knows."""
    if cu_seqlens_q is None:
        return q_shape[1] <= SHORT_SEQLEN_Q
    if isinstance(max_seqlen_q, int):
        return max_seqlen_q <= SHORT_SEQLEN_Q
    return q_shape[0] <= SHORT_SEQLEN_Q * (cu_seqlens_q.shape[0] - 1)


def _routed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    learnable_sink: Tensor | None,
    softcap: float,
    scheduler: str | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, learnable_sink)
    if not intercepted(*tensors):
        check_tangents(
            q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q, seqused_k=seqused_k, learnable_sink=learnable_sink,
        )  # fmt: skip
        return _forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, softmax_scale,
            causal, window_size, learnable_sink, softcap, scheduler, return_lse,
        )  # fmt: skip
    # Where it is traced, the fake implementation checks.
    if not is_compiling() and not overridden(*tensors):
        _validate_metadata(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, softmax_scale,
            causal, window_size, learnable_sink, softcap, scheduler, return_lse,
        )  # fmt: skip
    check_autograd(_NAMES, q, k, v, learnable_sink)
    _check_window(window_size)
    o, lse = torch.ops.cute_attn.flash_attn(
        q, k, v, cu_seqlens_q, cu_seqlens_k,
        None if isinstance(max_seqlen_q, Tensor) else max_seqlen_q,
        seqused_q, seqused_k, softmax_scale, causal, window_size[0], window_size[1],
        learnable_sink, softcap, scheduler, return_lse,
    )  # fmt: skip
    return o, lse if return_lse else None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    learnable_sink: Tensor | None,
    softcap: float,
    scheduler: str | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """The kernel on what is plain memory."""
    try:
        ready = _ready[
            _key(
                q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, causal,
                window_size, learnable_sink, softcap, scheduler, return_lse,
            )
        ]  # fmt: skip
        if softmax_scale is None:
            softmax_scale = ready[1]
        elif not _SMALLEST_SCALE <= softmax_scale <= LARGEST_SCALE or softmax_scale is True:
            raise KeyError
        if not (q.numel() and k.numel()):
            raise KeyError
    except Exception:  # new, or not even tensors, or none that have a shape
        return _first_call(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, softmax_scale,
            causal, window_size, learnable_sink, softcap, scheduler, return_lse,
        )  # fmt: skip
    if is_grad_enabled():
        check_autograd(_NAMES, q, k, v, learnable_sink)
    try:
        return _launch(
            ready, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale,
            learnable_sink, return_lse,
        )  # fmt: skip
    except Exception as error:
        return _refused(
            error, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k,
            softmax_scale, causal, window_size, learnable_sink, softcap, scheduler, return_lse,
        )  # fmt: skip


def _launch(
    ready: _Ready,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    learnable_sink: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    function, _, softcap, left, right, clusters = ready
    o = _empty_like(q, memory_format=_contiguous)
    lse = _empty_lse(q) if return_lse else None
    function(
        q, k, v, o, lse, learnable_sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        softmax_scale, softcap, left, right, clusters,
    )  # fmt: skip
    return o, lse


def _empty_lse(q: Tensor) -> Tensor:
    *batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((*batch, heads, seqlen_q), dtype=torch.float32)


def _first_call(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Validate, load the kernel and remember it, and call it."""
    (
        q, k, v, cu_seqlens_q, cu_seqlens_k, _, seqused_q, seqused_k, softmax_scale, _, _,
        learnable_sink, _, _, return_lse,
    ) = arguments  # fmt: skip
    _validate(*arguments)
    if is_grad_enabled():
        check_autograd(_NAMES, q, k, v, learnable_sink)
    if q.numel() == 0 or k.numel() == 0 or (cu_seqlens_q is not None and len(cu_seqlens_q) == 1):
        return _no_keys(q, learnable_sink, return_lse)
    ready = _prepare(*arguments)
    q, k, v = (_with_strides_for_tma(x) for x in (q, k, v))
    return _launch(
        ready, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        ready[1] if softmax_scale is None else softmax_scale, learnable_sink, return_lse,
    )  # fmt: skip


def _refused(error: Exception, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    """The compiled host code would not launch: say why in the operator's words, or mend it."""
    _validate(*arguments)
    if any(_with_strides_for_tma(x) is not x for x in arguments[:3]):
        return _first_call(*arguments)
    raise error


def _no_keys(
    q: Tensor, learnable_sink: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """What attention over nothing gives."""
    o = torch.zeros_like(q, memory_format=_contiguous)
    if not return_lse:
        return o, None
    lse = _empty_lse(q).fill_(-math.inf)
    if learnable_sink is not None:
        lse.copy_(learnable_sink[:, None])
    return o, lse


def _with_strides_for_tma(x: Tensor) -> Tensor:
    """x, or a view of it where a dimension of one element has a stride that TMA would refuse."""
    if all(stride % _VECTOR == 0 for stride in x.stride()[:-1]):
        return x
    strides = [
        stride if stride % _VECTOR == 0 else x.shape[-1]
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    return x.as_strided(x.shape, (*strides, 1))


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    learnable_sink: Tensor | None,
    softcap: float,
    scheduler: str | None,
    return_lse: bool,
) -> _Ready:
    """Load the kernel for these arguments, and remember it if they are on a GPU."""
    del v, softmax_scale
    left, right = _bounds(window_size, causal)
    arch = launch.arch_for(q.device)
    cluster = table.find("forward", arch, q.shape[-1]).cluster
    ((kernel, spec),) = plan_attention(
        arch,
        head_dim=q.shape[-1],
        dtype=DTYPE_NAMES[q.dtype],
        heads=q.shape[-2],
        heads_k=k.shape[-2],
        window_left=left is not None,
        window_right=right is not None,
        sink=None if learnable_sink is None else DTYPE_NAMES[learnable_sink.dtype],
        softcap=bool(softcap),
        varlen_q=cu_seqlens_q is not None,
        varlen_k=cu_seqlens_k is not None,
        seqused_q=seqused_q is not None,
        seqused_k=seqused_k is not None,
        scheduler=scheduler,
        return_lse=bool(return_lse),
        short=_is_short(q.shape, cu_seqlens_q, max_seqlen_q),
    )
    ready = (
        launch.get_for(q.device, kernel, spec),
        q.shape[-1] ** -0.5,
        float(softcap or 1.0),
        left or 0,
        right or 0,
        max(1, launch.num_sms(q.device) // cluster),
    )
    if q.is_cuda:  # which emulator runs a CPU tensor depends on where the call is made
        key = _key(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, causal,
            window_size, learnable_sink, softcap, scheduler, return_lse,
        )  # fmt: skip
        _ready[key] = ready
    return ready


# -- checks -------------------------------------------------------------------------------------


def _bounds(window_size: Window, causal: bool) -> Window:
    """The bounds that hide anything, None for those that do not."""
    left, right = (
        None if bound is None or bound == -1 or bound >= _MAX_SEQLEN else bound
        for bound in window_size
    )
    return left, 0 if causal else right


def _check_window(window_size: Any) -> None:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}, must be a pair (left, right)")
    for bound in window_size:
        if bound is None:
            continue
        if not is_int(bound):
            raise TypeError(
                f"window_size holds a {type(bound).__name__}, must be ints, or None for no bound"
            )
        if bound < -1:
            raise ValueError(
                f"window_size is {tuple(window_size)}, each must be at least 0, or None or -1 for "
                "no bound"
            )


def _check_max_seqlen(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.dtype.is_floating_point or value.dtype.is_complex:
            raise TypeError(
                f"{name} is a tensor of shape {_shape(value)} and {value.dtype}, must be an int or "
                "an integer tensor without dimensions"
            )
    elif not is_int(value):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    elif value < 0:
        raise ValueError(f"{name} is {value}, must be at least 0")


def _validate(*arguments: Any) -> None:
    """Raise the documented exception if no kernel can take these arguments."""
    _validate_metadata(*arguments)
    q, k, v = arguments[:3]
    launch.check_device("q", q.device)
    table.find("forward", launch.arch_for(q.device), q.shape[-1])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"{name} starts at address {x.data_ptr():#x}: TMA, which reads it in place, needs "
                f"{_ALIGNMENT}-byte alignment"
            )


def _validate_metadata(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    seqused_q: Any,
    seqused_k: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    learnable_sink: Any,
    softcap: Any,
    scheduler: Any,
    return_lse: Any,
) -> None:
    """The checks that need no memory, and so hold for fake tensors too."""
    required = {"q": q, "k": k, "v": v}
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    lengths = {name: x for name, x in lengths.items() if x is not None}
    sink = {} if learnable_sink is None else {"learnable_sink": learnable_sink}
    check_tensors(required, lengths | sink)
    _check_scalars(softmax_scale, causal, window_size, softcap, scheduler, return_lse)
    if max_seqlen_q is not None:
        _check_max_seqlen("max_seqlen_q", max_seqlen_q)

    if DTYPE_NAMES.get(q.dtype) not in DTYPES:
        raise TypeError(f"q has dtype {q.dtype}, must be one of {DTYPES}")
    for names, dtype in ((("k", "v"), q.dtype), (tuple(lengths), torch.int32)):
        for name in names:
            x = (required | lengths)[name]
            if x.dtype != dtype:
                raise TypeError(f"{name} has dtype {x.dtype}, must be {dtype}")
    if sink and DTYPE_NAMES.get(learnable_sink.dtype) not in SINK_DTYPES:
        raise TypeError(
            f"learnable_sink has dtype {learnable_sink.dtype}, must be one of {SINK_DTYPES[1:]}"
        )

    _check_shapes(q, k, v, lengths, learnable_sink)

    for name, x in required.items():
        if x.numel() and (
            x.stride(-1) != 1
            or any(
                size > 1 and stride % _VECTOR
                for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
            )
        ):
            raise ValueError(
                f"{name} has strides {x.stride()}: TMA, which reads it in place, needs the last "
                f"dimension contiguous and the others to step by multiples of {_VECTOR} elements"
            )
    for name, x in (lengths | sink).items():
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}, must be contiguous")


def _check_scalars(
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    scheduler: Any,
    return_lse: Any,
) -> None:
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if value is not None:
            check_is_number(name, value)
    check_flags(causal=causal, return_lse=return_lse)
    if softmax_scale is not None and not _SMALLEST_SCALE <= softmax_scale <= LARGEST_SCALE:
        raise ValueError(
            f"softmax_scale is {softmax_scale}, must be positive and finite in float32, also times "
            f"log2(e): from {_SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}"
        )
    if softcap and not _SMALLEST_SCALE <= softcap <= LARGEST_SOFTCAP:
        raise ValueError(
            f"softcap is {softcap}, must be positive, from {_SMALLEST_SCALE:.3g} to "
            f"{LARGEST_SOFTCAP:.3g}, or 0 for none"
        )
    _check_window(window_size)
    if scheduler is not None and scheduler not in SCHEDULERS:
        raise ValueError(f"scheduler is {scheduler!r}, must be one of {SCHEDULERS} or None")


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Tensor], learnable_sink: Tensor | None
) -> None:
    for name, x in (("q", q), ("k", k)):
        packed = f"cu_seqlens_{name}" in lengths
        if x.dim() != (3 if packed else 4):
            heads_of = "heads" if name == "q" else "heads_k"
            rows = f"total_{name}" if packed else f"batch, seqlen_{name}"
            given = "given" if packed else "not given"
            raise ValueError(
                f"{name} has shape {_shape(x)}, must be [{rows}, {heads_of}, head_dim] where "
                f"cu_seqlens_{name} is {given}"
            )
        if x.shape[-3] >= _MAX_SEQLEN:
            raise ValueError(f"{name} has {x.shape[-3]} rows, must be fewer than {_MAX_SEQLEN}")
    head_dim = int(q.shape[-1])
    if head_dim not in table.head_dims("forward"):
        raise NotImplementedError(
            f"head_dim of q is {head_dim}, there are kernels for: {table.head_dims('forward')}"
        )
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in lengths and (lengths[name].dim() != 1 or lengths[name].shape[0] == 0):
            raise ValueError(f"{name} has shape {_shape(lengths[name])}, must be [batch + 1]")
    batch = lengths["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in lengths else q.shape[0]
    heads, heads_k = q.shape[-2], k.shape[-2]
    expected_k = (
        (k.shape[0], heads_k, head_dim)
        if "cu_seqlens_k" in lengths
        else (batch, k.shape[1], heads_k, head_dim)
    )
    expected: dict[str, tuple[Any, ...]] = {"k": expected_k, "v": expected_k}
    tensors = {"k": k, "v": v} | lengths
    for name in lengths:
        expected[name] = (batch + 1,) if name.startswith("cu_") else (batch,)
    if learnable_sink is not None:
        expected["learnable_sink"] = (heads,)
        tensors["learnable_sink"] = learnable_sink
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} has shape {_shape(tensors[name])}, must be {list(shape)}")
    if (heads_k == 0 and heads != 0) or (heads_k != 0 and heads % heads_k):
        raise ValueError(f"q has {heads} heads, must be a multiple of the heads of k, {heads_k}")
    if "seqused_q" in lengths and "cu_seqlens_q" not in lengths:
        raise NotImplementedError(
            "seqused_q without cu_seqlens_q has no kernel: pack q and give cu_seqlens_q"
        )
    rows = table.smallest_tile("forward", head_dim)
    if "cu_seqlens_q" in lengths:  # at most
        tiles = heads * (q.shape[0] // rows + batch)
    else:
        tiles = heads * batch * -(-q.shape[1] // rows)
    if tiles >= _MAX_TILES:
        raise ValueError(
            f"q has {batch} sequences of {heads} heads, {tiles} tiles of {rows} rows: fewer than "
            f"{_MAX_TILES} fit one call"
        )


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


# -- the registered operator --------------------------------------------------------------------

_library = torch.library.Library("cute_attn", "FRAGMENT")
_library.define(
    "flash_attn(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, float? softmax_scale=None, bool causal=False, "
    "SymInt? window_left=None, SymInt? window_right=None, Tensor? learnable_sink=None, "
    "float softcap=0.0, str? scheduler=None, bool return_lse=False) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    scheduler: str | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """o and lse; lse has no elements unless it is asked for."""
    q, k, v = plain(q), plain(k), plain(v)
    cu_seqlens_q, cu_seqlens_k = plain(cu_seqlens_q), plain(cu_seqlens_k)
    seqused_q, seqused_k = plain(seqused_q), plain(seqused_k)
    learnable_sink = plain(learnable_sink)
    check_tangents(q=q, k=k, v=v, learnable_sink=learnable_sink)
    with torch.no_grad():  # whoever calls it by its own name gets no gradient, as its schema says
        o, lse = _forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, softmax_scale,
            causal, (window_left, window_right), learnable_sink, softcap, scheduler, return_lse,
        )  # fmt: skip
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    scheduler: str | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    _validate_metadata(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k, softmax_scale,
        causal, (window_left, window_right), learnable_sink, softcap, scheduler, return_lse,
    )  # fmt: skip
    o = torch.empty_like(q, memory_format=_contiguous)
    return o, _empty_lse(q) if return_lse else q.new_empty(0, dtype=torch.float32)


_library.impl("flash_attn", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("cute_attn::flash_attn", _fake, lib=_library)
