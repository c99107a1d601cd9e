"""The reference itself: against PyTorch's own attention in float64, and small cases by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_attn.reference.attention import (
    attention_gradients,
    attention_gradients_in_low_precision,
    attention_in_low_precision,
    attention_reference,
    visible,
)

F64 = torch.float64


def problem(
    seed: int,
    batch: int = 2,
    sq: int = 5,
    sk: int = 7,
    heads: int = 4,
    heads_k: int = 2,
    dim: int = 8,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    return normal(batch, sq, heads, dim), *(normal(batch, sk, heads_k, dim) for _ in range(2))


def by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    o = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


def mask_by_hand(
    sq: int, sk: int, causal: bool, window: tuple[int | None, int | None]
) -> torch.Tensor:
    """Key by key, from the words of the documentation."""
    mask = torch.zeros(sq, sk, dtype=torch.bool)
    for i in range(sq):
        for j in range(sk):
            position = i + sk - sq
            left = window[0] in (None, -1) or position - j <= window[0]
            right = window[1] in (None, -1) or j - position <= window[1]
            mask[i, j] = left and right and not (causal and j > position)
    return mask


WINDOWS = [
    (None, None),
    (-1, -1),
    (0, 0),
    (2, 0),
    (1, None),
    (None, 1),
    (3, 2),
    (-1, 2),
    (100, 100),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(5, 7), (7, 5), (6, 6), (1, 4), (4, 1)])
def test_agrees_with_torch(sq: int, sk: int, causal: bool, window: tuple[int | None, int | None]):
    mask = mask_by_hand(sq, sk, causal, window)
    assert torch.equal(visible(sq, sk, causal, window), mask)
    q, k, v = problem(0, sq=sq, sk=sk)
    o, lse = attention_reference(q, k, v, causal=causal, window_size=window, softmax_scale=0.3)
    seen = mask.any(dim=1)
    expected = by_torch(q, k, v, mask, 0.3)
    torch.testing.assert_close(o[:, seen], expected[:, seen])
    scores = 0.3 * torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2))
    expected_lse = torch.logsumexp(scores.masked_fill(~mask, -math.inf), dim=-1)
    torch.testing.assert_close(lse, expected_lse)
    assert not o[:, ~seen].any()
    assert (lse[..., ~seen] == -math.inf).all()


def test_default_scale_is_the_inverse_root_of_head_dim():
    q, k, v = problem(1)
    default, given = (
        attention_reference(q, k, v, **options) for options in ({}, {"softmax_scale": 8**-0.5})
    )
    torch.testing.assert_close(default, given)


def test_two_keys_by_hand():
    """Scores 0 and log 3: probabilities 1/4 and 3/4, lse log 4."""
    q = torch.tensor([[[[1.0]]]], dtype=F64)
    k = torch.tensor([[[[0.0]], [[math.log(3)]]]], dtype=F64)
    v = torch.tensor([[[[4.0]], [[8.0]]]], dtype=F64)
    o, lse = attention_reference(q, k, v, softmax_scale=1.0)
    assert o.item() == pytest.approx(7.0)
    assert lse.item() == pytest.approx(math.log(4))


def test_a_sink_takes_its_share_by_hand():
    """A sink of log 4 takes half of the sum."""
    q = torch.tensor([[[[1.0]]]], dtype=F64)
    k = torch.tensor([[[[0.0]], [[math.log(3)]]]], dtype=F64)
    v = torch.tensor([[[[4.0]], [[8.0]]]], dtype=F64)
    sink = torch.tensor([math.log(4)])
    o, lse = attention_reference(q, k, v, softmax_scale=1.0, learnable_sink=sink)
    assert o.item() == pytest.approx(3.5)
    assert lse.item() == pytest.approx(math.log(8))


def test_a_sink_is_a_key_of_value_zero():
    """Each head has its own; as torch would do it with one key more."""
    q, k, v = problem(2, heads=2)
    sink = torch.tensor([0.7, -1.5], dtype=F64)
    o, lse = attention_reference(q, k, v, learnable_sink=sink, causal=True)
    for head in range(2):
        scores = torch.einsum("bid,bjd->bij", q[:, :, head], k[:, :, head]) * 8**-0.5
        scores = scores.masked_fill(~mask_by_hand(5, 7, True, (None, None)), -math.inf)
        scores = torch.cat([scores, sink[head].expand(2, 5, 1)], dim=-1)
        p = torch.softmax(scores, dim=-1)[..., :-1]
        torch.testing.assert_close(o[:, :, head], p @ v[:, :, head])
        torch.testing.assert_close(lse[:, head], torch.logsumexp(scores, dim=-1))


def test_softcap_by_hand():
    """One score of 2 under a cap of 3, beside one of 0."""
    q = torch.tensor([[[[2.0]]]], dtype=F64)
    k = torch.tensor([[[[1.0]], [[0.0]]]], dtype=F64)
    v = torch.tensor([[[[1.0]], [[0.0]]]], dtype=F64)
    o, lse = attention_reference(q, k, v, softmax_scale=1.0, softcap=3.0)
    e = math.exp(3 * math.tanh(2 / 3))
    assert o.item() == pytest.approx(e / (e + 1))
    assert lse.item() == pytest.approx(math.log(e + 1))


@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_grouped_heads_are_repeated_heads(heads_k: int):
    q, k, v = problem(3, heads=4, heads_k=heads_k)
    grouped = attention_reference(q, k, v, causal=True)
    repeated = attention_reference(
        q, *(x.repeat_interleave(4 // heads_k, dim=2) for x in (k, v)), causal=True
    )
    assert all(map(torch.equal, grouped, repeated))


def test_packed_sequences_are_sequences_alone():
    lengths_q, lengths_k = [3, 0, 5, 2], [4, 6, 0, 1]
    (q,), (k, v) = problem(4, batch=1, sq=10, sk=11)[0], (x[0] for x in problem(4, 1, 10, 11)[1:])
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    options: dict[str, Any] = {"causal": True, "window_size": (2, None)}
    o, lse = attention_reference(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    assert o.shape == (10, 4, 8)
    assert lse.shape == (4, 10)
    for b in range(4):
        rows_q, rows_k = (slice(*cu[b : b + 2].tolist()) for cu in (cu_q, cu_k))
        alone, lse_alone = attention_reference(
            q[None, rows_q], k[None, rows_k], v[None, rows_k], **options
        )
        assert torch.equal(o[rows_q], alone[0])
        assert torch.equal(lse[:, rows_q], lse_alone[0])


def test_seqused_cuts_sequences_and_leaves_the_rest_out():
    q, k, v = problem(5, batch=3)
    used_k = torch.tensor([7, 3, 0], dtype=torch.int32)
    o, lse = attention_reference(q, k, v, seqused_k=used_k, causal=True)
    for b, n in enumerate(used_k.tolist()):
        expected = attention_reference(
            q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], causal=True
        )
        assert torch.equal(o[b : b + 1], expected[0])
        assert torch.equal(lse[b : b + 1], expected[1])
    assert not o[2].any()
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    used_q = torch.tensor([2, 5], dtype=torch.int32)
    packed = q.flatten(0, 1)
    o, lse = attention_reference(
        packed, k[:2], v[:2], cu_seqlens_q=cu, seqused_q=used_q, causal=True
    )
    first = attention_reference(packed[None, :2], k[:1], v[:1], causal=True)
    assert torch.equal(o[:2], first[0][0])
    outside = torch.ones(15, dtype=torch.bool)
    outside[[0, 1, 5, 6, 7, 8, 9]] = False
    assert torch.equal(o.isnan().all(dim=(1, 2)), outside)
    assert torch.equal(lse.isnan().all(dim=0), outside)


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf])
def test_what_is_hidden_does_not_count(hidden: float):
    """NaN or infinite k and v of keys that a row does not see change nothing in that row."""
    q, k, v = problem(6, sq=4, sk=6)
    expected = attention_reference(q, k, v, causal=True)
    k[:, 4:], v[:, 4:] = hidden, hidden
    o, lse = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(o[:, :2], expected[0][:, :2], rtol=1e-14, atol=1e-14)
    assert torch.equal(lse[..., :2], expected[1][..., :2])
    assert not o[:, 2:].isfinite().any()


def test_scores_of_minus_infinity_alone_are_no_keys():
    q, k, v = (torch.ones(1, 2, 1, 1, dtype=F64) for _ in range(3))
    k[:] = -math.inf
    o, lse = attention_reference(q, k, v)
    assert not o.any()
    assert (lse == -math.inf).all()
    o, lse = attention_reference(q, k, v, learnable_sink=torch.tensor([2.0]))
    assert not o.any()
    assert (lse == 2.0).all()


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_visible_nan_and_infinity_show(score: float):
    q, k, v = problem(7, sq=3, sk=3, heads=1, heads_k=1, dim=1)
    q.abs_()
    k[:, 2] = score
    o, lse = attention_reference(q, k, v, causal=True)
    assert o[:, 2].isnan().all() and lse[..., 2].isnan().all()
    assert o[:, :2].isfinite().all() and lse[..., :2].isfinite().all()


@pytest.mark.parametrize(("sq", "sk"), [(0, 3), (3, 0), (0, 0)])
def test_nothing(sq: int, sk: int):
    q, k, v = problem(8, sq=sq, sk=sk)
    sink = torch.full((4,), 1.5)
    o, lse = attention_reference(q, k, v, learnable_sink=sink)
    assert o.shape == (2, sq, 4, 8) and lse.shape == (2, 4, sq)
    assert not o.any() and (lse == 1.5).all()
    for sinks in ({}, {"learnable_sink": sink}):
        found = attention_gradients(q, k, v, torch.ones_like(o), torch.ones_like(lse), **sinks)
        assert not any(x.any() for x in found[:3])
        assert found.dsink is None or (found.dsink == 2 * sq).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_errs_by_its_roundings(dtype: torch.dtype):
    """Two roundings of p and o, each uniform: about half an ulp, and by no means none."""
    q, k, v = (x.to(dtype) for x in problem(9, sq=64, sk=96, dim=32))
    exact, exact_lse = attention_reference(q, k, v, causal=True)
    plain, plain_lse = attention_in_low_precision(q, k, v, causal=True)
    assert plain.dtype == dtype
    error = ((plain.double() - exact).norm() / exact.norm()).item()
    eps = torch.finfo(dtype).eps
    assert eps / 16 < error < eps / 2
    torch.testing.assert_close(plain_lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


# -- gradients


def weights(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of o and lse, 0 where those are not defined or infinite."""
    generator = torch.Generator().manual_seed(99)
    do, dlse = (torch.randn(x.shape, generator=generator, dtype=F64) for x in (o, lse))
    return do.masked_fill(o.isnan(), 0.0), dlse.masked_fill(~lse.isfinite(), 0.0)


