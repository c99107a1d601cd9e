"""The absorbed form of multi-head latent attention agrees with the expanded form."""

from __future__ import annotations

import pytest
import torch

from cute_attn.reference.mla import absorbed, mla_decode_reference, mla_expanded_reference

LENGTHS = (23, 0, 40)
HEADS, QUERIES, PAGE = 3, 2, 16


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 64), (512, 0)])
def test_both_forms_agree(latent: int, rope: int) -> None:
    """With heads of 128 columns beside the rotated columns, which may be none."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q_nope, q_rope = normal(3, QUERIES, HEADS, 128), normal(3, QUERIES, HEADS, rope)
    w_uk, w_uv = normal(HEADS, 128, latent) / 20, normal(HEADS, 128, latent) / 20
    rows = normal(3, 48, latent + rope)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    scale = (128 + rope) ** -0.5
    expanded, expanded_lse = mla_expanded_reference(
        q_nope, q_rope, rows[..., :latent], rows[..., latent:], w_uk, w_uv, softmax_scale=scale,
        cache_seqlens=lengths,
    )  # fmt: skip
    table = torch.arange(9, dtype=torch.int32).flip(0).view(3, 3)
    cache = torch.empty(9, PAGE, latent + rope, dtype=torch.float64)
    cache[table.flatten().long()] = rows.view(9, PAGE, latent + rope)
    o, lse = mla_decode_reference(
        absorbed(q_nope, w_uk), q_rope if rope else None, cache, block_table=table,
        cache_seqlens=lengths, softmax_scale=scale, head_dim_v=latent,
    )  # fmt: skip
    torch.testing.assert_close(torch.einsum("bthl,hvl->bthv", o, w_uv), expanded)
    torch.testing.assert_close(lse, expanded_lse)
    assert (expanded[1] == 0).all() and (expanded_lse[1] == -torch.inf).all()
