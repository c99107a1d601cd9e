"""The Emulator class: what it takes, what it reports, what it refuses."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import cache
from cute_attn.emulation import current_emulation
from cute_attn.emulator import (
    Emulator,
    EmulatorUnavailable,
    Finding,
    FindingsError,
    Names,
    UnsupportedInstruction,
    build,
    coverage,
)
from cute_attn.emulator.report import causes
from cute_attn.emulator.runner import run_ptx
from cute_attn.ops.lightning import plan_decode
from cute_attn.reference.lightning import lightning_attn_decode_reference

from . import planted_kernels

B, H, D = 2, 2, 64
SCALE = D**-0.5


@pytest.fixture(scope="module")
def entry() -> cache.Entry:
    """Lightning decode, compiled and stored."""
    ((kernel, spec),) = plan_decode("sm_90a", head_dim_k=D, head_dim_v=D, indexed=False)
    entry = cache.compile(kernel, spec, arch="sm_90a")
    assert entry.directory is not None
    return entry


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, B, H, D, generator=generator).to(torch.bfloat16)
    return {
        "q": q,
        "k": k,
        "v": v,
        "o": torch.full_like(v, torch.nan),
        "state": torch.randn(B, H, D, D, generator=generator),
        "decay": torch.rand(H, generator=generator),
    }


def arguments(t: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return (*t.values(), None, None, None, None, SCALE)


def patched(entry: cache.Entry, directory: Path, old: str, new: str) -> Path:
    """A copy of the entry whose PTX has been changed."""
    directory.mkdir()
    text = entry.read("kernel.ptx").decode()
    assert old in text
    (directory / "kernel.ptx").write_text(text.replace(old, new, 1))
    shutil.copy(entry.directory / "kernel.o", directory)
    return directory


@pytest.mark.parametrize("schedule", ["fair", "random", "adversarial"])
@pytest.mark.parametrize("how", ["entry", "directory"])
def test_runs_what_is_cached(entry: cache.Entry, schedule: str, how: str):
    emulator = Emulator(schedule=schedule)
    t = tensors()
    exact_o, exact_state = lightning_attn_decode_reference(
        t["q"], t["k"], t["v"], t["state"], t["decay"]
    )
    function = emulator.load(entry if how == "entry" else entry.directory)
    function(*arguments(t))
    torch.testing.assert_close(t["o"].double(), exact_o, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(t["state"].double(), exact_state, rtol=1e-5, atol=1e-5)
    assert emulator.report.findings == []


def test_runs_what_the_compiler_returned():
    from cutlass import cute

    ((_, spec),) = plan_decode("sm_100a", head_dim_k=D, head_dim_v=D, indexed=False)
    from cute_attn.kernels.lightning.decode import LightningDecode

    kernel = LightningDecode(spec)
    options = "--enable-tvm-ffi --gpu-arch sm_100a --keep-ptx"
    compiled = cute.compile(kernel, *kernel.fake_args(), options=options)
    t = tensors()
    exact_o, _ = lightning_attn_decode_reference(t["q"], t["k"], t["v"], t["state"], t["decay"])
    Emulator().load(compiled)(*arguments(t))
    torch.testing.assert_close(t["o"].double(), exact_o, rtol=2e-2, atol=2e-2)

    without_ptx = cute.compile(
        kernel, *kernel.fake_args(), options="--enable-tvm-ffi --gpu-arch sm_100a"
    )
    with pytest.raises(ValueError, match="--keep-ptx"):
        Emulator().load(without_ptx)


def test_all_ctas_of_a_cooperative_launch_are_resident():
    """Each of six CTAs waits for all others, on a machine of two SMs."""
    from cutlass import Int32, cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from . import grid_barrier

    count = grid_barrier.CTAS
    stand_ins = [make_fake_compact_tensor(Int32, (n,)) for n in (1, count)]
    options = "--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx"
    compiled = cute.compile(grid_barrier.run, *stand_ins, options=options)
    counter, seen = (torch.zeros(n, dtype=torch.int32) for n in (1, count))
    emulator = Emulator(num_sms=2)
    emulator.load(compiled)(counter, seen)
    assert seen.tolist() == [count] * count
    assert emulator.report.findings == []


def test_report(entry: cache.Entry):
    emulator = Emulator(num_sms=2)
    function = emulator.load(entry)
    for seed in range(2):
        function(*arguments(tensors(seed)))
    report = emulator.report
    assert [record.kernel for record in report.launches] == list(function.kernels) * 2
    assert report.launches[0].grid[1:] == (H, B)
    assert report.instructions == sum(report.by_opcode.values()) == sum(report.by_warp.values())
    assert report.by_opcode["fma.rn.f32"] > 0
    t = tensors()
    stored = 2 * (t["o"].nbytes + t["state"].nbytes)
    assert report.bytes["global_store"] == stored
    assert report.bytes["global_load"] >= stored
    assert report.bank_conflicts >= 1
    assert report.uncoalesced >= 1
    assert "no findings" in str(report)


def test_the_same_seed_gives_the_same_run(entry: cache.Entry, tmp_path: Path):
    def events(seed: int, path: Path) -> bytes:
        emulator = Emulator(schedule="random", seed=seed, traced=True)
        emulator.load(entry)(*arguments(tensors()))
        emulator.trace(path)
        return path.read_bytes()

    first, second, other = (
        events(seed, tmp_path / f"{i}.json") for i, seed in enumerate((1, 1, 2))
    )
    assert first == second
    assert first != other


def test_trace_names_rows_and_waits(entry: cache.Entry, tmp_path: Path):
    emulator = Emulator(traced=True)
    names = Names(shared={}, warps={"compute": (0, 15)})
    emulator.load(entry, names)(*arguments(tensors()))
    emulator.trace(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "warp 0: compute" in rows
    waits = [e for e in events if e.get("cat") == "wait"]
    assert waits
    assert all(e["dur"] >= 0 and e["args"]["line"] > 0 for e in waits)
    assert emulator.report.by_warp["compute"] == emulator.report.instructions


def test_a_trace_must_be_asked_for(tmp_path: Path):
    with pytest.raises(ValueError, match="traced=True"):
        Emulator().trace(tmp_path / "timeline.json")


def test_host_code_checks_its_arguments(entry: cache.Entry):
    function = Emulator().load(entry)
    t = tensors()
    t["k"] = t["k"].to(torch.float16)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="dtype"):
        function(*arguments(t))
    t["k"] = torch.empty_like(t["q"], device="meta")  # its address is 0
    with pytest.raises(ValueError, match="a tensor on meta has no memory"):
        function(*arguments(t))


def test_findings_raise_and_the_outputs_are_there(entry: cache.Entry, tmp_path: Path):
    directory = patched(entry, tmp_path / "bug", "bar.sync", "// bar.sync")
    with pytest.raises(FindingsError, match="race") as caught:
        Emulator().load(directory)(*arguments(tensors()))
    finding = next(f for f in caught.value.findings if f.check == "race")
    assert finding.line is not None
    assert finding.ptx in (directory / "kernel.ptx").read_text()

    emulator = Emulator(on_findings="collect")
    t = tensors()
    emulator.load(directory)(*arguments(t))
    assert [f.check for f in emulator.report.errors].count("race") > 0
    assert not torch.equal(t["state"], tensors()["state"])  # it ran to its end

    Emulator(checks="none").load(directory)(*arguments(tensors()))
    Emulator(checks=["deadlock", "barrier"]).load(directory)(*arguments(tensors()))


def test_findings_come_out_of_another_process():
    raised = FindingsError([Finding("race", "error", "a write after a read", "kernel", line=7)])
    again = pickle.loads(pickle.dumps(raised))
    assert isinstance(again, FindingsError)
    assert again.findings == raised.findings and str(again) == str(raised)


def test_an_unknown_instruction_is_named(entry: cache.Entry, tmp_path: Path):
    directory = patched(entry, tmp_path / "new", "fma.rn.f32", "fma.rn.marvellous.f32")
    with pytest.raises(UnsupportedInstruction, match=r"fma\.rn\.marvellous\.f32.*line \d+"):
        Emulator().load(directory)


def test_a_directory_without_an_entry(tmp_path: Path):
    with pytest.raises(ValueError, match=r"kernel\.o and no kernel\.ptx"):
        Emulator().load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "slow"}, "schedule is 'slow', must be one of 'fair'"),
        ({"checks": ["racy"]}, "checks is 'racy', must be one of 'deadlock'"),
        ({"num_sms": 0}, "num_sms is 0, must be a positive integer"),
        ({"numerics": "double"}, "numerics is 'double'"),
        ({"on_findings": "ignore"}, "on_findings is 'ignore'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Emulator(**options)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    build.compiler.cache_clear()
    try:
        with pytest.raises(EmulatorUnavailable, match=r"no C compiler.*Install gcc"):
            build.compiler()
    finally:
        build.compiler.cache_clear()


# -- operators on CPU tensors -------------------------------------------------------------------


def decode(t: dict[str, torch.Tensor]) -> torch.Tensor:
    return cute_attn.lightning_attn_decode(t["q"], t["k"], t["v"], t["state"], t["decay"])


def test_operators_take_cpu_tensors_only_where_they_are_emulated(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"a CUDA device, or .* CUTE_ATTN_EMULATE=1"):
        decode(tensors())
    with cute_attn.emulated("sm_100a") as emulator:
        inside = decode(tensors())
    with pytest.raises(ValueError, match="must be on a CUDA device"):
        decode(tensors())
    assert len(emulator.report.launches) == 1

    monkeypatch.setenv("CUTE_ATTN_EMULATE", "1")
    monkeypatch.setenv("CUTE_ATTN_ARCH", "sm_80")
    cute_attn.reload_settings()
    try:
        emulation = current_emulation()
        assert emulation is not None
        assert emulation.arch == "sm_80"
        assert torch.equal(decode(tensors()), inside)
    finally:
        monkeypatch.undo()
        cute_attn.reload_settings()


def test_the_coverage_page_is_up_to_date():
    root = Path(__file__).parents[2]
    forms = "tests/data/silicon/forms.json"
    page = (root / "docs" / "emulator_instructions.md").read_text()
    assert page == coverage.page(root / forms), f"run python -m cute_attn.emulator.coverage {forms}"


# ---- findings by cause


def finding(check: str, line: int, other: int | None = None, severity: str = "error") -> Finding:
    return Finding(check, severity, f"{check} at {line}", "k", line, "x;", other_line=other)


def test_findings_at_common_instructions_have_one_cause():
    """A missed barrier: two races with one store, and what the unwritten value leads to."""
    stored = finding("uninitialised", 30, 20)
    note, race, late = finding("race", 20, 9, "note"), finding("race", 20, 10), finding("race", 11)
    apart = finding("barrier", 40)
    other_kernel = replace(finding("race", 20), kernel="other")
    found = causes([stored, note, apart, race, late, other_kernel])
    assert found == [[apart], [race, stored, note], [late], [other_kernel]]


def test_an_early_dealloc_is_one_cause():
    kernel = planted_kernels.TCGEN05
    lines = [x for x in kernel.text.splitlines() if "// @dealloc" not in x]
    at = next(i for i, x in enumerate(lines) if "// @stored" in x)
    lines.insert(at + 1, "@!%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;")
    run = run_ptx(
        "\n".join(lines),
        block=kernel.block,
        args=kernel.arguments(),
        dynamic_shared=kernel.dynamic_shared,
    )
    ((root, *others),) = causes(run.errors)
    assert root.check == "tmem" and "tcgen05.dealloc" in root.other_ptx
    assert len(others) >= 2
    text = str(FindingsError(run.findings))
    assert text.count("  at CTA ") == 1 and all(f.message in text for f in others)
