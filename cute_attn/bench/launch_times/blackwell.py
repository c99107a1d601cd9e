"""Predicted rates of attention on a B200: our kernels, and FlashAttention-4's beside their
published rates. Needs no GPU, and FlashAttention-4 for its rows.

No B200 has run this. The rates of the model are published ones (`timing/published/b200.json`). So
the error at FlashAttention-4's kernels, whose rates on a B200 are published, is the error to expect
at ours.

A launch of the published size is too large for the emulator. Two reduced launches of one cluster
run instead, whose work is that of some tiles (or query rows) with all of their keys. Their
difference gives the time of a tile, and the whole launch is as many tiles as the busiest cluster
has. The rates of the L2 and of memory are those of a GPU that is full of such clusters.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark
from ..harness.report import Report, Row, Verdict

if TYPE_CHECKING:
    from ...emulator.recording import Recording
    from ..peers import Request

GPU, SMS = "b200", 148
ROWS = 128  # of a CTA of the kernels before and after a backward
CAPTURES = Path(__file__).parents[3] / "build" / "peers-with-lines"

Record = Callable[[int], "list[Recording]"]  # of a reduced launch with so much work


@dataclass(frozen=True)
class Piece:
    """A launch of a call.

    Attributes:
        launch: its number in the reduced call.
        work: of the reduced launches: two of them, or one whose CTAs are those of the whole launch.
        whole: work of a cluster of the whole launch.
        rounds: clusters that the busiest SMs run one after the other.
        ctas: for one reduced launch, CTAs of the whole launch.
        readers: clusters that read the same bytes at a time.
        record: the recordings of a reduced call.
    """

    launch: int
    record: Record
    work: tuple[int, ...]
    whole: int
    rounds: float = 1.0
    ctas: int = SMS
    readers: float = 1.0

    def us(self) -> float:
        """Microseconds of the whole launch."""
        from ...timing import Whole, load_rates, predict
        from ...timing.blackwell import Blackwell

        start = Blackwell(load_rates(GPU)).launch_us(self.ctas) or 0.0
        times = []
        for work in self.work:
            recording = self.record(work)[self.launch]
            (found,) = predict([recording], gpu=GPU, whole=Whole(self.ctas, self.readers))
            times.append(found.us)
        if len(times) == 1:
            return times[0]
        (less, more), (first, second) = self.work, times
        cluster = first - start + (self.whole - less) * (second - first) / (more - less)
        return start + self.rounds * cluster


@dataclass(frozen=True)
class Case:
    """A call: who has the kernels, the call's name, TFLOP, and what is published of it."""

    who: str
    name: str
    tflop: float
    pieces: Sequence[Piece]
    published: float | None = None
    source: str = ""


# -- reduced calls


def _ours(seqlen_q: int, seqlen_k: int, scheduler: str | None,
          backward: bool = False) -> list[Recording]:  # fmt: skip
    import torch

    from ... import flash_attn_func
    from ...emulation import emulated
    from ...emulator import Emulator

    emulator = Emulator(num_sms=2, checks="none", on_findings="collect", record=1)
    q, do = (torch.randn(1, seqlen_q, 1, 256, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, seqlen_k, 1, 256, dtype=torch.bfloat16) for _ in range(2))
    with emulated("sm_100a", emulator):
        if not backward:
            flash_attn_func(q, k, v, scheduler=scheduler)
            return emulator.recordings
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o, _ = flash_attn_func(*leaves)
        emulator.recordings.clear()
        torch.autograd.grad(o, leaves, do)
    return emulator.recordings


def _request(head_dim: int, seqlen_q: int, seqlen_k: int, backward: bool) -> Request:
    from ..peers import flash_attention_4

    return (flash_attention_4.backward if backward else flash_attention_4.forward)(
        arch="sm_100a", head_dim=head_dim, heads=1,
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_sms=2,
    )  # fmt: skip


