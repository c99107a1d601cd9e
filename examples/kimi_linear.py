"""Kimi Linear, small: training steps, a prefill, and decode with states and a latent cache.

    python examples/kimi_linear.py

What it shows:

- three layers of Kimi Delta Attention (arXiv 2510.26692) for each layer of multi-head latent
  attention, both in plain PyTorch around the operators; no layer has positions;
- training: `chunk_kda` has grouped value heads, and its kernels apply the gate, the norms and the
  sigmoid. `flash_attn_func` runs in the expanded form: q and k have 192 columns, and v has 128.
  Parameters are in float32, and autocast computes in bfloat16. `A_log`, `dt_bias` and their
  gradients stay in float32. Activation checkpointing runs each layer's forward again in the
  backward;
- generation: from the prompt, each layer of Kimi Delta Attention keeps a state and the last inputs
  of the convolution. The other layers keep one latent vector for each token, in a cache of pages. A
  decode step of a layer is one call. `kda_decode` also applies the convolution, and updates the
  state and the inputs in place. `mla_decode` runs in the absorbed form;
- with flash-linear-attention and a Hopper GPU: that package's model on these kernels, and with
  FLA_CUTE_ATTN=0 on that package's own kernels.

The example compares the first step's gradients, and the generated tokens' logits, with float64
references. It compares the errors with the errors of plain PyTorch. Without a Hopper GPU the
kernels run in the emulator, with every check on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from functools import partial
from typing import Any

import language_model
import torch
from language_model import WIDTH, Rules, Ways, exact_delta, exact_softmax, plain_delta
from rich.console import Console
from torch import Tensor
from torch.nn import functional

import cute_attn
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.integrations import fla as integration
from cute_attn.reference.attention import attention_in_low_precision
from cute_attn.reference.kda import kda_chunk_reference, kda_reference

HEADS, HEADS_V, HEAD_DIM = 1, 2, 64  # of Kimi Delta Attention; Kimi Linear has 32, 32 and 128
CONVOLUTION = 4  # tokens that a short convolution sees
HEADS_LATENT = 2  # of latent attention; Kimi Linear has 32
NOPE, SHARED, VALUE = 128, 64, 128  # columns of a head's own k, of k of all heads, of a head's v
LATENT = 256  # columns of a cached vector; Kimi Linear has 512
LAYERS = ("linear", "linear", "linear", "latent")
BATCH, TOKENS = 1, 90
STEPS = 4
PROMPT, GENERATED = 20, 4
PAGE, PAGES = 64, 4
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}


class Past:
    """What a layer keeps between calls: a state and inputs of the convolution, or a latent cache.

    The latent cache has one sequence. The sequence's pages are not in order, as in a server.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.state: Tensor | None = None
        self.inputs: Tensor | None = None
        self.cache: Tensor | None = None

    def append(self, rows: Tensor) -> None:
        """Write the vectors of new tokens, `[tokens, columns]`, to the cache."""
        if self.cache is None:
            self.table = torch.randperm(PAGES, device=rows.device, dtype=torch.int32)[None]
            self.cache = rows.new_full((PAGES, PAGE, rows.shape[1]), torch.nan)
        at = torch.arange(self.tokens, self.tokens + len(rows), device=rows.device)
        self.cache[self.table[0, at // PAGE].long(), at % PAGE] = rows
        self.tokens += len(rows)


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
        # With this bias and a gate input of 0, a token's decays are about exp(-A / 100).
        self.dt_bias = torch.nn.Parameter(torch.full((HEADS_V, HEAD_DIM), 0.01).expm1().log())
        self.out_gate = torch.nn.Linear(WIDTH, HEADS_V * HEAD_DIM, bias=False)
        self.norm = torch.nn.RMSNorm(HEAD_DIM)
        self.out = torch.nn.Linear(HEADS_V * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, rules: Rules, past: Past | None) -> Tensor:
        mixed = self.qkv(x)
        g, beta = self.gate(x).unflatten(-1, (-1, HEAD_DIM)), self.beta(x)
        parameters = {"A_log": self.A_log, "dt_bias": self.dt_bias, **IN_KERNEL}
        if past is not None and past.state is not None:
            o = cute_attn.kda_decode(
                *self.heads(mixed), g, beta, past.state, conv_state=past.inputs,
                conv_weight=self.convolution.weight.squeeze(1), **parameters,
            )  # fmt: skip
        else:
            convolved = self.convolution(mixed.mT)[..., : x.shape[1]].mT
            o, state = rules.delta(
                *self.heads(functional.silu(convolved)), g, beta, **parameters,
                output_final_state=past is not None,
            )  # fmt: skip
            if past is not None:
                past.state, past.inputs = state, mixed.mT[..., 1 - CONVOLUTION :].contiguous()
        gate = torch.sigmoid(self.out_gate(x)).unflatten(-1, o.shape[-2:])
        return self.out((self.norm(o) * gate).flatten(-2))

    def heads(self, mixed: Tensor) -> list[Tensor]:
        parts = mixed.split(self.widths, dim=-1)
        return [part.unflatten(-1, (-1, HEAD_DIM)) for part in parts]


class LatentAttention(torch.nn.Module):
    """Multi-head latent attention without positions: the other layers know the order."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(WIDTH, HEADS_LATENT * (NOPE + SHARED), bias=False)
        self.down = torch.nn.Linear(WIDTH, LATENT + SHARED, bias=False)
        self.norm = torch.nn.RMSNorm(LATENT)
        self.up = torch.nn.Linear(LATENT, HEADS_LATENT * (NOPE + VALUE), bias=False)
        self.out = torch.nn.Linear(HEADS_LATENT * VALUE, WIDTH, bias=False)

    def forward(self, x: Tensor, rules: Rules, past: Past | None) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS_LATENT, -1))
        latent, shared = self.down(x).split([LATENT, SHARED], dim=-1)
        latent = self.norm(latent).to(q.dtype)
        if past is not None:
            past.append(torch.cat([latent, shared], dim=-1)[0])
        if past is not None and past.tokens > x.shape[1]:
            o = self.absorbed(q, past)
        else:
            k, v = self.up(latent).unflatten(-1, (HEADS_LATENT, -1)).split([NOPE, VALUE], dim=-1)
            shared = shared[:, :, None].expand(-1, -1, HEADS_LATENT, -1)
            o, _ = rules.softmax(q, torch.cat([k, shared], dim=-1), v, causal=True)
        return self.out(o.flatten(-2))

    def absorbed(self, q: Tensor, past: Past) -> Tensor:
        """Attention of new tokens over the cached latent vectors, without expanded k and v."""
        of_head = self.up.weight.unflatten(0, (HEADS_LATENT, -1))
        to_key, to_value = of_head.split([NOPE, VALUE], dim=1)
        q_nope, q_shared = q.split([NOPE, SHARED], dim=-1)
        o, _ = cute_attn.mla_decode(
            torch.einsum("bthd,hdl->bthl", q_nope, to_key), q_shared, past.cache,
            block_table=past.table, cache_seqlens=past.table.new_tensor([past.tokens]),
            softmax_scale=(NOPE + SHARED) ** -0.5, head_dim_v=LATENT,
        )  # fmt: skip
        return torch.einsum("bthl,hvl->bthv", o, to_value)


def ways() -> Ways:
    return Ways(
        Rules(partial(exact_delta, kda_reference), exact_softmax),
        Rules(cute_attn.chunk_kda, cute_attn.flash_attn_func),
        Rules(partial(plain_delta, kda_chunk_reference), attention_in_low_precision),
    )


def train(device: str) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """The losses of all steps, and the errors of the first step's gradients and of the generated
    tokens' logits. Each error is a pair: the kernels' error, and plain PyTorch's error."""
    torch.manual_seed(0)
    kinds = {"linear": KimiDeltaAttention, "latent": LatentAttention}
    model = language_model.Model(kinds[kind]() for kind in LAYERS).to(device)
    tokens = language_model.repeated_tokens(BATCH, TOKENS, device)
    # The operators' inputs depend on these parameters.
    names = ("qkv", "gate", "beta", "A_log", "dt_bias", "q", "down", "up")
    found = [language_model.gradients(model, tokens, rules, names) for rules in ways()]
    losses = language_model.fit(model, lambda: model.loss(tokens, ways().ours), STEPS, device)
    return losses, {
        "gradients": language_model.errors(*found),
        "generated tokens' logits": generated(model, tokens[:, :PROMPT]),
    }


def generated(model: language_model.Model, prompt: Tensor) -> tuple[float, float]:
    """The errors of the logits of generated tokens: the kernels' error, and plain PyTorch's."""
    return language_model.errors(*language_model.generate(model, prompt, GENERATED, ways(), Past))


def train_with_fla() -> dict[str, list[float]]:
    """The losses of flash-linear-attention's model, on our kernels and on FLA's kernels."""
    from fla.models.kda import KDAConfig, KDAForCausalLM

    integration.register()
    config = KDAConfig(
        hidden_size=language_model.WIDTH, head_dim=HEAD_DIM, num_heads=HEADS, num_v_heads=HEADS_V,
        num_hidden_layers=len(LAYERS), vocab_size=language_model.VOCABULARY, hidden_ratio=4,
    )  # fmt: skip
    losses: dict[str, list[float]] = {}
    for name, switch in (("cute_attn", "1"), ("flash-linear-attention", "0")):
        os.environ["FLA_CUTE_ATTN"] = switch
        torch.manual_seed(0)
        model = KDAForCausalLM(config).cuda().train()
        tokens = language_model.repeated_tokens(BATCH, TOKENS, "cuda")
        losses[name] = language_model.fit(model, partial(loss_of_fla, model, tokens), STEPS, "cuda")
    return losses


def loss_of_fla(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def main() -> bool:
    """Train and generate, and return whether the loss fell and all is close to the references."""
    console = Console()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    where = torch.cuda.get_device_name() if on_gpu else "sm_90a, emulated"
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}, on {where}")
    with contextlib.nullcontext() if on_gpu else cute_attn.emulated("sm_90a"):
        losses, found = train("cuda" if on_gpu else "cpu")
    columns = {"loss": losses}
    if on_gpu and importlib.util.find_spec("fla"):
        theirs = train_with_fla()
        columns |= {f"flash-linear-attention's model on {name}": x for name, x in theirs.items()}
    return language_model.report(console, columns, found)


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
