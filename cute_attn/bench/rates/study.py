"""Rates and latencies of the units of a GPU: what the timing model of the emulator reads.

arithmetic  clocks of an instruction on one of an SM's four quarters, and until its result
mma         mma.sync and wgmma: clocks between instructions, and until a group has finished
shared      loads and stores of shared memory
barriers    hand-overs between warps
copies      bulk copies by bytes in flight, from L2 and from memory; stores and additions
memory      plain loads, stores and additions
code        clocks until machine code has come that the SM has not executed lately
beside      products beside other work of the SM
chain       steps that wait for each other
sharing     rates of an SM while other SMs copy or add, too
launch      microseconds of a launch, and the clock under load
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ...cache import KernelDef
from ..harness.environment import describe
from ..harness.registry import Benchmark, GpuCheckStage, Unavailable
from ..harness.report import Report, Row, Verdict
from ..harness.timing import Mode
from .beside import GROUP, NOTHING, ROUNDS, WARPGROUPS, other_work
from .loops import LOOPS, WGMMA_BESIDE, WGMMA_GROUPS
from .spec import KERNEL, LoopsSpec

if TYPE_CHECKING:
    import torch

    from .machine import Machine

CLOCKS, GBPS, MICROSECONDS, MHZ = "clocks", "GB/s", "us", "MHz"
QUARTERS = 4  # of an SM, each with its own scheduler
CHAINS = 8
THROUGHPUT_WARPS = (4, 16)
SHARED_WARPS = (1, 4, 16)
WGMMA_N = (8, 16, 32, 64, 80, 96, 128, 160, 192, 256)
SHORT_WGMMA_N = (64, 128, 256)
BARRIER_WARPS = (2, 4, 8, 12)
LATENCY_BYTES = (16, 1024, 2048, 4096, 8192, 16384, 32768)
IN_FLIGHT_KIB = (2, 4, 8, 16, 32, 64, 128, 192)
STORE_BYTES = (512, 2048, 8192, 16384)
ADD_WARPS = 8
LOAD_S = 0.25  # seconds of products before the clock is read
EMPTY_LAUNCHES = 200
EVICT_KIB = 320  # more than an SM's caches of instructions hold
CODE_WARPS = (4, 8)
CODE_KIB = {  # the assembler takes a minute for a block of 300 KiB
    "code": (4, 16, 32, 48, 64, 96, 128, 160),
    "code with jumps": (16, 32, 64, 96, 128, 160),
}
CODE_SHARED_KIB = 120  # one CTA an SM
FIRST_CODE = ((32, 4), (64, 4), (96, 4), (96, 12), (128, 4))  # KiB, warps
SHARING_SMS = (1, 4, 16, 32, 64, 132)
SAME_KIB = 64
SHORTEST_PRODUCTS = (1, 4)
BUSY_LAUNCHES = 20
CLUSTERS = (1, 2)
# Shared memory in KiB, CTAs, warps and CTAs of a cluster of empty kernels.
EMPTY = (
    (1, 1, 1, 1),
    (1, 132, 4, 1),
    (200, 132, 12, 1),
    (200, 16, 12, 1),
    (200, 16, 12, 2),
    (200, 132, 12, 2),
)
STARTED_CODE = (("code", 8), ("code", 32), ("code with jumps", 32))  # KiB
ONCE = ("load", "store", "load and store")
LAUNCH_MODES: tuple[Mode, ...] = ("do_bench", "graph")
PRODUCTS, SHORT_PRODUCTS = 4000, 40  # groups of products, of about 2,300 clocks each

STALL = "stall for an instruction of a quarter"

Rows = Iterator[Row]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[*PARTS], choices=[*PARTS], help="parts")


def row(part: str, what: str, how: str, value: float, unit: str) -> Row:
    return {"part": part, "what": what, "how": how, "value": float(value), "unit": unit}


# ------------------------------------------------------------------------------------- parts


def arithmetic(gpu: Machine, short: bool) -> Rows:
    from .machine import spec_of

    for name, t in gpu.times(spec_of("arithmetic", 1, 1), 32).items():
        ops = _operations("arithmetic", 1, name)
        yield row("arithmetic", name, "until the result", t.clocks / ops, CLOCKS)
    for warps in THROUGHPUT_WARPS:
        for name, t in gpu.times(spec_of("arithmetic", CHAINS, warps), 32).items():
            each = _operations("arithmetic", CHAINS, name) * warps / QUARTERS
            how = f"on a quarter, {warps // QUARTERS} warps"
            yield row("arithmetic", name, how, t.clocks / each, CLOCKS)


def mma(gpu: Machine, short: bool) -> Rows:
    from .machine import spec_of

    for chains, warps, how in (
        (1, 1, "until the result"),
        (4, 4, "on a quarter, 1 warp"),
        (4, 8, "on a quarter, 2 warps"),
    ):
        for name, t in gpu.times(spec_of("mma.sync", chains, warps), 32).items():
            ops = _operations("mma.sync", chains, name) * max(1, warps // QUARTERS)
            yield row("mma", name, how, t.clocks / ops, CLOCKS)
    for kind in ("square", "logic"):
        for name, t in gpu.times(spec_of(f"mma.sync beside {kind}", 0, 8), 32).items():
            ops = _operations(f"mma.sync beside {kind}", 0, name) * 2
            yield row("mma", name, "on a quarter, 2 warps", t.clocks / ops, CLOCKS)
    few, many = WGMMA_GROUPS
    for what, operands in (("wgmma", "SS"), ("wgmma, A in registers", "RS")):
        for n in SHORT_WGMMA_N if short else WGMMA_N:
            for warpgroups in (1, 2) if n in SHORT_WGMMA_N else (1,):
                times = gpu.times(spec_of(what, n, 4 * warpgroups, shared_kib=64), 32)
                one = times[f"group of {few}"].clocks
                group = times[f"group of {many}"].clocks
                name = f"m64n{n}k16 {operands}"
                if warpgroups == 1:
                    yield row("mma", name, "until the result", one, CLOCKS)
                interval = (group - one) / (many - few) / warpgroups
                yield row("mma", name, f"interval, {warpgroups} warpgroups", interval, CLOCKS)
                how = f"group of {many}, {warpgroups} warpgroups"
                yield row("mma", name, how, group, CLOCKS)
                beside = times[f"group of {many} beside fma"].clocks
                yield row("mma", name, f"{how}, beside {WGMMA_BESIDE} fma", beside, CLOCKS)


def shared(gpu: Machine, short: bool) -> Rows:
    from .machine import spec_of

    for name, t in gpu.times(spec_of("shared memory latency"), 32).items():
        ops = _operations("shared memory latency", 0, name)
        yield row("shared", name, "until the result", t.clocks / ops, CLOCKS)
    for warps in SHARED_WARPS:
        for name, t in gpu.times(spec_of("shared memory", 0, warps), 32).items():
            ops = _operations("shared memory", 0, name) * warps
            yield row("shared", name, f"{warps} warps", t.clocks / ops, CLOCKS)


def barriers(gpu: Machine, short: bool) -> Rows:
    from .machine import spec_of

    for warps in BARRIER_WARPS:
        for name, t in gpu.times(spec_of("barriers", 0, warps), 64).items():
            ops = _operations("barriers", 0, name)
            yield row("barriers", name, f"{warps} warps", t.clocks / ops, CLOCKS)
    for cluster in CLUSTERS:
        spec = spec_of("cluster barrier", 0, 4, cluster=cluster)
        for name, t in gpu.times(spec, 64, ctas=cluster).items():
            ops = _operations("cluster barrier", 0, name)
            yield row("barriers", name, f"4 warps of {cluster} CTAs", t.clocks / ops, CLOCKS)


def copies(gpu: Machine, short: bool) -> Rows:
    from .machine import L2_BYTES, MEMORY_BYTES, spec_of

    spec = spec_of("bulk loads", 0, 1, shared_kib=224)
    ways = {"L2": L2_BYTES, "memory": MEMORY_BYTES}
    for level, size in ways.items():
        for nbytes in LATENCY_BYTES:
            step = nbytes if level == "L2" else 65 * 4096  # far from the copy before
            mask = (1 if level == "L2" else size // 2**20) * 2**20 - 1
            cold = level == "memory"
            t = gpu.times(
                spec, 200, size=nbytes, depth=1, step=step, mask=mask, cold=cold
            )["load"]  # fmt: skip
            yield row(
                "copies", f"bulk load from {level}", f"{nbytes} bytes alone", t.clocks, CLOCKS
            )
    for level, size in ways.items():
        for ctas in (1, gpu.sms):
            for kib in IN_FLIGHT_KIB:
                nbytes = min(16384, kib * 1024 // 2)
                depth = kib * 1024 // nbytes
                count = (2**29 if ctas > 1 else 2**23) // nbytes // ctas
                t = gpu.times(
                    spec, count, few=depth, ctas=ctas, size=nbytes, depth=depth,
                    step=nbytes * ctas, mask=size - 1, cold=level == "memory",
                )["load"]  # fmt: skip
                how = f"{kib} KiB in flight, {ctas} SMs"
                name = f"bulk load from {level}"
                yield row("copies", name, how, nbytes / t.clocks, "bytes a clock and SM")
                yield row("copies", name, how, ctas * nbytes / t.nanoseconds, GBPS)
    spec = spec_of("bulk stores", 0, 1, shared_kib=20)
    for ctas in (1, gpu.sms):
        for nbytes in STORE_BYTES:
            for level, size in ways.items():
                if level == "memory" and ctas == 1:
                    continue
                count = (2**27 if ctas > 1 else 2**21) // nbytes // ctas
                times = gpu.times(
                    spec, count, ctas=ctas, size=nbytes, step=nbytes * ctas, mask=size - 1
                )
                for name, t in times.items():
                    how = f"{nbytes} bytes each, {ctas} SMs"
                    name = f"bulk {name} to {level}"
                    yield row("copies", name, how, nbytes / t.clocks, "bytes a clock and SM")


def memory(gpu: Machine, short: bool) -> Rows:
    import torch

    from ..async_copy.machines import Gpu
    from ..harness.roofline import measure_copies
    from .machine import L2_BYTES, MEMORY_BYTES, spec_of

    words = gpu.memory.numel()
    for level, footprint in (("L2", 4 * 2**20), ("memory", MEMORY_BYTES)):
        nodes = footprint // 4096
        order = torch.randperm(nodes - 1, device=gpu.device) + 1
        way = torch.cat([torch.zeros(1, dtype=torch.int64, device=gpu.device), order])
        gpu.memory[: nodes * 1024 : 1024][way] = (way.roll(-1) * 4096).int()
        count = 64 if level == "L2" else 256
        cold = level == "memory"
        t = gpu.times(spec_of("global latency"), count, few=64, cold=cold)["load"]
        yield row("memory", f"load from {level}", "until the result", t.clocks / 8, CLOCKS)
        gpu.memory.zero_()
    for ctas in (1, gpu.sms):
        for level, size in (("L2", L2_BYTES), ("memory", MEMORY_BYTES)):
            if level == "memory" and ctas == 1:
                continue
            for nbytes in (4, 16):
                threads = ADD_WARPS * 32 * ctas
                spec = spec_of("global memory", nbytes, ADD_WARPS)
                times = gpu.times(
                    spec, 64, ctas=ctas, size=nbytes, step=nbytes * threads, mask=size - 1
                )
                for name, t in times.items():
                    moved = nbytes * ADD_WARPS * 32 * 8
                    rate = moved / t.clocks
                    yield row("memory", f"{name} to {level}", f"{ctas} SMs", rate,
                              "bytes a clock and SM")  # fmt: skip
    gpu.memory.zero_()
    assert gpu.memory.numel() == words
    reads = Gpu()
    for level in ("l2", "hbm"):
        name = {"l2": "L2", "hbm": "memory"}[level]
        yield row("memory", f"plain loads from {name}", f"{gpu.sms} SMs", reads.read(level), GBPS)
    for name, timing in measure_copies().items():
        yield row("memory", f"{name} of 1 GiB", "read plus written", 2**31 / timing.median_us / 1e3,
                  GBPS)  # fmt: skip


def launches(gpu: Machine, short: bool) -> Rows:
    import torch

    from ... import launch
    from ..harness.timing import time_cuda
    from .machine import spec_of

    for kib, ctas, warps, cluster in EMPTY:
        spec = spec_of("nothing", 0, warps, shared_kib=kib, cluster=cluster)
        how = f"{ctas} CTAs of {warps} warps, {kib} KiB" + ", clusters of 2" * (cluster == 2)

        times = torch.full((ctas, warps, 1, 4), -1, dtype=torch.int64, device=gpu.device)
        function = launch.get_for(gpu.device, KERNEL, spec)
        call = functools.partial(function, times, gpu.memory, 1, 16, 1, 0, 0)
        many = functools.partial(_repeat, call)

        for after, before in _befores(gpu).items():
            us = _profiled(call, before)
            yield row("launch", "empty kernel, profiled", how + after, us, MICROSECONDS)
        for mode in LAUNCH_MODES:
            t = time_cuda(call, mode=mode)
            yield row("launch", f"empty kernel, {mode}", how, t.median_us, MICROSECONDS)
        t = time_cuda(many, mode="graph", flush="none", rep_ms=20)
        yield row("launch", "empty kernel, one of many in a graph", how,
                  t.median_us / EMPTY_LAUNCHES, MICROSECONDS)  # fmt: skip
    for what, kib in STARTED_CODE:
        times = torch.full((gpu.sms, 4, 1, 4), -1, dtype=torch.int64, device=gpu.device)
        started = launch.get_for(gpu.device, KERNEL, spec_of(what, kib, 4, shared_kib=0))
        call = functools.partial(started, times, gpu.memory, 1, 16, 1, 0, 0)
        for after, before in _befores(gpu).items():
            how = f"{kib} KiB, {gpu.sms} CTAs of 4 warps" + after
            yield row("launch", f"{what}, profiled", how, _profiled(call, before), MICROSECONDS)
    times = torch.full((gpu.sms, ADD_WARPS, 1, 4), -1, dtype=torch.int64, device=gpu.device)
    for what in ONCE:
        once = launch.get_for(gpu.device, KERNEL, spec_of(what, 0, ADD_WARPS, shared_kib=0))
        call = functools.partial(once, times, gpu.memory, 1, 16, 1, 0, 0)
        for after, before in _befores(gpu).items():
            us = _profiled(call, before)
            how = f"{gpu.sms} CTAs of {ADD_WARPS} warps" + after
            yield row("launch", f"{what}, 16 B a thread, profiled", how, us, MICROSECONDS)
    products = spec_of("wgmma", 256, 8, shared_kib=64)
    for name, count, seconds in (
        *((f"after a rest, {n} groups", n, 0.0) for n in SHORTEST_PRODUCTS),
        ("after a rest, short", SHORT_PRODUCTS, 0.0),
        ("after a rest", PRODUCTS, 0.0),
        ("under load", PRODUCTS, LOAD_S),
    ):
        gpu.run(products, 1, ctas=gpu.sms)
        torch.cuda.synchronize()
        time.sleep(0.3)
        until = time.monotonic() + seconds
        while True:
            out = gpu.run(products, count, ctas=gpu.sms)
            torch.cuda.synchronize()
            if time.monotonic() >= until:
                break
        yield row("launch", "clock during products", name, _mhz(out), MHZ)
    for ctas in SHARING_SMS:  # in a queue without rests, as the launches of a program
        for _ in range(BUSY_LAUNCHES):
            gpu.memory.sum(dtype=torch.int32)
            out = gpu.run(products, SHORT_PRODUCTS, ctas=ctas)
        how = f"{ctas} SMs, after reading memory"
        yield row("launch", "clock during products", how, _mhz(out), MHZ)


def _mhz(out: torch.Tensor) -> float:
    """The clock during products, from what they wrote."""
    loop = out[..., 1, :].double()  # groups of the larger size
    return 1e3 * ((loop[..., 1] - loop[..., 0]) / loop[..., 2]).median().item()


def _evict(gpu: Machine) -> None:
    """Fill the instruction caches of all SMs with other code."""
    from .machine import spec_of

    gpu.run(spec_of("code with jumps", EVICT_KIB, 1, shared_kib=200), 1, ctas=gpu.sms)


def _befores(gpu: Machine) -> dict[str, Callable[[], object]]:
    """What runs before a call, by what the call's name says."""

    def empty() -> None:
        gpu.memory.sum(dtype=torch.int32)

    def both() -> None:
        _evict(gpu)
        empty()

    import torch

    return {
        "": lambda: None,
        ", after other code": functools.partial(_evict, gpu),
        ", empty L2": empty,
        ", after other code, empty L2": both,
    }


