"""FlashAttention 2's functions, with its arguments in its order, on this package's kernels.

    from cute_attn.compat import flash_attn_func  # in place of: from flash_attn import ...

Names, order and defaults of arguments are those of flash_attn 2.8, and so are the results: a
tensor, or with `return_attn_probs` the triple (o, lse, None). What has no kernel raises
NotImplementedError, which names the argument: `dropout_p` above 0, `alibi_slopes`, and other head
dimensions than `cute_attn.flash_attn_func` takes.

Everywhere, heads_k divides heads, -1 in `window_size` is no bound, positions are aligned at the end
(query i sees the keys up to i + seqlen_k - seqlen_q with `causal`), and a q, k or v whose last
dimension is not contiguous is copied. The lse of a query that sees no key is -inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops.attention import flash_attn_func as _dense
from .ops.attention import flash_attn_varlen_func as _varlen
from .ops.checks import check_dtype, check_dtypes_are, check_shapes, is_int

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int | None, int | None]
Result = Tensor | tuple[Tensor, Tensor | None, None]

ROTARY_STEP = 16  # what FlashAttention's rotary_dim is a multiple of


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
        _rows(q),
        _rows(k),
        _rows(v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
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
    q, k, v = _unpacked("qkv", qkv, "[batch, seqlen, 3, heads, head_dim]", 5)
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
    k, v = _unpacked("kv", kv, "[batch, seqlen_k, 2, heads_k, head_dim]", 5)
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
            `[num_pages, page_size, heads_k, head_dim]`, page_size a multiple of 16.
        v: as k.
        cu_seqlens_q: `[batch + 1]` int32: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q are
            sequence b.
        cu_seqlens_k: likewise for k and v. With block_table only the differences count, which are
            the lengths.
        max_seqlen_q: length of the longest sequence, a hint.
        max_seqlen_k: likewise for the keys.
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
            "page_table": _rows(block_table),
            "num_splits": 0,
        }
    o, lse = _varlen(
        _rows(q),
        _rows(k),
        _rows(v),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
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
    q, k, v = _unpacked("qkv", qkv, "[total, 3, heads, head_dim]", 4)
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
    k, v = _unpacked("kv", kv, "[total_k, 2, heads_k, head_dim]", 4)
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
    none, whatever q does.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, bfloat16 or float16.
        k_cache: `[batch_cache, seqlen_cache, heads_k, head_dim]`, dtype of q; with block_table
            `[num_pages, page_size, heads_k, head_dim]`, page_size a multiple of 16. Written in
            place if k is given: other rows keep their bits. Without cache_batch_idx and
            block_table, its first sequences are used.
        v_cache: as k_cache.
        k: `[batch, seqlen_new, heads_k, head_dim]`, dtype of q: keys to append at cache_seqlens.
            There must be room for them, also in block_table; only an int cache_seqlens is checked.
        v: as k, given with k.
        rotary_cos: `[positions, rotary_dim / 2]`, dtype of q: q and k are rotated in float32, k at
            its place in the cache. With `causal` or a window, query i is rotated at
            cache_seqlens + i, else each query at cache_seqlens. Needs k and rotary_sin.
        rotary_sin: as rotary_cos. rotary_dim is a multiple of 16, at most head_dim.
        cache_seqlens: keys in the cache before the call, an int or `[batch]` int32. None is the
            whole cache, if k is not given.
        cache_batch_idx: `[batch]` int32: the sequence of the cache for each sequence of q, all
            distinct if k is given. Needs a seqlen_cache that is a multiple of 16.
        cache_leftpad: `[batch]` int32: the first row of each sequence of the cache; the rows in
            front are not seen. cache_seqlens counts them.
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
            rotary_sin do not go together. Where the kernel refuses a cache, it says k and v.
        NotImplementedError: alibi_slopes is given; cache_batch_idx or cache_leftpad is given with
            block_table or with each other; cache_batch_idx, and seqlen_cache is no multiple of 16;
            no kernel has the head dimension on this GPU.
    """
    _refuse(0.0, alibi_slopes)
    cache = _Cache.of(
        q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, k, v
    )
    with torch.no_grad():
        if k is not None and v is not None:
            at = cache.appended(k.shape[1])
            if rotary_cos is not None or rotary_sin is not None:
                rotary = _Rotary.of(q, rotary_cos, rotary_sin, rotary_interleaved)
                local = any(b is not None and 0 <= b < cache.capacity for b in window_size)
                first = cache.lengths[:, None].long()
                steps = torch.arange(q.shape[1] if causal or local else 1, device=q.device)
                q, k = rotary(q, first + steps), rotary(k, at)
            cache.write(k, v, at)
        elif rotary_cos is not None or rotary_sin is not None:
            raise ValueError("rotary_cos or rotary_sin is given, it needs k and v to be appended")
        o, lse = _varlen(
            _rows(q),
            **cache.seen(0 if k is None else k.shape[1]),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            num_splits=num_splits,
            return_lse=bool(return_softmax_lse),
        )
    return (o, lse) if return_softmax_lse else o


