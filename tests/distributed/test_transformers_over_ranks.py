"""Models of transformers whose sequences are split between ranks."""

from __future__ import annotations

import pytest
import torch

from .ranks import logits_and_gradients, model_of, ranks

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [("Llama", "zigzag"), ("Qwen3", "zigzag"), ("Mistral", "contiguous")]
)
def test_logits_and_gradients_of_a_model(kind: str, layout: str) -> None:
    """No more than twice the error of the model's own attention in bfloat16."""
    tokens = torch.randint(1, 97, (1, 61), generator=torch.Generator().manual_seed(0))
    upstream = torch.randn(1, 61, 97, generator=torch.Generator().manual_seed(1))
    with ranks(2) as two:
        results = two.call("trained", kind=kind, tokens=tokens, upstream=upstream, layout=layout)
    plain, exact = (
        logits_and_gradients(model_of(kind, "eager", dtype), upstream, input_ids=tokens)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for found in results:
        for ours, theirs, true in zip(found, plain, exact, strict=True):
            errors = [(x.double() - true.double()).norm() for x in (ours, theirs)]
            assert errors[0] <= 2 * errors[1]
