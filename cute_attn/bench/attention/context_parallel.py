"""Attention over several GPUs beside one GPU with a part of the work.

The benchmark runs one process for each of W GPUs, with NCCL: the processes that `torchrun` started,
or new processes for all GPUs of the machine. The base is one GPU's time for a call with 1 / W of
the work: 1 / W of the heads, or, if the K/V heads are too few for that, 1 / W of a windowed call's
tokens. All GPUs run the base at once, in the same processes, in turn with the calls over ranks. The
share is the base's time divided by the time over ranks.

Delta rules are in `delta_rules_over_ranks`.

`--tiny` runs tiny cases without a GPU, over gloo and in the emulator. Then times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..harness.environment import describe
from ..harness.registry import Benchmark, Unavailable
from ..harness.report import Report, Row, Verdict
from . import delta_rules_over_ranks
from .clock_of_ranks import Clock

if TYPE_CHECKING:
    import torch

MODES = ("gather", "ring", "heads", "mesh")


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

    def part(self, world: int) -> Case:
        """The call with 1 / world of the work."""
        if not self.heads_k % world:
            return self._replace(heads=self.heads // world, heads_k=self.heads_k // world)
        assert self.window is not None
        return self._replace(lengths=tuple(n // world for n in self.lengths))


def _documents(total: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of 100 to 16k tokens, log-uniform, that sum to `total`."""
    draw = random.Random(seed)
    found: list[int] = []
    while (rest := total - sum(found)) > 0:
        found.append(min(rest, int(100 * 160 ** draw.random())))
    return tuple(found)


def cases(world: int) -> tuple[Case, ...]:
    """The table for W ranks. Most numbers of tokens grow with W."""

    def k(tokens: int) -> str:
        return f"{tokens // 1024}k"

    def gqa(tokens: int) -> Case:
        return Case(f"GQA 32/8, {k(tokens)}", (tokens,), 32, 8, 128, forward=0.97, both=0.95)

    mha, wide, packed = 2**13 * world, 2**14 * world, 2**15 * world
    name = f"documents, {k(packed)} in all"
    documents = Case(name, _documents(packed), 32, 8, 128, forward=0.9, both=0.9)
    window = Case(f"hd256 16/2, window 1024, {k(wide)}", (wide,), 16, 2, 256, "contiguous", 1024)
    lengths = {2**14 * world, 2**15 * world, 2**17}
    return (
        *map(gqa, sorted(lengths)),
        Case(f"MHA 32/32, {k(mha)}", (mha,), 32, 32, 128, forward=0.9, both=0.9),
        window._replace(forward=0.95, both=0.95),
        documents._replace(name=f"{name}, layout documents", layout="documents"),
        documents._replace(forward=0.0, both=0.0),
    )


def tiny_cases(world: int) -> tuple[Case, ...]:
    """Cases for the emulator."""
    return (
        Case("GQA", (40 * world,), 2 * world, world, 64),
        Case("window", (40 * world,), world, 1, 64, "contiguous", 20),
        Case("documents", (30 * world, 7, 10 * world), 2 * world, world, 64, "documents"),
    )


DECODE_KEYS, DECODE_KEYS_OF_TINY = 2**18, 64
DECODE_SHARE = 0.85  # W ranks decode 0.85 W times as fast as one


