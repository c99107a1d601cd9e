"""mla_decode over a latent cache in pages of 64 tokens, against the bytes that it must read and the
operations that it must do.

The kernels are compiled first, on all cores. Each case is checked against the float64 reference of
its first sequences, then timed in some of these ways:

- `calls`: one of many calls in a CUDA graph, by `do_bench_cudagraph`. The times on the kernel's
  page are such times. The L2 holds what the previous call left.
- `rested`: calls after a rest, so that the GPU's clock has not yet fallen under the load. The
  goal of calls that the products bound is for such times, as in `bench attention`.
- `graph`: the replay of a graph of one call, with a flushed L2.
- `do_bench`: by `triton.testing.do_bench`.

The roofline is the longer of two times: of reading the cache once at the bandwidth of a large copy,
and of the products at the rate of a large matrix product.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..harness.choosing import add_only, chosen
from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report, Row, Verdict
from ..harness.roofline import Roofline, gbps, measure_roofline
from ..harness.timing import Call, Flush, Timing, time_cuda, time_cudagraph, time_rested

HEAD_DIM, HEAD_DIM_V, PAGE = 576, 512, 64
SCALE = 192**-0.5
CHECKED = 2  # sequences that are compared with float64
Mode = Literal["calls", "rested", "graph", "do_bench"]
MODES: tuple[Mode, ...] = get_args(Mode)
FILTERS = {"B": "batch", "S": "tokens", "H": "heads", "T": "queries"}
LEAST_BYTES, LEAST_SHARE = 64 * 2**20, 0.85  # of the copy bandwidth, from so many bytes on
LEAST_TFLOPS = 680.0  # where the products take longer


@dataclass(frozen=True)
class Case:
    """A decode step.

    Attributes:
        batch: sequences.
        tokens: cached tokens of a sequence; with `ragged`, of the longest.
        heads, queries: of each sequence.
        ragged: lengths lie between 0 and `tokens`.
    """

    batch: int
    tokens: int
    heads: int
    queries: int = 1
    ragged: bool = False

    @property
    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.tokens] * self.batch
        return [i * 2657 % (self.tokens + 1) for i in range(self.batch)]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, q and o."""
        rows = self.batch * self.queries * self.heads
        return 2 * (sum(self.lengths) * HEAD_DIM + rows * (HEAD_DIM + HEAD_DIM_V))

    @property
    def flops(self) -> int:
        return 2 * sum(self.lengths) * self.queries * self.heads * (HEAD_DIM + HEAD_DIM_V)


CASES = (
    *(Case(batch, 1024, 16) for batch in (1, 32, 128)),
    *(Case(batch, 4096, 16) for batch in (128, 160)),
    Case(64, 8192, 16, ragged=True),
    Case(128, 4096, 64),
    *(Case(32, 8192, 12, queries=queries) for queries in (1, 4, 8)),
    Case(1, 131072, 12),
    *(Case(128, 4096, 128, queries=queries) for queries in (1, 2)),
    Case(66, 8192, 128, queries=2),
    *(Case(64, 8192, 128, queries=queries, ragged=True) for queries in (1, 2)),
    Case(32, 4096, 128),
    Case(1, 131072, 128),
)
SHORT_CASES = (Case(1, 1024, 16), Case(128, 4096, 16), Case(32, 8192, 12, queries=4))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_only(parser, FILTERS, "B=128,H=16")
    parser.add_argument("--mode", nargs="+", default=["calls", "rested"], choices=MODES)


def run(args: argparse.Namespace) -> Report:
    import torch

    few = args.short and not args.only
    rep_ms = 20.0 if args.short else 60.0
    cases = chosen(SHORT_CASES if few else CASES, args.only)
    compile_all(cases)
    roofline = measure_roofline(rep_ms=rep_ms)
    rows: list[Row] = []
    worst = 0.0
    with torch.no_grad():
        for case in track(cases, "mla"):
            arguments = inputs(case)
            worst = max(worst, checked(case, arguments))
            rows += [row(case, mode, arguments, roofline, rep_ms) for mode in args.mode]
            del arguments
    return Report(
        benchmark="mla",
        title="Latent decode, 512 + 64 columns, bfloat16, pages of 64 tokens",
        environment=describe(args.argv, commit=args.commit),
        parameters={"rep_ms": rep_ms},
        roofline=roofline.to_dict(),
        rows=rows,
        verdicts=verdicts(rows),
        notes=[f"largest error, in errors of plain bfloat16 code: {worst:.2f}"],
    )


