"""Attention to a KV cache to which new keys are appended first: `flash_attn_with_kvcache`.

Appending is a few torch operators in front of the kernel. Nothing reads device memory, so that a
CUDA graph can capture the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.attention import flash_attn_varlen_func, refuse_varlen
from ..ops.attention.arguments import check_strides, is_fp8
from ..ops.attention.support import page_step
from ..ops.checks import (
    check_dtype,
    check_dtypes_are,
    check_flags,
    check_not_expanded,
    check_shapes,
    is_int,
)
from .arguments import Window, given_tensors, window_of, with_contiguous_rows

ROTARY_STEP = 16  # what FlashAttention's rotary_dim is a multiple of


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: tuple[str, Tensor | None],
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_interleaved: bool,
    causal: bool,
    window_size: Window,
    return_lse: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Append k and v, rotated, and return (o, lse), without a gradient.

    Args:
        page_table: the table with the name that the caller has for it.
        cu_seqlens_q: for packed queries, which are not rotated.
        options: of `cute_attn.flash_attn_varlen_func`.
    """
    check_flags(rotary_interleaved=rotary_interleaved, return_softmax_lse=return_lse)
    cache = _Cache.of(
        q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        cu_seqlens_q, k, v,
    )  # fmt: skip
    rotated = rotary_cos is not None or rotary_sin is not None
    with torch.no_grad():
        call = {
            **cache.seen(0 if k is None else k.shape[1]),
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": max_seqlen_q,
            "causal": causal,
            "window_size": window_of(window_size),
            "return_lse": return_lse,
            **options,
        }
        q = with_contiguous_rows(q)
        if k is not None and v is not None:
            refuse_varlen(q, **call)  # first, so that a refused call leaves the cache as it was
            at = cache.appended(k.shape[1])
            if rotated:
                if k_cache.dtype != q.dtype:
                    raise NotImplementedError(
                        f"rotary_cos is given with a cache of {k_cache.dtype}: rotate q and k "
                        "before k is rounded"
                    )
                rotary = Rotary.of(q, rotary_cos, rotary_sin, rotary_interleaved)
                local = any(b is not None and 0 <= b < cache.capacity for b in window_size)
                steps = torch.arange(q.shape[1] if causal or local else 1, device=q.device)
                if isinstance(cache_seqlens, int):  # on a GPU, torch would end the process
                    rotary.check_positions(cache_seqlens + max(len(steps), k.shape[1]))
                q, k = rotary(q, cache.lengths[:, None].long() + steps), rotary(k, at)
            cache.write(k, v, at)
        elif rotated:
            raise ValueError("rotary_cos or rotary_sin is given, it needs k and v to be appended")
        return flash_attn_varlen_func(q, **call)


