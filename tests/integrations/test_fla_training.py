"""Layers and models of flash-linear-attention train on our kernels as they do on its own."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cute_attn.reference.gated_delta_rule import gated_delta_rule_reference
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


@dataclass(frozen=True)
class Kind:
    """A kind of layer: its class, the function that it calls, and the definition of the result."""

    path: str
    function: str
    definition: Callable[..., Any]

    def exact(self, q: Tensor, *, output_final_state: bool, **given: Any) -> tuple[Tensor, None]:
        assert not output_final_state
        return self.definition(q, **given).o.to(q.dtype), None


KDA = Kind("fla.layers.kda:KimiDeltaAttention", "chunk_kda", kda_reference)
GDN = Kind(
    "fla.layers.gated_deltanet:GatedDeltaNet", "chunk_gated_delta_rule", gated_delta_rule_reference
)
LAYERS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "KDA, softplus": (KDA, {"num_heads": 2, "head_dim": 128}),
    "KDA, grouped value heads, bounded": (
        KDA,
        {
            "num_heads": 1,
            "num_v_heads": 2,
            "head_dim": 64,
            "lower_bound": -5.0,
            "safe_gate": True,
            "allow_neg_eigval": True,
        },
    ),
    "Gated Delta Net, grouped value heads": (
        GDN,
        {"num_heads": 1, "num_v_heads": 2, "head_dim": 128, "expand_v": 1},
    ),
    "Gated Delta Net, wide values": (
        GDN,
        {"num_heads": 2, "head_dim": 64, "expand_v": 2, "allow_neg_eigval": True},
    ),
}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(
    fla: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch, name: str, packed: bool
) -> None:
    """Output and gradients, in autocast, are as near to those through the float64 reference with
    our kernels as with flash-linear-attention's, which one environment variable switches to."""
    kind, given = LAYERS[name]
    path, _, of_layer = kind.path.partition(":")
    module = pytest.importorskip(path, reason="needs transformers", exc_type=ImportError)
    torch.manual_seed(0)
    layer = getattr(module, of_layer)(hidden_size=128, **given).to(DEVICE)
    options = {"cu_seqlens": torch.tensor([0, 70, 71, 200], device=DEVICE)} if packed else {}
    x, dy = torch.randn(2, 1, 200, 128, device=DEVICE)

    def output(leaf: Tensor) -> Tensor:
        with torch.autocast(DEVICE, DTYPE):
            y, *_ = layer(leaf, **options)
        return y

    def step() -> dict[str, Tensor]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = output(leaf)
        y.backward(dy.to(y.dtype))
        return {
            "y": y.detach(),
            "x": leaf.grad,
            **{name: parameter.grad for name, parameter in layer.named_parameters()},
        }

    ours = step()
    assert reached == {kind.function: 1}
    monkeypatch.setenv("FLA_CUTE_ATTN", "0")
    try:
        theirs = step()
    except RuntimeError as error:  # with some releases of Triton, the gradients would be wrong
        if "produces incorrect results" not in str(error):
            raise
        theirs = {"y": output(x).detach()}
    assert reached == {kind.function: 1}
    monkeypatch.setattr(module, kind.function, kind.exact)
    exact = {name: gradient.double() for name, gradient in step().items()}
    assert exact["A_log"].isfinite().all() and exact["dt_bias"].any()
    for of, true in exact.items():
        for found in (ours, theirs):
            assert of not in found or (found[of] - true).norm() < 0.05 * true.norm(), of
        if of in theirs and of != "A_log":  # of a few numbers an error says little
            assert_no_worse(ours[of], theirs[of], true)


# -- a model