VARLEN: dict[str, Any] = {
    "cu_seqlens_q": torch.tensor([0, 3, 3, 10], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 5, 9, 14], dtype=torch.int32),
}
USED: dict[str, Any] = {
    "seqused_q": torch.tensor([2, 0, 7], dtype=torch.int32),
    "seqused_k": torch.tensor([4, 4, 3], dtype=torch.int32),
}
SINK = torch.tensor([0.4, -1.0, 0.0, 2.0], dtype=F64)
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 0.7, "softmax_scale": 0.9},
    "sink": {"learnable_sink": SINK, "window_size": (None, -3)},
    "varlen": {**VARLEN, "causal": True},
    "used": {**VARLEN, **USED, "causal": True, "softcap": 1.5, "learnable_sink": SINK},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_the_slopes_in_random_directions(options: dict[str, Any]):
    tensors = problem(10, sq=7, sk=5)
    if "cu_seqlens_q" in options:
        tensors = problem(10, 1, 10, 14)
        tensors = (tensors[0][0], tensors[1][0], tensors[2][0])
    sinks = [options["learnable_sink"]] if "learnable_sink" in options else []
    rest = {name: x for name, x in options.items() if name != "learnable_sink"}

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sink = inputs[3] if sinks else None
        return attention_reference(*inputs[:3], learnable_sink=sink, **rest)

    do, dlse = weights(*forward(*tensors, *sinks))

    def value(*inputs: torch.Tensor) -> float:
        o, lse = forward(*inputs)
        parts = (torch.where(g == 0, 0.0, x * g).sum() for x, g in ((o, do), (lse, dlse)))
        return sum(part.item() for part in parts)

    sink = sinks[0] if sinks else None
    found = list(attention_gradients(*tensors, do, dlse, learnable_sink=sink, **rest))
    assert (found[3] is None) == (sink is None)
    generator = torch.Generator().manual_seed(11)
    for position, x in enumerate([*tensors, *sinks]):
        direction = torch.randn(x.shape, generator=generator, dtype=F64)
        values = []
        for step in (1e-6, -1e-6):
            moved = [*tensors, *sinks]
            moved[position] = x + step * direction
            values.append(value(*moved))
        slope = (found[position] * direction).sum().item()
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("head_dim_v", [8, 3, 11])
def test_gradients_agree_with_torch(head_dim_v: int):
    q, k, v = problem(12)
    v = torch.cat([v, v.roll(1, -1)], dim=-1)[..., :head_dim_v]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = mask_by_hand(5, 7, True, (None, None))
    o = by_torch(*leaves, mask, 8**-0.5)
    torch.testing.assert_close(attention_reference(q, k, v, causal=True)[0], o)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(13), dtype=F64)
    expected = torch.autograd.grad(o, leaves, do)
    found = attention_gradients(q, k, v, do, causal=True)
    for actual, gradient in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(actual, gradient)