class _Cache(NamedTuple):
    """A KV cache and where its sequences are, checked."""

    k: Tensor
    v: Tensor
    lengths: Tensor  # `[batch]` int32, before the call
    batch_idx: Tensor | None
    leftpad: Tensor | None
    page_table: Tensor | None
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
        page_table: tuple[str, Tensor | None],
        cu_seqlens_q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
    ) -> _Cache:
        if not (lengths is None or is_int(lengths) or isinstance(lengths, Tensor)):
            name = type(lengths).__name__
            raise TypeError(f"cache_seqlens must be an int or a tensor, got {name}")
        of_sequences = {
            "cache_seqlens": lengths if isinstance(lengths, Tensor) else None,
            "cache_batch_idx": batch_idx,
            "cache_leftpad": leftpad,
        }
        table_name, table = page_table
        given = given_tensors(
            {"q": q, "k_cache": k_cache, "v_cache": v_cache},
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            **of_sequences,
            **{table_name: table},
        )
        packed = cu_seqlens_q is not None
        for name, dims in (("q", 3 if packed else 4), ("k_cache", 4), ("v_cache", 4)):
            if given[name].dim() != dims:
                shape = list(given[name].shape)
                raise ValueError(f"{name} has shape {shape}, must have {dims} dimensions")
        kv_dtype = k_cache.dtype if is_fp8(k_cache) else q.dtype
        check_dtypes_are(given, ("k_cache", "v_cache", "k", "v"), kv_dtype)
        for name in (*of_sequences, table_name, "cu_seqlens_q"):
            if name in given:
                check_dtype(name, given[name], ("int32",))
        check_strides(given, ("k_cache", "v_cache"))
        _refuse_together(given, "cache_batch_idx", table_name)
        _refuse_together(given, "cache_leftpad", table_name)
        _refuse_together(given, "cache_batch_idx", "cache_leftpad")
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        check_shapes(given, dict.fromkeys(of_sequences, (batch,)))
        capacity = k_cache.shape[1]
        if table is not None:
            if table.dim() != 2 or table.shape[0] != batch:
                shape = list(table.shape)
                raise ValueError(f"{table_name} has shape {shape}, must be [{batch}, max_pages]")
            capacity *= table.shape[1]
            table = with_contiguous_rows(table)
        elif batch_idx is None:  # the first sequences of the cache
            k_cache, v_cache = k_cache[:batch], v_cache[:batch]
        new = _check_new(given, lengths, batch)
        if new:
            check_not_expanded(given, ("k_cache", "v_cache"))
        if is_int(lengths) and not 0 <= lengths <= capacity - new:
            raise ValueError(
                f"cache_seqlens is {lengths}, must be from 0 to {capacity - new}: a sequence of "
                f"the cache has {capacity} rows, and {new} are appended"
            )
        if not isinstance(lengths, Tensor):
            length = capacity if lengths is None else lengths
            lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
        return cls(k_cache, v_cache, lengths, batch_idx, leftpad, table, capacity)

    def appended(self, new: int) -> Tensor:
        """The rows of each sequence where `new` new rows go, `[batch, new]`."""
        steps = torch.arange(new, device=self.lengths.device)
        return self.lengths[:, None].long() + steps

    def write(self, k: Tensor, v: Tensor, at: Tensor) -> None:
        first, rows = torch.arange(len(at), device=at.device)[:, None], at
        if self.page_table is not None:
            page_size = self.k.shape[1]
            first = self.page_table.gather(1, at // page_size).long()
            rows = at % page_size
        elif self.batch_idx is not None:
            first = self.batch_idx[:, None].long()
        for cache, new in ((self.k, k), (self.v, v)):
            if is_fp8(cache):  # torch does not index fp8 on every device
                cache, new = cache.view(torch.uint8), new.view(torch.uint8)
            cache.index_put_((first, rows), new)

    def seen(self, new: int) -> dict[str, Any]:
        """k, v and lengths for the kernel, after `new` rows were appended."""
        used, table = self.lengths + new, self.page_table
        if self.batch_idx is not None:  # a page for each sequence of the cache
            step = page_step(self.k.device)
            if self.capacity % step:
                raise NotImplementedError(
                    f"cache_batch_idx needs a seqlen_cache that is a multiple of {step} on this "
                    f"GPU, k_cache has {self.capacity} rows in a sequence"
                )
            table = self.batch_idx[:, None].contiguous()
        if self.leftpad is None:
            return {"k": self.k, "v": self.v, "seqused_k": used, "page_table": table}
        # All rows of the cache one after another; a sequence begins at its first used row.
        k, v = (_joined(name, x) for name, x in (("k_cache", self.k), ("v_cache", self.v)))
        sequences = torch.arange(len(self.leftpad) + 1, dtype=torch.int32, device=k.device)
        starts = sequences * self.capacity
        starts[:-1] += self.leftpad
        return {"k": k, "v": v, "cu_seqlens_k": starts, "seqused_k": used - self.leftpad}


def _check_new(given: dict[str, Tensor], lengths: Any, batch: int) -> int:
    """How many rows are appended to each sequence."""
    if "k" not in given and "v" not in given:
        return 0
    if "k" not in given or "v" not in given:
        raise ValueError("one of k and v is given, must be both or none")
    if lengths is None:
        raise ValueError("k and v are given, they need cache_seqlens: where to append them")
    k, k_cache, v_cache = (given[name] for name in ("k", "k_cache", "v_cache"))
    new = k.shape[1] if k.dim() == 4 else 0
    rows = batch, new, k_cache.shape[2]
    check_shapes(given, {"k": (*rows, k_cache.shape[3]), "v": (*rows, v_cache.shape[3])})
    return new


class Rotary(NamedTuple):
    """A rotary embedding by position."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def of(cls, q: Tensor, cos: Any, sin: Any, interleaved: bool) -> Rotary:
        if cos is None or sin is None:
            raise ValueError("one of rotary_cos and rotary_sin is given, must be both or none")
        given = given_tensors({"q": q, "rotary_cos": cos, "rotary_sin": sin})
        check_dtypes_are(given, ("rotary_cos", "rotary_sin"), q.dtype)
        if q.dim() != 4:
            raise NotImplementedError(
                "rotary_cos is given with cu_seqlens_q: rotate q and k before"
            )
        rotary_dim = 2 * cos.shape[-1] if cos.dim() == 2 else 0
        if not rotary_dim or rotary_dim % ROTARY_STEP or rotary_dim > q.shape[-1]:
            raise ValueError(
                f"rotary_cos has shape {list(cos.shape)}, must be [positions, rotary_dim / 2], "
                f"rotary_dim a positive multiple of {ROTARY_STEP}, at most {q.shape[-1]}"
            )
        check_shapes(given, {"rotary_sin": tuple(cos.shape)})
        return cls(cos, sin, interleaved)

    def check_positions(self, needed: int) -> None:
        """Raise ValueError unless there are angles for so many positions."""
        if len(self.cos) < needed:
            raise ValueError(
                f"rotary_cos has {len(self.cos)} positions, must have at least {needed}, up to the "
                "last appended key and query"
            )

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


def _refuse_together(given: dict[str, Tensor], one: str, other: str) -> None:
    if one in given and other in given:
        raise NotImplementedError(f"{one} is given with {other}: there is no kernel for both")


def _joined(name: str, x: Tensor) -> Tensor:
    """x, `[batch, rows, heads, head_dim]`, as `[batch * rows, heads, head_dim]`, never a copy."""
    if x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
        raise ValueError(
            f"{name} has strides {x.stride()}: with cache_leftpad, each sequence must follow the "
            "one before"
        )
    return x.flatten(0, 1)
