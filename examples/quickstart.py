"""Run every operator once and check it against its float64 reference.

    python examples/quickstart.py

Without a GPU it compiles the kernels for Hopper and Blackwell instead, and says what it would run.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cute_attn
from cute_attn import cache
from cute_attn.ops.lightning import plan_decode
from cute_attn.reference.lightning import lightning_attn_decode_reference

# name -> (shape of q without H and K, extra parameters of the plan)
DECODES = {
    "one token": ((8,), {}),
    "four tokens at once": ((8, 4), {"multi_token": True}),
    "bfloat16 state": ((8,), {"state_dtype": "bfloat16"}),
    "layout kv": ((8,), {"state_layout": "kv"}),
}
HEADS, HEAD_DIM, SLOTS = 16, 128, 12

console = Console()


def run() -> bool:
    """Decode on the GPU; whether every result agrees with the reference."""
    table = Table("Lightning Attention decode", "output error", "state error", "plain PyTorch", "")
    passed = True
    for name, (step, options) in track(DECODES.items(), "Running", console=console):
        q, k, v = torch.randn(3, *step, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        state_dtype = getattr(torch, options.get("state_dtype", "float32"))
        state = torch.randn(SLOTS, HEADS, HEAD_DIM, HEAD_DIM, device="cuda").to(state_dtype)
        decay = torch.rand(HEADS, device="cuda")
        slots = torch.randperm(SLOTS, device="cuda")[: step[0]].to(torch.int32)
        slots[0] = -1  # a padded row
        layout = options.get("state_layout", "vk")

        call = {"state_indices": slots, "state_layout": layout}
        exact_o, exact_state = lightning_attn_decode_reference(q, k, v, state, decay, **call)
        plain_o, plain_state = lightning_attn_decode_reference(
            q, k, v, state, decay, **call, dtype=torch.float32
        )
        o = cute_attn.lightning_attn_decode(q, k, v, state, decay, **call)

        errors = [relative_error(o, exact_o), relative_error(state, exact_state)]
        plain = [
            relative_error(plain_o.to(q.dtype), exact_o),
            relative_error(plain_state, exact_state),
        ]
        agrees = all(e <= 2 * p for e, p in zip(errors, plain, strict=True))
        passed &= agrees
        table.add_row(
            name,
            *(f"{error:.1e}" for error in errors),
            " / ".join(f"{error:.1e}" for error in plain),
            "agrees" if agrees else "WRONG",
        )
    console.print(table)
    return passed


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


def compile_only() -> bool:
    """Compile what `run` would launch, for architectures that this machine lacks."""
    table = Table(
        "Lightning Attention decode", "arch", "registers", "spills", "shared memory", "seconds"
    )
    clean = True
    work = [(name, arch) for name in DECODES for arch in ("sm_90a", "sm_100a")]
    for name, arch in track(work, "Compiling", console=console):
        _, options = DECODES[name]
        ((kernel, spec),) = plan_decode(arch, indexed=True, **options)
        entry = cache.compile(kernel, spec, arch)
        (use,) = entry.kernels
        clean &= use.spills == 0
        table.add_row(
            name,
            arch,
            str(use.registers),
            str(use.spills),
            f"{use.static_shared + (use.dynamic_shared or 0)} bytes",
            f"{entry.meta['compile_seconds']:.2f}",
        )
    console.print(table)
    console.print(
        "No GPU here: the kernels above are compiled and cached. On a GPU this would run each of "
        f"them on 8 sequences of {HEADS} heads of {HEAD_DIM}, and compare outputs and states with "
        "the float64 reference."
    )
    return clean


if __name__ == "__main__":
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}")
    raise SystemExit(0 if (run() if torch.cuda.is_available() else compile_only()) else 1)
