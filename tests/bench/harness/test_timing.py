import statistics

import pytest

from cute_attn.bench.harness.timing import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    Timing,
    first_drop,
    quantile,
    time_cuda,
    time_cuda_interleaved,
    time_host,
)


class SimulatedDevice:
    """A device whose clock advances by the duration of its work, in microseconds."""

    def __init__(self):
        self.now_us = 0.0
        self.log = []
        self.captured = 0

    def work(self, name, durations_us):
        """A call that takes the next of `durations_us`; the last one repeats."""
        remaining = list(durations_us)

        def call():
            self.log.append(name)
            self.now_us += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return call

    def event(self):
        return SimulatedEvent(self)

    def synchronize(self):
        self.log.append("sync")

    def flusher(self, flush):
        return self.work(f"flush {flush}", [90.0])

    def capture(self, fn):
        self.captured += 1

        def replay():
            self.log.append("replay")
            fn()

        return replay


class SimulatedEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.time_us = self.device.now_us

    def elapsed_time(self, end):
        return (end.time_us - self.time_us) / 1e3


def test_quantile_agrees_with_the_standard_library():
    values = [7.0, 1.0, 4.0, 9.0, 2.0, 8.5]
    expected = statistics.quantiles(values, n=10, method="inclusive")
    assert [quantile(values, q / 10) for q in range(1, 10)] == pytest.approx(expected)
    assert (quantile(values, 0), quantile(values, 1)) == (1.0, 9.0)
    assert quantile([3.0], 0.8) == 3.0


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_quantile_refuses_what_has_none(values, q):
    with pytest.raises(ValueError):
        quantile(values, q)


def test_timing_summarises_samples():
    timing = Timing.from_samples([float(i) for i in range(11)])
    assert timing == Timing(median_us=5.0, p20_us=2.0, p80_us=8.0, min_us=0.0, samples=11)
    assert timing.spread_us == 6.0


def test_the_flush_is_not_in_the_time():
    device = SimulatedDevice()
    timing = time_cuda(device.work("fn", [40.0]), device=device)
    assert timing.median_us == pytest.approx(40.0)
    assert timing.min_us == pytest.approx(40.0)


def test_every_sample_follows_a_flush():
    device = SimulatedDevice()
    time_cuda(device.work("fn", [40.0]), flush="read", device=device)
    first, *timed = [i for i, name in enumerate(device.log) if name == "fn"]
    assert device.log[first - 1] != "flush read"  # the very first call only warms up
    assert all(device.log[i - 1] == "flush read" for i in timed)


def test_the_slow_first_calls_are_not_samples():
    device = SimulatedDevice()
    timing = time_cuda(device.work("fn", [1e6, 5e3, 40.0]), device=device)
    assert timing.p80_us == pytest.approx(40.0)


def test_functions_take_turns_and_are_told_apart():
    device = SimulatedDevice()
    fns = {"a": device.work("a", [10.0]), "b": device.work("b", [30.0])}
    timings = time_cuda_interleaved(fns, flush="zero", device=device)
    assert timings["a"].median_us == pytest.approx(10.0)
    assert timings["b"].median_us == pytest.approx(30.0)
    calls = [name for name in device.log if name in "ab"]
    assert calls == ["a", "b"] * (len(calls) // 2)


def test_graph_mode_times_replays():
    device = SimulatedDevice()
    timing = time_cuda(device.work("fn", [12.0]), mode="graph", device=device)
    assert timing.median_us == pytest.approx(12.0)
    assert device.captured == 1
    assert device.log.count("replay") == device.log.count("fn") > MIN_SAMPLES


@pytest.mark.parametrize(
    ("duration_us", "rep_ms", "samples"),
    [(1000.0, 100.0, 100), (1e5, 100.0, MIN_SAMPLES), (2.0, 100.0, MAX_SAMPLES)],
)
def test_the_number_of_samples_follows_the_duration(duration_us, rep_ms, samples):
    device = SimulatedDevice()
    timing = time_cuda(device.work("fn", [duration_us]), rep_ms=rep_ms, device=device)
    assert timing.samples == samples


def test_nothing_to_time_is_an_error():
    with pytest.raises(ValueError):
        time_cuda_interleaved({}, device=SimulatedDevice())
    with pytest.raises(ValueError):
        time_host({})


def test_host_time_is_per_call_and_excludes_synchronisation():
    clock = SimulatedDevice()
    timings = time_host(
        {"a": clock.work("a", [3.0]), "b": clock.work("b", [8.0])},
        calls=10,
        batches=4,
        synchronize=clock.work("drain", [1000.0]),
        clock_ns=lambda: round(clock.now_us * 1e3),
    )
    assert timings["a"] == Timing(3.0, 3.0, 3.0, 3.0, samples=4)
    assert timings["b"].median_us == 8.0
    batches = [name for name in clock.log[2:] if name != "drain"]
    assert batches == (["a"] * 10 + ["b"] * 10) * 4


def test_host_time_of_real_calls_is_positive():
    timing = time_host({"sum": lambda: sum(range(100))}, calls=20, batches=5)["sum"]
    assert 0 < timing.min_us <= timing.median_us


def test_first_drop_looks_past_noise():
    assert first_drop([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]) is None
    assert first_drop([1.0, 3.0, 2.5], [0.0, 0.6, 0.0]) is None
    assert first_drop([1.0, 3.0, 2.5], [0.0, 0.1, 0.4]) == 2
    assert first_drop([], []) is None