STEPS, BATCH, TOKENS = 200, 16, 256
WIDTH = 256
SYMBOLS = 16  # of keys, and of values
# Faster learning makes roundings grow until runs on the same kernels are 3e-2 apart.
LEARNING_RATE, WARMUP = 3e-4, 50


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
    """Pairs of a key and its value, in bytes, one batch a step: `[STEPS, BATCH, TOKENS]`.

    Each text has a table of its own, so that a value can only be recalled by its key.
    """
    generator = torch.Generator().manual_seed(0)
    tables = torch.randint(SYMBOLS, (STEPS, BATCH, SYMBOLS), generator=generator)
    keys = torch.randint(SYMBOLS, (STEPS, BATCH, TOKENS // 2), generator=generator)
    values = tables.gather(2, keys)
    return torch.stack((keys + ord("a"), values + ord("A")), -1).flatten(-2)


def train(batches: Tensor) -> Tensor:
    """The losses of all steps."""
    model = kimi_linear()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimiser, 1 / WARMUP, total_iters=WARMUP)
    losses = []
    for batch in batches.to(DEVICE):
        with torch.autocast(DEVICE, DTYPE):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        warmup.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def distance(one: Tensor, other: Tensor) -> float:
    """The distance of two curves, as the root mean square over all steps."""
    return float((one - other).square().mean().sqrt())


def without(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The call without the gradient of an argument."""
    return lambda **given: call(**given | {name: given[name].detach()})


# Orders of a batch's texts: the same gradients of weights, added in another order.
ORDERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda texts: texts,
    lambda texts: texts.flip(1),
    lambda texts: texts.roll(5, 1),
)


@pytest.mark.slow  # twelve runs of five seconds or more
def test_a_model_trains_to_the_same_losses(
    layers: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs from the same weights on the same texts drift apart by their roundings alone.

    Six runs on flash-linear-attention's kernels differ in nothing else: in the order of sums, and
    with chunks of 32 instead of 64 tokens in the states and corrections that are rounded to 16
    bits. Their spread is the largest distance of two of them. Three of our runs may be no farther
    from them, on average. Runs without the gradient of k, g or beta are: the test notices such
    bugs.
    """
    dispatched = layers.chunk_kda
    batches = texts()

    def run(order: Callable[[Tensor], Tensor], call: Callable[..., Any]) -> Tensor:
        monkeypatch.setattr(layers, "chunk_kda", call)
        return train(order(batches))

    ours = [run(order, dispatched) for order in ORDERS]
    wrong = {name: run(ORDERS[0], without(dispatched, name)) for name in ("k", "g", "beta")}
    assert reached == {"chunk_kda": 2 * STEPS * (len(ours) + len(wrong))}
    # Keys cannot be known, nor values of keys that are new: 16 of 128 pairs.
    least = math.log(SYMBOLS) / 2 * (1 + 2 * SYMBOLS / TOKENS)
    assert all(abs(losses[-10:].mean() - least) < 0.03 for losses in ours), "it learns too little"

    monkeypatch.setenv("FLA_CUTE_ATTN", "0")
    theirs = [
        run(order, functools.partial(dispatched, chunk_size=chunk_size))
        for chunk_size, order in itertools.product((64, 32), ORDERS)
    ]
    assert reached == {"chunk_kda": 2 * STEPS * (len(ours) + len(wrong))}

    def distances(one: list[Tensor], other: list[Tensor]) -> list[float]:
        return [distance(*pair) for pair in itertools.product(one, other)]

    found = {
        "theirs": [distance(*pair) for pair in itertools.combinations(theirs, 2)],
        "ours": [distance(*pair) for pair in itertools.combinations(ours, 2)],
        "ours to theirs": distances(ours, theirs),
        **{f"no d{name}": distances([losses], theirs) for name, losses in wrong.items()},
    }
    for name, of in found.items():
        print(f"distances, {name}: {' '.join(f'{x:.1e}' for x in of)}")
    print(f"losses: {ours[0][0]:.3f}, at the end {ours[0][-1]:.4f}; theirs {theirs[0][-1]:.4f}")
    spread = max(found["theirs"])
    assert sum(found["ours to theirs"]) / len(found["ours to theirs"]) <= spread
    assert all(min(found[f"no d{name}"]) > 10 * spread for name in wrong)
