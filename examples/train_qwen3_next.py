"""Training steps of a small model whose layers are those of Qwen3-Next, and generation with it.

    python examples/train_qwen3_next.py

What it shows:

- three layers of Gated Delta Net for each layer of softmax attention with head_dim 256, both in
  plain PyTorch around `chunk_gated_delta_rule` and `flash_attn_func`;
- parameters in float32 and autocast to bfloat16; `A_log` and `dt_bias` stay in float32, and so do
  their gradients;
- activation checkpointing: each layer's forward runs again in the backward;
- generation: the prompt leaves a state, and the last inputs of the convolution, in each layer of
  Gated Delta Net. A step of such a layer is one call of `gated_delta_rule_decode`, which updates
  both in place.

The gradients of the first step are compared with those through the float64 references, and so are
the logits of the generated tokens. Their errors are compared with those of plain PyTorch. Without a
GPU the kernels run in the emulator, with every check on.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

import language_model
import torch
from language_model import WIDTH, Rules, Ways, exact_delta, exact_softmax, plain_delta
from rich.console import Console
from torch import Tensor
from torch.nn import functional

import cute_attn
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.reference.attention import attention_in_low_precision
from cute_attn.reference.gated_delta_rule import (
    gated_delta_rule_chunk_reference,
    gated_delta_rule_reference,
)

HEADS, HEADS_V, HEAD_DIM = 1, 2, 64  # of Gated Delta Net; Qwen3-Next has 16, 32 and 128
HEADS_Q, HEADS_KV, HEAD_DIM_SOFTMAX = 2, 1, 256
CONVOLUTION = 4  # tokens that a short convolution sees
LAYERS = ("linear", "linear", "linear", "softmax")
BATCH, TOKENS = 1, 90
STEPS = 4
PROMPT, GENERATED = 20, 4
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}


@dataclass
class Past:
    """What a layer keeps: a state and inputs of the convolution, or keys and values."""

    first: Tensor | None = None
    second: Tensor | None = None


class GatedDeltaNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widths = [HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEADS_V * HEAD_DIM]
        channels = sum(self.widths)
        self.qkv = torch.nn.Linear(WIDTH, channels, bias=False)
        self.convolution = torch.nn.Conv1d(
            channels, channels, CONVOLUTION, groups=channels, padding=CONVOLUTION - 1, bias=False
        )
        self.gates = torch.nn.Linear(WIDTH, 2 * HEADS_V, bias=False)
        self.A_log = torch.nn.Parameter(torch.empty(HEADS_V).uniform_(1, 16).log())
        self.dt_bias = torch.nn.Parameter(torch.full((HEADS_V,), 0.01).expm1().log())
        self.out_gate = torch.nn.Linear(WIDTH, HEADS_V * HEAD_DIM, bias=False)
        self.norm = torch.nn.RMSNorm(HEAD_DIM)
        self.out = torch.nn.Linear(HEADS_V * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, rules: Rules, past: Past | None) -> Tensor:
        mixed = self.qkv(x)
        g, beta = self.gates(x).chunk(2, dim=-1)
        parameters = {"A_log": self.A_log, "dt_bias": self.dt_bias, **IN_KERNEL}
        if past is not None and past.first is not None:
            o = cute_attn.gated_delta_rule_decode(
                *self.heads(mixed), g, beta, past.first, conv_state=past.second,
                conv_weight=self.convolution.weight.squeeze(1), **parameters,
            )  # fmt: skip
        else:
            convolved = self.convolution(mixed.mT)[..., : x.shape[1]].mT
            o, state = rules.delta(
                *self.heads(functional.silu(convolved)), g, beta, **parameters,
                output_final_state=past is not None,
            )  # fmt: skip
            if past is not None:
                past.first = state
                past.second = mixed.mT[..., 1 - CONVOLUTION :].contiguous()
        gate = functional.silu(self.out_gate(x)).unflatten(-1, o.shape[-2:])
        return self.out((self.norm(o) * gate).flatten(-2))

    def heads(self, mixed: Tensor) -> list[Tensor]:
        parts = mixed.split(self.widths, dim=-1)
        return [part.unflatten(-1, (-1, HEAD_DIM)) for part in parts]


class GatedAttention(torch.nn.Module):
    """Softmax attention with a gate, here without positions: the other layers know the order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [HEADS_Q * HEAD_DIM_SOFTMAX] * 2 + [HEADS_KV * HEAD_DIM_SOFTMAX] * 2
        self.qkv = torch.nn.Linear(WIDTH, sum(self.sizes), bias=False)
        self.out = torch.nn.Linear(self.sizes[0], WIDTH, bias=False)

    def forward(self, x: Tensor, rules: Rules, past: Past | None) -> Tensor:
        gate, *parts = self.qkv(x).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM_SOFTMAX)) for part in parts)
        if past is not None:
            if past.first is not None and past.second is not None:
                k, v = torch.cat([past.first, k], dim=1), torch.cat([past.second, v], dim=1)
            past.first, past.second = k, v
        o, _ = rules.softmax(q, k, v, causal=True)
        return self.out(o.flatten(-2) * torch.sigmoid(gate))


def ways() -> Ways:
    return Ways(
        Rules(partial(exact_delta, gated_delta_rule_reference), exact_softmax),
        Rules(cute_attn.chunk_gated_delta_rule, cute_attn.flash_attn_func),
        Rules(partial(plain_delta, gated_delta_rule_chunk_reference), attention_in_low_precision),
    )


def train(device: str) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """The losses of all steps, and the errors of the first step's gradients and of the generated
    tokens' logits: ours, and those of plain PyTorch."""
    torch.manual_seed(0)
    kinds = {"linear": GatedDeltaNet, "softmax": GatedAttention}
    model = language_model.Model(kinds[kind]() for kind in LAYERS).to(device)
    tokens = language_model.repeated_tokens(BATCH, TOKENS, device)
    names = ("qkv", "gates", "A_log", "dt_bias")
    found = [language_model.gradients(model, tokens, rules, names) for rules in ways()]
    losses = language_model.fit(model, lambda: model.loss(tokens, ways().ours), STEPS, device)
    return losses, {
        "gradients": language_model.errors(*found),
        "generated tokens' logits": generated(model, tokens[:, :PROMPT]),
    }


def generated(model: language_model.Model, prompt: Tensor) -> tuple[float, float]:
    """The errors of the next tokens' logits."""
    found = language_model.generate(model, prompt, GENERATED, ways(), Past)
    return language_model.errors(*found)


def main() -> bool:
    """Train and generate, and return whether the loss fell and all is close to the references."""
    console = Console()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    where = torch.cuda.get_device_name() if on_gpu else "sm_90a, emulated"
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}, on {where}")
    with contextlib.nullcontext() if on_gpu else cute_attn.emulated("sm_90a"):
        losses, found = train("cuda" if on_gpu else "cpu")
    return language_model.report(console, {"loss": losses}, found)


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
