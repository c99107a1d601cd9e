"""Attention over several GPUs beside one GPU with a part of the work.

The benchmark runs one process for each of the W GPUs of the machine, with NCCL. The base is one
GPU's time for the call with 1 / W of the heads, and so 1 / W of the work. All GPUs run the base at
once, in the same processes. The share is the base's time divided by the time over ranks. Delta
rules are in `delta_rules_over_ranks`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.environment import describe
from ..harness.registry import Benchmark, Unavailable
from ..harness.report import Report, Row, Verdict
from . import delta_rules_over_ranks

MODES = ("gather", "ring", "heads")


class Case(NamedTuple):
    """A row of the table; goals are shares of W times one GPU's rate."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    heads_k: int
    head_dim: int
    layout: str = "zigzag"
    window: int | None = None  # keys that a query sees
    forward: float = 0.0
    both: float = 0.0


def _documents(total: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of 100 to 16k tokens, log-uniform, that sum to `total`."""
    draw = random.Random(seed)
    found: list[int] = []
    while (rest := total - sum(found)) > 0:
        found.append(min(rest, int(100 * 160 ** draw.random())))
    return tuple(found)


CASES = (
    Case("GQA 32/8, 32k", (2**15,), 32, 8, 128, forward=0.97, both=0.95),
    Case("GQA 32/8, 128k", (2**17,), 32, 8, 128, forward=0.97, both=0.95),
    Case("MHA 32/32, 16k", (2**14,), 32, 32, 128, forward=0.9, both=0.9),
    Case("hd256 16/2, window 1024", (2**15,), 16, 2, 256, "contiguous", 1024, 0.95, 0.95),
    Case("documents, 64k in all", _documents(2**16), 32, 8, 128, forward=0.9, both=0.9),
)
DECODE_KEYS = 2**18
DECODE_SHARE = 0.85  # two GPUs decode 1.7 times as fast as one


def lockstep(call: Callable[[], Any], seconds: float = 0.25) -> float:
    """Milliseconds of a call that all ranks make: the slowest rank's time, the median of three."""
    import torch
    import torch.distributed as dist

    def run(count: int) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(count):
            call()
        events[1].record()
        torch.cuda.synchronize()
        time_of = torch.tensor([events[0].elapsed_time(events[1]) / count], device="cuda")
        dist.all_reduce(time_of, dist.ReduceOp.MAX)
        return time_of.item()

    run(1)
    count = max(1, min(50, int(seconds * 1000 / 3 / max(run(1), 1e-3))))
    return statistics.median(run(count) for _ in range(3))


def measured(case: Case, modes: tuple[str | None, ...], *, forward_only: bool = False) -> list[Row]:
    """A row for each mode; every rank calls this."""
    import torch

    from ... import flash_attn_func, flash_attn_varlen_func
    from ...distributed import context_parallel

    packed = len(case.lengths) > 1
    bounds = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    window = (None if case.window is None else case.window - 1, 0)

    def inputs(rows: int, share: int) -> list[torch.Tensor]:
        shape = (rows,) if packed else (1, rows)
        heads = (case.heads, case.heads_k, case.heads_k, case.heads)
        return [
            torch.randn(*shape, n // share, case.head_dim, device="cuda", dtype=torch.bfloat16)
            for n in heads
        ]

    def times(function: Callable[..., Any], tensors: list[torch.Tensor]) -> tuple[float, float]:
        q, k, v, do = tensors
        with torch.no_grad():
            forward = lockstep(lambda: function(q, k, v, window_size=window))
        if forward_only:
            return forward, float("nan")
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def both() -> None:
            o, _ = function(*leaves, window_size=window)
            torch.autograd.grad(o, leaves, do)

        return forward, lockstep(both)

    def whole(*tensors: torch.Tensor, **options: Any) -> Any:
        if not packed:
            return flash_attn_func(*tensors, **options)
        longest = max(case.lengths)
        return flash_attn_varlen_func(
            *tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest,
            max_seqlen_k=longest, **options,
        )  # fmt: skip

    offsets = torch.tensor(bounds, device="cuda", dtype=torch.int32)
    world = torch.distributed.get_world_size()
    base, base_both = times(whole, inputs(sum(case.lengths), world))
    torch.cuda.empty_cache()
    rows: list[Row] = []
    for mode in modes:
        lengths: Any = {"cu_seqlens": bounds} if packed else {"seqlen": case.lengths[0]}
        plan = context_parallel(layout=case.layout, mode=mode, **lengths)
        torch.cuda.reset_peak_memory_stats()
        tensors = inputs(plan.tokens, 1)

        def over_ranks(*tensors: torch.Tensor, plan: Any = plan, **options: Any) -> Any:
            own = flash_attn_varlen_func if plan.packed else flash_attn_func
            return own(*tensors, cp=plan, **options)

        forward, both = times(over_ranks, tensors)
        rows.append(
            {
                "case": case.name,
                "mode": mode or "chosen",
                "base_ms": base,
                "forward_ms": forward,
                "share_of_ideal_forward": base / forward,
                "base_both_ms": base_both,
                "both_ms": both,
                "share_of_ideal_both": base_both / both,
                "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
            }
        )
        del tensors, plan
        torch.cuda.empty_cache()
    return rows


def decoded(heads: int = 32, heads_k: int = 8, head_dim: int = 128) -> Row:
    """One sequence of DECODE_KEYS keys: on one GPU, and over all ranks."""
    import torch

    from ... import flash_attn_func
    from ...distributed import decode_over_ranks

    world = torch.distributed.get_world_size()
    q = torch.randn(1, 1, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(1, DECODE_KEYS, heads_k, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    own = slice(0, DECODE_KEYS // world)
    with torch.no_grad():
        one = lockstep(lambda: flash_attn_func(q, k, v, num_splits=0), 0.1)
        all_ranks = lockstep(lambda: decode_over_ranks(q, k[:, own], v[:, own]), 0.1)
    empty = dict.fromkeys(("base_both_ms", "both_ms", "share_of_ideal_both", "peak_mib"))
    return {
        "case": f"decode, {DECODE_KEYS // 1024}k keys",
        "mode": "decode",
        "base_ms": one / world,
        "forward_ms": all_ranks,
        "share_of_ideal_forward": one / world / all_ranks,
        **empty,
    }


def worker(rank: int, world: int, port: int, file: str, options: dict[str, Any]) -> None:
    """One rank of the benchmark; rank 0 writes the rows."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    begin = time.time()
    rows: list[Row] = []
    for case in CASES[: 1 if options["short"] else None]:
        rows += measured(case, tuple(options["modes"]))
        if rank == 0:
            print(f"{case.name}: after {time.time() - begin:.0f} s", flush=True)
    for delta_case in delta_rules_over_ranks.CASES[: 1 if options["short"] else None]:
        rows += delta_rules_over_ranks.measured(delta_case, lockstep)
    rows.append(decoded())
    if rank == 0:
        Path(file).write_text(json.dumps(rows))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--modes", nargs="+", default=["chosen"], choices=["chosen", *MODES],
        help="modes to time, beside the chosen mode",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    import torch
    from torch.multiprocessing.spawn import spawn

    world = torch.cuda.device_count()
    if world < 2:
        raise Unavailable(f"{world} GPU, and context parallelism needs 2")
    modes = [None if mode == "chosen" else mode for mode in args.modes]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "rows.json")
        options = {"modes": modes, "short": args.short}
        spawn(worker, (world, free_port(), file, options), nprocs=world)
        rows: list[Row] = json.loads(Path(file).read_text())
    return Report(
        benchmark="context-parallel",
        title=f"Attention over {world} GPUs beside one GPU with 1 / {world} of the work",
        environment=describe(args.argv, commit=args.commit),
        parameters={"gpus": world},
        rows=rows,
        verdicts=list(_verdicts(rows)),
    )


def _verdicts(rows: list[Row]) -> list[Verdict]:
    found = []
    goals: dict[str, Any] = {case.name: case for case in (*CASES, *delta_rules_over_ranks.CASES)}
    for row in rows:
        case = goals.get(str(row["case"]))
        if case is None:
            share = float(row["share_of_ideal_forward"])  # type: ignore[arg-type]
            claim = f"{row['case']}: at least {DECODE_SHARE:.0%} of all GPUs' rate"
            found.append(Verdict(claim, share >= DECODE_SHARE, f"{share:.1%}"))
        elif row["mode"] in ("chosen", "states"):
            for name in ("forward", "both"):
                goal, share = getattr(case, name), float(row[f"share_of_ideal_{name}"])  # type: ignore[arg-type]
                if not goal:
                    continue
                claim = f"{case.name}, {name}: at least {goal:.0%} of all GPUs' rate"
                found.append(Verdict(claim, share >= goal, f"{share:.1%}"))
    return found


BENCHMARK = Benchmark(run=run, add_arguments=add_arguments)
