"""Prefill and decode of the attention layers of Gemma 3 and Qwen3-Next, whose head_dim is 256.

    python examples/gemma_qwen_attention.py

What it shows:

- q, k and v as views of one fused projection, read in place;
- a KV cache that is only partly filled: `seqused_k` holds the filled lengths on the device, so that
  a decode step could be captured in a CUDA graph;
- a prefill of prompts of different lengths, each at the start of its row of the cache;
- grouped query heads: in decode those of a K/V head share a tile, so that K and V are read once;
- Gemma 3's sliding windows of w tokens, the query included: window_size=(w - 1, 0).

Every output of the operator is compared with the float64 reference on the same q, k and v, and its
error with that of plain PyTorch. Without a Hopper or Blackwell GPU the kernels run in the emulator,
with every check on.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cute_attn
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.reference.attention import attention_in_low_precision, attention_reference

WIDTH, HEAD_DIM = 256, 256  # of the hidden states: small
PROMPTS = (150, 67)  # tokens
STEPS = 3  # of decode
CACHE = 200  # rows for each sequence


@dataclass(frozen=True)
class Kind:
    """The parameters in which the layers differ."""

    heads: int
    heads_k: int
    rotary: int  # dimensions of a head that are rotated
    window: int | None = None  # tokens that a query sees, including itself
    gated: bool = False  # the output is multiplied by a sigmoid of a projection


KINDS = {
    "Gemma 3, sliding": Kind(heads=4, heads_k=2, rotary=256, window=64),
    "Gemma 3, full": Kind(heads=4, heads_k=2, rotary=256),
    "Qwen3-Next": Kind(heads=8, heads_k=1, rotary=64, gated=True),
}


@dataclass
class Errors:
    """Relative errors of attention's outputs, by phase: the kernel's, and plain PyTorch's."""

    kernel: dict[str, float] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)

    def note(self, phase: str, o: Tensor, counted: Tensor, call: dict[str, object]) -> None:
        """Compare the rows of o that `counted` selects, which are tokens and not padding."""
        exact = attention_reference(**call)[0][counted]
        for errors, result in (
            (self.kernel, o),
            (self.plain, attention_in_low_precision(**call)[0]),
        ):
            error = float((result[counted].double() - exact).norm() / exact.norm())
            errors[phase] = max(errors.get(phase, 0.0), error)

    @property
    def agree(self) -> bool:
        return all(self.kernel[phase] <= 2 * self.plain[phase] for phase in self.kernel)


class AttentionLayer(torch.nn.Module):
    """Projections, norms of q and k, rotation, a KV cache, and the operator."""

    def __init__(self, kind: Kind, sequences: int):
        super().__init__()
        self.kind = kind
        heads = 2 * kind.heads_k + kind.heads * (2 if kind.gated else 1)
        self.qkv = torch.nn.Linear(WIDTH, heads * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(kind.heads * HEAD_DIM, WIDTH, bias=False)
        self.norm_q = torch.nn.RMSNorm(HEAD_DIM)
        self.norm_k = torch.nn.RMSNorm(HEAD_DIM)
        # NaN in rows that were never written would show if they were read.
        cache = torch.full((2, sequences, CACHE, kind.heads_k, HEAD_DIM), torch.nan)
        self.register_buffer("cache", cache)

    def forward(self, x: Tensor, positions: Tensor, counted: Tensor, errors: Errors) -> Tensor:
        """The layer's output for x `[batch, tokens, width]`.

        `counted` selects the tokens of x, which are at the end of each row, at `positions` of their
        sequence; the rest is padding. The cache holds the tokens before them.
        """
        kind = self.kind
        sizes = [kind.heads, kind.heads_k, kind.heads_k] + [kind.heads] * kind.gated
        q, k, v, *gate = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split(sizes, dim=-2)
        q = rotate(self.norm_q(q), positions, kind.rotary)
        k = rotate(self.norm_k(k), positions, kind.rotary)
        sequence = torch.arange(len(x), device=x.device)[:, None].expand_as(positions)
        for cache, new in zip(self.cache, (k, v), strict=True):
            cache[sequence[counted], positions[counted]] = new[counted]

        call = {
            "q": q,
            "k": self.cache[0],
            "v": self.cache[1],
            "seqused_k": (positions[:, -1] + 1).to(torch.int32),
            "causal": True,  # the last query of a row is at the position of its last key
            "window_size": (None if kind.window is None else kind.window - 1, None),
        }
        o, _ = cute_attn.flash_attn_varlen_func(**call)
        errors.note("decode" if x.shape[1] == 1 else "prefill", o, counted, call)
        if kind.gated:
            o = o * torch.sigmoid(gate[0])
        return self.out(o.flatten(-2))


def rotate(x: Tensor, positions: Tensor, dims: int) -> Tensor:
    """Rotary embedding of the first dims dimensions of `[batch, tokens, heads, head_dim]`."""
    frequencies = 10_000.0 ** (-torch.arange(0, dims, 2, device=x.device) / dims)
    angles = (positions[..., None] * frequencies)[:, :, None]
    a, b = x[..., :dims].float().chunk(2, dim=-1)
    rotated = torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
    )
    return torch.cat([rotated.to(x.dtype), x[..., dims:]], dim=-1)


def prefill_and_decode(kind: Kind, device: str) -> Errors:
    """One layer, on random hidden states."""
    torch.manual_seed(0)
    layer = AttentionLayer(kind, len(PROMPTS)).to(device, torch.bfloat16)
    errors = Errors()
    lengths = torch.tensor(PROMPTS, device=device)[:, None]
    x = torch.randn(len(PROMPTS), max(PROMPTS), WIDTH, device=device, dtype=torch.bfloat16)
    # Prompts are padded on the left, so that they end together; padding's queries see no key.
    positions = torch.arange(max(PROMPTS), device=device) - (max(PROMPTS) - lengths)
    layer(x, positions.clamp(min=0), positions >= 0, errors)
    for step in range(STEPS):
        y = torch.randn(len(PROMPTS), 1, WIDTH, device=device, dtype=torch.bfloat16)
        layer(y, lengths + step, torch.ones_like(lengths, dtype=torch.bool), errors)
    return errors


@torch.inference_mode()
def main() -> bool:
    """Run all kinds, and return whether every output is close enough to the reference."""
    console = Console()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    where = torch.cuda.get_device_name() if on_gpu else "sm_100a, emulated"
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}, on {where}")
    table = Table("layer", "phase", "error", "plain PyTorch", "")
    agree = True
    for name, kind in KINDS.items():
        with contextlib.nullcontext() if on_gpu else cute_attn.emulated("sm_100a"):
            errors = prefill_and_decode(kind, "cuda" if on_gpu else "cpu")
        agree &= errors.agree
        for phase in errors.kernel:
            table.add_row(
                name,
                phase,
                f"{errors.kernel[phase]:.1e}",
                f"{errors.plain[phase]:.1e}",
                "agrees" if errors.kernel[phase] <= 2 * errors.plain[phase] else "WRONG",
            )
    console.print(table)
    if not on_gpu:
        console.print(
            "No Hopper or Blackwell GPU here: the compiled kernels ran in the emulator, which "
            "found no race, no missing fence, no access out of bounds and no uninitialised read."
        )
    return agree


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no Hopper or Blackwell GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
