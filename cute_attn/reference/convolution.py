"""The causal convolution before a decode step in plain PyTorch: the reference for tests."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch


class Convolved(NamedTuple):
    """Tokens after the convolution, and what is kept for later calls.

    record_k and draft_windows are None for a call without them. In record_k, accepted tokens have
    gone through the convolution.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    conv_state: torch.Tensor
    record_k: torch.Tensor | None = None
    draft_windows: torch.Tensor | None = None


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
    record_k: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    draft_windows: torch.Tensor | None = None,
    draft_indices: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Convolved:
    """q, k and v of `kda_decode` after the convolution, and the pool after the call.

    The channels are q's, then k's, then v's. A channel's inputs are the window in the sequence's
    slot, then the call's tokens:

        y[t] = silu(conv_bias + sum over i of conv_weight[i] inputs[t + i])

    Plain decoding: the window is the slot's first inputs, and the last inputs of the call replace
        it.

    A slot for each position, state_indices `[B, 1 + S]`: the window begins at position
        num_accepted_tokens[b] - 1 of slot state_indices[b, 0], and all inputs but the first replace
        what the slot holds.

    Records, `[slots, S, HQK, K]`: the slot holds the window before the recorded tokens, then the
        inputs of these tokens. The window begins at position num_accepted_tokens[b], and all inputs
        replace what the slot holds.

    A tensor for drafts, `[M, S, D, taps - 1]`: the window after token t is stored in
        draft_windows[draft_indices[b], t], and the pool does not change.

    Sequences of padding keep their tokens and their slots, tokens of no sequence keep their values.
    Where has_initial_state is False, the inputs before the first token, or before the recorded
    tokens, are 0.

    Args:
        q, k, v: `[B, T, heads, dim]`, or without the dimension of tokens.
        conv_state: `[N, D, W]`.
        conv_weight: `[D, taps]`.
        conv_bias: `[D]`.

    Returns:
        All results in `dtype`.
    """
    squeeze = q.dim() == 3
    if squeeze:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    sizes = [x[0, 0].numel() for x in (q, k, v)]
    x = torch.cat([x.to(dtype).flatten(2) for x in (q, k, v)], dim=-1)
    pool, weight = conv_state.to(dtype).clone(), conv_weight.to(dtype)
    bias = torch.zeros_like(weight[:, 0]) if conv_bias is None else conv_bias.to(dtype)
    recorded = None if record_k is None else record_k.to(dtype).clone()
    drafts = None if draft_windows is None else draft_windows.to(dtype).clone()
    taps = weight.shape[1]
    of_k = slice(sizes[0], sizes[0] + sizes[1])
    spans = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    if cu_seqlens is not None:
        spans = [(0, start, end) for start, end in itertools.pairwise(cu_seqlens.tolist())]
    slots = torch.arange(len(spans)) if state_indices is None else state_indices
    slots = slots.unsqueeze(1) if slots.dim() == 1 else slots
    positions = slots.shape[1]
    y = x.clone()

    def output(inputs: torch.Tensor, channels: slice = slice(None)) -> torch.Tensor:
        """The output after as many inputs as there are taps."""
        total = bias[channels] + (weight[channels] * inputs).sum(1)
        return total * torch.sigmoid(total)

    for b, (row, start, end) in enumerate(spans):
        slot = int(slots[b, 0])
        if not int(pad_slot_id == 0) <= slot < pool.shape[0] or start == end:
            continue
        first = 0
        if recorded is not None:
            assert num_accepted_tokens is not None
            first = min(max(int(num_accepted_tokens[b]), 0), recorded.shape[1])
        elif num_accepted_tokens is not None:
            first = min(max(int(num_accepted_tokens[b]), 1), positions) - 1
        held = pool[slot].clone()
        if has_initial_state is not None and not has_initial_state[b]:
            held[:, : taps - 1 if recorded is not None else None] = 0
        inputs = torch.cat([held[:, first : first + taps - 1], x[row, start:end].T], dim=1)
        for t in range(end - start):
            y[row, start + t] = output(inputs[:, t : t + taps])
            draft = -1 if draft_indices is None else int(draft_indices[b])
            if drafts is not None and 0 <= draft < drafts.shape[0] and t < drafts.shape[1]:
                drafts[draft, t] = inputs[:, t + 1 : t + taps]
        if recorded is not None:
            for i in range(first):
                k_of_record = output(held[of_k, i : i + taps], of_k)
                recorded[slot, i] = k_of_record.unflatten(0, recorded.shape[2:])
        if drafts is None:
            skipped = 0 if recorded is not None else 1 if positions > 1 else end - start
            kept = inputs[:, skipped:][:, : pool.shape[2]]
            pool[slot, :, : kept.shape[1]] = kept
    q, k, v = (
        part.unflatten(-1, like.shape[2:]).squeeze(1)
        if squeeze
        else part.unflatten(-1, like.shape[2:])
        for part, like in zip(y.split(sizes, dim=-1), (q, k, v), strict=True)
    )
    return Convolved(q, k, v, pool, recorded, drafts)
