"""Run every operator, forward and backward, and check it against its float64 reference.

    python examples/quickstart.py

Without a GPU, or on a GPU that an operator has no kernel for, the same kernels run in the emulator,
for Hopper and for Blackwell, with every check on and fewer heads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cute_attn
from cute_attn import cache
from cute_attn.emulator import Emulator, EmulatorUnavailable
from cute_attn.reference.attention import (
    attention_gradients,
    attention_gradients_in_low_precision,
    attention_in_low_precision,
    attention_reference,
)
from cute_attn.reference.kda import (
    kda_chunk_gradients,
    kda_chunk_reference,
    kda_decode_reference,
    kda_gradients,
    kda_reference,
)
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
MOST_PROCESSES = 8
ROUNDING = torch.finfo(torch.float32).eps
EMULATED_ARCHS = ("sm_90a", "sm_100a")
HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_103a")

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # of a log or a pipe, where rich would take 80


def main() -> bool:
    """Run everything, and return whether every result agrees with the reference."""
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}")
    runs = [(name, emulated) for name in CHECKS for emulated in targets(CHECKS[name])]
    table = Table("operator", "on", "results", "relative error", "plain PyTorch's", "")
    passed = True
    found: dict[tuple[str, str | None], Errors] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("Running", total=len(runs))
        for run, errors in results(runs):
            found[run] = errors
            progress.update(task, description=run[0], advance=1)
    for name, emulated in runs:
        errors = found[name, emulated]
        # The rule of docs/testing.md: at most twice plain PyTorch's error, plus one rounding.
        agrees = all(error <= 2 * plain + ROUNDING for error, plain in errors.values())
        passed &= agrees
        ours, plain = zip(*errors.values(), strict=True)
        table.add_row(
            name,
            f"{emulated} (emulated)" if emulated else torch.cuda.get_device_name(),
            " / ".join(errors),
            " / ".join(f"{error:.1e}" for error in ours),
            " / ".join(f"{error:.1e}" for error in plain),
            "agrees" if agrees else "WRONG",
        )
    console.print(table)
    if any(emulated for _, emulated in runs):
        console.print(
            "Emulated means that no GPU here runs these kernels: the emulator ran the "
            "compiled code, and found no race, no missing fence, no access out of bounds and no "
            "uninitialised read."
        )
    return passed


Run = tuple[str, str | None]  # a check, and the architecture to emulate; None stands for the GPU
Errors = dict[str, tuple[float, float]]  # of each result: the kernel's, plain PyTorch's


class Check(NamedTuple):
    """A function of device and heads that runs an operator, and the operator's architectures."""

    run: Callable[[str, int], Errors]
    gpus: tuple[str, ...] | None = None  # None: any
    emulated: tuple[str, ...] = EMULATED_ARCHS


def results(runs: list[Run]) -> Iterator[tuple[Run, Errors]]:
    """What each run finds, in the order in which they end: emulated ones in a few processes."""
    emulated = [run for run in runs if run[1]]
    for run in runs:
        if run not in emulated:
            yield run, result(*run)
    if emulated:
        Emulator()  # builds its engine where that was not done yet
        workers = min(os.cpu_count() or 1, MOST_PROCESSES)
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            pending = {pool.submit(result, *run): run for run in emulated}
            for done in as_completed(pending):
                yield pending[done], done.result()


def result(name: str, emulated: str | None) -> Errors:
    torch.manual_seed(0)
    with machine(emulated):
        if emulated:
            return CHECKS[name].run("cpu", EMULATED_HEADS)
        return CHECKS[name].run("cuda", HEADS)


def targets(check: Check) -> tuple[str | None, ...]:
    """Where to run it: as in `Run`."""
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


def attention(head_dim: int, device: str, heads: int) -> Errors:
    """Causal, GQA, and the gradients; `plain` is PyTorch with products of bfloat16."""
    group = heads // 2 + 1
    q, k, v = (
        torch.randn(1, rows, heads, head_dim, device=device).to(torch.bfloat16)
        for rows, heads in ((70, group), (130, 1), (130, 1))
    )
    do = torch.randn_like(q)
    exact, _ = attention_reference(q, k, v, causal=True)
    plain, _ = attention_in_low_precision(q, k, v, causal=True)
    exact_gradients = attention_gradients(q, k, v, do, causal=True)
    plain_gradients = attention_gradients_in_low_precision(q, k, v, do, causal=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = cute_attn.flash_attn_func(*leaves, causal=True)
    gradients = torch.autograd.grad(o, leaves, do)
    return relative_errors(
        o=(o, plain, exact),
        dq=(gradients[0], plain_gradients.dq, exact_gradients.dq),
        dk=(gradients[1], plain_gradients.dk, exact_gradients.dk),
        dv=(gradients[2], plain_gradients.dv, exact_gradients.dv),
    )


def packed_attention(head_dim: int, device: str, heads: int) -> Errors:
    """Three packed sequences with a sliding window; `plain` is as above."""
    q, k, v = (
        torch.randn(150, n, head_dim, device=device).to(torch.bfloat16) for n in (heads, 1, 1)
    )
    cu_seqlens = torch.tensor([0, 70, 71, 150], device=device, dtype=torch.int32)
    call = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "window_size": (40, 0)}
    exact, _ = attention_reference(q, k, v, **call)
    plain, _ = attention_in_low_precision(q, k, v, **call)
    o, _ = cute_attn.flash_attn_varlen_func(q, k, v, **call, max_seqlen_q=79, max_seqlen_k=79)
    return relative_errors(o=(o, plain, exact))


