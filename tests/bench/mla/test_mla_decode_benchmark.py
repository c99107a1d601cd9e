"""`bench mla` on the CPU: the inputs in the emulator, and formulas for GPU times."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

import cute_attn
from cute_attn.bench.harness.roofline import Roofline
from cute_attn.bench.harness.timing import Timing
from cute_attn.bench.mla import decode
from cute_attn.bench.mla.decode import CASES, Case, checked, inputs

ROOFLINE = Roofline(memcpy_gbps=3000.0, kernel_copy_gbps=2900.0, matmul_tflops=700.0)


def test_a_small_case_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a log-sum-exp, whose kernel other tests have."""
    from cute_attn.ops import mla

    right = mla.mla_decode
    monkeypatch.setattr(mla, "mla_decode", lambda **a: right(**a | {"return_lse": True}))
    case = Case(2, 70, 3, ragged=True)
    with cute_attn.emulated("sm_90a"):
        assert 0 < checked(case, inputs(case, "cpu")) < 2


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_attn.ops import mla

    case = Case(1, 70, 3)
    arguments = inputs(case, "cpu")
    monkeypatch.setattr(mla, "mla_decode", lambda **a: (a["q_nope"] * 0, None))
    with pytest.raises(ValueError, match=r"error .* of plain bfloat16 code"):
        checked(case, arguments)


def test_bytes_and_operations() -> None:
    case = Case(128, 4096, 16)
    assert case.nbytes == 128 * (4096 * 1152 + 16 * 1088 * 2)
    assert case.flops == 2 * 128 * 4096 * 16 * 1088
    assert max(Case(64, 8192, 16, ragged=True).lengths) <= 8192


def report(monkeypatch: pytest.MonkeyPatch, time_us: float, **options: Any) -> Any:
    timing = Timing(time_us, time_us, time_us, time_us, 20)
    monkeypatch.setattr(decode, "time_cudagraph", lambda *_, **__: timing)
    monkeypatch.setattr(decode, "time_rested", lambda fns, **_: dict.fromkeys(fns, timing))
    monkeypatch.setattr(decode, "compile_all", lambda cases: None)
    monkeypatch.setattr(decode, "measure_roofline", lambda **_: ROOFLINE)
    monkeypatch.setattr(decode, "inputs", lambda case: {})
    monkeypatch.setattr(decode, "checked", lambda case, arguments: 1.0)
    args = argparse.Namespace(
        short=False, only=None, mode=["calls", "rested"], argv=["mla"], commit=None, **options
    )
    found = decode.run(args)
    found.validate()
    return found


def test_every_case_has_a_row_and_verdicts_follow_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = report(monkeypatch, time_us=1.0)
    assert len(fast.rows) == 2 * len(CASES)
    assert {row["bound"] for row in fast.rows} == {"memory", "products"}
    assert fast.verdicts and all(verdict.passed for verdict in fast.verdicts)
    slow = report(monkeypatch, time_us=1e6)
    assert not any(verdict.passed for verdict in slow.verdicts)
