"""Models of transformers whose sequences are split between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .ranks import Ranks, logits_and_gradients, model_of, ranks

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


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "way", "packed"),
    [
        ("Llama", "zigzag", "sum", False),
        ("Qwen3", "zigzag", "mean", False),
        ("Qwen3", "documents", "sum", True),
        ("Mistral", "contiguous", "checkpoint", False),
        ("Qwen3", "zigzag", "fsdp", False),
    ],
)
def test_a_split_model_has_one_processs_loss_and_gradients(
    two: Ranks, kind: str, layout: str, way: str, packed: bool
) -> None:
    """No more than twice the error of the model's own attention in bfloat16."""
    ids = torch.randint(1, 97, (1, 61), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 20:30] = -100
    inputs = {}
    if packed:
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (17, 40, 4)])[None]
    results = two.call("split", kind=kind, ids=ids, labels=labels, layout=layout, way=way, **inputs)
    plain, exact = (
        _loss_and_gradients(model_of(kind, "eager", dtype), input_ids=ids, labels=labels, **inputs)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for found in results:
        for ours, theirs, true in zip(found, plain, exact, strict=True):
            errors = [(x.double() - true.double()).norm() for x in (ours, theirs)]
            assert errors[0] <= 2 * errors[1] + 1e-3 * true.double().norm()
    assert torch.equal(results[0][0], results[1][0])


def _loss_and_gradients(model: Any, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    loss = model(use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "implementation", "config", "message"),
    [
        ("Llama", "sdpa", {}, "NotImplementedError: use_context_parallel needs a model with"),
        (
            "Qwen3",
            "cute_attn",
            {"layer_types": ["linear_attention", "full_attention"]},
            "NotImplementedError: use_context_parallel has softmax attention only "
            "(full_attention, sliding_attention), and the model has layers of type "
            "linear_attention",
        ),
        (
            "Llama",
            "cute_attn",
            {"output_router_logits": True},
            "NotImplementedError: use_context_parallel computes no loss of a router",
        ),
    ],
    ids=["another attention", "linear layers", "a router's loss"],
)
def test_models_that_are_refused(
    two: Ranks, kind: str, implementation: str, config: dict[str, Any], message: str
) -> None:
    for found in two.call("refused_model", kind=kind, implementation=implementation, **config):
        assert found.startswith(message), found
