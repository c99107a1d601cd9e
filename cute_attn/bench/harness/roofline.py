"""Ceilings of the machine, measured in the same run and by the same clock as the benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .timing import Call, Flush, Timing, time_cuda, time_cuda_interleaved

COPY_BYTES = 2**30  # large enough that launch and drain are under 1 % of the time
MATMUL_SIZE = 8192


def gbps(num_bytes: float, time_us: float) -> float:
    """Bytes in a time in microseconds, as GB/s (1e9 bytes a second)."""
    return num_bytes / time_us / 1e3


@dataclass(frozen=True)
class Roofline:
    """Ceilings of the GPU, or of the green context of the current stream.

    Attributes:
        memcpy_gbps: `Tensor.copy_` of 1 GiB, which is a driver memcpy; bytes read plus written.
        kernel_copy_gbps: an elementwise torch kernel from one 1 GiB tensor to another, likewise.
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


def measure_copies(flush: Flush = "zero", rep_ms: float = 100.0) -> dict[str, Timing]:
    """Times of the two 1 GiB copies of `Roofline`."""
    import torch

    source = torch.randn(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    fns: dict[str, Call] = {
        "memcpy": lambda: target.copy_(source),
        "kernel_copy": lambda: torch.neg(source, out=target),
    }
    return time_cuda_interleaved(fns, flush=flush, rep_ms=rep_ms)


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
