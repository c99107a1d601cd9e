"""Multi-head latent attention in plain PyTorch: the reference for tests of the kernels.

A layer keeps one latent vector c_j and one rotated vector r_j of each token j in a cache, for all
heads together. The expanded form computes each head's keys and values from the latent vectors:

    k_hj = (W_UK,h c_j, r_j)        v_hj = W_UV,h c_j

The absorbed form moves W_UK to the query and W_UV behind the attention, because

    q_nope,h . (W_UK,h c_j) = (W_UK,h^T q_nope,h) . c_j

So the heads' queries attend to the cached vectors (c_j, r_j) themselves, whose first part c_j is
also the value, and W_UV,h is applied to each head's result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import attention_in_low_precision, attention_reference


def mla_decode_reference(
    q_nope: Tensor,
    q_rope: Tensor | None,
    kv_cache: Tensor,
    *,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool = True,
    head_dim_v: int = 512,
    kv_descale: Tensor | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The definition of `cute_attn.mla_decode`, which is the absorbed form.

    Args:
        kv_descale: factor of the cache, for an fp8 cache.
        dtype: dtype of the arithmetic; float64 gives the reference. None: low precision, with
            probabilities and results rounded to the dtype of q, as a kernel has to round them.

    Returns:
        (o, lse): o is `[B, T, H, head_dim_v]`, lse `[B, H, T]`.
    """
    q = q_nope if q_rope is None else torch.cat([q_nope, q_rope], -1)
    keys = gathered(kv_cache, block_table, cache_seqlens)[:, :, None]
    values = keys[..., :head_dim_v]
    if kv_descale is not None:
        softmax_scale *= kv_descale.item()
        values = values.double() * kv_descale.item()
    call: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "seqused_k": cache_seqlens,
    }
    if dtype is None:
        return attention_in_low_precision(q, keys, values, **call)
    return attention_reference(q, keys, values, **call, dtype=dtype)


def gathered(kv_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> Tensor:
    """The sequences' cached vectors in one piece, `[B, most, head_dim]`, and 0 past each end."""
    pages = kv_cache.flatten(2) if kv_cache.dim() == 4 else kv_cache
    if pages.element_size() == 1:  # PyTorch computes little in fp8
        pages = pages.to(torch.float32)
    size = pages.shape[1]
    most = max(1, *cache_seqlens.tolist()) if len(cache_seqlens) else 1
    found = pages.new_zeros(len(cache_seqlens), -(-most // size) * size, pages.shape[2])
    for i, length in enumerate(cache_seqlens.tolist()):
        count = -(-max(0, length) // size)
        rows = pages[block_table[i, :count].long()].flatten(0, 1)[:length]
        found[i, : len(rows)] = rows
    return found


def absorbed(q: Tensor, w_uk: Tensor) -> Tensor:
    """The absorbed queries `[B, T, H, L]` of the expanded queries `[B, T, H, D]`, which have no
    rotated part. `w_uk` is `[H, D, L]`: W_UK,h maps a latent vector of L numbers to a key."""
    return torch.einsum("bthd,hdl->bthl", q, w_uk)


def mla_expanded_reference(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    cache_seqlens: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The expanded form, as in prefill and training.

    Args:
        q_nope, q_rope: `[B, T, H, D]` and `[B, T, H, R]`, before the absorption.
        latent, rope: `[B, S, L]` and `[B, S, R]`, what the cache holds.
        w_uk, w_uv: `[H, D, L]` and `[H, V, L]`.
        cache_seqlens: `[B]`, the number of used rows; None: all rows.

    Returns:
        (o, lse): o is `[B, T, H, V]`, lse `[B, H, T]`.
    """
    q = torch.cat([q_nope, q_rope], -1)
    latent, w_uk, w_uv = (x.to(dtype) for x in (latent, w_uk, w_uv))
    k_nope = torch.einsum("bsl,hdl->bshd", latent, w_uk)
    shared = rope.to(dtype)[:, :, None].expand(*k_nope.shape[:3], rope.shape[-1])
    return attention_reference(
        q, torch.cat([k_nope, shared], -1), torch.einsum("bsl,hvl->bshv", latent, w_uv),
        softmax_scale=softmax_scale, causal=causal, seqused_k=cache_seqlens, dtype=dtype,
    )  # fmt: skip