@pytest.mark.parametrize("sink", [None, SINK], ids=["none", "sink"])
def test_rows_without_keys_have_no_gradient(sink: torch.Tensor | None):
    """But that of the sink, which is their lse."""
    q, k, v = problem(14, sq=6, sk=2)
    o, lse = attention_reference(q, k, v, causal=True, learnable_sink=sink)
    do, dlse = (torch.ones_like(x) for x in (o, lse))
    found = attention_gradients(q, k, v, do, dlse, causal=True, learnable_sink=sink)
    assert all(x.isfinite().all() for x in found if x is not None)
    assert not found.dq[:, :4].any() and found.dq[:, 4:].any()
    if sink is not None and found.dsink is not None:
        unseen = attention_gradients(
            q[:, :4], k[:, :0], v[:, :0], do[:, :4], dlse[..., :4], learnable_sink=sink
        )
        assert unseen.dsink is not None and (unseen.dsink == 8).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_hidden_has_no_gradient_and_gives_none(name: str, value: float):
    """Query 3 alone sees key 5: NaN there reaches no gradient of others."""
    q, k, v = problem(15, sq=4, sk=6)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(15), dtype=F64)
    expected = attention_gradients(q[:, :3], k[:, :5], v[:, :5], do[:, :3], causal=True)
    {"q": q, "k": k, "v": v, "do": do}[name][:, 3 if name in ("q", "do") else 5] = value
    found = attention_gradients(q, k, v, do, causal=True)
    torch.testing.assert_close(found.dq[:, :3], expected.dq)
    assert found.dq[:, 3].isnan().any()
    # Query 3 sees all keys: the gradient of k shows it.
    assert found.dk.isnan().any()


