"""Layers and models of flash-linear-attention train on our kernels as they do on its own."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cute_attn.reference.kda import kda_reference
from tests.ops.lightning_cases import assert_no_worse

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE = torch.bfloat16


@pytest.fixture
def layers(fla: Any) -> Any:
    """The module whose `chunk_kda` the layer calls."""
    return pytest.importorskip("fla.layers.kda", reason="needs transformers", exc_type=ImportError)


# -- a layer


def exact_chunk_kda(q: Tensor, *, output_final_state: bool, **given: Any) -> tuple[Tensor, None]:
    assert not output_final_state
    return kda_reference(q, **given).o.to(q.dtype), None


LAYERS: dict[str, dict[str, Any]] = {
    "softplus": {"num_heads": 2, "head_dim": 128},
    "grouped value heads, bounded": {
        "num_heads": 1,
        "num_v_heads": 2,
        "head_dim": 64,
        "lower_bound": -5.0,
        "safe_gate": True,
        "allow_neg_eigval": True,
    },
}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(
    layers: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch, name: str, packed: bool
) -> None:
    """Output and gradients, in autocast, are as near to those through the float64 reference with
    our kernels as with flash-linear-attention's, which one environment variable switches to."""
    torch.manual_seed(0)
    layer = layers.KimiDeltaAttention(hidden_size=128, **LAYERS[name]).to(DEVICE)
    options = {"cu_seqlens": torch.tensor([0, 70, 71, 200], device=DEVICE)} if packed else {}
    x, dy = torch.randn(2, 1, 200, 128, device=DEVICE)

    def step() -> dict[str, Tensor]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast(DEVICE, DTYPE):
            y, *_ = layer(leaf, **options)
        y.backward(dy.to(y.dtype))
        return {
            "y": y.detach(),
            "x": leaf.grad,
            **{name: parameter.grad for name, parameter in layer.named_parameters()},
        }

    ours = step()
    assert reached == {"chunk_kda": 1}
    monkeypatch.setenv("FLA_CUTE_ATTN", "0")
    theirs = step()
    assert reached == {"chunk_kda": 1}
    monkeypatch.setattr(layers, "chunk_kda", exact_chunk_kda)
    exact = {name: gradient.double() for name, gradient in step().items()}
    assert exact["A_log"].isfinite().all() and exact["dt_bias"].any()
    for of, true in exact.items():
        for found in (ours, theirs):
            assert (found[of] - true).norm() < 0.05 * true.norm(), of
        if of != "A_log":  # of a few numbers an error says little
            assert_no_worse(ours[of], theirs[of], true)


# -- a model

STEPS, BATCH, TOKENS = 200, 16, 256
WIDTH = 256
LEARNING_RATE = 1e-3


class FullAttention(torch.nn.Module):
    """Softmax attention without positions, as every fourth layer of Kimi Linear has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o_proj = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None, None]:
        heads = self.qkv(hidden_states).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(-2)), None, None


def kimi_linear() -> Any:
    """Two layers of Kimi Delta Attention and one of full attention."""
    from fla.models.kda import KDAConfig, KDAForCausalLM

    torch.manual_seed(0)
    config = KDAConfig(
        hidden_size=WIDTH,
        head_dim=128,
        num_heads=1,
        num_v_heads=2,
        num_hidden_layers=3,
        hidden_ratio=2,
        vocab_size=256,
        fuse_norm=False,
        fuse_swiglu=False,
        fuse_cross_entropy=False,
    )
    model = KDAForCausalLM(config)
    model.model.layers[-1].attn = FullAttention()
    return model.to(DEVICE).train()


def texts() -> Tensor:
    """Sums of two numbers, in bytes, one batch a step: `[STEPS, BATCH, TOKENS]`."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(100, (STEPS * BATCH, TOKENS // 6, 2), generator=generator)
    lines = [
        "".join(f"{a}+{b}={a + b};" for a, b in line)[:TOKENS].ljust(TOKENS)
        for line in numbers.tolist()
    ]
    return torch.tensor([list(line.encode()) for line in lines]).view(STEPS, BATCH, TOKENS)


def train(batches: Tensor) -> Tensor:
    """The losses of all steps."""
    model = kimi_linear()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses = []
    for batch in batches.to(DEVICE):
        with torch.autocast(DEVICE, DTYPE):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def distance(one: Tensor, other: Tensor) -> float:
    """Of two curves, as the root mean square over all steps."""
    return float((one - other).square().mean().sqrt())


def without(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The call without the gradient of an argument."""
    return lambda **given: call(**given | {name: given[name].detach()})


@pytest.mark.slow  # six runs, each of five seconds or more
def test_a_model_trains_to_the_same_losses(
    layers: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs from the same weights on the same texts drift apart by their roundings alone.

    Four runs on flash-linear-attention's kernels differ in nothing else. With chunks of 32 instead
    of 64 tokens it rounds other states and corrections to 16 bits; with the sequences of each batch
    in reverse it adds the same gradients of weights in another order. Their spread is the largest
    distance of two of them. Our run may be no farther from them, on average. A run without the
    gradient of k is: the test notices such a bug.
    """
    dispatched = layers.chunk_kda
    batches = texts()
    ours = train(batches)
    assert reached == {"chunk_kda": 2 * STEPS}
    assert ours[-10:].mean() < 0.5 * ours[0], "it learns nothing"

    monkeypatch.setattr(layers, "chunk_kda", without(dispatched, "k"))
    wrong = train(batches)
    assert reached == {"chunk_kda": 4 * STEPS}

    monkeypatch.setenv("FLA_CUTE_ATTN", "0")
    theirs = []
    for chunk_size, order in itertools.product((64, 32), (batches, batches.flip(1))):
        call = functools.partial(dispatched, chunk_size=chunk_size)
        monkeypatch.setattr(layers, "chunk_kda", call)
        theirs.append(train(order))
    assert reached == {"chunk_kda": 4 * STEPS}

    between = [distance(one, other) for one, other in itertools.combinations(theirs, 2)]
    from_theirs, of_wrong = ([distance(run, other) for other in theirs] for run in (ours, wrong))
    for name, found in (("theirs", between), ("ours", from_theirs), ("wrong", of_wrong)):
        print(f"distances, {name}: {' '.join(f'{x:.2e}' for x in found)}")
    print(f"losses: {ours[0]:.3f}, at the end {ours[-1]:.4f}; theirs {theirs[0][-1]:.4f}")
    spread = max(between)
    assert sum(from_theirs) / len(theirs) <= spread
    assert min(of_wrong) > 2 * spread
