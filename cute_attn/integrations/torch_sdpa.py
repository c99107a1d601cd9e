"""PyTorch's own attention functions on this package's kernels.

    from cute_attn.integrations.torch_sdpa import register

    register()
    torch.nn.attention.activate_flash_attention_impl("cute_attn")
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

PyTorch's functions reach FlashAttention by five operators in the namespace `aten`. While active,
this module's functions stand in for these operators on CUDA. A call that the kernels do not take
goes on to PyTorch's own kernel, which is looked up before the replacement. Whether the kernels take
a call depends on nothing that differs between a forward and its backward. So the forward and its
backward run on one side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import flash_attn_func, flash_attn_varlen_func
from ..ops.attention.arguments import ALIGNMENT, has_readable_strides, readable_or_copied
from ..ops.attention.backward import BACKWARD, BackwardArguments
from ..ops.attention.support import has_kernels

__all__ = ["register"]

NAME = "cute_attn"
_NEEDED = "register_flash_attention_impl"


def register(name: str = NAME, *, fallback: bool = True) -> None:
    """Make `torch.nn.attention.activate_flash_attention_impl(name)` known to PyTorch.

    After that call, `torch.nn.functional.scaled_dot_product_attention`, where PyTorch chooses
    FlashAttention for it, and `torch.nn.attention.varlen.varlen_attn` run on this package's
    kernels, forward and backward, eager and compiled.
    `torch.nn.attention.restore_flash_attention_impl()` gives PyTorch's kernels back.

    The kernels take bfloat16 and float16, head_dim 64, 128 and 256 on Hopper and 256 on Blackwell,
    causal masks, windows, grouped heads, pages and splits. A q, k or v with strides or an address
    that TMA cannot read is copied. The kernels do not take other head dimensions, `dropout_p` above
    0, `alibi_slopes`, `return_debug_mask`, or a page table without lengths of the keys.

    Args:
        name: the value for `activate_flash_attention_impl`.
        fallback: whether calls that the kernels do not take go to PyTorch's own kernels, silently,
            as they do before activation. Otherwise such calls raise NotImplementedError with the
            reason.

    Raises:
        RuntimeError: PyTorch has no such function; the message names PyTorch's version.
    """
    from torch.nn import attention

    if not hasattr(attention, _NEEDED) or not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.{_NEEDED}, or no "
            "torch.library.get_kernel, which this integration needs: install a newer one"
        )
    attention.register_flash_attention_impl(
        name, register_fn=functools.partial(_activate, fallback=fallback)
    )


class _Active:
    """What PyTorch keeps while the kernels stand in, and removes."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        self._library = None  # its finalizer gives the operators back


def _activate(fallback: bool = True, dispatch_key: str = "CUDA") -> _Active:
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    for name, function in _FUNCTIONS.items():
        if not hasattr(torch.ops.aten, name):
            continue  # of a newer PyTorch
        stand_in = _StandIn(name, function, dispatch_key, fallback)
        library.impl(name, stand_in, dispatch_key, with_keyset=True)
    return _Active(library)


class _NoKernel(NotImplementedError):
    """The kernels do not take a call."""


class _StandIn:
    """An operator that calls ours, or PyTorch's own."""

    def __init__(
        self, name: str, function: Callable[..., Any], dispatch_key: str, fallback: bool
    ) -> None:
        self._name, self._function = name, function
        self._own = None
        if fallback and torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", dispatch_key
        ):
            self._own = torch.library.get_kernel(f"aten::{name}", dispatch_key)

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # The graph is PyTorch's: a graph of ours would be a second graph.
            with torch.no_grad():
                return self._function(*args, **kwargs)
        except _NoKernel as error:
            if self._own is None:
                raise NotImplementedError(f"aten::{self._name} on cute_attn: {error}") from None
        return self._own.call_boxed(keys, *args, **kwargs)


# -- the operators --------------------------------------------------------------------------------


