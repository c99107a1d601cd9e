"""Training steps of a small model whose layers are those of Kimi Linear.

    python examples/train_kimi_linear.py

What it shows:

- parameters in float32 and autocast to bfloat16, in which Kimi Delta Attention runs; `A_log` and
  `dt_bias` stay in float32, and so do their gradients;
- a layer of the paper (arXiv 2510.26692) in plain PyTorch around `chunk_kda`, with grouped value
  heads: the kernels apply the gate, the norms and the sigmoid, forwards and backwards;
- every other layer is full attention without positions (in Kimi Linear every fourth);
- activation checkpointing: each layer's forward runs again in the backward;
- with flash-linear-attention installed and a GPU: its own model on these kernels, and on its own
  once FLA_CUTE_ATTN=0 is set.

The gradients of the first step are compared with those through the float64 reference, and their
error with that of plain PyTorch. Without a GPU the kernels run in the emulator, with every check
on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import language_model
import torch
from language_model import WIDTH
from rich.console import Console
from torch import Tensor
from torch.nn import functional

import cute_attn
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.integrations import fla as integration
from cute_attn.reference.kda import kda_chunk_reference, kda_reference

HEADS, HEADS_V, HEAD_DIM = 1, 2, 64
CONVOLUTION = 4  # tokens that a short convolution sees
LAYERS = 2
BATCH, TOKENS = 1, 90
STEPS = 4
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}

Attention = Callable[..., tuple[Tensor, Any]]


class KimiDeltaAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widths = [HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEADS_V * HEAD_DIM]
        channels = sum(self.widths)
        self.qkv = torch.nn.Linear(WIDTH, channels, bias=False)
        self.convolution = torch.nn.Conv1d(
            channels, channels, CONVOLUTION, groups=channels, padding=CONVOLUTION - 1, bias=False
        )
        self.gate = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, HEAD_DIM, bias=False),
            torch.nn.Linear(HEAD_DIM, HEADS_V * HEAD_DIM, bias=False),
        )
        self.beta = torch.nn.Linear(WIDTH, HEADS_V, bias=False)
        self.A_log = torch.nn.Parameter(torch.empty(HEADS_V).uniform_(1, 16).log())
        # The decays of a token that follow from it, without a gate, are about exp(-A / 100).
        self.dt_bias = torch.nn.Parameter(torch.full((HEADS_V, HEAD_DIM), 0.01).expm1().log())
        self.out_gate = torch.nn.Linear(WIDTH, HEADS_V * HEAD_DIM, bias=False)
        self.norm = torch.nn.RMSNorm(HEAD_DIM)
        self.out = torch.nn.Linear(HEADS_V * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, attention: Attention, _: None) -> Tensor:
        convolved = self.convolution(self.qkv(x).mT)[..., : x.shape[1]].mT
        qkv = functional.silu(convolved).split(self.widths, dim=-1)
        q, k, v, g = (y.unflatten(-1, (-1, HEAD_DIM)) for y in (*qkv, self.gate(x)))
        parameters = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        o, _ = attention(q, k, v, g, self.beta(x), **parameters, **IN_KERNEL)
        gate = torch.sigmoid(self.out_gate(x)).unflatten(-1, o.shape[-2:])
        return self.out((self.norm(o) * gate).flatten(-2))


class FullAttention(torch.nn.Module):
    """Softmax attention without positions: the other layers know the order."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        heads = self.heads(x).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(-2))


def exact_attention(q: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, None]:
    """The float64 reference, token by token; the gradient is autograd's."""
    return kda_reference(q, *inputs, **options).o.to(q.dtype), None


def plain_attention(q: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Plain PyTorch in chunks, with 16-bit operands."""
    stages = kda_chunk_reference(q, *inputs, **options, dtype=torch.float32, stage_dtype=q.dtype)
    return stages.o.to(q.dtype), None


def train(device: str) -> tuple[list[float], float, float]:
    """The losses of all steps, and the errors of the first step's gradients: ours, and those of
    plain PyTorch."""
    torch.manual_seed(0)
    attentions = (FullAttention() if i % 2 else KimiDeltaAttention() for i in range(LAYERS))
    model = language_model.Model(attentions).to(device)
    tokens = language_model.repeated_tokens(BATCH, TOKENS, device)
    # From these parameters q, k, v, the gates and beta are computed.
    names = ("qkv", "gate", "beta", "A_log", "dt_bias")
    exact, ours, plain = (
        language_model.gradients(model, tokens, attention, names)
        for attention in (exact_attention, cute_attn.chunk_kda, plain_attention)
    )
    losses = language_model.fit(
        model, lambda: model.loss(tokens, cute_attn.chunk_kda), STEPS, device
    )
    relative_error = language_model.relative_error
    return losses, relative_error(ours, exact), relative_error(plain, exact)


def train_with_fla() -> dict[str, list[float]]:
    """The losses of flash-linear-attention's model, on our kernels and on its own."""
    from fla.models.kda import KDAConfig, KDAForCausalLM

    integration.register()
    config = KDAConfig(
        hidden_size=language_model.WIDTH, head_dim=HEAD_DIM, num_heads=HEADS, num_v_heads=HEADS_V,
        num_hidden_layers=LAYERS, vocab_size=language_model.VOCABULARY, hidden_ratio=4,
    )  # fmt: skip
    losses: dict[str, list[float]] = {}
    for name, switch in (("cute_attn", "1"), ("flash-linear-attention", "0")):
        os.environ["FLA_CUTE_ATTN"] = switch
        torch.manual_seed(0)
        model = KDAForCausalLM(config).cuda().train()
        tokens = language_model.repeated_tokens(BATCH, TOKENS, "cuda")
        losses[name] = language_model.fit(
            model, functools.partial(loss_of_fla, model, tokens), STEPS, "cuda"
        )
    return losses


def loss_of_fla(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def main() -> bool:
    """Train, and return whether the loss fell and the gradients are close to the reference."""
    console = Console()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    where = torch.cuda.get_device_name() if on_gpu else "sm_90a, emulated"
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}, on {where}")
    with contextlib.nullcontext() if on_gpu else cute_attn.emulated("sm_90a"):
        losses, ours, plain = train("cuda" if on_gpu else "cpu")
    columns = {"loss": losses}
    if on_gpu and importlib.util.find_spec("fla"):
        theirs = train_with_fla()
        columns |= {f"flash-linear-attention's model on {name}": x for name, x in theirs.items()}
    return language_model.report(console, columns, {"gradients": (ours, plain)})


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
