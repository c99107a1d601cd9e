"""Softmax attention: the public functions.

Both `flash_attn_func` and `flash_attn_varlen_func` call one operator:
`torch.ops.cute_attn.flash_attn`, or `torch.ops.cute_attn.flash_attn_out` if `out` is given. These
functions never read device memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checks import check_flags
from .arguments import Arguments, check_length
from .call import attend
from .forward import FORWARD

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
    num_splits: int = 1,
    deterministic: bool = False,
    scheduler: str | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    batch_invariant: bool = False,
    cp: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention over a batch of sequences of one length.

    Forward and backward have kernels for head_dim 64, 128 and 256 on Hopper (sm_90a), and for 256
    on Blackwell (sm_100a, sm_103a). On Hopper, v may also have head_dim_v 128 where q and k have
    head_dim 192. Hopper also has a forward, without a backward, for head_dim 512, for 320 with
    head_dim_v 256, and for 576 with head_dim_v 512.

    FlashAttention-4's function of this name has the same arguments and defaults, so that a user
    only changes the import. Arguments after v are keyword-only, because the fourth argument differs
    between FlashAttention's versions. Positions are aligned at the end: with `causal`, query i sees
    the keys up to i + seqlen_k - seqlen_q.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, bfloat16 or float16. q, k and v are read in place:
            the last dimension must be contiguous, and the other strides multiples of 8 elements.
        k: `[batch, seqlen_k, heads_k, head_dim]`, dtype of q, or on Hopper fp8: float8_e4m3fn or
            float8_e5m2. heads_k divides heads (MHA, GQA, MQA): query head h uses head
            h // (heads // heads_k).
        v: `[batch, seqlen_k, heads_k, head_dim_v]`, dtype of k.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: mask the keys after a query's position.
        window_size: how many keys to the left and to the right of its position a query sees; None
            or -1 is all. With `causal` the right number is 0. With a number n below -1, a query
            sees only keys on the other side, from -n keys away on.
        learnable_sink: `[heads]`, bfloat16, float16 or float32: each head's score of one extra key,
            whose value is 0. This score is not scaled.
        softcap: scores become softcap * tanh(score / softcap); 0 is no cap.
        num_splits: into how many parts the keys are split, at most 256. Separate CTAs compute the
            parts, and a second kernel combines the results. More than one part is faster for a few
            short queries with many keys. 0 chooses by shapes, and on Hopper in decode by the
            lengths, which the kernel reads; the host reads nothing from the device.
            Equal calls with equal num_splits give equal bits. With several parts, and always on
            Hopper, bits also depend on whether sequences have more than 128 queries (packed
            sequences: by max_seqlen_q).
        deterministic: whether the gradients have the same bits in every run. If False, a kernel on
            Hopper, at head_dim 64 and 128, adds up the gradient of q in any order. All other
            results are always deterministic. Under `torch.use_deterministic_algorithms` every
            result is deterministic.
        scheduler: "static" (each cluster's tiles are fixed) or "clc" (clusters take tiles from the
            hardware's queue, which balances uneven tiles). Both schedulers give the same bits. None
            follows the environment variable `FA_CLC`, see `cute_attn.reload_settings`. Hopper has
            no such queue: with either scheduler, CTAs take tiles from a counter.
        return_lse: whether to compute the log-sum-exp. On Hopper, at head_dim 64 and 128, the last
            bits of o depend on return_lse, and so on whether a gradient is taken. Without lse, a
            row is divided by the sum of its rounded probabilities; with lse, by a sum in float32.
        out: a tensor to write o to, of o's shape and dtype, with the last dimension contiguous and
            the other strides multiples of 8 elements. `out` must not overlap an argument. A call
            with `out` has no gradient.
        k_descale: with fp8 k and v, a positive factor of k: float32, a single number or
            `[batch, heads_k]`. The result is as for k * k_descale. The kernel reads the factor;
            None is 1. A call with fp8 k and v has no gradient.
        v_descale: with fp8 k and v, the factor of v, as k_descale.
        batch_invariant: whether the bits of a sequence's results, gradients included, are the same
            in every batch, with every padding, and with and without return_lse. With num_splits of
            1, the bits of a query are also the same in every chunk of its sequence. So chunked
            prefill and decode have the bits of one call with the whole sequence. With num_splits of
            0, calls with at most 64 query rows for each K/V head split the keys at multiples of
            1024. Other values of num_splits are refused. Gradients are `deterministic`. The
            gradient of learnable_sink is a sum over the batch.
        cp: a plan of `cute_attn.distributed.context_parallel`, for context parallelism. q, k and v
            have this rank's tokens of the plan, and queries see the keys of all ranks. Every rank
            calls the function. Such a call takes no out, k_descale and v_descale, and num_splits
            must be 0 or 1. Each rank's gradient of learnable_sink covers a part of the work. The
            sum over all ranks is the gradient, as for other parameters in data parallelism.

    Returns:
        The pair (o, lse). o is `out`, or a new contiguous tensor
        `[batch, seqlen_q, heads, head_dim_v]` of q's dtype. lse is
        float32 `[batch, heads, seqlen_q]`, natural logarithm, or None without return_lse. For a
        query that sees no key, o is 0, and lse is the sink, or -inf without a sink.

    o and lse are differentiable with respect to q, k, v and learnable_sink, once. Only needed
    gradients are computed, each in its tensor's dtype. Sums over queries, keys and heads are
    float32. A query that sees no key, and a key that no query sees, have gradient 0. On Hopper, at
    head_dim 192 and 256, gradients of q and k together take a workspace of up to 2 GiB while they
    are computed. At head_dim 64 and 128, partial sums of groups of query heads may take as much.
    `CUTE_ATTN_WORKSPACE_MIB` sets the limit; with 0, the backward takes no such workspace and is
    slower.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, strides, alignment, devices or values; with cp, also arguments
            that differ between ranks.
        NotImplementedError: head dimensions or an architecture without a kernel (the message
            lists the supported ones), `out` where a gradient is needed, or an argument that cp
            does not take.
    """
    if cp is not None:
        return _over_ranks(
            cp, q, k, v, False, softmax_scale, causal, window_size, learnable_sink, softcap,
            deterministic, scheduler, return_lse, batch_invariant, num_splits, out=out,
            k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
    try:
        left, right = window_size if type(window_size) is tuple else _pair(window_size)
    except ValueError:  # of another length
        left, right = _pair(window_size)
    if deterministic is not False:
        check_flags(deterministic=deterministic)
    return attend(
        q, k, v, out, None, None, None, None, None, None, None, k_descale, v_descale, None,
        softmax_scale, causal, left, right, learnable_sink, softcap, scheduler, num_splits,
        return_lse, deterministic, batch_invariant,
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
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    deterministic: bool = False,
    scheduler: str | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    batch_invariant: bool = False,
    cp: Any = None,
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention over sequences of different lengths, packed one after another.

    Args:
        q: `[total_q, heads, head_dim]` with cu_seqlens_q, else
            `[batch, seqlen_q, heads, head_dim]`.
        k: `[total_k, heads_k, head_dim]` with cu_seqlens_k, else
            `[batch, seqlen_k, heads_k, head_dim]`: a KV cache, whose filled lengths are in
            seqused_k. With page_table, `[num_pages, page_size, heads_k, head_dim]`, where
            page_size is any number on Hopper, and a multiple of 16 on Blackwell and for fp8. The
            dtype is as for `flash_attn_func`.
        v: of k's shape but for head_dim_v, dtype of k.
        cu_seqlens_q: `[batch + 1]` int32: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q are
            sequence b. Not decreasing, at most total_q; not checked, since that would synchronise.
        cu_seqlens_k: `[batch + 1]` int32: the rows of k and v of each sequence, as cu_seqlens_q.
        max_seqlen_q: length of the longest sequence, an int or a tensor. This is only a hint: heads
            share a query tile if sequences are short. None and a tensor stand for the mean length;
            a tensor is not read.
        max_seqlen_k: length of the longest sequence of keys, an int or a tensor. This too is only a
            hint: with num_splits of 0, it is the number of keys to split, if the tensors have room
            for more keys.
        seqused_q: `[batch]` int32: how many of a sequence's rows of q are used, clamped to
            0..length.
        seqused_k: `[batch]` int32: how many of a sequence's rows of k and v are used, clamped to
            0..length.
        page_table: `[batch, max_pages]` int32, rows contiguous: sequence b's keys j * page_size to
            (j + 1) * page_size - 1 are in page page_table[b, j]. Needs seqused_k; entries of
            pages without a used key are not read. Not differentiable.
        softmax_scale: as for `flash_attn_func`.
        causal: as for `flash_attn_func`, within each sequence.
        window_size: as for `flash_attn_func`, within each sequence.
        learnable_sink: as for `flash_attn_func`.
        softcap: as for `flash_attn_func`.
        num_splits: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`.
        scheduler: as for `flash_attn_func`.
        return_lse: as for `flash_attn_func`.
        out: as for `flash_attn_func`. Rows that belong to no sequence keep what they hold, or are
            overwritten.
        k_descale: as for `flash_attn_func`.
        v_descale: as for `flash_attn_func`.
        batch_invariant: as for `flash_attn_func`. With num_splits of 0, max_seqlen_q must be an int
            where cu_seqlens_q is given, and max_seqlen_k at least the longest length if given.
        cp: as for `flash_attn_func`. The plan has the lengths, so the call takes no cu_seqlens_q,
            cu_seqlens_k, page_table and tree_mask. seqused_q and seqused_k have a number for each
            sequence of the plan, equal on all ranks.
        tree_mask: for the verification of a tree of draft tokens, which of its sequence's last
            seqlen_q keys a query sees. int64 `[total_q]`, or `[batch, seqlen_q]` without
            cu_seqlens_q; contiguous. Bit j is the key at the position of query j. A query sees all
            keys before the last seqlen_q keys, and no key after its own position. The mask needs
            `causal`, Hopper, and at most 64 queries in each sequence. Packed sequences need
            max_seqlen_q. A call with tree_mask has no gradient.

    Returns:
        The pair (o, lse). o is `out`, or a new contiguous tensor of q's shape, but for head_dim_v,
        and dtype. lse is float32 `[heads, total_q]`, or `[batch, heads, seqlen_q]` without
        cu_seqlens_q, or None without return_lse. o and lse are undefined for rows of q that belong
        to no sequence or are not used.

    Differentiable as `flash_attn_func`. Rows of q, k and v that belong to no sequence, or that are
    not used, have gradient 0, whatever the gradient of o holds there.

    Raises:
        TypeError: as `flash_attn_func`.
        ValueError: as `flash_attn_func`.
        NotImplementedError: as `flash_attn_func`.
    """
    if cp is not None:
        return _over_ranks(
            cp, q, k, v, True, softmax_scale, causal, window_size, learnable_sink, softcap,
            deterministic, scheduler, return_lse, batch_invariant, num_splits, out=out,
            k_descale=k_descale, v_descale=v_descale, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, page_table=page_table, tree_mask=tree_mask,
            used=(seqused_q, seqused_k),
        )  # fmt: skip
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        max_seqlen_q = _length_on_the_host("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        max_seqlen_k = _length_on_the_host("max_seqlen_k", max_seqlen_k)
    try:
        left, right = window_size if type(window_size) is tuple else _pair(window_size)
    except ValueError:  # of another length
        left, right = _pair(window_size)
    if deterministic is not False:
        check_flags(deterministic=deterministic)
    return attend(
        q, k, v, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        page_table, k_descale, v_descale, tree_mask, softmax_scale, causal, left, right,
        learnable_sink, softcap, scheduler, num_splits, return_lse, deterministic, batch_invariant,
    )  # fmt: skip


def refuse_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, window_size: Window, max_seqlen_q: Any, **others: Any
) -> None:
    """Raise what `flash_attn_varlen_func`, without a gradient, raises before its launch."""
    left, right = _pair(window_size)
    rows = None if max_seqlen_q is None else _length_on_the_host("max_seqlen_q", max_seqlen_q)
    bounds: dict[str, Any] = {"window_left": left, "window_right": right}
    FORWARD.refuse(Arguments(q, k, v, max_seqlen_q=rows, **bounds, **others))


def _over_ranks(
    cp: Any, q: Tensor, k: Tensor, v: Tensor, packed: bool, softmax_scale: float | None,
    causal: bool, window_size: Window, learnable_sink: Tensor | None, softcap: float,
    deterministic: bool, scheduler: str | None, return_lse: bool, batch_invariant: bool,
    num_splits: int, used: tuple[Tensor | None, Tensor | None] = (None, None), **unsupported: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run a call that has cp; the plan runs the call. `used` has seqused_q and seqused_k."""
    if not hasattr(cp, "attend"):
        raise TypeError(
            f"cp is {type(cp).__name__}, must be a plan of cute_attn.distributed.context_parallel"
        )
    check_flags(
        causal=causal, deterministic=deterministic, return_lse=return_lse,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if num_splits not in (0, 1):
        unsupported["num_splits"] = num_splits
    found: tuple[Tensor, Tensor | None] = cp.attend(
        q, k, v, packed=packed, softmax_scale=softmax_scale, causal=bool(causal),
        window_size=window_size, learnable_sink=learnable_sink, softcap=softcap,
        deterministic=deterministic, scheduler=scheduler, return_lse=bool(return_lse),
        batch_invariant=batch_invariant, seqused_q=used[0], seqused_k=used[1],
        unsupported={name: x for name, x in unsupported.items() if x is not None},
    )  # fmt: skip
    return found


def _pair(window_size: Any) -> Window:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}, must be a pair (left, right)")
    return tuple(window_size)


def _length_on_the_host(name: str, value: Any) -> int | None:
    """The length, or None for a tensor, which is not read."""
    if not isinstance(value, Tensor):
        check_length(name, value)
        return value  # type: ignore[no-any-return]
    if value.dim() != 0 or value.dtype.is_floating_point or value.dtype.is_complex:
        raise TypeError(
            f"{name} is a tensor of shape {list(value.shape)} and {value.dtype}, must be an int or "
            "an integer tensor without dimensions"
        )
    return None
