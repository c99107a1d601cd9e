"""Decode over a KV cache that is split between ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.attention.arguments import Arguments, check_values
from ..ops.attention.forward import splits_of
from ..ops.attention.partial import attend_partial, combine_partial
from ..ops.checks import check_tensors

PADDING = 4  # columns after o: the first has lse, and four keep rows aligned to 16 bytes


def decode_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over keys that are split between ranks. All ranks have the same queries.

    Every rank computes o and lse over its own keys in float32. One all-gather exchanges these
    results, `4 * batch * seqlen_q * heads * (head_dim_v + 4)` bytes of each rank. The kernel of
    `flash_attn_combine` then combines them, so every rank has the whole result.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, bfloat16 or float16, equal on all ranks. Every
            query sees every key.
        k: the rank's keys, `[batch, seqlen_k, heads_k, head_dim]`, or pages as for
            `flash_attn_varlen_func`. A rank may hold any keys, or none.
        v: the rank's values, of k's shape but for head_dim_v.
        group: a process group of torch.distributed; None is the default group.
        seqused_k: `[batch]` int32: how many of the rank's keys each sequence uses.
        page_table: as for `flash_attn_varlen_func`.
        softmax_scale: as for `flash_attn_func`.
        learnable_sink: as for `flash_attn_func`. The sink counts once, not once for each rank.
        softcap: as for `flash_attn_func`.
        num_splits: into how many parts each rank's keys are split; 0 chooses by shapes.
        return_lse: whether to return lse.

    Returns:
        The pair (o, lse) over the keys of all ranks, as `flash_attn_func` returns o and lse. Every
        rank has the same bits. o and lse have no gradient.

    Raises:
        TypeError: as `flash_attn_func`.
        ValueError: as `flash_attn_func`.
        NotImplementedError: as `flash_attn_func`.
    """
    group = dist.group.WORLD if group is None else group
    call = Arguments(
        q, k, v, seqused_k=seqused_k, page_table=page_table, softmax_scale=softmax_scale,
        softcap=softcap, num_splits=num_splits, return_lse=True,
    )  # fmt: skip
    try:
        return _decode(call, group, learnable_sink, return_lse)
    except Exception:
        # Checks cost the host time, so only calls that fail are checked.
        _check(call._replace(learnable_sink=learnable_sink), group)
        raise


def _check(a: Arguments, group: Any) -> None:
    """Raise the documented exception for arguments that no call takes."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {type(group).__name__}, must be a ProcessGroup or None")
    names = ("learnable_sink", "seqused_k", "page_table")
    optional = {name: getattr(a, name) for name in names}
    check_values(a, check_tensors({"q": a.q, "k": a.k, "v": a.v}, optional))


def _decode(
    call: Arguments, group: Any, sink: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`decode_over_ranks`. Wrong arguments may raise any exception."""
    q, v = call.q, call.v
    if sink is not None and (sink.shape != q.shape[2:3] or sink.device != q.device):
        raise ValueError("learnable_sink is not [heads]")  # a kernel would read other memory
    with torch.no_grad():
        parts = splits_of(call)
        shape = (*q.shape[:-1], v.shape[-1])
        world, columns = dist.get_world_size(group), shape[-1]
        found = q.new_empty(world, *shape[:-1], columns + PADDING, dtype=torch.float32)
        own = found.new_empty(found.shape[1:])
        o, lse = found.new_empty(parts, *shape), found.new_empty(parts, *shape[:-1])
        attend_partial(call, o, lse)
        combine_partial(o, lse, own[..., :columns], own[..., columns].mT, None)
        dist.all_gather_into_tensor(found.view(-1), own.view(-1), group=group)
        out = q.new_empty(shape)
        batch, rows, heads = shape[:-1]
        out_lse = found.new_empty(batch, heads, rows) if return_lse else None
        combine_partial(found[..., :columns], found[..., columns], out, out_lse, sink)
    return out, out_lse