def _requests() -> list[Request]:
    """What is captured of FlashAttention-4: all of it in one process, which takes less time."""
    return [
        *(_request(128, rows, 8192, False) for rows in (512, 1024)),
        *(_request(256, rows, keys, False) for keys in (4096, 16384) for rows in (256, 512)),
        *(_request(128, rows, 256, True) for rows in (1024, 2048)),
        *(_request(256, 256, keys, True) for keys in (1024, 2048)),
        *(_request(256, rows, 128, True) for rows in (1024, 2048)),
    ]


def _theirs(head_dim: int, seqlen_q: int, seqlen_k: int, backward: bool = False) -> list[Recording]:
    from ...emulator import Emulator
    from ..peers import capture_all

    (captured,) = capture_all(CAPTURES, [_request(head_dim, seqlen_q, seqlen_k, backward)])
    memory = captured.materialise(captured.random_inputs())
    emulator = Emulator(num_sms=2, checks="none", on_findings="collect", record=1)
    for call in captured.calls:
        image = call.function.object_file.read_bytes()
        emulator.load_object(image, call.function.ptx)(*memory.arguments(call))
    return emulator.recordings


def _once(record: Record) -> Record:
    """A call's recordings, which several pieces use."""
    known: dict[int, list[Recording]] = {}

    def recorded(work: int) -> list[Recording]:
        if work not in known:
            known[work] = record(work)
        return known[work]

    return recorded


# -- whole calls

FORWARD_2280 = "FlashAttention pull request 2280, B200"
FORWARD_2454 = "FlashAttention pull request 2454, B200 at 1,965 MHz"
CUDNN = "NVIDIA's runs of September 2026, GB200"


def _forward(record: Callable[[int, int], list[Recording]], rows: int, seqlen: int,
             sequences: int) -> tuple[Piece]:  # fmt: skip
    """A dense forward, in tiles of so many query rows for a cluster of two CTAs."""
    tiles = seqlen // rows
    clusters = SMS // 2
    return (
        Piece(
            0,
            _once(lambda n: record(n * rows, seqlen)),
            (1, 2),
            math.ceil(tiles * sequences / clusters),
            readers=min(tiles, clusters),
        ),
    )


