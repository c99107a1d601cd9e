"""The machines that run the study: the GPU, which is timed, and the emulator. Both machines check
the sums of every run.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from ... import cache
from ... import launch as kernels
from ...emulation import emulated
from ...kernels.async_copy import table
from ...kernels.async_copy.spec import READ_THREADS, VECTOR_WORDS, AsyncCopySpec, PlainReadSpec
from ...kernels.common.spec import VECTOR_BYTES
from ..harness.roofline import gbps
from ..harness.timing import CudaDevice, time_cuda, time_cuda_interleaved
from . import kda
from .cases import KIB, Run
from .problem import (
    Tiles,
    checksums_of_reads,
    compare,
    expected_sums,
    launch,
    make_memory,
    source_of,
)

MIB = 1024 * KIB
MEMORY_BYTES = 1024 * MIB  # many times any L2
L2_BYTES = 16 * MIB  # within the L2 of one half of any GPU here
STREAMED_BYTES = 1024 * MIB  # copied by all CTAs of a run together
READ_UNROLL = 8
READ_CTAS_PER_SM = 8
SEED = 20261122
WARMUP_MS, REP_MS = 2.0, 10.0
LATENCY_TILES = 64
LATENCY_REPEATS = 7


class Gpu:
    """The current GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.arch = kernels.arch_of(torch.cuda.current_device())
        self.sms = kernels.num_sms(self.device)
        self.memory = make_memory(MEMORY_BYTES, self.device, SEED)
        self.flush = CudaDevice().flusher("read")
        self.checked = 0

    def prepare(self, runs: list[Run]) -> None:
        """Compile all kernels, in parallel."""
        records, passes = kda.requests(self.arch)
        requests: list[Any] = [(table.kernel_of(run.spec), run.spec) for run in runs]
        requests += [(table.PLAIN_READ, PlainReadSpec(READ_UNROLL)), records, *passes.values()]
        kernels.warmup(requests, arch=self.arch)

    def ctas(self, run: Run) -> int:
        cluster = run.spec.cluster
        return kernels.num_clusters(self.device, cluster) * cluster if cluster > 1 else self.sms

    def repeated(self, run: Run, count: int) -> float:
        """GB/s at which each CTA copies one tile again and again. The kernel first copies different
        tiles, because the sums would not show a missing copy of the repeated tile."""
        ctas = self.ctas(run)
        self._time(run, Tiles(ctas, 16 * ctas, 64), timed=False)
        return self._time(run, Tiles(ctas, ctas, count))

    def stream(self, run: Run, level: str) -> float:
        """GB/s that reach the SMs from "hbm" or "l2"."""
        return self._time(run, self.tiles_of(run, level))

    def tiles_of(self, run: Run, level: str) -> Tiles:
        """Tiles that exceed the L2, each copied once; or tiles that fit the L2, in another order
        each time, so that no CTA finds its tiles in L1."""
        spec, ctas = run.spec, self.ctas(run)
        streams = ctas // run.sharing
        count = STREAMED_BYTES // spec.tile_bytes // ctas
        if level == "hbm":
            count = MEMORY_BYTES // spec.tile_bytes // streams // spec.heads * spec.heads
            return Tiles(ctas, streams * count, count, run.sharing)
        tiles = L2_BYTES // spec.tile_bytes // streams * streams + spec.heads
        return Tiles(ctas, tiles // spec.heads * spec.heads, count, run.sharing)

    def _time(self, run: Run, how: Tiles, *, timed: bool = True) -> float:
        spec = run.spec
        source = source_of(self.memory, spec, how.tiles)
        function = kernels.get_for(self.device, table.kernel_of(spec), spec)
        call, sums, _ = launch(function, spec, source, how)
        expected = expected_sums(spec, source, how)
        call()
        compare(spec, how, sums, expected)
        self.checked += how.ctas * how.count
        if not timed:
            return 0.0
        sums.fill_(-1)
        timing = time_cuda(call, flush="none", warmup_ms=WARMUP_MS, rep_ms=REP_MS)
        compare(spec, how, sums, expected)
        return gbps(how.ctas * how.count * spec.tile_bytes, timing.median_us)

    def latency(self, run: Run, level: str) -> float:
        """Clocks from the start of a tile's copy until it may be used, by one CTA."""
        spec = run.spec
        how = Tiles(1, LATENCY_TILES, LATENCY_TILES)
        source = source_of(self.memory, spec, how.tiles)
        function = kernels.get_for(self.device, table.kernel_of(spec), spec)
        call, sums, clocks = launch(function, spec, source, how)
        expected = expected_sums(spec, source, how)
        found = []
        for _ in range(LATENCY_REPEATS):
            if level == "l2":
                call()
            else:
                self.flush()
            call()
            compare(spec, how, sums, expected)
            self.checked += how.count
            found.append(int(clocks[0]) / how.count)
        return statistics.median(found)

    def kda(self, tokens: int, heads: int) -> tuple[dict[str, float | None], list[str]]:
        """Microseconds of the state pass with each choice of copies, and notes on choices with
        different bits."""
        calls, outputs = kda.state_passes(self.arch, self.device, tokens, heads)
        timings = time_cuda_interleaved(calls, flush="zero", rep_ms=REP_MS)
        times: dict[str, float | None] = {n: t.median_us for n, t in timings.items()}
        return times, kda.differing(outputs)

    def read(self, level: str) -> float:
        """GB/s of plain loads to registers."""
        spec = PlainReadSpec(READ_UNROLL)
        function = kernels.get_for(self.device, table.PLAIN_READ, spec)
        threads = READ_CTAS_PER_SM * self.sms * READ_THREADS
        words = self.memory["bits"].view(torch.int32).view(-1, VECTOR_WORDS)
        total = len(words)
        if level == "l2":
            # The count is no multiple of the threads. With a multiple, each thread would read its
            # own vectors again.
            words = words[: L2_BYTES // VECTOR_BYTES // threads * threads + READ_THREADS * 8]
        count = total // threads // READ_UNROLL
        shape = (READ_CTAS_PER_SM * self.sms, READ_THREADS, VECTOR_WORDS)
        sums = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        timing = time_cuda(
            lambda: function(words, sums, count), flush="none", warmup_ms=WARMUP_MS, rep_ms=REP_MS
        )
        expected = checksums_of_reads(words, threads, count * READ_UNROLL)
        if not torch.equal(sums, expected.view(shape)):
            raise AssertionError(f"the plain reads of {level} have wrong checksums")
        return gbps(threads * count * READ_UNROLL * VECTOR_BYTES, timing.median_us)


class Emulator:
    """The emulator: a few tiles of every kernel, on CTAs of a small GPU."""

    ctas = 2

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.checked = 0

    def check(self, run: Run) -> None:
        """Run with enough tiles that every producer warp uses every stage twice."""
        self.execute(run, 2 * run.spec.num_stages + run.spec.producer_warps)

    def kda(self, tokens: int, heads: int) -> tuple[dict[str, float | None], list[str]]:
        """Return None for each choice of copies of the state pass, and notes on choices with
        different bits."""
        with emulated(self.arch):
            calls, outputs = kda.state_passes(self.arch, torch.device("cpu"), tokens, heads)
            for call in calls.values():
                call()
        return dict.fromkeys(calls), kda.differing(outputs)

    def execute(self, run: Run, count: int) -> None:
        """Copy and check `count` tiles a CTA.

        Raises:
            cute_attn.emulator.FindingsError: the emulator found a race or another error.
            WrongTiles: the sums are wrong.
        """
        spec = run.spec
        streams = self.ctas // run.sharing
        # The last tiles are the first tiles again.
        tiles = max(streams * spec.turns, streams * count - 1)
        tiles = -(-tiles // spec.heads) * spec.heads
        how = Tiles(self.ctas, tiles, count, run.sharing)
        device = torch.device("cpu")
        memory = make_memory(tiles * spec.tile_bytes, device, SEED + count)
        source = source_of(memory, spec, tiles)
        with emulated(self.arch):
            function = kernels.get_for(device, table.kernel_of(spec), spec)
            call, sums, _ = launch(function, spec, source, how)
            call()
        compare(spec, how, sums, expected_sums(spec, source, how))
        self.checked += self.ctas * count


def registers(spec: AsyncCopySpec, arch: str) -> int:
    """Registers of a thread."""
    (use,) = cache.compile(table.kernel_of(spec), spec, arch).kernels
    return use.registers
