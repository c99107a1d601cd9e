"""A part of the GPU: a CUDA green context with a given number of SMs.

Work belongs to a green context through its stream, not through the current context. So code that
selects its device (and with it the primary context) on every launch stays inside the partition. So
the benchmark runs on a stream created in the green context. `visible_sms` counts the SMs that a
kernel really uses, which confirms the partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class GreenContextError(RuntimeError):
    """The driver refused a step of creating the green context; the message names the step and the
    status.
    """


@contextmanager
def sm_partition(num_sms: int, device: int = 0, *, driver: Any = None) -> Iterator[tuple[int, int]]:
    """A green context on `device` with at least `num_sms` SMs.

    The driver rounds the count up to its granularity: 78 becomes 80 on Hopper.

    Yields: (handle of a stream inside the context, number of SMs of the context).

    Raises:
        GreenContextError: the driver has no green contexts, or fewer SMs than asked for.
    """
    from ...cache.driver import DriverError, ask, binding

    driver = driver or binding()

    def checked(name: str, *args: Any) -> Any:
        try:
            return ask(name, *args, through=driver)
        except DriverError as error:
            raise GreenContextError(str(error)) from None

    checked("cuInit", 0)
    sm = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    handle = checked("cuDeviceGet", device)
    everything = checked("cuDeviceGetDevResource", handle, sm)
    if num_sms > everything.sm.smCount:
        raise GreenContextError(f"{num_sms} SMs asked for, the GPU has {everything.sm.smCount}")
    groups, _, _ = checked("cuDevSmResourceSplitByCount", 1, everything, 0, num_sms)
    description = checked("cuDevResourceGenerateDesc", [groups[0]], 1)
    context = checked(
        "cuGreenCtxCreate",
        description,
        handle,
        driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM,
    )
    try:
        granted = checked("cuGreenCtxGetDevResource", context, sm).sm.smCount
        stream = checked(
            "cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0
        )
        try:
            yield int(stream), int(granted)
        finally:
            checked("cuStreamSynchronize", stream)
            checked("cuStreamDestroy", stream)
    finally:
        checked("cuGreenCtxDestroy", context)


@contextmanager
def torch_sm_partition(num_sms: int) -> Iterator[int]:
    """Run the torch, Triton and TVM-FFI work of the `with` block on part of the current GPU.

    Yields:
        the number of SMs of the partition, `num_sms` rounded up to the driver's granularity.
    """
    import torch

    torch.cuda.init()
    device = torch.cuda.current_device()
    torch.cuda.synchronize()  # makes the primary context current, as the driver requires
    with sm_partition(num_sms, device) as (handle, granted):
        stream = torch.cuda.ExternalStream(handle, device=device)
        with torch.cuda.stream(stream):
            yield granted
            torch.cuda.synchronize()


def visible_sms(*, graph: bool) -> int:
    """The number of SMs that a kernel on the current stream runs on, eagerly or in a graph."""
    import torch

    from .sm_ids import CTAS, record_smid
    from .timing import CudaDevice

    seen = torch.full((CTAS,), -1, dtype=torch.int32, device="cuda")

    def launch() -> None:
        record_smid[(CTAS,)](seen)

    (CudaDevice().capture(launch) if graph else launch)()
    torch.cuda.synchronize()
    return int(torch.unique(seen).numel())
