"""Run every operator once, and check it against its float64 reference.

    python examples/quickstart.py

Without a GPU, or on a GPU that an operator has no kernel for, the same kernels run in the emulator,
for Hopper and for Blackwell, with every check on and fewer heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cute_attn
from cute_attn import cache
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.reference.attention import attention_in_low_precision, attention_reference
from cute_attn.reference.kda import kda_chunk_reference, kda_decode_reference, kda_reference
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
ROUNDING = torch.finfo(torch.float32).eps
EMULATED_ARCHS = ("sm_90a", "sm_100a")

console = Console()


def main() -> bool:
    """Run everything, and return whether every result agrees with the reference."""
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}")
    torch.manual_seed(0)
    runs = [
        (name, check, emulated) for name, check in CHECKS.items() for emulated in targets(check)
    ]
    table = Table("operator", "on", "output error", "state error", "plain PyTorch", "")
    passed = True
    with Progress(console=console) as progress:
        task = progress.add_task("Running", total=len(runs))
        for name, check, emulated in runs:
            on = f"{emulated} (emulated)" if emulated else torch.cuda.get_device_name()
            progress.update(task, description=f"{name}, {on}")
            with machine(emulated):
                errors, plain = check.run(
                    "cpu" if emulated else "cuda", EMULATED_HEADS if emulated else HEADS
                )
            # The rule of docs/testing.md: at most twice plain PyTorch's error, plus one rounding.
            agrees = all(e <= 2 * p + ROUNDING for e, p in zip(errors, plain, strict=True))
            passed &= agrees
            table.add_row(
                name,
                on,
                f"{errors[0]:.1e}",
                f"{errors[1]:.1e}" if len(errors) > 1 else "no state",
                " / ".join(f"{error:.1e}" for error in plain),
                "agrees" if agrees else "WRONG",
            )
            progress.advance(task)
    console.print(table)
    if any(emulated for _, _, emulated in runs):
        console.print(
            "Emulated means that no GPU here runs these kernels: the emulator ran the "
            "compiled code, and found no race, no missing fence, no access out of bounds and no "
            "uninitialised read."
        )
    return passed


Errors = tuple[list[float], list[float]]  # of output and state: the kernel's, plain PyTorch's


class Check(NamedTuple):
    """A function of device and heads that runs an operator, and the operator's architectures."""

    run: Callable[[str, int], Errors]
    gpus: tuple[str, ...] | None = None  # None: any
    emulated: tuple[str, ...] = EMULATED_ARCHS


def targets(check: Check) -> tuple[str | None, ...]:
    """The architectures to emulate; None stands for the GPU."""
    on_gpu = torch.cuda.is_available() and (
        check.gpus is None or cache.current_arch() in check.gpus
    )
    return (None,) if on_gpu else check.emulated


@contextlib.contextmanager
def machine(emulated: str | None) -> Iterator[None]:
    """The GPU, or an emulator that raises an exception on anything it finds wrong."""
    if emulated is None:
        yield
    else:
        with cute_attn.emulated(emulated):
            yield


def attention(device: str, heads: int) -> Errors:
    """head_dim 256, causal, GQA; `plain` is PyTorch with the probabilities in bfloat16."""
    group = heads // 2 + 1
    q, k, v = (
        torch.randn(1, rows, heads, 256, device=device).to(torch.bfloat16)
        for rows, heads in ((130, group), (200, 1), (200, 1))
    )
    exact, _ = attention_reference(q, k, v, causal=True)
    plain, _ = attention_in_low_precision(q, k, v, causal=True)
    o, _ = cute_attn.flash_attn_func(q, k, v, causal=True)
    return [relative_error(o, exact)], [relative_error(plain, exact)]


def combination(device: str, heads: int) -> Errors:
    """Three parts of the keys; `plain` is the formula in PyTorch float32."""
    o = torch.randn(3, 2, 9, heads, HEAD_DIM, device=device)
    lse = torch.randn(3, 2, 9, heads, device=device)
    exact, plain = (
        ((lse.to(dtype) - lse.to(dtype).logsumexp(0)).exp()[..., None] * o.to(dtype)).sum(0)
        for dtype in (torch.float64, torch.float32)
    )
    out, _ = cute_attn.flash_attn_combine(o, lse)
    return [relative_error(out, exact)], [relative_error(plain, exact)]


def lightning_decode(name: str, device: str, heads: int) -> Errors:
    """One or more tokens a sequence; `plain` is the formula in PyTorch float32."""
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
    """Two value heads for each head of q and k; the kernels apply gate, norm and sigmoid."""

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
    """Three packed sequences; `plain` is the chunked formula with bfloat16 between its stages."""
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


def kda_recurrent(device: str, heads: int) -> Errors:
    """Two short sequences, token by token; `plain` is the formula in PyTorch float32."""
    call = kda_inputs(device, max(1, heads // 2), 1, 7) | {
        "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "cu_seqlens": torch.tensor([0, 5, 7], device=device),
    }
    exact, plain = kda_reference(**call), kda_reference(**call, dtype=torch.float32)
    o, state = cute_attn.fused_recurrent_kda(**call, output_final_state=True)
    assert state is not None
    return (
        [relative_error(o, exact.o), relative_error(state, exact.final_state)],
        [
            relative_error(plain.o.to(o.dtype), exact.o),
            relative_error(plain.final_state, exact.final_state),
        ],
    )


def kda_decode(device: str, heads: int) -> Errors:
    """One token; `plain` is the formula in PyTorch float32."""
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


CHECKS = {
    "Softmax attention, head_dim 256": Check(attention, gpus=("sm_90a", "sm_100a", "sm_103a")),
    "Softmax attention, parts combined": Check(combination),
    **{name: Check(partial(lightning_decode, name)) for name in LIGHTNING},
    "KDA, prefill": Check(kda_prefill),
    "KDA, recurrent": Check(kda_recurrent),
    "KDA, decode": Check(kda_decode),
}


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
