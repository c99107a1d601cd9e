"""The rate at which CTAs of a cluster of four hand P' to one another, by st.async.

The dK/dV kernel at head_dim 256 needs 32 KB for each of two CTAs in 2048 clocks: 16 bytes per
clock.
"""

from __future__ import annotations

import argparse

from ...cache import KernelDef
from ..harness.environment import describe
from ..harness.registry import Benchmark, GpuCheckStage, Unavailable
from ..harness.report import Report, Row, Verdict

KERNEL = KernelDef(
    name="bench_exchange", target="cute_attn.bench.attention.exchange_kernel:Exchange"
)
NEEDED = 16.0  # bytes per clock of each sending CTA
TILES = 2000


def run(args: argparse.Namespace) -> Report:
    import torch

    from ... import launch
    from .exchange_kernel import CLUSTER, EXCHANGE_BYTES, ExchangeSpec

    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability()[0] < 9:
        raise Unavailable("clusters need sm_90 or newer")
    most = launch.num_clusters(device, CLUSTER)
    rows: list[Row] = []
    for stages in (1, 2, 4):
        function = launch.get_for(device, KERNEL, ExchangeSpec(stages))
        for clusters in sorted({1, most}):
            clocks = torch.full((clusters, CLUSTER), -1, dtype=torch.int64, device=device)
            for _ in range(3):
                function(clocks, TILES)
            each = clocks.double() / TILES
            rows.append(
                {
                    "stages": stages,
                    "clusters": clusters,
                    "tile_clocks": each.median().item(),
                    "slowest_tile_clocks": each.max().item(),
                    "bytes_per_clock": EXCHANGE_BYTES / each.median().item(),
                }
            )
    single = next(row for row in rows if row["stages"] == 1 and row["clusters"] == most)
    reached = float(single["bytes_per_clock"])  # type: ignore[arg-type]
    return Report(
        benchmark="attention-exchange",
        title="st.async between the CTAs of clusters of four",
        environment=describe(args.argv, commit=args.commit),
        parameters={"tiles": TILES, "bytes_of_a_tile": EXCHANGE_BYTES},
        rows=rows,
        verdicts=[
            Verdict(
                f"the dK/dV kernel's one stage moves {NEEDED:g} bytes a clock of each sending CTA",
                reached >= NEEDED,
                f"{reached:.1f}",
            )
        ],
    )


BENCHMARK = Benchmark(run=run, gpu_check=(GpuCheckStage((), 30),))