def _profiled(call: Callable[[], object], before: Callable[[], object]) -> float:
    """Microseconds of the last kernel of `before` and `call`, by the profiler."""
    from ..launch_times.measure import launches as profile

    return profile(call, [before])[0][-1][1]


def code(gpu: Machine, short: bool) -> Rows:
    """How long machine code takes to come: a pass that repeats, and what the first pass takes
    beyond it, after other code has filled the caches of all SMs."""
    import torch

    from .machine import REPEATS, spec_of

    for what, sizes in CODE_KIB.items():
        for kib in sizes:
            for warps in CODE_WARPS:
                spec = spec_of(what, kib, warps, shared_kib=CODE_SHARED_KIB)
                for ctas in (1, gpu.sms):
                    (t,) = gpu.times(spec, 8, few=2, ctas=ctas).values()
                    how = f"{kib} KiB, {warps} warps, {ctas} SMs"
                    yield row("code", f"{what}, again", how, t.clocks, CLOCKS)
    for what in CODE_KIB:
        for kib, warps in FIRST_CODE:
            spec = spec_of(what, kib, warps, shared_kib=CODE_SHARED_KIB)
            for ctas in (1, gpu.sms):
                for level in ("L2", "memory"):
                    first = []
                    for _ in range(REPEATS):
                        clocks: list[float] = []
                        for count in (1, 2):
                            _evict(gpu)
                            if level == "memory":
                                gpu.memory.sum(dtype=torch.int32)
                            out = gpu.run(spec, count, ctas=ctas)[:, :, 0]
                            each = out[..., 1].amax(dim=1) - out[..., 0].amin(dim=1)
                            clocks.append(each.double().median().item())
                        first.append(2 * clocks[0] - clocks[1])
                    how = f"{kib} KiB, {warps} warps, {ctas} SMs"
                    value = statistics.median(first)
                    yield row("code", f"{what}, first from {level}", how, value, CLOCKS)