def _gradients_hd256(record: Callable[[int, int], list[Recording]], seqlen: int, heads: int,
                     heads_k: int, keys: int, cluster: int) -> tuple[Piece, ...]:  # fmt: skip
    """A causal backward in a kernel of dQ, with 256 rows for a cluster of two CTAs, and one of dK
    and dV, with `keys` for a cluster. The work is that of the average cluster, which sees half of
    the sequence."""
    clusters, group = SMS // cluster, heads // heads_k
    dq = _once(lambda n: record(256, n))
    dkdv = _once(lambda n: record(n, keys))
    of_keys = seqlen // keys * heads_k
    return (
        Piece(0, dq, (1024,), 0, ctas=heads * seqlen // ROWS),
        Piece(1, dq, (1024, 2048), seqlen // 2, heads * seqlen / 256 / (SMS // 2),
              readers=min(seqlen // 256, SMS // 2)),
        # The longest cluster has twice the average work.
        Piece(2, dkdv, (1024, 2048), group * seqlen // 2, max(of_keys / clusters, 2.0),
              readers=min(seqlen // keys, clusters)),
    )  # fmt: skip


def _gradients_hd128(seqlen: int, sequences: int) -> tuple[Piece, ...]:
    """FlashAttention-4's dense backward: a cluster of two CTAs has 256 keys."""
    record = _once(lambda n: _theirs(128, n, 256, backward=True))
    rounds = math.ceil(seqlen // 256 * sequences / (SMS // 2))
    rows = 1024
    return (
        Piece(0, record, (rows,), 0, ctas=sequences * seqlen // ROWS),
        Piece(1, record, (rows, 2 * rows), seqlen, rounds, readers=min(seqlen // 256, SMS // 2)),
        Piece(2, record, (rows,), 0, ctas=sequences * seqlen // ROWS),
    )


def cases() -> list[Case]:
    """All calls."""

    def tflop(head_dim: int, seqlen: int, sequences: int, products: float, share: float) -> float:
        return products * 2 * seqlen**2 * head_dim * sequences * share * 1e-12

    def theirs(head_dim: int) -> Callable[[int, int], list[Recording]]:
        return lambda q, k: _theirs(head_dim, q, k)

    def ours(scheduler: str) -> Callable[[int, int], list[Recording]]:
        return lambda q, k: _ours(q, k, scheduler)

    four, us = "FlashAttention-4", "cute_attn"
    found = [
        Case(four, "forward, head_dim 128, 4 x 8192, 16 heads", tflop(128, 8192, 64, 2, 1),
             _forward(theirs(128), 512, 8192, 64), 1534.8, FORWARD_2280),
        Case(four, "backward, head_dim 128, 4 x 8192, 16 heads", tflop(128, 8192, 64, 5, 1),
             _gradients_hd128(8192, 64), 1359.8, FORWARD_2280),
    ]  # fmt: skip
    for seqlen, published in ((4096, 1488.0), (16384, 1680.0)):
        name = f"forward, head_dim 256, 1 x {seqlen}, 8 heads"
        work = tflop(256, seqlen, 8, 2, 1)
        found.append(
            Case(four, name, work, _forward(theirs(256), 256, seqlen, 8), published, FORWARD_2454)
        )
        found += [
            Case(us, f"{name}, {scheduler}", work, _forward(ours(scheduler), 256, seqlen, 8))
            for scheduler in ("static", "clc")
        ]
    for seqlen, published in ((8192, 842.0), (16384, 946.0)):
        name = f"backward, head_dim 256, causal, 1 x {seqlen}, 32/2 heads"
        work = tflop(256, seqlen, 32, 5, 0.5)
        pieces = _gradients_hd256(
            lambda q, k: _theirs(256, q, k, backward=True), seqlen, 32, 2, 128, 2
        )
        found.append(Case(four, name, work, pieces, published, CUDNN))
        pieces = _gradients_hd256(
            lambda q, k: _ours(q, k, None, backward=True), seqlen, 32, 2, 256, 4
        )
        found.append(Case(us, name, work, pieces))
    return found


# -- the report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="calls whose names have a TEXT")


def run(args: argparse.Namespace) -> Report:
    os.environ["CUTE_DSL_LINEINFO"] = "1"  # before the compiler is imported
    from ..peers import capture_all, missing

    lacking = missing("flash_attention_4")
    chosen = [
        case
        for case in cases()
        if not args.only or any(text in f"{case.who} {case.name}" for text in args.only)
    ]
    if not lacking and any(case.who != "cute_attn" for case in chosen):
        capture_all(CAPTURES, _requests())
    rows: list[Row] = []
    problems = []
    for case in track(chosen[:1] if args.short else chosen, "predictions of a B200"):
        if lacking and case.who != "cute_attn":
            continue
        try:
            rows.append(predicted(case))
        except Exception as error:
            problems.append(f"{case.who}, {case.name}: {type(error).__name__}: {error}")
    return Report(
        benchmark="predictions-b200",
        title="Predicted TFLOP/s on a B200, beside published ones",
        environment=describe(args.argv, commit=args.commit),
        rows=rows,
        verdicts=[
            Verdict("every call was predicted", not problems, "; ".join(problems) or "all of them")
        ],
        notes=[
            "all rates of the model are published ones or an H100's: no B200 has run it",
            *([f"without FlashAttention-4: {lacking}"] if lacking else []),
        ],
        succeeded=not problems,
    )


def predicted(case: Case) -> Row:
    """The row of a call."""
    times = [piece.us() for piece in case.pieces]
    tflops = case.tflop * 1e6 / sum(times)
    row: dict[str, Any] = {
        "kernels": case.who,
        "call": case.name,
        "predicted_us": sum(times),
        "predicted_us_of_launches": ", ".join(f"{us:.0f}" for us in times),
        "predicted_tflops": tflops,
        "published_tflops": case.published,
        "error_pct": 100 * (tflops / case.published - 1) if case.published else None,
        "published_by": case.source,
    }
    return row


BENCHMARK = Benchmark(run=run, needs_gpu=False, add_arguments=add_arguments)