def _check(
    q: Tensor,
    v: Tensor,
    dropout_p: float,
    return_debug_mask: bool = False,
    alibi_slopes: Tensor | None = None,
) -> None:
    """Raise _NoKernel for what no kernel takes, before anything is computed."""
    if dropout_p != 0.0:
        raise _NoKernel(f"dropout_p is {dropout_p}, must be 0")
    if return_debug_mask:
        raise _NoKernel("return_debug_mask is True, must be False")
    if alibi_slopes is not None:
        raise _NoKernel("alibi_slopes is given, must be None")
    if not has_kernels(q, v):
        raise _NoKernel(
            f"there is no kernel for {q.dtype} and head_dim {q.shape[-1]} of q, {v.shape[-1]} of "
            f"v on {q.device}"
        )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_flash_attention_forward`: `[batch, seqlen, heads, head_dim]`, or packed as
    `[total, heads, head_dim]` with cum_seq_q."""
    _check(query, value, dropout_p, return_debug_mask, alibi_slopes)
    if block_table is not None and seqused_k is None:
        raise _NoKernel("block_table is given without seqused_k")
    packed = cum_seq_q is not None
    if packed and cum_seq_k is None and block_table is None:
        raise _NoKernel("cum_seq_q is given without cum_seq_k")
    q, k, v = map(readable_or_copied, (query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": (window_size_left, window_size_right),
        "num_splits": num_splits or 0,
        "return_lse": True,
        "out": out,
    }
    if packed or seqused_k is not None:
        o, lse = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cum_seq_q,
            cu_seqlens_k=None if block_table is not None else cum_seq_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            seqused_k=seqused_k,
            page_table=block_table,
            **options,
        )
    else:
        o, lse = flash_attn_func(q, k, v, **options)
    assert lse is not None
    return o, lse, *_extras(query)


def _forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`_flash_attention_forward_no_dropout_inplace`, which returns the log-sum-exp."""
    direct = has_readable_strides(out) and out.data_ptr() % ALIGNMENT == 0
    o, lse, *_ = _forward(*args, **kwargs, out=out if direct else None)
    if not direct:
        out.copy_(o)
    return lse


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """`_scaled_dot_product_flash_attention`: `[batch, heads, seqlen, head_dim]`."""
    _check(query, value, dropout_p, return_debug_mask)
    o = torch.empty_like(query)  # compiled graphs count on its strides
    lse = _forward_into(
        o.transpose(1, 2),
        *(x.transpose(1, 2) for x in (query, key, value)),
        None,
        None,
        query.shape[2],
        key.shape[2],
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
    )
    return o, lse, None, None, query.shape[2], key.shape[2], *_extras(query)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None = None,
    unused: Tensor | None = None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """`_flash_attention_backward`."""
    _check(query, value, dropout_p)
    q, k, v = map(readable_or_copied, (query, key, value))
    gradients = BACKWARD.routed(
        *BackwardArguments(
            q,
            k,
            v,
            out,
            grad_out,
            logsumexp.contiguous(),
            cu_seqlens_q=cum_seq_q,
            cu_seqlens_k=cum_seq_k,
            softmax_scale=scale,
            causal=is_causal,
            window_left=window_size_left,
            window_right=window_size_right,
        )
    )[:3]
    return tuple(map(_with_strides_of, gradients, (query, key, value)))


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None = None,
    philox_offset: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`_scaled_dot_product_flash_attention_backward`."""
    do, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = _backward(
        do, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, scale=scale
    )
    return tuple(x.transpose(1, 2) for x in gradients)


def _extras(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last results of a forward, of no use without dropout: nothing reads them."""
    return (
        torch.empty(2, dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
        torch.empty(0, dtype=query.dtype, device=query.device),
    )


def _with_strides_of(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient with the strides that compiled graphs count on: the strides of
    `empty_like(x)`."""
    if gradient.stride() == torch.empty_like(x, device="meta").stride():
        return gradient
    return torch.empty_like(x).copy_(gradient)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