def compile_all(cases: Sequence[Case]) -> None:
    """Compile the kernels of the cases on all cores, instead of one by one when called."""
    from cute_attn import cache, warmup
    from cute_attn.ops.mla import plan_mla_decode

    arch = cache.current_arch()
    shapes = {(case.queries, case.heads) for case in cases}
    plans = [plan_mla_decode(arch, queries=queries, heads=heads) for queries, heads in shapes]
    warmup(dict.fromkeys(request for plan in plans for request in plan))


def inputs(case: Case, device: str = "cuda") -> dict[str, Any]:
    """The arguments of `mla_decode`."""
    import torch

    random = torch.Generator(device).manual_seed(0)
    counts = [-(-n // PAGE) for n in case.lengths]
    order = torch.randperm(sum(counts), generator=random, device=device, dtype=torch.int32)
    table = torch.zeros(case.batch, max(1, *counts), dtype=torch.int32, device=device)
    for sequence, part in enumerate(order.split(counts)):
        table[sequence, : len(part)] = part

    def normal(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=random)

    return {
        "q_nope": normal(case.batch, case.queries, case.heads, HEAD_DIM_V),
        "q_rope": normal(case.batch, case.queries, case.heads, HEAD_DIM - HEAD_DIM_V),
        "kv_cache": normal(len(order), PAGE, HEAD_DIM),
        "block_table": table,
        "cache_seqlens": torch.tensor(case.lengths, dtype=torch.int32, device=device),
        "softmax_scale": SCALE,
    }


def checked(case: Case, arguments: dict[str, Any]) -> float:
    """The error of the first sequences over the error of plain bfloat16 code.

    Raises:
        ValueError: the error is more than twice that of plain code.
    """
    import torch

    from ...ops.mla import mla_decode
    from ...reference.mla import mla_decode_reference

    o, _ = mla_decode(**arguments)
    few = arguments | {
        name: arguments[name][:CHECKED]
        for name in ("q_nope", "q_rope", "block_table", "cache_seqlens")
    }
    exact, _ = mla_decode_reference(**few)
    plain, _ = mla_decode_reference(**few, dtype=None)
    ours, theirs = (torch.linalg.vector_norm(x - exact).item() for x in (o[:CHECKED], plain))
    if not ours <= 2 * theirs:
        raise ValueError(f"{case}: error {ours:.3g}, of plain bfloat16 code {theirs:.3g}")
    return ours / theirs if theirs else 0.0


def row(
    case: Case, mode: Mode, arguments: dict[str, Any], roofline: Roofline, rep_ms: float
) -> Row:
    from ...ops.mla import mla_decode

    timing = timed(lambda: mla_decode(**arguments), mode, rep_ms)
    reading = case.nbytes / roofline.copy_gbps / 1e3
    products = case.flops / (roofline.matmul_tflops or 1.0) / 1e6
    return {
        "batch": case.batch,
        "tokens": case.tokens,
        "ragged": case.ragged,
        "heads": case.heads,
        "queries": case.queries,
        "mode": mode,
        "time_us": timing.median_us,
        "spread_us": timing.spread_us,
        "roofline_us": max(reading, products),
        "bound": "products" if products > reading else "memory",
        "cache_mib": case.nbytes / 2**20,
        "read_gbps": gbps(case.nbytes, timing.median_us),
        "share_of_copy": gbps(case.nbytes, timing.median_us) / roofline.copy_gbps,
        "rate_tflops": case.flops / timing.median_us / 1e6,
    }


def timed(call: Call, mode: Mode, rep_ms: float) -> Timing:
    if mode == "calls":
        return time_cudagraph(call, rep_ms / 4)  # the graph is replayed ten times
    if mode == "rested":
        return time_rested({"call": call}, mode="eager", flush="none")["call"]
    flush: Flush = "zero" if mode == "do_bench" else "read"
    return time_cuda(call, mode=mode, flush=flush, rep_ms=rep_ms)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for x in rows:
        if x["mode"] != ("rested" if x["bound"] == "products" else "calls"):
            continue
        mib, share, rate = x["cache_mib"], x["share_of_copy"], x["rate_tflops"]
        assert isinstance(mib, float) and isinstance(share, float) and isinstance(rate, float)
        what = f"B={x['batch']} S={x['tokens']} H={x['heads']} T={x['queries']}"
        if x["bound"] == "products":
            detail = f"{rate:.0f} TFLOP/s"
            found.append(
                Verdict(f"{what}: at least {LEAST_TFLOPS:g}", rate >= LEAST_TFLOPS, detail)
            )
        elif mib * 2**20 >= LEAST_BYTES:
            name = f"{what}: share_of_copy at least {LEAST_SHARE}"
            found.append(Verdict(name, share >= LEAST_SHARE, f"{share:.3f}"))
    return found


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage((), 40),),
)
