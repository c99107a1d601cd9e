"""Softmax attention: which kernels a call gets."""

from __future__ import annotations

from ... import launch
from ...kernels.attention import table
from ...kernels.attention.heuristics import packed_heads
from ...kernels.attention.spec import Hd256ForwardSpec
from ...settings import settings
from .arguments import USER_SCHEDULERS


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
    """The kernels that the attention functions use for such tensors, for `cute_attn.warmup` and
    spec files. They do not depend on batch size or lengths.

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
        softcap: whether softcap is not 0.
        varlen_q: whether cu_seqlens_q is given.
        varlen_k: whether cu_seqlens_k is given.
        seqused_q: whether seqused_q is given.
        seqused_k: whether seqused_k is given.
        scheduler: as the operator's; None follows `FA_CLC`.
        return_lse: as the operator's.
        short: True for at most 128 queries a sequence (decode), False for more (prefill), None for
            both, which are two kernels if heads_k < heads.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names it.
        NotImplementedError: there is no kernel for this head_dim on this architecture.
    """
    kernel = table.find("forward", arch, head_dim).kernel
    if heads_k < 1 or heads < 1 or heads % heads_k:
        raise ValueError(f"heads is {heads}, must be a positive multiple of heads_k, {heads_k}")
    chosen = settings().scheduler if scheduler is None else scheduler
    if chosen not in USER_SCHEDULERS:
        raise ValueError(f"scheduler is {scheduler!r}, must be one of {USER_SCHEDULERS} or None")
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