class Timed:
    """The calls of one case on this rank.

    Attributes:
        plan: the plan of a call over ranks, or None for one GPU.
    """

    def __init__(self, case: Case, device: torch.device, plan: Any = None) -> None:
        import torch

        self.case, self.plan = case, plan
        self.bounds = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
        self.packed = len(case.lengths) > 1
        self.window = (None if case.window is None else case.window - 1, 0)
        self.offsets = torch.tensor(self.bounds, device=device, dtype=torch.int32)
        rows = self.bounds[-1] if plan is None else plan.tokens
        shape = (rows,) if self.packed else (1, rows)
        self.q, self.k, self.v, self.do = (
            torch.randn(*shape, heads, case.head_dim, device=device, dtype=torch.bfloat16)
            for heads in (case.heads, case.heads_k, case.heads_k, case.heads)
        )
        self.leaves = [x.requires_grad_() for x in (self.q, self.k, self.v)]

    def attend(self) -> Any:
        from ... import flash_attn_func, flash_attn_varlen_func

        options: dict[str, Any] = {"window_size": self.window}
        if self.plan is not None:
            function = flash_attn_varlen_func if self.packed else flash_attn_func
            return function(*self.leaves, cp=self.plan, **options)
        if not self.packed:
            return flash_attn_func(*self.leaves, **options)
        longest = max(self.case.lengths)
        return flash_attn_varlen_func(
            *self.leaves, cu_seqlens_q=self.offsets, cu_seqlens_k=self.offsets,
            max_seqlen_q=longest, max_seqlen_k=longest, **options,
        )  # fmt: skip

    def forward(self) -> None:
        import torch

        with torch.no_grad():
            self.attend()

    def both(self) -> None:
        import torch

        o, _ = self.attend()
        torch.autograd.grad(o, self.leaves, self.do)