def beside(gpu: Machine, short: bool) -> Rows:
    """Products of a warpgroup and other work of two warpgroups: each alone, and both at once."""
    from .machine import spec_of

    for n in SHORT_WGMMA_N:
        for kind in (NOTHING, *ROUNDS):
            spec = spec_of(f"wgmma beside {kind}", n, 4 * WARPGROUPS, shared_kib=64)
            for name, t in gpu.times(spec, 32).items():
                yield row("beside", f"{GROUP} m64n{n}k16", name, t.clocks, CLOCKS)
                if kind == NOTHING:
                    products = t.clocks
                elif name.startswith("products"):
                    # Where the work alone would take no longer than the products.
                    each = (t.clocks - products) / other_work(kind, n)
                    yield row("beside", f"m64n{n}k16 beside {kind}", STALL, each, CLOCKS)


def chain(gpu: Machine, short: bool) -> Rows:
    """Steps that wait for each other, as a warpgroup alone on its SM takes them."""
    from .machine import spec_of

    for name, t in gpu.times(spec_of("chains", 0, 4, shared_kib=64), 64).items():
        yield row("chain", name, "4 warps", t.clocks, CLOCKS)


def sharing(gpu: Machine, short: bool) -> Rows:
    """Rates of an SM while so many SMs copy, and of additions to the same bytes."""
    from .machine import L2_BYTES, MEMORY_BYTES, spec_of

    unit = "bytes a clock and SM"
    loads = spec_of("bulk loads", 0, 1, shared_kib=224)
    stores = spec_of("bulk stores", 0, 1, shared_kib=200)
    nbytes = 16384
    for ctas in SHARING_SMS:
        for level, size in (("L2", L2_BYTES), ("memory", MEMORY_BYTES)):
            for depth in (4, 12):
                t = gpu.times(
                    loads, 2**27 // nbytes // ctas, few=depth, ctas=ctas, size=nbytes, depth=depth,
                    step=nbytes * ctas, mask=size - 1, cold=level == "memory",
                )["load"]  # fmt: skip
                how = f"{depth * nbytes // 1024} KiB in flight, {ctas} SMs"
                yield row("sharing", f"bulk load from {level}", how, nbytes / t.clocks, unit)
        for name, t in gpu.times(
            stores, 2**26 // nbytes // ctas, ctas=ctas, size=nbytes, step=nbytes * ctas,
            mask=L2_BYTES - 1,
        ).items():  # fmt: skip
            yield row("sharing", f"bulk {name} to L2", f"{ctas} SMs", nbytes / t.clocks, unit)
        a_cta = 16 * ADD_WARPS * 32
        spec = spec_of("global memory", 16, ADD_WARPS, shared_kib=120)
        for how, mask in (
            (f"{ctas} SMs", L2_BYTES - 1),
            (f"{ctas} SMs, the same {SAME_KIB} KiB", SAME_KIB * 1024 - 1),
            (f"{ctas} SMs, the same {a_cta // 1024} KiB", a_cta - 1),
        ):
            times = gpu.times(spec, 64, ctas=ctas, size=16, step=a_cta, mask=mask)
            for name, t in times.items():
                yield row("sharing", f"{name} to L2", how, 8 * a_cta / t.clocks, unit)
    gpu.memory.zero_()


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(EMPTY_LAUNCHES):
        call()


