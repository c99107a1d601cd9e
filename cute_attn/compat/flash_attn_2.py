"""FlashAttention 2's functions, with its arguments in its order, on this package's kernels.

    from cute_attn.compat import flash_attn_func  # in place of: from flash_attn import ...

Arguments have flash_attn 2.8's names, order and defaults. Results too are flash_attn 2.8's: a
tensor, or with `return_attn_probs` the triple (o, lse, None). What has no kernel raises
NotImplementedError, which names the argument: `dropout_p` above 0, `alibi_slopes`, and other head
dimensions than `cute_attn.flash_attn_func` takes.

In every function, heads_k divides heads, and a negative number in `window_size` is no bound.
Positions are aligned at the end: with `causal`, query i sees the keys up to i + seqlen_k -
seqlen_q. A q, k or v whose last dimension is not contiguous is copied. The lse of a query that sees
no key is -inf.
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
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor | None, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Softmax attention over a batch of sequences of one length.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, bfloat16 or float16.
        k: `[batch, seqlen_k, heads_k, head_dim]`, dtype of q.
        v: as k.
        dropout_p: only 0.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: mask the keys after a query's position.
        window_size: how many keys to the left and to the right of its position a query sees; -1 is
            all.
        softcap: scores become softcap * tanh(score / softcap); 0 is no cap.
        alibi_slopes: only None.
        deterministic: whether gradients are the same bit for bit in every run.
        return_attn_probs: whether to return lse too. The probabilities are never returned.

    Returns:
        o, a new tensor of q's shape and dtype. With return_attn_probs, (o, lse, None): lse is
        float32 `[batch, heads, seqlen_q]`, natural logarithm, and None stands for FlashAttention's
        third result, which only a call with dropout has.

    Differentiable with respect to q, k and v.

    Raises:
        TypeError: as `cute_attn.flash_attn_func`.
        ValueError: as `cute_attn.flash_attn_func`.
        NotImplementedError: dropout_p is not 0, alibi_slopes is given, or there is no kernel for
            the head dimension on this GPU.
    """
    _refuse(dropout_p, alibi_slopes)
    o, lse = _dense(
        with_contiguous_rows(q),
        with_contiguous_rows(k),
        with_contiguous_rows(v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_of(window_size),
        softcap=softcap,
        deterministic=deterministic,
        return_lse=bool(return_attn_probs),
    )
    return (o, lse, None) if return_attn_probs else o


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor, which is read in place.

    Args:
        qkv: `[batch, seqlen, 3, heads, head_dim]`, bfloat16 or float16: q, k and v.
        dropout_p: as for `flash_attn_func`.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`.
        window_size: as for `flash_attn_func`.
        softcap: as for `flash_attn_func`.
        alibi_slopes: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`.
        return_attn_probs: as for `flash_attn_func`.

    Returns:
        As `flash_attn_func`, o as `[batch, seqlen, heads, head_dim]`.

    Raises:
        TypeError: as `flash_attn_func`.
        ValueError: as `flash_attn_func`.
        NotImplementedError: as `flash_attn_func`.
    """
    q, k, v = unpacked("qkv", qkv, "[batch, seqlen, 3, heads, head_dim]", 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with k and v in one tensor, which is read in place.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, bfloat16 or float16.
        kv: `[batch, seqlen_k, 2, heads_k, head_dim]`, dtype of q: k and v.
        dropout_p: as for `flash_attn_func`.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`.
        window_size: as for `flash_attn_func`.
        softcap: as for `flash_attn_func`.
        alibi_slopes: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`.
        return_attn_probs: as for `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        TypeError: as `flash_attn_func`.
        ValueError: as `flash_attn_func`.
        NotImplementedError: as `flash_attn_func`.
    """
    k, v = unpacked("kv", kv, "[batch, seqlen_k, 2, heads_k, head_dim]", 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Softmax attention over sequences of different lengths, packed one after another.

    Args:
        q: `[total_q, heads, head_dim]`, bfloat16 or float16.
        k: `[total_k, heads_k, head_dim]`, dtype of q; with block_table
            `[num_pages, page_size, heads_k, head_dim]`. On Blackwell, page_size is a multiple of
            16.
        v: as k.
        cu_seqlens_q: `[batch + 1]` int32: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q are
            sequence b.
        cu_seqlens_k: `[batch + 1]` int32: the rows of k and v of each sequence, as cu_seqlens_q.
            With block_table only the differences count, which are the lengths.
        max_seqlen_q: length of the longest sequence, a hint.
        max_seqlen_k: the length of the longest sequence of keys, also a hint.
        dropout_p: as for `flash_attn_func`.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`.
        window_size: as for `flash_attn_func`, within each sequence.
        softcap: as for `flash_attn_func`.
        alibi_slopes: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`.
        return_attn_probs: as for `flash_attn_func`.
        block_table: `[batch, max_pages]` int32: sequence b's keys j * page_size to
            (j + 1) * page_size - 1 are in page block_table[b, j]. There is no gradient then.

    Returns:
        As `flash_attn_func`, o of q's shape, lse `[heads, total_q]`.

    Raises:
        TypeError: as `cute_attn.flash_attn_varlen_func`, which calls block_table page_table.
        ValueError: as `cute_attn.flash_attn_varlen_func`.
        NotImplementedError: as `flash_attn_func`, or a gradient is needed with block_table.
    """
    _refuse(dropout_p, alibi_slopes)
    lengths: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        lengths = {
            "seqused_k": cu_seqlens_k[1:] - cu_seqlens_k[:-1],
            "page_table": with_contiguous_rows(block_table),
            "num_splits": 0,
        }
    o, lse = _varlen(
        with_contiguous_rows(q),
        with_contiguous_rows(k),
        with_contiguous_rows(v),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_of(window_size),
        softcap=softcap,
        deterministic=deterministic,
        return_lse=bool(return_attn_probs),
        **lengths,
    )
    return (o, lse, None) if return_attn_probs else o


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in one tensor, which is read in place.

    Args:
        qkv: `[total, 3, heads, head_dim]`, bfloat16 or float16: q, k and v.
        cu_seqlens: `[batch + 1]` int32: where each sequence begins and ends.
        max_seqlen: length of the longest sequence, a hint.
        dropout_p: as for `flash_attn_func`.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`.
        window_size: as for `flash_attn_func`.
        softcap: as for `flash_attn_func`.
        alibi_slopes: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`.
        return_attn_probs: as for `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`, o as `[total, heads, head_dim]`.

    Raises:
        TypeError: as `flash_attn_varlen_func`.
        ValueError: as `flash_attn_varlen_func`.
        NotImplementedError: as `flash_attn_varlen_func`.
    """
    q, k, v = unpacked("qkv", qkv, "[total, 3, heads, head_dim]", 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with k and v in one tensor, which is read in place.

    Args:
        q: `[total_q, heads, head_dim]`, bfloat16 or float16.
        kv: `[total_k, 2, heads_k, head_dim]`, dtype of q: k and v.
        cu_seqlens_q: as for `flash_attn_varlen_func`.
        cu_seqlens_k: as for `flash_attn_varlen_func`.
        max_seqlen_q: as for `flash_attn_varlen_func`.
        max_seqlen_k: as for `flash_attn_varlen_func`.
        dropout_p: as for `flash_attn_func`.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`.
        window_size: as for `flash_attn_func`.
        softcap: as for `flash_attn_func`.
        alibi_slopes: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`.
        return_attn_probs: as for `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        TypeError: as `flash_attn_varlen_func`.
        ValueError: as `flash_attn_varlen_func`.
        NotImplementedError: as `flash_attn_varlen_func`.
    """
    k, v = unpacked("kv", kv, "[total_k, 2, heads_k, head_dim]", 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Attention of new queries to a KV cache, to which new keys and values are appended first.

    Appending is a few torch operators before the kernel. Nothing reads device memory, so that a
    CUDA graph can capture the call. There is no gradient, as in FlashAttention: the result requires
    no gradient, even if q does.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, bfloat16 or float16.
        k_cache: `[batch_cache, seqlen_cache, heads_k, head_dim]`, dtype of q; with block_table
            `[num_pages, page_size, heads_k, head_dim]`. On Blackwell, page_size is a multiple of
            16. Written in place if k is given: other rows keep their bits. Without cache_batch_idx
            and block_table, the cache's first sequences are used.
        v_cache: as k_cache.
        k: `[batch, seqlen_new, heads_k, head_dim]`, dtype of q: keys to append at cache_seqlens.
            There must be room for the new keys, also in block_table; only an int cache_seqlens is
            checked.
        v: as k, given with k.
        rotary_cos: `[positions, rotary_dim / 2]`, dtype of q: q and k are rotated in float32, k at
            its place in the cache. With `causal` or a window, query i is rotated at
            cache_seqlens + i, else each query at cache_seqlens. Needs k and rotary_sin.
        rotary_sin: as rotary_cos. rotary_dim is a multiple of 16, at most head_dim.
        cache_seqlens: keys in the cache before the call, an int or `[batch]` int32. None is the
            whole cache, if k is not given.
        cache_batch_idx: `[batch]` int32: the sequence of the cache for each sequence of q, all
            distinct if k is given. On Blackwell, seqlen_cache is a multiple of 16.
        cache_leftpad: `[batch]` int32: the first row of each sequence of the cache; the rows in
            front are not seen. cache_seqlens counts these rows.
        block_table: `[batch, max_pages]` int32: row j of sequence b is in page
            block_table[b, j // page_size].
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`: the last query sees all keys, appended ones included.
        window_size: as for `flash_attn_func`.
        softcap: as for `flash_attn_func`.
        rotary_interleaved: whether columns 2 i and 2 i + 1 are a pair to rotate, or i and
            i + rotary_dim / 2.
        alibi_slopes: only None.
        num_splits: into how many parts the keys are split; 0 chooses by shapes.
        return_softmax_lse: whether to return lse too.

    Returns:
        o, a new tensor of q's shape and dtype, or the pair (o, lse): lse is float32
        `[batch, heads, seqlen_q]`, natural logarithm.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, strides or values, or k, v, cache_seqlens, rotary_cos and
            rotary_sin do not go together. Where the kernel refuses a cache, the message says k and
            v.
        NotImplementedError: alibi_slopes is given; cache_batch_idx or cache_leftpad is given with
            block_table or with each other; on Blackwell, cache_batch_idx, and seqlen_cache is no
            multiple of 16; no kernel has the head dimension on this GPU.
    """
    refuse_given(alibi_slopes=alibi_slopes)
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
        ("block_table", block_table),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )
    return (o, lse) if return_softmax_lse else o


def _refuse(dropout_p: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p is {dropout_p}, must be 0: there is no kernel with dropout"
        )
    refuse_given(alibi_slopes=alibi_slopes)
