"""Run the operators with a state once each, and check them against their float64 references.

    python examples/quickstart.py

Without a GPU the same kernels run in the emulator, for Hopper and for Blackwell, with every check
on, on fewer heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cute_attn
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.reference.kda import kda_chunk_reference, kda_decode_reference
from cute_attn.reference.lightning import lightning_attn_decode_reference

# name -> (shape of q without H and K, dtype of the state, its layout)
LIGHTNING = {
    "Lightning decode, one token": ((8,), torch.float32, "vk"),
    "Lightning decode, 4 tokens": ((8, 4), torch.float32, "vk"),
    "Lightning decode, bfloat16 state": ((8,), torch.bfloat16, "vk"),
    "Lightning decode, layout kv": ((8,), torch.float32, "kv"),
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
    table = Table("operator", "on", "output error", "state error", "plain PyTorch", "")
    passed = True
    with Progress(console=console) as progress:
        task = progress.add_task("Running", total=len(CHECKS) * len(targets))
        for target in targets:
            device, heads = ("cuda", HEADS) if on_gpu else ("cpu", EMULATED_HEADS)
            for name, check in CHECKS.items():
                progress.update(task, description=f"{name}, {target}")
                with machine(target, on_gpu):
                    errors, plain = check(device, heads)
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


Errors = tuple[list[float], list[float]]  # of output and state: the kernel's, plain PyTorch's


def lightning_decode(name: str, device: str, heads: int) -> Errors:
    """Plain is the formula in PyTorch float32."""
    step, state_dtype, layout = LIGHTNING[name]
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


def kda_inputs(device: str, heads: int, *rows: int) -> dict[str, torch.Tensor]:
    """Two value heads for each head of q and k; gate, norm and sigmoid are left to the kernels."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*rows, *shape, device=device).to(torch.bfloat16)

    return {
        "q": normal(heads, HEAD_DIM),
        "k": normal(heads, HEAD_DIM),
        "v": normal(2 * heads, HEAD_DIM),
        "g": normal(2 * heads, HEAD_DIM),
        "beta": normal(2 * heads),
        "A_log": torch.rand(2 * heads, device=device),
        "dt_bias": -4 * torch.rand(2 * heads * HEAD_DIM, device=device),
    }


def kda_prefill(device: str, heads: int) -> Errors:
    """Three packed sequences; plain is the formula by chunks, with 16 bits between stages."""
    call = kda_inputs(device, max(1, heads // 2), 1, 150) | {
        "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "cu_seqlens": torch.tensor([0, 70, 71, 150], device=device),
    }
    exact = kda_chunk_reference(**call)
    plain = kda_chunk_reference(**call, dtype=torch.float32, stage_dtype=torch.bfloat16)
    o, state = cute_attn.chunk_kda(**call, output_final_state=True)
    exact_state, plain_state = exact.states.final_state, plain.states.final_state
    return (
        [relative_error(o, exact.o), relative_error(state, exact_state)],
        [relative_error(plain.o.to(o.dtype), exact.o), relative_error(plain_state, exact_state)],
    )


def kda_decode(device: str, heads: int) -> Errors:
    """One token; plain is the formula in PyTorch float32."""
    heads = max(1, heads // 2)
    slots = torch.randperm(SLOTS, device=device)[:8].to(torch.int32)
    slots[0] = -1  # a padded row
    state = torch.randn(SLOTS, 2 * heads, HEAD_DIM, HEAD_DIM, device=device)
    call = kda_inputs(device, heads, 8) | {"state_indices": slots, "lower_bound": -5.0}
    exact = kda_decode_reference(**call, state=state)
    plain = kda_decode_reference(**call, state=state, dtype=torch.float32)
    o = cute_attn.kda_decode(**call, state=state)
    return (
        [relative_error(o, exact.o), relative_error(state, exact.state)],
        [relative_error(plain.o.to(o.dtype), exact.o), relative_error(plain.state, exact.state)],
    )


CHECKS: dict[str, Callable[[str, int], Errors]] = {
    **{name: partial(lightning_decode, name) for name in LIGHTNING},
    "KDA, prefill": kda_prefill,
    "KDA, decode": kda_decode,
}


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
