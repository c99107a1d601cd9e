"""The causal convolution before a decode step in plain PyTorch: the reference for tests."""

from __future__ import annotations

import itertools

import torch


def causal_convolution_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None = None,
    *,
    state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of `kda_decode` after the convolution, and the pool after the call.

    The channels are q's, then k's, then v's. A channel's inputs are the window in the sequence's
    slot, then the call's tokens:

        y[t] = silu(conv_bias + sum over i of conv_weight[i] inputs[t + i])

    Plain decoding: the window is the slot's first inputs, and the last inputs of the call replace
        it.

    A slot for each position, state_indices `[B, 1 + S]`: the window begins at position
        num_accepted_tokens[b] - 1 of slot state_indices[b, 0], and all inputs but the first replace
        what the slot holds.

    Sequences of padding keep their tokens and their slots, tokens of no sequence keep their values.

    Args:
        q, k, v: `[B, T, heads, dim]`, or without the dimension of tokens.
        conv_state: `[N, D, W]`.
        conv_weight: `[D, taps]`.
        conv_bias: `[D]`.

    Returns:
        q, k, v and conv_state, all in `dtype`.
    """
    squeeze = q.dim() == 3
    if squeeze:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    x = torch.cat([x.to(dtype).flatten(2) for x in (q, k, v)], dim=-1)
    pool, weight = conv_state.to(dtype).clone(), conv_weight.to(dtype)
    bias = 0 if conv_bias is None else conv_bias.to(dtype)
    taps = weight.shape[1]
    spans = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    if cu_seqlens is not None:
        spans = [(0, start, end) for start, end in itertools.pairwise(cu_seqlens.tolist())]
    slots = torch.arange(len(spans)) if state_indices is None else state_indices
    slots = slots.unsqueeze(1) if slots.dim() == 1 else slots
    positions = slots.shape[1]
    y = x.clone()
    for b, (row, start, end) in enumerate(spans):
        slot = int(slots[b, 0])
        if not int(pad_slot_id == 0) <= slot < pool.shape[0] or start == end:
            continue
        first = 0
        if num_accepted_tokens is not None:
            first = min(max(int(num_accepted_tokens[b]), 1), positions) - 1
        window = pool[slot, :, first : first + taps - 1]
        if has_initial_state is not None and not has_initial_state[b]:
            window = torch.zeros_like(window)
        inputs = torch.cat([window, x[row, start:end].T], dim=1)
        for t in range(end - start):
            total = bias + (weight * inputs[:, t : t + taps]).sum(1)
            y[row, start + t] = total * torch.sigmoid(total)
        kept = inputs[:, 1:] if positions > 1 else inputs[:, -(taps - 1) :]
        kept = kept[:, : pool.shape[2]]
        pool[slot, :, : kept.shape[1]] = kept
    sizes = [x[0, 0].numel() for x in (q, k, v)]
    parts = (
        part.unflatten(-1, like.shape[2:]).squeeze(1)
        if squeeze
        else part.unflatten(-1, like.shape[2:])
        for part, like in zip(y.split(sizes, dim=-1), (q, k, v), strict=True)
    )
    return *parts, pool
