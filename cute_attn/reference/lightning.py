"""Lightning Attention in plain PyTorch: the reference for tests of the kernels."""

from __future__ import annotations

import torch


def lightning_attn_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    decay: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    state_indices: torch.Tensor | None = None,
    state_layout: str = "vk",
    num_accepted_tokens: torch.Tensor | None = None,
    draft_k: torch.Tensor | None = None,
    draft_v: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cute_attn.lightning_attn_decode` token by token, without changing its inputs.

    The recurrence of Lightning Attention-2 (arXiv 2401.04658, section 3) is, per head, S <-
    exp(-decay) S + v k^T and o = softmax_scale S q.

    Args:
        dtype: dtype of the arithmetic. float64 gives the reference. float32 gives a plain PyTorch
            implementation; tests compare the kernels' error with this implementation's error.

    Returns:
        (o, new_state) in `dtype`. Unless `dtype` is float64, new_state has been rounded to
        `state.dtype`, in which the state is stored between calls.
    """
    squeeze = q.dim() == 3
    if squeeze:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    batch, tokens, heads, head_dim_k = q.shape
    scale = head_dim_k**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.to(dtype) for x in (q, k, v))
    factor = torch.exp(-decay.to(dtype)).view(heads, 1, 1)
    matrices = state.to(dtype) if state_layout == "vk" else state.to(dtype).transpose(-1, -2)
    matrices = matrices.clone()
    o = q.new_zeros(batch, tokens, heads, v.shape[-1])

    def advance(s: torch.Tensor, k_t: torch.Tensor, v_t: torch.Tensor) -> torch.Tensor:
        return factor * s + v_t.unsqueeze(-1) * k_t.unsqueeze(-2)

    for b in range(batch):
        slot = b if state_indices is None else int(state_indices[b])
        if slot < 0:
            continue
        s = matrices[slot]
        if num_accepted_tokens is not None:
            assert draft_k is not None and draft_v is not None
            for i in range(int(num_accepted_tokens[b])):
                s = advance(s, draft_k[slot, i].to(dtype), draft_v[slot, i].to(dtype))
            matrices[slot] = s
        for t in range(tokens):
            s = advance(s, k[b, t], v[b, t])
            o[b, t] = scale * torch.einsum("hvk,hk->hv", s, q[b, t])
        if num_accepted_tokens is None:
            matrices[slot] = s

    new_state = matrices if state_layout == "vk" else matrices.transpose(-1, -2)
    if dtype is not torch.float64:
        new_state = new_state.to(state.dtype).to(dtype)
    return (o.squeeze(1) if squeeze else o), new_state
