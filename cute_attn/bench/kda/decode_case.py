"""Checks and times of one case of `kda-decode` and `gdn-decode`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..harness.report import Row
from ..harness.roofline import Roofline, copies, copy_columns
from ..harness.timing import Mode
from .cases import DecodeCase, timing_columns

MODES: tuple[Mode, ...] = ("do_bench", "graph")


def time_case(
    case: DecodeCase, with_peer: bool, modes: Sequence[Mode], roofline: Roofline, rep_ms: float
) -> tuple[dict[str, float], list[Row], list[str]]:
    """Return (errors, a row for each mode, notes)."""
    from .problem import (
        DEVICE,
        agreed,
        check_decode,
        decode_arguments,
        decode_calls,
        freed,
        time_calls,
    )

    rows: list[Row] = []
    with freed():
        arguments = decode_arguments(case)
        calls = decode_calls(arguments, with_peer=with_peer)
        errors, calls, notes = agreed(partial(check_decode, case, arguments), calls)
        calls |= copies(case.min_bytes, DEVICE)
        for mode in modes:
            timings, more = time_calls(calls, mode, rep_ms)
            notes += more
            rows.append(
                {
                    "batch": case.batch,
                    "heads": case.heads,
                    "heads_v": case.heads_v,
                    "slots": case.slots,
                    "mode": mode,
                    **timing_columns(timings, case.min_bytes, roofline),
                    **copy_columns(timings, mode),
                }
            )
        del arguments, calls
    return errors, rows, notes
