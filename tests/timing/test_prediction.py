"""A call in the emulator gives a prediction of each of its launches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cute_attn.emulator import Emulator
from cute_attn.timing import RatesError, load_rates
from cute_attn.timing import prediction as module
from cute_attn.timing.blackwell import Blackwell, operands
from cute_attn.timing.prediction import resident_ctas
from cute_attn.timing.simulate import Result
from cute_attn.timing.steps import Product

ROOT = Path(__file__).parents[2]

CALL = """
import sys, torch, cute_attn
from cute_attn.emulator import Emulator
from cute_attn.timing import predict

emulator = Emulator(num_sms=132, checks="none", record=1)
q, k, v = torch.randn(3, 1, 128, 2, 64, dtype=torch.bfloat16)
with cute_attn.emulated("sm_90a", emulator):
    cute_attn.flash_attn_func(q, k, v)
(prediction,) = predict(emulator, timeline=True)
prediction.trace(sys.argv[1])
print(prediction)
"""


@pytest.mark.slow
def test_a_call_is_predicted_and_traced(tmp_path: Path) -> None:
    """In a process of its own, because line information is asked for in the environment."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", CALL, str(tmp_path / "trace.json")],
        cwd=ROOT,
        env=os.environ | {"CUTE_DSL_LINEINFO": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "predicted" in done.stdout and "tensor cores" in done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"X", "M"}


def test_there_are_rates_of_measured_gpus_only(tmp_path: Path) -> None:
    with pytest.raises(RatesError, match="no rates of 'b200'"):
        load_rates("b200", tmp_path)


def test_every_published_rate_has_a_source() -> None:
    """What nobody has published is as on an H100."""
    rates = load_rates("b200")
    assert rates.sms == 148 and "published" in rates.gpu
    measured = load_rates("h100")
    assert rates.otherwise == measured
    for key, value in rates.values.items():
        if measured.values.get(key) != value:
            assert rates.sources[key], key
    assert not measured.sources


def test_published_clocks_of_products() -> None:
    model = Blackwell(load_rates("b200"))
    core = model.machine(148, 148, 1.0).tensor
    assert core
    pair = Product(1, 256, 256, 16, 1, False, 1)
    assert core.multiply(pair) == pytest.approx(128, abs=0.1)
    assert core.late(pair) == pytest.approx(298 - 128, abs=0.1)
    assert operands(pair) == (128 + 128) * 32 / 128
    alone = Product(1, 128, 192, 16, 1, True, None)  # between two published widths
    assert core.multiply(alone) == pytest.approx(96, abs=0.1)
    assert operands(alone) == 192 * 32 / 128
    with pytest.raises(RatesError, match="m32n64k16 SS"):
        core.multiply(Product(1, 32, 64, 16, 1, False, None))


def test_a_missing_rate_is_named(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    report = {"environment": {"gpu": "toy", "gpu_sms": 4}, "rows": []}
    (tmp_path / "toy" / "rates.json").write_text(json.dumps(report))
    rates = load_rates("toy", tmp_path)
    assert rates.sms == 4
    with pytest.raises(RatesError, match="arithmetic, fma"):
        rates.value("arithmetic", "fma", "until the result")


@pytest.mark.parametrize("record", [-1, True, "all"])
def test_record_is_a_number(record: object) -> None:
    with pytest.raises(ValueError, match="record is"):
        Emulator(record=record)  # type: ignore[arg-type]


def test_ctas_take_turns_on_the_sms() -> None:
    result = Result({0: 100.0, 1: 300.0}, {}, {}, 2)
    whole = module._whole_launch
    assert whole(result, {}, 2, 4) == 300
    # CTAs 0 to 2 are like CTA 0, the others like CTA 1: 100 + 100 + 300, and 100 + 300 + 300.
    assert whole(result, {}, 6, 2) == 700


def test_the_larger_need_limits_the_resident_ctas() -> None:
    def fits(shared: int, registers: int, threads: int) -> int:
        from types import SimpleNamespace

        return resident_ctas(
            SimpleNamespace(shared_bytes=shared, registers=registers, block=(threads, 1, 1))  # type: ignore[arg-type]
        )

    assert fits(200_000, 32, 128) == 1
    assert fits(100_000, 32, 128) == 2
    assert fits(0, 128, 128) == 4
    assert fits(0, 32, 1024) == 2
    assert fits(0, 16, 32) == 32
