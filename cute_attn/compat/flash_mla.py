"""FlashMLA's decode functions, with its arguments in its order, on this package's kernels.

    from cute_attn.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

`get_mla_metadata` plans nothing, because the kernel shares out its work on the device. The FP8
caches of sparse attention and sparse attention raise NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.attention.arguments import check_length
from ..ops.checks import check_dtype, check_has_slots
from ..ops.mla import DTYPES, mla_decode
from .arguments import given_tensors, refuse_given, with_contiguous_rows

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The plan of a decode step, which is empty: the kernel shares out its work on the device.

    Args:
        arguments: of any version of FlashMLA, no effect: `cache_seqlens`, the number of queries
            times heads, and the number of heads of the cache.
        named: as `arguments`.

    Returns:
        Two tensors without elements, which `flash_mla_with_kvcache` takes and ignores.
    """
    found = (x for x in (*arguments, *named.values()) if isinstance(x, Tensor))
    device = next((x.device for x in found), None)
    scheduler, splits = (torch.empty(0, dtype=torch.int32, device=device) for _ in range(2))
    return scheduler, splits


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode over a latent cache in pages.

    Args:
        q: `[batch, queries, heads, head_dim]`, bfloat16 or float16: the absorbed queries, and their
            rotated part in the last columns.
        k_cache: `[num_pages, page_size, 1, head_dim]`, dtype of q, or float8_e4m3fn, without a
            factor. Pages have any size.
        block_table: `[batch, max_pages]` int32.
        cache_seqlens: `[batch]` int32: the tokens of each sequence.
        head_dim_v: the first columns of a token, which are its value.
        tile_scheduler_metadata: no effect.
        num_splits: no effect.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: whether the last query is the last token, and no query sees a later token.
        is_fp8_kvcache: only False: the flag is for the FP8 caches of sparse attention.
        indices: only None: there is no sparse attention.
        attn_sink: only None, as all later arguments, which belong to sparse attention.
        extra_k_cache: only None.
        extra_indices_in_kvcache: only None.
        topk_length: only None.
        extra_topk_length: only None.

    Returns:
        The pair (o, lse): o is `[batch, queries, heads, head_dim_v]`, lse float32 `[batch, heads,
        queries]`, natural logarithm, -inf for a query that sees no token.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, strides, devices or alignment. Where `mla_decode` refuses q or
            k_cache, the message says q_nope, q_rope and kv_cache.
        NotImplementedError: an argument that has no kernel, as listed above, or that `mla_decode`
            has no kernel for.
    """
    del tile_scheduler_metadata, num_splits
    refuse_given(
        indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )  # fmt: skip
    if is_fp8_kvcache:
        raise NotImplementedError(
            "is_fp8_kvcache is True: there is no kernel for sparse attention's FP8 caches"
        )
    given_tensors({"q": q, "k_cache": k_cache})
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}, must be [batch, queries, heads, head_dim]")
    check_length("head_dim_v", head_dim_v)
    check_dtype("q", q, DTYPES)
    if k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise TypeError(
            f"k_cache has dtype {k_cache.dtype}, must be q's, {q.dtype}, or {torch.float8_e4m3fn}"
        )
    if k_cache.dim() not in (3, 4) or (k_cache.dim() == 4 and k_cache.shape[2] != 1):
        raise ValueError(
            f"k_cache has shape {list(k_cache.shape)}, must be [num_pages, page_size, 1, head_dim]"
        )
    check_has_slots("k_cache", k_cache, "pages")
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"q has shape {list(q.shape)}, must have the columns of k_cache, {k_cache.shape[-1]}"
        )
    q = with_contiguous_rows(q)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    o, lse = mla_decode(
        q[..., :head_dim_v],
        q[..., head_dim_v:] if q.shape[-1] > head_dim_v else None,
        k_cache,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        softmax_scale=scale,
        causal=causal,
        return_lse=True,
        head_dim_v=head_dim_v,
    )
    assert lse is not None
    return o, lse