def paged_attention(head_dim: int, device: str, heads: int) -> Errors:
    """One new token of each of three sequences, whose K and V are in pages of a pool; `plain` is
    as above."""
    sequences, page_size, pages = 3, 16, 5
    lengths = torch.tensor([80, 17, 1], device=device, dtype=torch.int32)
    q = torch.randn(sequences, heads, head_dim, device=device).to(torch.bfloat16)
    pool = torch.randn(2, 2 * sequences * pages, page_size, 1, head_dim, device=device)
    k_pool, v_pool = pool.to(torch.bfloat16)
    table = torch.randperm(len(k_pool), device=device)[: sequences * pages].view(sequences, pages)
    k, v = (x[table].view(sequences, pages * page_size, 1, head_dim) for x in (k_pool, v_pool))
    exact, _ = attention_reference(q[:, None], k, v, seqused_k=lengths)
    plain, _ = attention_in_low_precision(q[:, None], k, v, seqused_k=lengths)
    o, _ = cute_attn.flash_attn_varlen_func(
        q,
        k_pool,
        v_pool,
        cu_seqlens_q=torch.arange(sequences + 1, device=device, dtype=torch.int32),
        max_seqlen_q=1,
        seqused_k=lengths,
        page_table=table.to(torch.int32),
    )
    return relative_errors(o=(o, plain[:, 0], exact[:, 0]))


def combination(device: str, heads: int) -> Errors:
    """Three parts of the keys; `plain` is the formula in PyTorch float32."""
    o = torch.randn(3, 2, 9, heads, HEAD_DIM, device=device)
    lse = torch.randn(3, 2, 9, heads, device=device)
    exact, plain = (
        ((lse.to(dtype) - lse.to(dtype).logsumexp(0)).exp()[..., None] * o.to(dtype)).sum(0)
        for dtype in (torch.float64, torch.float32)
    )
    out, _ = cute_attn.flash_attn_combine(o, lse)
    return relative_errors(out=(out, plain, exact))


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
    return relative_errors(
        o=(o, plain_o.to(q.dtype), exact_o), state=(state, plain_state, exact_state)
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
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o), state=(state, plain_state, exact_state)
    )


def kda_backward(device: str, heads: int) -> Errors:
    """The gradients of one sequence; `plain` is the chunked formula as above."""
    inputs = kda_inputs(device, max(1, heads // 2), 1, 70)
    do = torch.randn_like(inputs["v"])
    call = inputs | {
        "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    exact = kda_gradients(**call, do=do)
    plain = kda_chunk_gradients(**call, do=do, dtype=torch.float32, stage_dtype=torch.bfloat16)
    names = ("q", "k", "v", "g", "beta")
    leaves = {name: inputs[name].requires_grad_() for name in names}
    o, _ = cute_attn.chunk_kda(**call | leaves)
    gradients = torch.autograd.grad(o, list(leaves.values()), do)
    return relative_errors(
        **{
            f"d{name}": (
                found,
                getattr(plain, f"d{name}").to(found.dtype),
                getattr(exact, f"d{name}"),
            )
            for name, found in zip(names, gradients, strict=True)
        }
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
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o),
        state=(state, plain.final_state, exact.final_state),
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
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o), state=(state, plain.state, exact.state)
    )


CHECKS = {
    "Softmax attention, head_dim 64": Check(partial(attention, 64), HOPPER, HOPPER),
    "Softmax attention, head_dim 128": Check(partial(attention, 128), HOPPER, HOPPER),
    "Softmax attention, head_dim 256": Check(partial(attention, 256), HOPPER + BLACKWELL),
    "Softmax attention, packed, head_dim 128": Check(
        partial(packed_attention, 128), HOPPER, HOPPER
    ),
    "Softmax attention, packed, head_dim 256": Check(
        partial(packed_attention, 256), HOPPER + BLACKWELL, BLACKWELL[:1]
    ),
    "Softmax attention, pages, head_dim 128": Check(partial(paged_attention, 128), HOPPER, HOPPER),
    "Softmax attention, pages, head_dim 256": Check(
        partial(paged_attention, 256), HOPPER + BLACKWELL, BLACKWELL[:1]
    ),
    "Softmax attention, parts combined": Check(combination),
    **{name: Check(partial(lightning_decode, name)) for name in LIGHTNING},
    "KDA, prefill": Check(kda_prefill),
    "KDA, gradients": Check(kda_backward),
    "KDA, recurrent": Check(kda_recurrent),
    "KDA, decode": Check(kda_decode),
}


def relative_errors(**results: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]) -> Errors:
    """Relative errors of (the kernel's, plain PyTorch's, the exact) result."""

    def error(actual: torch.Tensor | None, exact: torch.Tensor) -> float:
        assert actual is not None
        return float((actual.detach().double() - exact).norm() / exact.norm())

    return {
        name: (error(ours, exact), error(plain, exact))
        for name, (ours, plain, exact) in results.items()
    }


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
