"""The float64 attention that peers' kernels are compared with: against autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from . import attention_reference


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (5, 9)])
def test_reference_agrees_with_autograd(causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    torch.manual_seed(0)
    shapes = ((2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 6))
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    mask = attention_reference.visible(seqlen_q, seqlen_k, causal)
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    expected = scaled_dot_product_attention(
        heads_first[0], heads_first[1], heads_first[2], attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    dout = torch.randn_like(expected)
    expected.backward(dout)
    with torch.no_grad():
        out, lse = attention_reference.forward(q, k, v, causal=causal)
        gradients = attention_reference.backward(q, k, v, out, dout, lse, causal=causal)
    torch.testing.assert_close(out, expected.detach())
    for name, tensor in (("dq", q), ("dk", k), ("dv", v)):
        torch.testing.assert_close(getattr(gradients, name), tensor.grad, msg=name)


def test_reference_of_softcap_agrees_with_finite_differences() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 3, 1, 2, dtype=torch.float64) for _ in range(4))
    out, lse = attention_reference.forward(q, k, v, softcap=0.5)
    gradients = attention_reference.backward(q, k, v, out, dout, lse, softcap=0.5)
    for gradient, position in ((gradients.dq, 0), (gradients.dk, 1), (gradients.dv, 2)):
        for index in itertools.product(*map(range, gradient.shape)):
            values = []
            for step in (1e-6, -1e-6):
                moved = [t.clone() for t in (q, k, v)]
                moved[position][index] += step
                values.append((attention_reference.forward(*moved, softcap=0.5).out * dout).sum())
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(gradient[index].item(), abs=1e-7)


def test_reference_of_rows_that_see_nothing() -> None:
    q, k, v = torch.randn(1, 5, 1, 4), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    out, lse = attention_reference.forward(q, k, v, causal=True)
    assert (out[0, :3] == 0).all() and (lse[0, 0, :3] == -torch.inf).all()
    gradients = attention_reference.backward(q, k, v, out, torch.ones_like(out), lse, causal=True)
    assert all(torch.isfinite(t).all() for t in gradients) and (gradients.dq[0, :3] == 0).all()


def test_reference_of_a_window_and_a_sink() -> None:
    mask = attention_reference.visible(2, 5, window_size=(1, 0))
    assert mask.tolist() == [[False, False, True, True, False], [False, False, False, True, True]]
    q, k, v = (torch.randn(1, 3, 2, 4) for _ in range(3))
    out, lse = attention_reference.forward(q, k, v)
    sink = torch.tensor([-torch.inf, 1.0])
    with_sink = attention_reference.forward(q, k, v, learnable_sink=sink)
    torch.testing.assert_close(with_sink.out[:, :, 0], out[:, :, 0])
    torch.testing.assert_close(
        with_sink.lse[:, 1], torch.logaddexp(lse[:, 1], torch.tensor(1.0, dtype=torch.float64))
    )


def test_varlen_reference_is_that_of_each_sequence() -> None:
    lengths_q, lengths_k = (3, 1, 4), (5, 2, 4)
    q, k, v = torch.randn(8, 2, 4), torch.randn(11, 1, 4), torch.randn(11, 1, 4)
    out, lse = attention_reference.forward(
        q, k, v, causal=True, seqlens_q=lengths_q, seqlens_k=lengths_k
    )
    dout = torch.randn_like(out)
    gradients = attention_reference.backward(
        q, k, v, out, dout, lse, causal=True, seqlens_q=lengths_q, seqlens_k=lengths_k
    )
    assert lse.shape == gradients.dpsum.shape == (2, 8)
    one = attention_reference.forward(q[None, 4:], k[None, 7:], v[None, 7:], causal=True)
    torch.testing.assert_close(out[None, 4:], one.out)
    torch.testing.assert_close(lse[None, :, 4:], one.lse)
    last = attention_reference.backward(
        q[None, 4:], k[None, 7:], v[None, 7:], one.out, dout[None, 4:], one.lse, causal=True
    )
    torch.testing.assert_close(gradients.dk[None, 7:], last.dk)
    torch.testing.assert_close(gradients.dq[None, 4:], last.dq)
    torch.testing.assert_close(gradients.dpsum[None, :, 4:], last.dpsum)