def test_gradients_of_rows_of_no_sequence_are_zero():
    q, k, v = (x[0] for x in problem(16, 1, 12, 16))
    q[10:], k[14:], v[14:] = math.nan, math.nan, math.nan
    do = torch.randn(q.shape, dtype=F64)
    do[10:] = math.nan
    found = attention_gradients(q, k, v, do, **VARLEN, **USED)
    assert all(x.isfinite().all() for x in found[:3])
    rows_q, rows_k = [2, 10, 11], [4, 12, 13, 14, 15]
    assert not found.dq[rows_q].any() and not found.dk[rows_k].any() and not found.dv[rows_k].any()
    plain = attention_gradients_in_low_precision(q.nan_to_num(), k, v, do, **VARLEN, **USED)
    assert not plain.dq[rows_q].any() and not plain.dk[rows_k].any() and not plain.dv[rows_k].any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("jitter", [False, True])
def test_low_precision_gradients_err_by_their_roundings(options: dict[str, Any], jitter: bool):
    dtype = torch.bfloat16
    if "cu_seqlens_q" in options:
        q, k, v = (x[0].to(dtype) for x in problem(17, 1, 10, 14, dim=64))
    else:
        q, k, v = (x.to(dtype) for x in problem(17, sq=20, sk=24, dim=64))
    options = {n: x.float() if n == "learnable_sink" else x for n, x in options.items()}
    do, dlse = weights(*attention_reference(q, k, v, **options))
    do, dlse = do.to(dtype), dlse.float()
    generator = torch.Generator().manual_seed(3) if jitter else None
    exact = attention_gradients(q, k, v, do, dlse, **options)
    plain = attention_gradients_in_low_precision(q, k, v, do, dlse, jitter=generator, **options)
    eps = torch.finfo(dtype).eps
    for actual, true in zip(plain[:3], exact[:3], strict=True):
        assert actual.dtype == dtype
        error = ((actual.double() - true).norm() / true.norm()).item()
        assert eps / 16 < error < 1.5 * eps
    if plain.dsink is not None:
        torch.testing.assert_close(plain.dsink.double(), exact.dsink, rtol=eps, atol=4 * eps)
