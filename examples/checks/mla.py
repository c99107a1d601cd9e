"""Multi-head latent attention: decode over a latent cache in pages."""

from __future__ import annotations

from functools import partial

import torch
from checks.common import HOPPER, Check, Errors, relative_errors

import cute_attn
from cute_attn.reference.mla import mla_decode_reference

# name -> (queries, columns of a token, columns of its latent vector)
MLA = {
    "MLA decode": (1, 576, 512),
    "MLA decode, 2 queries": (2, 576, 512),
    "MLA decode, 320 columns": (1, 320, 256),
}


def mla_decode(name: str, device: str, heads: int) -> Errors:
    """Ragged lengths in pages of 64 tokens; `plain` rounds P and o to bfloat16."""
    queries, head_dim, head_dim_v = MLA[name]
    q = torch.randn(3, queries, heads, head_dim, device=device).to(torch.bfloat16)
    cache = torch.randn(5, 64, head_dim, device=device).to(torch.bfloat16)
    call = {
        "block_table": torch.tensor([[4, 0], [1, 3], [2, 0]], dtype=torch.int32, device=device),
        "cache_seqlens": torch.tensor([70, 128, 9], dtype=torch.int32, device=device),
        "softmax_scale": 0.1,
        "head_dim_v": head_dim_v,
    }
    given = q[..., :head_dim_v], q[..., head_dim_v:], cache
    exact, _ = mla_decode_reference(*given, **call)
    plain, _ = mla_decode_reference(*given, **call, dtype=None)
    o, _ = cute_attn.mla_decode(*given, **call)
    return relative_errors(o=(o, plain, exact))


CHECKS = {name: Check(partial(mla_decode, name), HOPPER, HOPPER) for name in MLA}
