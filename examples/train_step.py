"""Training steps of a small model whose attention has head_dim 256, as in Gemma 3.

    python examples/train_step.py

What it shows:

- parameters in float32 and autocast to bfloat16, in which attention runs;
- a sliding layer and a full one, with grouped query heads; q, k and v are views of one projection;
- activation checkpointing: each layer's forward runs again in the backward;
- forward, backward and an AdamW step, after which the loss on the same tokens is smaller.

The gradients of the first step are compared with those through the float64 reference of attention,
and their error with that of plain PyTorch. Without a Hopper or Blackwell GPU the kernels run in the
emulator, with every check on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cute_attn
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.reference.attention import attention_in_low_precision, attention_reference

WIDTH, HEADS, HEADS_K, HEAD_DIM = 128, 4, 2, 256
VOCABULARY = 61
WINDOWS = (24, None)  # of each layer: tokens that a query sees, including itself; None is all
BATCH, TOKENS = 2, 150
STEPS = 4
LEARNING_RATE = 3e-3

Attention = Callable[..., tuple[Tensor, Any]]


class Layer(torch.nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual around it."""

    def __init__(self, window: int | None):
        super().__init__()
        self.window = window
        self.norm, self.norm_mlp = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split([HEADS, HEADS_K, HEADS_K], dim=-2)
        left = None if self.window is None else self.window - 1
        o, _ = attention(q, k, v, causal=True, window_size=(left, None))
        x = x + self.out(o.flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Model(torch.nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(TOKENS, WIDTH)
        self.layers = torch.nn.ModuleList(map(Layer, WINDOWS))
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor, attention: Attention) -> Tensor:
        """The mean cross entropy of each next token."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, attention, use_reentrant=False)
        logits = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def exact_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The float64 reference; the gradient is autograd's."""
    o, lse = attention_reference(q, k, v, **options)
    return o.to(q.dtype), lse


def gradients(model: Model, tokens: Tensor, attention: Attention) -> Tensor:
    """The gradients of the layers' projections to q, k and v, as one vector."""
    model.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16):
        model.loss(tokens, attention).backward()
    found = [layer.qkv.weight.grad.double().flatten() for layer in model.layers]
    return torch.cat(found)


def train(device: str) -> tuple[list[float], float, float]:
    """The losses of all steps, and the relative errors of the first step's gradients: ours, and
    those of plain PyTorch."""
    torch.manual_seed(0)
    model = Model().to(device)
    # The second half repeats the first, which a model can learn from.
    half = torch.randint(VOCABULARY, (BATCH, TOKENS // 2), device=device)
    tokens = torch.cat([half, half], dim=1)
    exact, ours, plain = (
        gradients(model, tokens, attention)
        for attention in (exact_attention, cute_attn.flash_attn_func, attention_in_low_precision)
    )
    errors = [float((x - exact).norm() / exact.norm()) for x in (ours, plain)]

    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model.loss(tokens, cute_attn.flash_attn_func)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, errors[0], errors[1]


def main() -> bool:
    """Train, and return whether the loss fell and the gradients are close to the reference."""
    console = Console()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    where = torch.cuda.get_device_name() if on_gpu else "sm_100a, emulated"
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}, on {where}")
    with contextlib.nullcontext() if on_gpu else cute_attn.emulated("sm_100a"):
        losses, ours, plain = train("cuda" if on_gpu else "cpu")
    table = Table("step", "loss")
    for step, loss in enumerate(losses):
        table.add_row(str(step), f"{loss:.3f}")
    console.print(table)
    agree, fell = ours <= 2 * plain, losses[-1] < losses[0]
    console.print(f"Error of the gradients: {ours:.1e}; plain PyTorch's: {plain:.1e}.")
    console.print("The loss fell." if fell else "The loss did NOT fall.")
    return agree and fell


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no Hopper or Blackwell GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
