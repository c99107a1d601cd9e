"""FlashAttention 3's functions, with its arguments in its order, on this package's kernels.

    from cute_attn.compat.flash_attn_3 import flash_attn_func  # in place of flash_attn_interface

Arguments have the names, order and defaults of `hopper/flash_attn_interface.py`. Results too are as
there: a tensor, or the pair (o, lse). What has no kernel raises NotImplementedError, which names
the argument: `qv`, `q_descale`, `attention_chunk`, and other head dimensions than
`cute_attn.flash_attn_func` takes. fp8 k and v need a bfloat16 or float16 q. `pack_gqa`,
`sm_margin` and `scheduler_metadata`, which tune FlashAttention's kernels, have no effect.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.attention import flash_attn_func as _dense
from ..ops.attention import flash_attn_varlen_func as _varlen
from . import kv_cache
from .arguments import Window, refuse_given, unpacked, window_of, with_contiguous_rows

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Softmax attention over a batch of sequences of one length.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, bfloat16 or float16.
        k: `[batch, seqlen_k, heads_k, head_dim]`, dtype of q, or fp8 on Hopper; heads_k divides
            heads.
        v: `[batch, seqlen_k, heads_k, head_dim_v]`, dtype of k.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: mask the keys after a query's position, which is aligned at the end.
        qv: only None.
        q_descale: only None: q is not fp8.
        k_descale: as for `cute_attn.flash_attn_func`.
        v_descale: as for `cute_attn.flash_attn_func`.
        window_size: how many keys to the left and to the right of its position a query sees; -1 is
            all.
        attention_chunk: only 0.
        softcap: scores become softcap * tanh(score / softcap); 0 is no cap.
        num_splits: into how many parts the keys are split; 0 chooses by shapes.
        pack_gqa: no effect.
        deterministic: whether gradients are the same bit for bit in every run.
        sm_margin: no effect.
        return_attn_probs: whether to return lse too.

    Returns:
        o, a new tensor `[batch, seqlen_q, heads, head_dim_v]` of q's dtype, or the pair (o, lse):
        lse is float32 `[batch, heads, seqlen_q]`, natural logarithm, -inf for a query that sees no
        key.

    Differentiable with respect to q, k and v.

    Raises:
        TypeError: as `cute_attn.flash_attn_func`.
        ValueError: as `cute_attn.flash_attn_func`.
        NotImplementedError: an argument that supports only one value has another value, or there is
            no kernel for the head dimension on this GPU.
    """
    _refuse(attention_chunk, qv=qv, q_descale=q_descale)
    o, lse = _dense(
        with_contiguous_rows(q),
        with_contiguous_rows(k),
        with_contiguous_rows(v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_of(window_size),
        softcap=softcap,
        num_splits=num_splits,
        deterministic=deterministic,
        return_lse=bool(return_attn_probs),
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return (o, lse) if return_attn_probs else o


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor, which is read in place.

    Args:
        qkv: `[batch, seqlen, 3, heads, head_dim]`, or with num_heads_q
            `[batch, seqlen, num_heads_q + 2 heads_k, head_dim]`, bfloat16 or float16.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`.
        q_descale: only None.
        k_descale: only None.
        v_descale: only None.
        window_size: as for `flash_attn_func`.
        attention_chunk: only 0.
        softcap: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`.
        num_heads_q: how many of the heads are q's, where k and v have fewer.
        sm_margin: no effect.
        return_attn_probs: as for `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        TypeError: as `flash_attn_func`.
        ValueError: as `flash_attn_func`, or a shape of qkv that num_heads_q does not fit.
        NotImplementedError: as `flash_attn_func`.
    """
    if num_heads_q is None:
        q, k, v = unpacked("qkv", qkv, "[batch, seqlen, 3, heads, head_dim]", 5)
    else:
        rest = qkv.shape[2] - num_heads_q if qkv.dim() == 4 else -1
        if rest <= 0 or rest % 2:
            raise ValueError(
                f"qkv has shape {list(qkv.shape)}, must be [batch, seqlen, {num_heads_q} + 2 "
                "heads_k, head_dim], by num_heads_q"
            )
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], dim=2)
    refuse_given(k_descale=k_descale, v_descale=v_descale)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, None, None, window_size,
        attention_chunk, softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Softmax attention over sequences of different lengths, packed one after another.

    Args:
        q: `[total_q, heads, head_dim]`, bfloat16 or float16.
        k: `[total_k, heads_k, head_dim]`, dtype as for `flash_attn_func`.
        v: `[total_k, heads_k, head_dim_v]`, dtype of k.
        cu_seqlens_q: `[batch + 1]` int32: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q are
            sequence b.
        cu_seqlens_k: `[batch + 1]` int32: the rows of k and v of each sequence, as cu_seqlens_q.
        max_seqlen_q: length of the longest sequence, a hint.
        max_seqlen_k: the length of the longest sequence of keys, also a hint.
        seqused_q: `[batch]` int32: how many of a sequence's rows of q are used.
        seqused_k: `[batch]` int32: how many rows of k and v each sequence uses.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`, within each sequence.
        qv: only None.
        q_descale: only None: q is not fp8.
        k_descale: as for `cute_attn.flash_attn_func`.
        v_descale: as for `cute_attn.flash_attn_func`.
        window_size: as for `flash_attn_func`, within each sequence.
        attention_chunk: only 0.
        softcap: as for `flash_attn_func`.
        num_splits: as for `flash_attn_func`.
        pack_gqa: no effect.
        deterministic: as for `flash_attn_func`.
        sm_margin: no effect.
        return_attn_probs: as for `flash_attn_func`.

    Returns:
        As `flash_attn_func`: o `[total_q, heads, head_dim_v]`, lse `[heads, total_q]`.

    Raises:
        TypeError: as `cute_attn.flash_attn_varlen_func`.
        ValueError: as `cute_attn.flash_attn_varlen_func`.
        NotImplementedError: as `flash_attn_func`.
    """
    _refuse(attention_chunk, qv=qv, q_descale=q_descale)
    o, lse = _varlen(
        with_contiguous_rows(q),
        with_contiguous_rows(k),
        with_contiguous_rows(v),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_of(window_size),
        softcap=softcap,
        num_splits=num_splits,
        deterministic=deterministic,
        return_lse=bool(return_attn_probs),
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return (o, lse) if return_attn_probs else o


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """`cute_attn.compat.flash_attn_with_kvcache`, also for packed queries.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, or with cu_seqlens_q `[total_q, heads, head_dim]`,
            bfloat16 or float16.
        k_cache: as for FlashAttention 2's function, where page_table is called block_table; also
            fp8.
        v_cache: as for FlashAttention 2's function.
        k: as for FlashAttention 2's function: `[batch, seqlen_new, heads_k, head_dim]`.
        v: as k.
        qv: only None.
        rotary_cos: as for FlashAttention 2's function; not with cu_seqlens_q.
        rotary_sin: as rotary_cos.
        cache_seqlens: as for FlashAttention 2's function.
        cache_batch_idx: as for FlashAttention 2's function.
        cache_leftpad: as for FlashAttention 2's function.
        page_table: `[batch, max_pages]` int32; on Blackwell, page_size is a multiple of 16.
        cu_seqlens_q: `[batch + 1]` int32: where each sequence of q begins and ends.
        cu_seqlens_k_new: no effect without k; with k, only None.
        max_seqlen_q: length of the longest sequence of q, a hint.
        rotary_seqlens: only None.
        q_descale: only None: q is not fp8.
        k_descale: as for `cute_attn.flash_attn_func`.
        v_descale: as for `cute_attn.flash_attn_func`.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`.
        window_size: as for `flash_attn_func`.
        attention_chunk: only 0.
        softcap: as for `flash_attn_func`.
        rotary_interleaved: as for FlashAttention 2's function.
        scheduler_metadata: no effect.
        num_splits: as for `flash_attn_func`.
        pack_gqa: no effect.
        sm_margin: no effect.
        return_softmax_lse: whether to return lse too.

    Returns:
        o, a new tensor, or the pair (o, lse): lse is float32 `[batch, heads, seqlen_q]`, or with
        cu_seqlens_q `[heads, total_q]`. There is no gradient.

    Raises:
        TypeError: as FlashAttention 2's function.
        ValueError: as FlashAttention 2's function.
        NotImplementedError: as FlashAttention 2's function, or an argument that supports only one
            value has another value.
    """
    if k is not None:
        refuse_given(cu_seqlens_k_new=cu_seqlens_k_new)
    _refuse(
        attention_chunk,
        qv=qv,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
    )
    o, lse = kv_cache.attend(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        ("page_table", page_table),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return (o, lse) if return_softmax_lse else o


def _refuse(attention_chunk: int, **absent: Any) -> None:
    if attention_chunk != 0:
        raise NotImplementedError(
            f"attention_chunk is {attention_chunk}, must be 0: there is no kernel for it"
        )
    refuse_given(**absent)
