"""The Gated Delta Net's reference: a closed form, KDA with equal gates, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn.reference.gated_delta_rule import (
    gated_delta_rule_chunk_gradients,
    gated_delta_rule_chunk_reference,
    gated_delta_rule_decode_reference,
    gated_delta_rule_gradients,
    gated_delta_rule_reference,
)
from cute_attn.reference.kda import (
    KdaRecords,
    kda_chunk_reference,
    kda_decode_reference,
    kda_gradients,
    kda_reference,
)

HEADS_QK, HEADS_V, K, V = 2, 4, 6, 5
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def problem(seed: int, tokens: int = 70, *, raw: bool = False) -> dict[str, Any]:
    """A packed problem of three sequences, one of them empty; `raw` leaves the gate, beta and the
    norms to the operator."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    p: dict[str, Any] = {
        "q": normal(1, tokens, HEADS_QK, K),
        "k": torch.nn.functional.normalize(normal(1, tokens, HEADS_QK, K), dim=-1),
        "v": normal(1, tokens, HEADS_V, V),
        "g": -normal(1, tokens, HEADS_V).abs(),
        "beta": normal(1, tokens, HEADS_V).sigmoid(),
        "initial_state": normal(3, HEADS_V, K, V),
        "cu_seqlens": torch.tensor([0, 3, 3, tokens]),
    }
    if raw:
        p |= {
            **IN_KERNEL,
            "g": 3.0 * normal(1, tokens, HEADS_V),
            "beta": 2.0 * normal(1, tokens, HEADS_V),
            "A_log": normal(HEADS_V),
            "dt_bias": normal(HEADS_V),
        }
    return p


def for_kda(p: dict[str, Any]) -> dict[str, Any]:
    """The problem for KDA, whose gate has the same value in all channels of a head."""
    p = p | {"g": p["g"].unsqueeze(-1).expand(*p["g"].shape, K)}
    if p.get("dt_bias") is not None:
        p["dt_bias"] = p["dt_bias"].unsqueeze(-1).expand(-1, K).reshape(-1)
    return p


def test_tokens_are_affine_maps_of_the_state():
    """S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T."""
    p = problem(0, tokens=5) | {"cu_seqlens": None}
    p["initial_state"] = p["initial_state"][:1]
    result = gated_delta_rule_reference(**p, scale=0.3)
    for h in range(HEADS_V):
        s = p["initial_state"][0, h]
        for t in range(5):
            q, k = (p[x][0, t, h // (HEADS_V // HEADS_QK)] for x in "qk")
            decay, beta = p["g"][0, t, h].exp(), p["beta"][0, t, h]
            s = decay * (torch.eye(K) - beta * torch.outer(k, k)) @ s
            s = s + beta * torch.outer(k, p["v"][0, t, h])
            torch.testing.assert_close(result.o[0, t, h], 0.3 * s.T @ q)
        torch.testing.assert_close(result.final_state[0, h], s)


def test_the_gate_is_a_softplus():
    p = problem(1, tokens=5, raw=True)
    gate = -p["A_log"].exp() * torch.nn.functional.softplus(p["g"] + p["dt_bias"])
    before = p | {"g": gate, "use_gate_in_kernel": False}
    torch.testing.assert_close(
        gated_delta_rule_reference(**p).o, gated_delta_rule_reference(**before).o
    )


@pytest.mark.parametrize("raw", [False, True])
def test_is_kda_with_equal_gates(raw: bool):
    p = problem(2, raw=raw)
    for ours, theirs in (
        (gated_delta_rule_reference(**p), kda_reference(**for_kda(p))),
        (gated_delta_rule_chunk_reference(**p).states, kda_chunk_reference(**for_kda(p)).states),
    ):
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("raw", [False, True])
def test_chunks_are_the_recurrence(raw: bool):
    p = problem(3, raw=raw)
    exact, chunked = gated_delta_rule_reference(**p), gated_delta_rule_chunk_reference(**p)
    torch.testing.assert_close(chunked.o, exact.o)
    torch.testing.assert_close(chunked.states.final_state, exact.final_state)
    rounded = gated_delta_rule_chunk_reference(**p, dtype=torch.float32, stage_dtype=torch.bfloat16)
    error = (rounded.o - exact.o).norm() / exact.o.norm()
    assert 1e-4 < error < 1e-1


@pytest.mark.parametrize("raw", [False, True])
def test_gradients_are_kdas_summed_over_channels(raw: bool):
    p = problem(4, tokens=12, raw=raw)
    do = torch.randn(p["v"].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    theirs = kda_gradients(**for_kda(p), do=do)
    summed = {"dg": theirs.dg.sum(-1)}
    if theirs.ddt_bias is not None:
        summed["ddt_bias"] = theirs.ddt_bias.view(HEADS_V, K).sum(-1)
    expected = theirs._replace(**summed)
    for run in (gated_delta_rule_gradients, gated_delta_rule_chunk_gradients):
        for x, y in zip(run(**p, do=do), expected, strict=True):
            torch.testing.assert_close(x, y)


def test_decode_is_kdas_with_equal_gates():
    p = problem(6, tokens=4, raw=True)
    inputs = {x: p[x].view(2, 2, *p[x].shape[2:]) for x in ("q", "k", "v", "g", "beta")}
    state = torch.randn(3, HEADS_V, V, K, generator=torch.Generator().manual_seed(7)).double()
    records = KdaRecords(
        torch.randn(3, 2, HEADS_QK, K, dtype=torch.float64),
        torch.randn(3, 2, HEADS_V, dtype=torch.float64),
        torch.randn(3, 2, HEADS_V, V, dtype=torch.float64),
    )
    options: dict[str, Any] = {
        "A_log": p["A_log"],
        "dt_bias": p["dt_bias"],
        "state_indices": torch.tensor([2, 0]),
        "num_accepted_tokens": torch.tensor([1, 2]),
    }
    ours = gated_delta_rule_decode_reference(**inputs, state=state, records=records, **options)
    expanded = records._replace(g=records.g.unsqueeze(-1).expand(-1, -1, -1, K))
    theirs = kda_decode_reference(
        **for_kda(inputs | {"dt_bias": p["dt_bias"]}),
        state=state,
        records=expanded,
        **{name: x for name, x in options.items() if name != "dt_bias"},
    )
    torch.testing.assert_close(ours.o, theirs.o)
    torch.testing.assert_close(ours.state, theirs.state)
    assert ours.records is not None and theirs.records is not None
    torch.testing.assert_close(ours.records.g, theirs.records.g[..., 0])
    torch.testing.assert_close(ours.records.u, theirs.records.u)
