"""Lightning Attention: decode with one token and several, and both layouts of the state."""

from __future__ import annotations

from functools import partial

import torch
from checks.common import HEAD_DIM, SLOTS, Check, Errors, relative_errors

import cute_attn
from cute_attn.reference.lightning import lightning_attn_decode_reference

# name -> (shape of q without H and K, dtype of the state, its layout)
LIGHTNING = {
    "Lightning decode, one token": ((8,), torch.float32, "vk"),
    "Lightning decode, 4 tokens": ((8, 4), torch.float32, "vk"),
    "Lightning decode, bfloat16 state": ((8,), torch.bfloat16, "vk"),
    "Lightning decode, layout kv": ((8,), torch.float32, "kv"),
}


def lightning_decode(name: str, device: str, heads: int) -> Errors:
    """One or more tokens a sequence; `plain` is the formula in PyTorch float32."""
    step, state_dtype, layout = LIGHTNING[name]
    q, k, v = torch.randn(3, *step, heads, HEAD_DIM, device=device).to(torch.bfloat16)
    state = torch.randn(SLOTS, heads, HEAD_DIM, HEAD_DIM, device=device).to(state_dtype)
    decay = torch.rand(heads, device=device)
    slots = torch.randperm(SLOTS, device=device)[: step[0]].to(torch.int32)
    slots[0] = -1  # a padded row

    call = {"state_indices": slots, "state_layout": layout}
    exact_o, exact_state = lightning_attn_decode_reference(q, k, v, state, decay, **call)
    plain_o, plain_state = lightning_attn_decode_reference(
        q, k, v, state, decay, **call, dtype=torch.float32
    )
    o = cute_attn.lightning_attn_decode(q, k, v, state, decay, **call)
    return relative_errors(
        o=(o, plain_o.to(q.dtype), exact_o), state=(state, plain_state, exact_state)
    )


CHECKS = {name: Check(partial(lightning_decode, name)) for name in LIGHTNING}
