"""How long a fresh process waits for its first result of softmax attention, with cold and with warm
caches. The results are of a forward, of a training step (forward and backward) and of a decoding
step that chooses its number of splits. See `harness.first_result`.

Neither library tunes anything. FlashAttention-4's disk cache is switched on.
"""

from __future__ import annotations

import argparse

from ..harness import first_result
from ..harness.first_result import Peer, Study
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report
from .cases import FA4, HEAD_DIMS

SHORT_CALLS = ("forward", "decode")
CALLS = {
    "forward": "B=1, S=4096, then B=2, S=1000, causal",
    "training_step": "the same, forward and backward",
    "decode": "B=8 with 4096 keys, then B=3 with 777, one query",
}
HEADS, HEADS_K = 16, 2

_SETUP = """
sizes = [(8, 1, 4096), (3, 1, 777)] if call == "decode" else [(1, 4096, 4096), (2, 1000, 1000)]

def make(batch, seqlen_q, seqlen_k):
    rows = (seqlen_q, {heads}), (seqlen_k, {heads_k}), (seqlen_k, {heads_k}), (seqlen_q, {heads})
    q, k, v, do = (
        torch.randn(batch, *row, {head_dim}, device="cuda", dtype=torch.bfloat16) for row in rows
    )
    used = torch.full((batch,), seqlen_k, device="cuda", dtype=torch.int32)
    return (q, k, v), do, used

inputs = [make(*size) for size in sizes]

def call_of(arguments):
    if who == "ours":
        from cute_attn import flash_attn_func, flash_attn_varlen_func
    else:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    tensors, do, used = arguments
    splits = {{"num_splits": 0}} if who == "ours" else {{}}  # FlashAttention-4 has none on Hopper

    def training_step():
        with torch.enable_grad():
            o = flash_attn_func(*(x.requires_grad_() for x in tensors), causal=True)
            (o[0] if isinstance(o, tuple) else o).backward(do)

    return {{
        "forward": lambda: flash_attn_func(*tensors, causal=True),
        "training_step": training_step,
        "decode": lambda: flash_attn_varlen_func(
            *tensors, seqused_k=used, causal=True, **splits
        ),
    }}[call]
"""


def study(head_dim: int) -> Study:
    modules = {"ours": "cute_attn", FA4: "flash_attn.cute"}
    return Study(
        benchmark="attention-first-result",
        title="Softmax attention: the time until the first result of a process",
        peer=Peer(FA4, "FlashAttention-4", "flash_attn"),
        calls=CALLS,
        modules={(who, call): module for who, module in modules.items() for call in CALLS},
        setup=_SETUP.format(head_dim=head_dim, heads=HEADS, heads_k=HEADS_K),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=HEAD_DIMS[-1])
    first_result.add_arguments(parser, tuple(CALLS), "FlashAttention-4")


def run(args: argparse.Namespace) -> Report:
    return first_result.run(
        study(args.head_dim), args, SHORT_CALLS,
        {"head_dim": args.head_dim, "heads": HEADS, "heads_k": HEADS_K},
    )  # fmt: skip


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage(("--no-peer",), 60),),
)