def _operations(what: str, width: int, name: str) -> int:
    return next(loop.operations for loop in LOOPS[what](width) if loop.name == name)


PARTS: dict[str, Callable[[Machine, bool], Rows]] = {
    "arithmetic": arithmetic,
    "mma": mma,
    "shared": shared,
    "barriers": barriers,
    "copies": copies,
    "memory": memory,
    "code": code,
    "beside": beside,
    "chain": chain,
    "sharing": sharing,
    "launch": launches,
}


def requests(short: bool, only: list[str]) -> list[tuple[KernelDef, LoopsSpec]]:
    """All kernels of the parts, to compile them in parallel."""
    from .machine import spec_of

    specs: dict[str, list[LoopsSpec]] = {
        "arithmetic": [
            spec_of("arithmetic", 1, 1),
            *(spec_of("arithmetic", CHAINS, warps) for warps in THROUGHPUT_WARPS),
        ],
        "mma": [spec_of("mma.sync", chains, warps) for chains, warps in ((1, 1), (4, 4), (4, 8))]
        + [spec_of(f"mma.sync beside {kind}", 0, 8) for kind in ("square", "logic")]
        + [
            spec_of(what, n, 4 * warpgroups, shared_kib=64)
            for what in ("wgmma", "wgmma, A in registers")
            for n in (SHORT_WGMMA_N if short else WGMMA_N)
            for warpgroups in ((1, 2) if n in SHORT_WGMMA_N else (1,))
        ],
        "shared": [
            spec_of("shared memory latency"),
            *(spec_of("shared memory", 0, warps) for warps in SHARED_WARPS),
        ],
        "barriers": [
            *(spec_of("barriers", 0, warps) for warps in BARRIER_WARPS),
            *(spec_of("cluster barrier", 0, 4, cluster=cluster) for cluster in CLUSTERS),
        ],
        "copies": [
            spec_of("bulk loads", 0, 1, shared_kib=224),
            spec_of("bulk stores", 0, 1, shared_kib=20),
        ],
        "memory": [
            spec_of("global latency"),
            *(spec_of("global memory", n, ADD_WARPS) for n in (4, 16)),
        ],
        "launch": [
            *(spec_of("nothing", 0, w, shared_kib=k, cluster=c) for k, _, w, c in EMPTY),
            *(spec_of(what, kib, 4, shared_kib=0) for what, kib in STARTED_CODE),
            *(spec_of(what, 0, ADD_WARPS, shared_kib=0) for what in ONCE),
            spec_of("code with jumps", EVICT_KIB, 1, shared_kib=200),
            spec_of("wgmma", 256, 8, shared_kib=64),
        ],
        "code": [
            spec_of("code with jumps", EVICT_KIB, 1, shared_kib=200),
            *(
                spec_of(what, kib, warps, shared_kib=CODE_SHARED_KIB)
                for what, sizes in CODE_KIB.items()
                for kib, warps in (*((k, w) for k in sizes for w in CODE_WARPS), *FIRST_CODE)
            ),
        ],
        "beside": [
            spec_of(f"wgmma beside {kind}", n, 4 * WARPGROUPS, shared_kib=64)
            for kind in (NOTHING, *ROUNDS)
            for n in SHORT_WGMMA_N
        ],
        "chain": [spec_of("chains", 0, 4, shared_kib=64)],
        "sharing": [
            spec_of("bulk loads", 0, 1, shared_kib=224),
            spec_of("bulk stores", 0, 1, shared_kib=200),
            spec_of("global memory", 16, ADD_WARPS, shared_kib=120),
        ],
    }
    return [(KERNEL, spec) for part in only for spec in dict.fromkeys(specs[part])]