class _Cache(NamedTuple):
    """A KV cache of `flash_attn_with_kvcache`, its arguments checked."""

    k: Tensor
    v: Tensor
    lengths: Tensor  # `[batch]` int32, before the call
    batch_idx: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None
    capacity: int  # rows of a sequence

    @classmethod
    def of(
        cls,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        lengths: Any,
        batch_idx: Tensor | None,
        leftpad: Tensor | None,
        block_table: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
    ) -> _Cache:
        number = lengths if is_int(lengths) else None
        if not (lengths is None or is_int(lengths) or isinstance(lengths, Tensor)):
            raise TypeError(f"cache_seqlens must be an int or a tensor, got {type(lengths)}")
        given = _given(
            {"q": q, "k_cache": k_cache, "v_cache": v_cache},
            k=k,
            v=v,
            cache_seqlens=lengths if isinstance(lengths, Tensor) else None,
            cache_batch_idx=batch_idx,
            cache_leftpad=leftpad,
            block_table=block_table,
        )
        for name in ("q", "k_cache", "v_cache"):
            if given[name].dim() != 4:
                raise ValueError(f"{name} has shape {list(given[name].shape)}, must have four axes")
        check_dtypes_are(given, ("k_cache", "v_cache", "k", "v"), q.dtype)
        _refuse_together(given, "cache_batch_idx", "block_table")
        _refuse_together(given, "cache_leftpad", "block_table")
        _refuse_together(given, "cache_batch_idx", "cache_leftpad")
        batch, rows = q.shape[0], k_cache.shape[1]
        for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"):
            if name in given:
                check_dtype(name, given[name], ("int32",))
        of_sequences = ("cache_seqlens", "cache_batch_idx", "cache_leftpad")
        check_shapes(given, dict.fromkeys(of_sequences, (batch,)))
        capacity = rows
        if block_table is not None:
            if block_table.dim() != 2 or block_table.shape[0] != batch:
                shape = list(block_table.shape)
                raise ValueError(f"block_table has shape {shape}, must be [{batch}, max_pages]")
            capacity *= block_table.shape[1]
        new = 0
        if k is not None or v is not None:
            if k is None or v is None:
                raise ValueError("one of k and v is given, must be both or none")
            if lengths is None:
                raise ValueError("k and v are given, they need cache_seqlens: where to append them")
            new = k.shape[1] if k.dim() == 4 else 0
            heads_k = k_cache.shape[2]
            check_shapes(
                given,
                {
                    "k": (batch, new, heads_k, k_cache.shape[3]),
                    "v": (batch, new, heads_k, v_cache.shape[3]),
                },
            )
        if number is not None and not 0 <= number <= capacity - new:
            raise ValueError(
                f"cache_seqlens is {number}, must be from 0 to {capacity - new}: a sequence of the "
                f"cache has {capacity} rows, and {new} are appended"
            )
        if not isinstance(lengths, Tensor):
            length = capacity if number is None else number
            lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
        if block_table is not None:
            block_table = _rows(block_table)
        elif batch_idx is None:  # the first sequences of the cache
            k_cache, v_cache = k_cache[:batch], v_cache[:batch]
        return cls(k_cache, v_cache, lengths, batch_idx, leftpad, block_table, capacity)

    def appended(self, new: int) -> Tensor:
        """The rows of each sequence where so many new ones go, `[batch, new]`."""
        steps = torch.arange(new, device=self.lengths.device)
        return self.lengths[:, None].long() + steps

    def write(self, k: Tensor, v: Tensor, at: Tensor) -> None:
        first, rows = torch.arange(len(at), device=at.device)[:, None], at
        if self.block_table is not None:
            page_size = self.k.shape[1]
            first = self.block_table.gather(1, at // page_size).long()
            rows = at % page_size
        elif self.batch_idx is not None:
            first = self.batch_idx[:, None].long()
        self.k.index_put_((first, rows), k)
        self.v.index_put_((first, rows), v)

    def seen(self, new: int) -> dict[str, Any]:
        """k, v and lengths for the kernel, after so many rows were appended."""
        used = self.lengths + new
        if self.block_table is not None:
            return {
                "k": self.k,
                "v": self.v,
                "seqused_k": used,
                "page_table": self.block_table,
            }
        if self.batch_idx is not None:  # a page for each sequence of the cache
            if self.capacity % 16:
                raise NotImplementedError(
                    f"cache_batch_idx needs a seqlen_cache that is a multiple of 16, k_cache has "
                    f"{self.capacity} rows in a sequence"
                )
            table = self.batch_idx[:, None].contiguous()
            return {"k": self.k, "v": self.v, "seqused_k": used, "page_table": table}
        if self.leftpad is None:
            return {"k": self.k, "v": self.v, "seqused_k": used}
        # All rows of the cache one after another, of which a sequence begins at its first used one.
        k, v = (_joined(name, x) for name, x in (("k_cache", self.k), ("v_cache", self.v)))
        batch = len(self.leftpad)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * self.capacity
        starts[:-1] += self.leftpad
        return {"k": k, "v": v, "cu_seqlens_k": starts, "seqused_k": used - self.leftpad}


class _Rotary(NamedTuple):
    """The rotary embedding of `flash_attn_with_kvcache`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def of(cls, q: Tensor, cos: Any, sin: Any, interleaved: bool) -> _Rotary:
        if cos is None or sin is None:
            raise ValueError("one of rotary_cos and rotary_sin is given, must be both or none")
        given = _given({"q": q, "rotary_cos": cos, "rotary_sin": sin})
        check_dtypes_are(given, ("rotary_cos", "rotary_sin"), q.dtype)
        rotary_dim = 2 * cos.shape[-1] if cos.dim() == 2 else 0
        if not rotary_dim or rotary_dim % ROTARY_STEP or rotary_dim > q.shape[-1]:
            raise ValueError(
                f"rotary_cos has shape {list(cos.shape)}, must be [positions, rotary_dim / 2], "
                f"rotary_dim a positive multiple of {ROTARY_STEP}, at most {q.shape[-1]}"
            )
        check_shapes(given, {"rotary_sin": tuple(cos.shape)})
        return cls(cos, sin, interleaved)

    def __call__(self, x: Tensor, at: Tensor) -> Tensor:
        """x, `[batch, tokens, heads, head_dim]`, rotated at positions `[batch, tokens or 1]`."""
        cos, sin = (table[at].float()[:, :, None] for table in (self.cos, self.sin))
        columns = 2 * cos.shape[-1]
        turned, rest = x[..., :columns].float(), x[..., columns:]
        if self.interleaved:
            one, other = turned[..., ::2], turned[..., 1::2]
        else:
            one, other = turned.chunk(2, dim=-1)
        pairs = one * cos - other * sin, one * sin + other * cos
        joined = torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, -1)
        return torch.cat((joined.to(x.dtype), rest), dim=-1)


def _refuse(dropout_p: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p is {dropout_p}, must be 0: there is no kernel with dropout"
        )
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is given, must be None: there is no kernel for it")


def _refuse_together(given: dict[str, Tensor], one: str, other: str) -> None:
    if one in given and other in given:
        raise NotImplementedError(f"{one} is given with {other}: there is no kernel for both")


def _given(required: dict[str, Any], **optional: Any) -> dict[str, Tensor]:
    """The tensors that are not None, q first. The kernel's operator checks more, but not before it
    is called."""
    given = required | {name: x for name, x in optional.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != given["q"].device:
            raise ValueError(
                f"{name} is on {x.device}, must be on the device of q, {given['q'].device}"
            )
    return given


def _rows(x: Any) -> Any:
    """x, copied if its last dimension is not contiguous. What is no tensor is refused later."""
    if isinstance(x, Tensor) and x.dim() and x.stride(-1) != 1:
        return x.contiguous()
    return x


def _unpacked(name: str, x: Any, shape: str, dims: int) -> tuple[Tensor, ...]:
    """The tensors that are packed along the third dimension from the end."""
    parts = 3 if name == "qkv" else 2
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != dims or x.shape[-3] != parts:
        raise ValueError(f"{name} has shape {list(x.shape)}, must be {shape}")
    return x.unbind(-3)


def _joined(name: str, x: Tensor) -> Tensor:
    """x, `[batch, rows, heads, head_dim]`, as `[batch * rows, heads, head_dim]`, never a copy."""
    if x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
        raise ValueError(
            f"{name} has strides {x.stride()}: with cache_leftpad, each sequence must follow the "
            "one before"
        )
    return x.flatten(0, 1)
