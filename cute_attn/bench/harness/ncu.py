"""Running Nsight Compute on a command, and parsing its CSV."""

from __future__ import annotations

import csv
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .registry import Unavailable

# Sections rather than metric names: ncu resolves sections to the chip's names of counters.
SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "WarpStateStats",
    "LaunchStats",
)
EXTRA_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")

DURATION = ("gpu__time_duration.sum",)
DRAM_THROUGHPUT = (
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
OCCUPANCY = ("sm__warps_active.avg.pct_of_peak_sustained_active",)
L2_HIT_RATE = ("lts__t_sector_hit_rate.pct",)
REGISTERS = ("launch__registers_per_thread",)

_STALL = re.compile(r"^smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio$")

# Factors to microseconds and to bytes, because with `--print-units base` metrics still differ in
# unit.
_TO_US = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3,
          "s": 1e6, "second": 1e6}  # fmt: skip
_TO_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


class NcuError(RuntimeError):
    """ncu ran without usable results; the message holds the end of its output."""


@dataclass(frozen=True)
class Kernel:
    """One profiled launch: its name and metrics, each (value, unit)."""

    name: str
    block: str
    grid: str
    metrics: dict[str, tuple[float, str]]

    def get(self, names: Sequence[str]) -> float | None:
        """The first of `names` that was measured, in ncu's unit, or None."""
        return next((self.metrics[n][0] for n in names if n in self.metrics), None)

    @property
    def duration_us(self) -> float | None:
        return self._scaled(DURATION[0], _TO_US)

    @property
    def dram_bytes(self) -> float | None:
        """Bytes read from and written to device memory."""
        parts = [self._scaled(name, _TO_BYTES) for name in EXTRA_METRICS]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def _scaled(self, name: str, factors: dict[str, float]) -> float | None:
        if name not in self.metrics:
            return None
        value, unit = self.metrics[name]
        if unit not in factors:
            raise NcuError(f"{name} in unknown unit {unit!r}")
        return value * factors[unit]

    def stalls(self) -> list[tuple[str, float]]:
        """Return (reason, share of all warp-cycles between two issues), the largest share first.

        `selected` is the cycle in which the warp issues: part of the total, but no stall.
        """
        cycles = {
            match[1]: value
            for name, (value, _) in self.metrics.items()
            if (match := _STALL.match(name)) and not match[1].endswith("_not_issued")
        }
        total = sum(cycles.values())
        if total == 0:
            return []
        shares = [(reason, value / total) for reason, value in cycles.items()]
        return sorted((item for item in shares if item[0] != "selected"), key=lambda item: -item[1])


def find_ncu() -> str:
    """Path of ncu: on PATH, or where the CUDA toolkit and Nsight Compute install it.

    Raises:
        Unavailable: ncu is not installed.
    """
    if found := shutil.which("ncu"):
        return found
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    for place in (*installed, Path("/usr/local/cuda/bin/ncu")):  # the newest first
        if place.is_file():
            return str(place)
    raise Unavailable("needs Nsight Compute's ncu, on PATH or under /opt/nvidia/nsight-compute")


def name_pattern(word: str) -> str:
    """An ncu kernel-name filter for names that contain `word`, in upper or lower case.

    ncu's regular expressions have no case-insensitive flag.
    """
    letters = (f"[{c.lower()}{c.upper()}]" if c.isalpha() else re.escape(c) for c in word)
    return f"regex:{''.join(letters)}"


def command(
    ncu: str, log: Path, kernel_word: str, launches: int, program: Sequence[str]
) -> list[str]:
    """The ncu command line; the program starts and stops the profiler itself."""
    return [
        ncu,
        "--profile-from-start", "off",
        "--clock-control", "none",  # measure the GPU as it runs in the other benchmarks
        "--cache-control", "all",  # a cold L2 before each pass, as in the benchmarks
        "--kernel-name-base", "function",
        "--kernel-name", name_pattern(kernel_word),
        "--launch-count", str(launches),
        *(word for section in SECTIONS for word in ("--section", section)),
        "--metrics", ",".join(EXTRA_METRICS),
        "--csv",
        "--page", "raw",
        "--print-units", "base",
        "--log-file", str(log),
        *program,
    ]  # fmt: skip


def profile(
    program: Sequence[str], *, kernel_word: str, launches: int, timeout_s: float
) -> list[Kernel]:
    """Profile a command's kernels whose name contains `kernel_word`.

    Raises:
        Unavailable: there is no ncu, or the driver denies access to the counters.
        NcuError: ncu failed otherwise, or profiled no kernel.
    """
    ncu = find_ncu()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "ncu.csv"
        done = subprocess.run(
            command(ncu, log, kernel_word, launches, program),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        text = log.read_text() if log.exists() else ""
    said = "\n".join((done.stdout, done.stderr, text))[-2000:]
    if "ERR_NVGPUCTRPERM" in said:
        raise Unavailable("the driver denies access to the performance counters (ERR_NVGPUCTRPERM)")
    kernels = parse(text.splitlines())
    if done.returncode != 0 or not kernels:
        raise NcuError(f"ncu exited with {done.returncode} and {len(kernels)} kernels:\n{said}")
    return kernels


def parse(lines: Iterable[str]) -> list[Kernel]:
    """Kernels in the CSV of `ncu --csv --page raw`: a header, a row of units, a row per launch.

    Lines of ncu's own (`==PROF== ...`) around the CSV are skipped. Metrics that are not numbers are
    skipped too.
    """
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    start = next((i for i, row in enumerate(table) if row[:1] == ["ID"]), None)
    if start is None or len(table) < start + 3:
        return []
    header, units = table[start], table[start + 1]
    kernels = []
    for row in table[start + 2 :]:
        cells = dict(zip(header, row, strict=True))
        metrics = {}
        for name, unit, text in zip(header, units, row, strict=True):
            value = _number(text)
            if "__" in name and value is not None:
                metrics[name] = (value, unit)
        launch = (cells["Kernel Name"], cells["Block Size"], cells["Grid Size"])
        kernels.append(Kernel(*launch, metrics))
    return kernels


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))  # thousands are separated by commas
    except ValueError:
        return None


def median_kernel(kernels: Sequence[Kernel]) -> Kernel:
    """Launches of one kernel merged: the median of each metric over the launches that have the
    metric.

    Raises:
        NcuError: the launches are of several kernels.
    """
    names = {kernel.name for kernel in kernels}
    if len(names) != 1:
        raise NcuError(f"launches of several kernels: {sorted(names)}")
    merged = {}
    for name in kernels[0].metrics:
        seen = [kernel.metrics[name] for kernel in kernels if name in kernel.metrics]
        merged[name] = (statistics.median(value for value, _ in seen), seen[0][1])
    first = kernels[0]
    return Kernel(first.name, first.block, first.grid, merged)
