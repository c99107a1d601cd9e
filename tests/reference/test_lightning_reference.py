"""The reference itself, against the recurrence's closed form and its symmetries."""

from __future__ import annotations

import pytest
import torch

from cute_attn.reference.lightning import lightning_attn_decode_reference


def problem(seed: int, batch: int = 3, tokens: int = 4, heads: int = 2, k: int = 5, v: int = 7):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(batch, tokens, heads, k),
        "k": normal(batch, tokens, heads, k),
        "v": normal(batch, tokens, heads, v),
        "state": normal(batch, heads, v, k),
        "decay": torch.rand(heads, generator=generator, dtype=torch.float64),
    }


def test_closed_form():
    """After t tokens, S_t = e^{-dt} S_0 + sum_i e^{-d(t-1-i)} v_i k_i^T."""
    p = problem(0)
    o, state = lightning_attn_decode_reference(**p, softmax_scale=0.3)
    for b in range(3):
        for h in range(2):
            d = torch.exp(-p["decay"][h])
            for t in range(4):
                s = d ** (t + 1) * p["state"][b, h]
                for i in range(t + 1):
                    s = s + d ** (t - i) * torch.outer(p["v"][b, i, h], p["k"][b, i, h])
                torch.testing.assert_close(o[b, t, h], 0.3 * s @ p["q"][b, t, h])
            torch.testing.assert_close(state[b, h], s)


def test_default_scale_is_that_of_attention():
    p = problem(1)
    o, _ = lightning_attn_decode_reference(**p)
    scaled, _ = lightning_attn_decode_reference(**p, softmax_scale=5**-0.5)
    torch.testing.assert_close(o, scaled)


def test_tokens_at_once_are_calls_in_turn():
    p = problem(2)
    o, state = lightning_attn_decode_reference(**p)
    carried = p["state"]
    for t in range(4):
        step = {name: p[name][:, t] for name in ("q", "k", "v")}
        o_t, carried = lightning_attn_decode_reference(**step, state=carried, decay=p["decay"])
        torch.testing.assert_close(o[:, t], o_t)
    torch.testing.assert_close(state, carried)


def test_layouts_are_transposes():
    p = problem(3)
    o, state = lightning_attn_decode_reference(**p)
    transposed = p | {"state": p["state"].transpose(-1, -2)}
    o_kv, state_kv = lightning_attn_decode_reference(**transposed, state_layout="kv")
    torch.testing.assert_close(o, o_kv)
    torch.testing.assert_close(state, state_kv.transpose(-1, -2))


def test_indices_pick_slots_and_padding_touches_none():
    p = problem(4)
    pool = torch.randn(6, 2, 7, 5, dtype=torch.float64)
    indices = torch.tensor([4, -1, 0], dtype=torch.int32)
    o, state = lightning_attn_decode_reference(
        **(p | {"state": pool}), state_indices=indices, softmax_scale=1.0
    )
    assert not o[1].any()
    assert torch.equal(state[[1, 2, 3, 5]], pool[[1, 2, 3, 5]])
    alone, state_alone = lightning_attn_decode_reference(
        **{name: p[name][:1] for name in ("q", "k", "v")},
        state=pool[4:5],
        decay=p["decay"],
        softmax_scale=1.0,
    )
    torch.testing.assert_close(o[:1], alone)
    torch.testing.assert_close(state[4:5], state_alone)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_replay_commits_what_was_accepted(accepted: int):
    """Drafting, then accepting a prefix, is decoding that prefix."""
    first, second = problem(5, tokens=3), problem(6, tokens=2)
    decay = first["decay"]
    o, checkpoint = lightning_attn_decode_reference(
        **{name: second[name] for name in ("q", "k", "v")},
        state=first["state"],
        decay=decay,
        num_accepted_tokens=torch.full((3,), accepted, dtype=torch.int32),
        draft_k=first["k"],
        draft_v=first["v"],
    )
    committed = first["state"]
    if accepted:
        prefix = {name: first[name][:, :accepted] for name in ("q", "k", "v")}
        _, committed = lightning_attn_decode_reference(**prefix, state=committed, decay=decay)
    torch.testing.assert_close(checkpoint, committed)
    o_expected, _ = lightning_attn_decode_reference(
        **{name: second[name] for name in ("q", "k", "v")}, state=committed, decay=decay
    )
    torch.testing.assert_close(o, o_expected)
