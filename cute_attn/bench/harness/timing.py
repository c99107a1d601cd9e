"""Timing, for all benchmarks.

Device times come from CUDA events around one call, after a warm-up. The L2 cache is flushed before
each call, because a decode step finds its state in device memory, not in a cache that the layer's
previous step filled. Compared functions take turns in one loop, so that a change of clocks or
temperature affects all functions.

Three modes:

- `do_bench`: `triton.testing.do_bench`, one function after the other. The flush is queued before
  the call and hides up to its own duration (about 0.1 ms) of the host's work. All other work of the
  host counts, as an eager caller would wait for this work.
- `eager`: as `do_bench`, but in turns, so that the host runs ahead during longer calls. Only the
  device's time counts, including launch gaps.
- `graph`: the replay of a CUDA graph in which the call was captured once, as in an inference
  server. Any replay costs the host the same few microseconds.

Three flushes:

- `zero`: write 256 MiB of zeros, as `triton.testing.do_bench` does. The L2 is then full of dirty
  lines, whose write-back is charged to the timed call.
- `read`: read 256 MiB. The L2 is then full of clean lines, and the call pays for its own traffic
  only.
- `none`: no flush; the L2 holds what the previous run left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Mode = Literal["do_bench", "eager", "graph"]
Flush = Literal["zero", "read", "none"]
MODES: tuple[Mode, ...] = ("do_bench", "eager", "graph")
FLUSHES: tuple[Flush, ...] = ("zero", "read", "none")

# Several times the L2 of any supported GPU (H100 50 MB, B200 126 MB).
FLUSH_BYTES = 256 * 2**20

REST_S = 0.12  # seconds of rest before a timing in `time_rested`

# Fewer samples give poor quantiles; more samples only take longer.
MIN_SAMPLES, MAX_SAMPLES = 20, 500

Call = Callable[[], object]


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1), interpolated linearly between the two nearest values.

    Raises:
        ValueError: no values, or q out of range.
    """
    if not values:
        raise ValueError("quantile of no values")
    if not 0 <= q <= 1:
        raise ValueError(f"q is {q}, must be between 0 and 1")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class Timing:
    """A distribution of times, in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    min_us: float
    samples: int

    @classmethod
    def from_samples(cls, samples_us: Sequence[float]) -> Timing:
        return cls(
            median_us=quantile(samples_us, 0.5),
            p20_us=quantile(samples_us, 0.2),
            p80_us=quantile(samples_us, 0.8),
            min_us=min(samples_us),
            samples=len(samples_us),
        )

    @property
    def spread_us(self) -> float:
        """p80 - p20 in microseconds: differences of medians below this spread are noise."""
        return self.p80_us - self.p20_us


class Event(Protocol):
    def record(self) -> None: ...
    def elapsed_time(self, end: Any, /) -> float: ...


class Device(Protocol):
    """The methods that timing needs from a device: `CudaDevice`, or a simulated device in tests."""

    def event(self) -> Event: ...
    def synchronize(self) -> None: ...
    def flusher(self, flush: Flush) -> Call: ...
    def capture(self, fn: Call) -> Call: ...
    def do_bench(self, fn: Call, warmup_ms: float, rep_ms: float) -> list[float]: ...


class CudaDevice:
    """The current CUDA device and stream, through torch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def event(self) -> Event:
        event: Event = self._torch.cuda.Event(enable_timing=True)
        return event

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def flusher(self, flush: Flush) -> Call:
        """A call that evicts everything from the L2 in the way that `flush` names."""
        torch = self._torch
        if flush == "none":
            return lambda: None
        buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        if flush == "zero":
            return lambda: buffer.zero_()
        total = torch.empty((), dtype=torch.float32, device="cuda")
        return lambda: torch.sum(buffer, dim=0, out=total)

    def capture(self, fn: Call) -> Call:
        """`fn` captured in a CUDA graph on the current stream; the result replays it."""
        torch = self._torch
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            stream = torch.cuda.Stream()  # the default stream cannot be captured
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fn()  # compiles, tunes and allocates what a capture must not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            fn()
        replay: Call = graph.replay
        return replay

    def do_bench(self, fn: Call, warmup_ms: float, rep_ms: float) -> list[float]:
        """All samples of `triton.testing.do_bench`, in microseconds."""
        from triton.testing import do_bench

        times_ms = do_bench(fn, warmup=warmup_ms, rep=rep_ms, return_mode="all")
        return [time_ms * 1e3 for time_ms in times_ms]


def time_cuda(
    fn: Call,
    *,
    mode: Mode = "eager",
    flush: Flush = "zero",
    warmup_ms: float = 25.0,
    rep_ms: float = 100.0,
    device: Device | None = None,
) -> Timing:
    """Device time of one call of `fn`, in microseconds; see `time_cuda_interleaved`."""
    timings = time_cuda_interleaved(
        {"fn": fn}, mode=mode, flush=flush, warmup_ms=warmup_ms, rep_ms=rep_ms, device=device
    )
    return timings["fn"]


