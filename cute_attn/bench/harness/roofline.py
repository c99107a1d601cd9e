"""Ceilings of the machine, measured in the same run and by the same clock as the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .report import Row, Verdict
from .timing import Call, Flush, Mode, Timing, time_cuda, time_cuda_interleaved

COPY_BYTES = 2**30  # large enough that launch and drain are under 1 % of the time
MATMUL_SIZE = 8192
MAX_COPY_RATIO = 1.01  # time of a memory-bound call over an equally large copy


def gbps(num_bytes: float, time_us: float) -> float:
    """Bytes in a time in microseconds, as GB/s (1e9 bytes a second)."""
    return num_bytes / time_us / 1e3


@dataclass(frozen=True)
class Roofline:
    """Ceilings of the GPU, or of the green context of the current stream.

    Attributes:
        memcpy_gbps: `Tensor.copy_` of 1 GiB, which is a driver memcpy; bytes read plus written.
        kernel_copy_gbps: an elementwise torch kernel from one 1 GiB tensor to another; bytes read
            plus written.
        matmul_tflops: an 8192-cubed bf16 matrix product on random data; None if not measured.
    """

    memcpy_gbps: float
    kernel_copy_gbps: float
    matmul_tflops: float | None = None

    @property
    def copy_gbps(self) -> float:
        """The copy bandwidth that shares refer to: the faster of the two copies, in GB/s."""
        return max(self.memcpy_gbps, self.kernel_copy_gbps)

    def to_dict(self) -> dict[str, float | None]:
        return {"copy_gbps": self.copy_gbps, **asdict(self)}


def copies(num_bytes: int, device: str = "cuda") -> dict[str, Call]:
    """The two copies of `Roofline`, each of which reads and writes `num_bytes` in all."""
    import torch

    source = torch.randn(num_bytes // 2 // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return {
        "memcpy": lambda: target.copy_(source),
        "kernel_copy": lambda: torch.neg(source, out=target),
    }


def copy_columns(timings: Mapping[str, Timing], mode: Mode) -> dict[str, float]:
    """Columns: the time of a copy of as many bytes, and our time over the copy's time. The copy is
    `Tensor.copy_`; in a graph a torch kernel copies, because a memcpy node takes half as long
    again.
    """
    copy_us = timings["kernel_copy" if mode == "graph" else "memcpy"].median_us
    return {"copy_us": copy_us, "time_to_copy_ratio": timings["ours"].median_us / copy_us}


def beside_copy(what: str, row: Row) -> Verdict:
    """Whether a row's time is at most a copy's time for as many bytes, within 1 %."""
    ratio = row["time_to_copy_ratio"]
    assert isinstance(ratio, float)
    detail = f"{ratio:.3f}, {row['time_us']:.1f} us, the copy {row['copy_us']:.1f} us"
    name = f"{what}: time_to_copy_ratio at most {MAX_COPY_RATIO:g}"
    return Verdict(name, ratio <= MAX_COPY_RATIO, detail)


def measure_copies(flush: Flush = "zero", rep_ms: float = 100.0) -> dict[str, Timing]:
    """Times of the two 1 GiB copies of `Roofline`."""
    return time_cuda_interleaved(copies(2 * COPY_BYTES), flush=flush, rep_ms=rep_ms)


def measure_roofline(
    *, flush: Flush = "zero", matmul: bool = True, rep_ms: float = 100.0
) -> Roofline:
    """Measure the current GPU on the current stream; needs 2 GiB of its memory."""
    copies = measure_copies(flush, rep_ms)
    rates = {name: gbps(2 * COPY_BYTES, timing.median_us) for name, timing in copies.items()}
    tflops = None
    if matmul:
        import torch

        a, b = torch.randn(
            (2, MATMUL_SIZE, MATMUL_SIZE), dtype=torch.bfloat16, device="cuda"
        ).unbind()
        out = torch.empty_like(a)
        timing = time_cuda(lambda: torch.mm(a, b, out=out), flush=flush, rep_ms=rep_ms)
        tflops = 2 * MATMUL_SIZE**3 / timing.median_us / 1e6
    return Roofline(rates["memcpy"], rates["kernel_copy"], tflops)
