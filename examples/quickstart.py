"""Run every operator once and check it against its float64 reference.

    python examples/quickstart.py

Without a GPU the same kernels run in the emulator, for Hopper and for Blackwell, with every check
on, on fewer heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cute_attn
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.reference.lightning import lightning_attn_decode_reference

# name -> (shape of q without H and K, dtype of the state, its layout)
DECODES = {
    "one token": ((8,), torch.float32, "vk"),
    "four tokens at once": ((8, 4), torch.float32, "vk"),
    "bfloat16 state": ((8,), torch.bfloat16, "vk"),
    "layout kv": ((8,), torch.float32, "kv"),
}
HEADS, HEAD_DIM, SLOTS = 16, 128, 12
EMULATED_HEADS = 3
EMULATED_ARCHS = ("sm_90a", "sm_100a")

console = Console()


def main() -> bool:
    """Run everything; whether every result agrees with the reference."""
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}")
    on_gpu = torch.cuda.is_available()
    targets = [torch.cuda.get_device_name()] if on_gpu else list(EMULATED_ARCHS)
    table = Table(
        "Lightning Attention decode", "on", "output error", "state error", "plain PyTorch", ""
    )
    passed = True
    with Progress(console=console) as progress:
        task = progress.add_task("Running", total=len(DECODES) * len(targets))
        for target in targets:
            device, heads = ("cuda", HEADS) if on_gpu else ("cpu", EMULATED_HEADS)
            for name in DECODES:
                progress.update(task, description=f"{name}, {target}")
                with machine(target, on_gpu):
                    errors, plain = decode(name, device, heads)
                agrees = all(e <= 2 * p for e, p in zip(errors, plain, strict=True))
                passed &= agrees
                table.add_row(
                    name,
                    target if on_gpu else f"{target} (emulated)",
                    *(f"{error:.1e}" for error in errors),
                    " / ".join(f"{error:.1e}" for error in plain),
                    "agrees" if agrees else "WRONG",
                )
                progress.advance(task)
    console.print(table)
    if not on_gpu:
        console.print(
            "No GPU here: the compiled kernels ran in the emulator, which found no race, no "
            "missing fence, no access out of bounds and no uninitialised read."
        )
    return passed


@contextlib.contextmanager
def machine(target: str, on_gpu: bool) -> Iterator[None]:
    """The GPU, or an emulator that raises an exception on anything it finds wrong."""
    if on_gpu:
        yield
    else:
        with cute_attn.emulated(target):
            yield


def decode(name: str, device: str, heads: int) -> tuple[list[float], list[float]]:
    """Errors of output and state: of the kernel, and of the formula in plain PyTorch float32."""
    step, state_dtype, layout = DECODES[name]
    q, k, v = torch.randn(3, *step, heads, HEAD_DIM, device=device).to(torch.bfloat16)
    state = torch.randn(SLOTS, heads, HEAD_DIM, HEAD_DIM, device=device).to(state_dtype)
    decay = torch.rand(heads, device=device)
    slots = torch.randperm(SLOTS, device=device)[: step[0]].to(torch.int32)
    slots[0] = -1  # a padded row

    call = {"state_indices": slots, "state_layout": layout}
    exact_o, exact_state = lightning_attn_decode_reference(q, k, v, state, decay, **call)
    plain_o, plain_state = lightning_attn_decode_reference(
        q, k, v, state, decay, **call, dtype=torch.float32
    )
    o = cute_attn.lightning_attn_decode(q, k, v, state, decay, **call)
    return (
        [relative_error(o, exact_o), relative_error(state, exact_state)],
        [relative_error(plain_o.to(q.dtype), exact_o), relative_error(plain_state, exact_state)],
    )


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
