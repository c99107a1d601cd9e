"""ncu_raw.csv has the form that `ncu --csv --page raw` writes; its numbers are made up."""

import re
import stat
import sys
from pathlib import Path

import pytest

from cute_attn.bench.__main__ import main
from cute_attn.bench.harness import ncu
from cute_attn.bench.harness.registry import Unavailable
from cute_attn.bench.harness.report import Report
from cute_attn.bench.lightning import decode_ncu

CSV = Path(__file__).with_name("ncu_raw.csv")


@pytest.fixture
def kernels():
    return ncu.parse(CSV.read_text().splitlines())


def test_launches_are_read(kernels):
    assert len(kernels) == 2
    first = kernels[0]
    assert (first.name, first.block, first.grid) == (
        "kernel_LightningDecode_0", "(128, 1, 1)", "(8, 64, 64)"
    )  # fmt: skip
    assert first.duration_us == pytest.approx(181.216)
    assert first.dram_bytes == 268_600_320 + 251_330_560
    assert first.get(ncu.DRAM_THROUGHPUT) == 91.73
    assert first.get(ncu.OCCUPANCY) == 41.20
    assert first.get(ncu.L2_HIT_RATE) == 50.41
    assert first.get(["nothing__of.the_kind"]) is None


def test_what_is_no_number_is_no_metric(kernels):
    assert "launch__cluster_scheduling_policy" not in kernels[0].metrics
    assert "smsp__pcsamp_interval" not in kernels[0].metrics


def test_stalls_are_shares_of_all_warp_cycles(kernels):
    stalls = kernels[0].stalls()
    assert [reason for reason, _ in stalls[:3]] == ["long_scoreboard", "drain", "lg_throttle"]
    assert [share for _, share in stalls[:3]] == pytest.approx([0.70, 0.15, 0.08])
    assert "selected" not in dict(stalls)
    assert sum(dict(stalls).values()) == pytest.approx(0.98)  # the rest is `selected`


def test_launches_merge_to_their_medians(kernels):
    merged = ncu.median_kernel(kernels)
    assert merged.duration_us == pytest.approx((181.216 + 180.992) / 2)
    other = ncu.Kernel("other", "", "", {})
    with pytest.raises(ncu.NcuError, match=r"kernel_LightningDecode_0.*other"):
        ncu.median_kernel([*kernels, other])


def test_an_unknown_unit_is_an_error_not_a_wrong_time():
    kernel = ncu.Kernel("k", "", "", {"gpu__time_duration.sum": (1.0, "fortnight")})
    with pytest.raises(ncu.NcuError, match="fortnight"):
        _ = kernel.duration_us


def test_a_log_without_a_table_has_no_kernels():
    assert ncu.parse(["==PROF== Connected", "==WARNING== No kernels were profiled."]) == []


def test_the_table(kernels):
    row = decode_ncu.row(64, 500_000_000, ncu.median_kernel(kernels))
    assert row["dram_throughput_pct"] == pytest.approx(91.82)
    assert row["registers"] == 72
    assert row["stall_1"] == "long_scoreboard 70%"
    assert row["dram_bytes_over_min_ratio"] == pytest.approx(1.03986, rel=1e-4)
    bare = decode_ncu.row(128, 1, ncu.Kernel("k", "(1, 1, 1)", "(1, 1, 1)", {}))
    assert bare["stall_1"] is bare["time_us"] is bare["dram_gbps"] is None
    Report("toy", "toy", {}, rows=[row, bare]).validate()


def test_the_name_filter_ignores_case():
    pattern = ncu.name_pattern("lightning_2").removeprefix("regex:")
    for name in ("kernel_Lightning_2Decode", "LIGHTNING_2", "xlightning_2"):
        assert re.search(pattern, name)
    assert not re.search(pattern, "lightening_2")


def fake_ncu(directory, script):
    """An executable `ncu`, alone on PATH, that runs a Python script."""
    path = directory / "ncu"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(directory)


WRITE_LOG = f"""
import pathlib, sys
log = sys.argv[sys.argv.index("--log-file") + 1]
assert sys.argv[-2:] == ["program", "--flag"]
pathlib.Path(log).write_text(pathlib.Path({str(CSV)!r}).read_text())
"""


def profile():
    return ncu.profile(["program", "--flag"], kernel_word="lightning", launches=2, timeout_s=60)


def test_profile_reads_what_ncu_wrote(tmp_path, monkeypatch, kernels):
    monkeypatch.setenv("PATH", fake_ncu(tmp_path, WRITE_LOG))
    assert profile() == kernels


def test_profile_reports_a_failure_with_its_output(tmp_path, monkeypatch):
    script = "import sys; print('==ERROR== the program crashed'); sys.exit(9)"
    monkeypatch.setenv("PATH", fake_ncu(tmp_path, script))
    with pytest.raises(ncu.NcuError, match=r"(?s)exited with 9.*the program crashed"):
        profile()


def test_denied_counters_make_the_benchmark_unavailable(tmp_path, monkeypatch):
    script = "import sys; print('==ERROR== ERR_NVGPUCTRPERM'); sys.exit(1)"
    monkeypatch.setenv("PATH", fake_ncu(tmp_path, script))
    with pytest.raises(Unavailable, match="counters"):
        profile()


def test_no_ncu_makes_the_benchmark_unavailable(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    with pytest.raises(Unavailable, match="ncu"):
        ncu.find_ncu()


def test_the_benchmark_profiles_itself(monkeypatch, kernels):
    programs = []

    def profile(program, **_):
        programs.append(program)
        return kernels

    monkeypatch.setattr(ncu, "profile", profile)
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)
    assert main(["lightning-decode-ncu", "--batches", "64", "128", "--print-only"]) == 0
    command = [sys.executable, "-m", "cute_attn.bench", "lightning-decode-ncu", "--drive"]
    assert programs == [[*command, "64"], [*command, "128"]]