def plan_of(case: Case, mode: str) -> Any:
    """The plan of a mode; "mesh" has 2 parts of the tokens."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ...distributed import context_parallel

    bounds = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    lengths: Any = {"cu_seqlens": bounds} if len(case.lengths) > 1 else {"seqlen": bounds[1]}
    if mode != "mesh":
        of_plan = None if mode == "chosen" else mode
        return context_parallel(layout=case.layout, mode=of_plan, **lengths)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    sizes = (2, dist.get_world_size() // 2)
    if sizes not in _meshes:
        _meshes[sizes] = init_device_mesh(device, sizes, mesh_dim_names=("tokens", "heads"))
    return context_parallel(_meshes[sizes], layout=case.layout, mode="gather", **lengths)


_meshes: dict[tuple[int, int], Any] = {}


def takes(case: Case, mode: str, world: int) -> bool:
    """Whether a mode takes a case."""
    if mode == "mesh":
        return world >= 4 and world % 2 == 0 and case.heads_k % (world // 2) == 0
    return mode != "heads" or case.heads_k % world == 0


def measured(
    case: Case, modes: tuple[str, ...], device: torch.device, *, forward_only: bool = False
) -> Iterator[Row]:
    """A row for each mode that takes the case; every rank calls this."""
    import torch
    import torch.distributed as dist

    world, clock = dist.get_world_size(), Clock(device)
    base = Timed(case.part(world), device)
    for mode in modes:
        if not takes(case, mode, world):
            continue
        over = Timed(case, device, plan_of(case, mode))
        calls = {"base": base.forward, "over": over.forward}
        if not forward_only:
            calls |= {"base_both": base.both, "over_both": over.both}
        times = clock.times(calls)
        base_both, over_both = times.get("base_both"), times.get("over_both")
        yield {
            "case": case.name,
            "mode": mode,
            "gpus": world,
            "base_ms": times["base"],
            "forward_ms": times["over"],
            "share_of_ideal_forward": times["base"] / times["over"],
            "base_both_ms": base_both,
            "both_ms": over_both,
            "share_of_ideal_both": base_both / over_both if base_both and over_both else None,
            "forward_peak_mib": clock.peak_mib(over.forward),
            "both_peak_mib": None if forward_only else clock.peak_mib(over.both),
        }
        del over, calls
        if device.type == "cuda":
            torch.cuda.empty_cache()


def decoded(
    device: torch.device, keys: int = DECODE_KEYS, heads: int = 32, heads_k: int = 8,
    head_dim: int = 128,
) -> Iterator[Row]:  # fmt: skip
    """One sequence: on one GPU, and over all ranks; call by call, and replays of graphs."""
    import torch
    import torch.distributed as dist

    from ... import flash_attn_func
    from ...distributed import decode_over_ranks

    world, clock = dist.get_world_size(), Clock(device)
    q = torch.randn(1, 1, heads, head_dim, device=device, dtype=torch.bfloat16)
    k, v = (
        torch.randn(1, keys, heads_k, head_dim, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    own = slice(0, keys // world)
    own_k, own_v = k[:, own].contiguous(), v[:, own].contiguous()
    calls: dict[str, Callable[[], Any]] = {
        "base": lambda: flash_attn_func(q, k, v, num_splits=0),
        "over": lambda: decode_over_ranks(q, own_k, own_v),
    }
    with torch.no_grad():
        for mode in ("calls", "graphs") if device.type == "cuda" else ("calls",):
            if mode == "graphs":
                calls = {name: replays(call) for name, call in calls.items()}
            times = clock.times(calls, 0.03)
            yield {
                "case": decode_name(keys),
                "mode": mode,
                "gpus": world,
                "base_ms": times["base"] / world,
                "forward_ms": times["over"],
                "share_of_ideal_forward": times["base"] / world / times["over"],
                **dict.fromkeys(("base_both_ms", "both_ms", "share_of_ideal_both")),
                **dict.fromkeys(("forward_peak_mib", "both_peak_mib")),
            }


def decode_name(keys: int) -> str:
    return f"decode, {keys // 1024}k keys"


def replays(call: Callable[[], Any]) -> Callable[[], None]:
    """Replays of a graph of a call, which has run before."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def table(
    modes: tuple[str, ...], *, tiny: bool, short: bool, budget: float, wanted: tuple[str, ...] = ()
) -> Iterator[Row]:
    """All rows, on every rank: first the chosen mode of each case, delta rules and decode, then
    other modes. No case begins that would, if it takes as long as the longest case so far, end
    after `budget` seconds.

    Args:
        wanted: only cases whose name contains one of these words; all cases without words.
    """
    import torch
    import torch.distributed as dist

    begin, world = time.time(), dist.get_world_size()
    device = torch.device("cpu") if tiny else torch.device("cuda", torch.cuda.current_device())
    todo = tiny_cases(world) if tiny else cases(world)
    of_deltas = () if tiny else delta_rules_over_ranks.cases(world)
    keys = DECODE_KEYS_OF_TINY if tiny else DECODE_KEYS
    last = 1 if short else None
    parts: list[tuple[str, Callable[[], Iterator[Row]]]] = []
    first = modes[:1] if "chosen" not in modes else ("chosen",)
    for names in (first, tuple(mode for mode in modes if mode not in first)):
        if names:
            parts += [(case.name, partial(measured, case, names, device)) for case in todo[:last]]
        if names == first:
            for delta_case in of_deltas[:last]:
                rows = partial(delta_rules_over_ranks.measured, delta_case, Clock(device))
                parts.append((delta_case.name, rows))
            shape = (2, 1, 64) if tiny else ()
            parts.append((decode_name(keys), partial(decoded, device, keys, *shape)))
    longest = 0.0
    for name, rows_of in parts:
        if wanted and not any(word in name for word in wanted):
            continue
        now = time.time()
        # Rank 0 says whether the budget is spent, so all ranks agree.
        late = torch.tensor([float(now - begin + longest > budget)], device=device)
        dist.broadcast(late, 0)
        if late.item():
            return
        yield from rows_of()
        longest = max(longest, time.time() - now)