def measure(
    only: list[str], short: bool, shown: Callable[[Row], None]
) -> tuple[list[Row], list[str]]:
    """The rows of the parts, and the problems. A part that fails does not stop the others."""
    from ... import launch
    from .machine import Machine

    launch.warmup(requests(short, only), progress=False)
    gpu = Machine()
    rows: list[Row] = []
    problems: list[str] = []
    for part in only:
        problems += _run_part(part, gpu, short, rows, shown)
    return rows, problems


def _run_part(
    part: str, gpu: Machine, short: bool, rows: list[Row], shown: Callable[[Row], None]
) -> list[str]:
    """Add the part's rows to `rows`, as far as it gets. Returns the problem, if there is one."""
    try:
        for one in PARTS[part](gpu, short):
            rows.append(one)
            shown(one)
    except Exception as error:
        traceback.print_exc()
        return [f"{part}: {type(error).__name__}: {error}"]
    return []


def run(args: argparse.Namespace) -> Report:
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        raise Unavailable("measures wgmma, which only sm_90 has")
    rows, problems = measure(args.only, args.short, lambda row: None)
    return Report(
        benchmark="rates",
        title="Rates and latencies of the GPU's units",
        environment=describe(args.argv, commit=args.commit),
        rows=rows,
        verdicts=[Verdict("every part ran", not problems, "; ".join(problems) or "all of them")],
        succeeded=not problems,
    )


BENCHMARK = Benchmark(
    run=run, add_arguments=add_arguments, gpu_check=(GpuCheckStage(("--only", "barriers"), 30),)
)