def time_cuda_interleaved(
    fns: Mapping[str, Call],
    *,
    mode: Mode = "eager",
    flush: Flush = "zero",
    warmup_ms: float = 25.0,
    rep_ms: float = 100.0,
    device: Device | None = None,
) -> dict[str, Timing]:
    """Device times in microseconds of functions that are compared, taken in turns in one loop.

    Args:
        fns: the functions, by name. Each function launches on the current stream.
        mode, flush: see the module's docstring.
        warmup_ms: milliseconds of running all functions before the first sample.
        rep_ms: milliseconds that the timed calls of the slowest function add up to. Each function
            has between MIN_SAMPLES and MAX_SAMPLES samples in any case.
    """
    if not fns:
        raise ValueError("no functions to time")
    device = CudaDevice() if device is None else device
    if mode == "do_bench":
        if flush != "zero":
            raise ValueError(f"flush is {flush!r}, do_bench has its own: 'zero'")
        return {
            name: Timing.from_samples(device.do_bench(fn, warmup_ms, rep_ms))
            for name, fn in fns.items()
        }
    calls = {name: device.capture(fn) if mode == "graph" else fn for name, fn in fns.items()}
    flush_l2 = device.flusher(flush)

    def round_of_samples() -> list[tuple[str, Event, Event]]:
        events = []
        for name, call in calls.items():
            start, end = device.event(), device.event()
            flush_l2()
            start.record()
            call()
            end.record()
            events.append((name, start, end))
        return events

    for call in calls.values():
        call()  # first calls compile, tune and load
    device.synchronize()
    estimates_us: dict[str, list[float]] = {name: [] for name in calls}
    for name, start, end in [sample for _ in range(5) for sample in round_of_samples()]:
        device.synchronize()
        estimates_us[name].append(start.elapsed_time(end) * 1e3)
    slowest_us = max(quantile(times, 0.5) for times in estimates_us.values())
    slowest_us = max(slowest_us, 1.0)  # an event resolves half a microsecond

    for _ in range(min(MAX_SAMPLES, math.ceil(warmup_ms * 1e3 / slowest_us / len(calls)))):
        round_of_samples()
    rounds = min(MAX_SAMPLES, max(MIN_SAMPLES, math.ceil(rep_ms * 1e3 / slowest_us)))
    events = [sample for _ in range(rounds) for sample in round_of_samples()]
    device.synchronize()

    samples_us: dict[str, list[float]] = {name: [] for name in calls}
    for name, start, end in events:
        samples_us[name].append(start.elapsed_time(end) * 1e3)
    return {name: Timing.from_samples(times) for name, times in samples_us.items()}


def time_rested(
    fns: Mapping[str, Call],
    *,
    mode: Mode = "do_bench",
    flush: Flush = "zero",
    rounds: int = 3,
    rest_s: float = REST_S,
    warmup_ms: float = 8.0,
    rep_ms: float = 25.0,
    device: Device | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Timing]:
    """Device times of functions that load the GPU fully, each by itself and after a rest.

    An H200 lowers its clocks under load, so that one of two functions in a row may seem slower by a
    fifth. Every other round goes through the functions backwards.

    Args:
        mode, flush, warmup_ms, rep_ms, device: as for `time_cuda`.
        rounds: how often each function is timed; the round with the median time counts.
        rest_s: seconds that the GPU idles before each timing.
    """
    device = CudaDevice() if device is None else device
    found: dict[str, list[Timing]] = {name: [] for name in fns}
    for number in range(rounds):
        for name in list(fns) if number % 2 == 0 else reversed(list(fns)):
            device.synchronize()
            sleep(rest_s)
            found[name].append(
                time_cuda(
                    fns[name],
                    mode=mode,
                    flush=flush,
                    warmup_ms=warmup_ms,
                    rep_ms=rep_ms,
                    device=device,
                )
            )
    return {
        name: sorted(times, key=lambda timing: timing.median_us)[len(times) // 2]
        for name, times in found.items()
    }


def time_cudagraph(fn: Call, rep_ms: float = 20.0) -> Timing:
    """Device times in microseconds by `triton.testing.do_bench_cudagraph`. A graph has enough calls
    to fill `rep_ms`, and is replayed ten times. Each sample is the mean of a replay. The L2 holds
    the data that the previous call left."""
    from triton.testing import do_bench_cudagraph

    samples_ms = do_bench_cudagraph(fn, rep=rep_ms, return_mode="all")
    return Timing.from_samples([sample * 1e3 for sample in samples_ms])


def time_host(
    fns: Mapping[str, Call],
    *,
    calls: int = 100,
    batches: int = 50,
    synchronize: Call | None = None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, Timing]:
    """Host microseconds per call, over batches of calls with no synchronisation inside.

    The functions take turns, one batch each; the distribution is over batches. Keep `calls` under
    the depth of the launch queue (1024), or the host waits for the device within a batch.

    Args:
        synchronize: drains the device; called before and after each batch, outside of the timed
            section.
    """
    if not fns:
        raise ValueError("no functions to time")
    drain = synchronize or (lambda: None)
    for fn in fns.values():
        fn()
    samples_us: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(batches):
        for name, fn in fns.items():
            drain()
            start = clock_ns()
            for _ in range(calls):
                fn()
            samples_us[name].append((clock_ns() - start) / calls / 1e3)
            drain()
    return {name: Timing.from_samples(times) for name, times in samples_us.items()}


def first_drop(values: Sequence[float], noise: Sequence[float]) -> int | None:
    """Index of the first value that is below its predecessor by more than the noise of both values,
    or None.

    `values` ought to be non-decreasing; `noise` is the spread of each value, in the same unit.
    """
    for i in range(1, len(values)):
        if values[i] < values[i - 1] - max(noise[i], noise[i - 1]):
            return i
    return None