def worker(rank: int, world: int, port: int, file: str, options: dict[str, Any]) -> None:
    """One rank of the benchmark; rank 0 prints each row when it is known, and writes all rows."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    import torch
    import torch.distributed as dist

    running: Any = contextlib.nullcontext()
    if options["tiny"]:
        from ... import emulated

        torch.set_num_threads(1)
        running = emulated("sm_90a")
        dist.init_process_group("gloo", rank=rank, world_size=world)
    else:
        local = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
        dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    rows: list[Row] = []
    with running:
        for row in table(**options):
            rows.append(row)
            if rank == 0:
                print(line(row), flush=True)
                Path(file).write_text(json.dumps(rows))
    dist.destroy_process_group()


def line(row: Row) -> str:
    """A row on the terminal."""

    def share(name: str) -> str:
        value = row[f"share_of_ideal_{name}"]
        return "     -" if value is None else f"{value:6.1%}"

    def ms(name: str) -> str:
        value = row[name]
        return "       -" if value is None else f"{value:8.3f}"

    return (
        f"{row['case']:44s} {row['mode']:7s} forward {share('forward')} ({ms('base_ms')} over "
        f"{ms('forward_ms')} ms)  with backward {share('both')} ({ms('base_both_ms')} over "
        f"{ms('both_ms')} ms)"
    )


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
    parser.add_argument(
        "--budget", type=float, default=600.0, metavar="SECONDS",
        help="begin no case that would probably end after so many seconds",
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="WORD",
        help="only cases whose name contains one of these words, such as window, chunk or decode",
    )  # fmt: skip
    parser.add_argument(
        "--tiny", action="store_true",
        help="tiny cases over gloo in the emulator, which only show that the benchmark runs",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report:
    import torch

    gpus = torch.cuda.device_count()
    options = {
        "modes": tuple(args.modes), "tiny": args.tiny, "short": args.short, "budget": args.budget,
        "wanted": tuple(args.cases),
    }  # fmt: skip
    started = "RANK" in os.environ  # by torchrun
    world = int(os.environ["WORLD_SIZE"]) if started else 2 if args.tiny else gpus
    if not args.tiny and (world < 2 or not gpus):
        raise Unavailable(f"{gpus} GPUs and {world} processes, and context parallelism needs 2")
    with tempfile.TemporaryDirectory() as folder, _ends_by_exception():
        path = Path(folder) / "rows.json"
        try:
            if started:
                rank = int(os.environ["RANK"])
                worker(rank, world, 0, str(path), options)
                if rank:
                    raise SystemExit(0)
            else:
                _spawn(world, str(path), options)
        except Exception as error:  # what has run is reported
            if not path.exists():
                raise
            print(f"ended early: {type(error).__name__}: {error}", flush=True)
        if not path.exists():
            raise Unavailable(f"no case has one of the words {args.cases} in its name")
        rows: list[Row] = json.loads(path.read_text())
    args.tag = "-".join(filter(None, (args.tag, f"{world}-gpus")))  # a file for each number
    return Report(
        benchmark="context-parallel",
        title=f"Attention over {world} GPUs beside one GPU with 1 / {world} of the work",
        environment=describe(args.argv, commit=args.commit),
        parameters={"gpus": world, "tiny": args.tiny},
        rows=rows,
        verdicts=[] if args.tiny else list(_verdicts(rows, world)),
    )


def _spawn(world: int, file: str, options: dict[str, Any]) -> None:
    """Run the ranks, which end with this function."""
    from torch.multiprocessing.spawn import spawn

    ranks = spawn(worker, (world, free_port(), file, options), nprocs=world, join=False)
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.terminate()


class _Ended(Exception):
    """The process got SIGTERM, as from `timeout`."""


@contextlib.contextmanager
def _ends_by_exception() -> Iterator[None]:
    """Within it, SIGTERM raises an exception."""

    def end(*_: Any) -> None:
        raise _Ended("SIGTERM")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _verdicts(rows: list[Row], world: int) -> list[Verdict]:
    found = []
    of_deltas = {case.name: case for case in delta_rules_over_ranks.cases(world)}
    goals: dict[str, Any] = {case.name: case for case in cases(world)} | of_deltas
    for row in rows:
        case = goals.get(str(row["case"]))
        if case is None:
            share = float(row["share_of_ideal_forward"])  # type: ignore[arg-type]
            claim = f"{row['case']}, {row['mode']}: at least {DECODE_SHARE:.0%} of all GPUs' rate"
            found.append(Verdict(claim, share >= DECODE_SHARE, f"{share:.1%}"))
        elif row["mode"] in ("chosen", "states"):
            for name in ("forward", "both"):
                goal, share = getattr(case, name), float(row[f"share_of_ideal_{name}"])  # type: ignore[arg-type]
                if goal:
                    claim = f"{case.name}, {name}: at least {goal:.0%} of all GPUs' rate"
                    found.append(Verdict(claim, share >= goal, f"{share:.1%}"))
    return found


BENCHMARK = Benchmark(run=run, needs_gpu=False, add_arguments=add_arguments)
