"""Run a case in the emulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cute_attn.emulator.machine import Run
from cute_attn.emulator.runner import run_ptx

from .cases import BLOCK_BYTES, Case, kernel_name, module

_ALIGNMENT = 1024


def aligned(data: np.ndarray) -> np.ndarray:
    """A copy at an address that suits tensor maps."""
    room = np.zeros(data.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + data.nbytes]
    copy[:] = data
    return copy


def patched(encoded: bytes, address: int) -> bytes:
    """A tensor map of the driver's for memory elsewhere."""
    return address.to_bytes(8, "little") + encoded[8:]


def emulate(case: Case, maps: Sequence[bytes] = (), **options: object) -> tuple[np.ndarray, Run]:
    """The output buffer and what was found; `maps` as the driver encoded them."""
    given, output = aligned(case.input()), aligned(np.full(case.output_bytes, 0xFF, np.uint8))
    bases = {"in": given.ctypes.data, "out": output.ctypes.data}
    arguments: list[object] = [given, output]
    arguments += [
        patched(encoded, bases[m.buffer] + m.offset)
        for m, encoded in zip(case.maps, maps, strict=True)
    ]
    if case.block:
        arguments.append(given[:BLOCK_BYTES].tobytes())
    run = run_ptx(
        module([case]),
        kernel_name(0),
        case.blocks,
        case.threads,
        arguments,
        dynamic_shared=case.shared,
        **options,
    )
    return output, run
