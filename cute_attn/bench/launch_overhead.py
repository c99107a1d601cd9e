"""Host time of one launch: the public operator and the layers under it, compared with torch.mul.

Calls are timed in batches, with no synchronisation inside a batch, so no call waits for the
device. The result is the cost of a decode step to the Python thread. This cost bounds how many
kernels per second an eager loop can launch.
"""

from __future__ import annotations

import argparse

from .harness.environment import describe
from .harness.registry import Benchmark, GpuCheckStage
from .harness.report import Report, Row, Verdict
from .harness.timing import time_host

SEED = 20261120
BASELINE = "torch.mul(a, 2.0, out=b)"
PUBLIC = "cute_attn.lightning_attn_decode(..., out=o)"
PUBLIC_ATTENTION = "cute_attn.flash_attn_func(q, k, v, out=o)"
TARGET_RATIOS = {PUBLIC: 1.0, PUBLIC_ATTENTION: 1.2}  # a public call's time over the baseline's
HEAD_DIMS = (128, 256)  # attention takes the first head_dim that has a kernel


def run(args: argparse.Namespace) -> Report:
    import torch

    from .attention import problem as attention
    from .lightning.problem import Case, launch_paths, make_inputs

    case = Case(batch=1, heads=8, head_dim_k=64, head_dim_v=64)  # small: the host must be slower
    a = torch.randn(1024, device="cuda")
    b = torch.empty_like(a)
    paths = {
        BASELINE: lambda: torch.mul(a, 2.0, out=b),
        **launch_paths(case, make_inputs(case, SEED), public_name=PUBLIC),
    }
    head_dim = next(filter(attention.has_forward, HEAD_DIMS), None)
    if head_dim is not None:
        paths |= attention.launch_paths(PUBLIC_ATTENTION, head_dim)
    calls, batches = (100, 30) if args.short else (200, 200)
    rows: list[Row] = []
    verdicts = []
    for grad_mode, context in (("inference", torch.inference_mode), ("grad", torch.enable_grad)):
        with context():
            timings = time_host(
                paths, calls=calls, batches=batches, synchronize=torch.cuda.synchronize
            )
        baseline_us = timings[BASELINE].median_us
        rows += [
            {
                "grad_mode": grad_mode,
                "call": name,
                "host_us": timing.median_us,
                "p20_us": timing.p20_us,
                "p80_us": timing.p80_us,
                "min_us": timing.min_us,
                "to_torch_mul_ratio": timing.median_us / baseline_us,
            }
            for name, timing in timings.items()
        ]
        for public, target in TARGET_RATIOS.items():
            if public in timings:
                ratio = timings[public].median_us / baseline_us
                name = f"{grad_mode} mode: {public} costs at most {target:g}x of {BASELINE}"
                verdicts.append(Verdict(name, ratio <= target, f"{ratio:.2f}x"))
    return Report(
        benchmark="launch-overhead",
        title="Host time of one launch",
        environment=describe(args.argv, commit=args.commit),
        parameters={
            "calls_per_batch": calls,
            "batches": batches,
            "attention_head_dim": head_dim,
        },
        rows=rows,
        verdicts=verdicts,
    )


BENCHMARK = Benchmark(
    run=run,
    gpu_check=(GpuCheckStage((), 40),),
)
