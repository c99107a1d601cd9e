"""The benchmark of `chunk_gated_delta_rule` on the CPU, with plain PyTorch for kernels and formulas
for GPU times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn.bench.__main__ import main
from cute_attn.bench.gated_delta_rule import chunk
from cute_attn.bench.gated_delta_rule import problem as gated
from cute_attn.bench.harness.roofline import Roofline
from cute_attn.bench.harness.timing import Timing
from cute_attn.bench.kda import problem
from cute_attn.reference.gated_delta_rule import gated_delta_rule_reference

SIZES = {"head_dim_k": 64, "head_dim_v": 64}
CASES = {
    "forward": [chunk.GatedCase(1, 2, 70, **SIZES), chunk.GatedCase(2, 2, 66, **SIZES)],
    "backward": [chunk.GatedCase(1, 2, 70, **SIZES)],
}


def plain(*, output_final_state: bool, **rest: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    found = gated_delta_rule_reference(**rest, dtype=torch.float32)
    return found.o.to(rest["v"].dtype), found.final_state if output_final_state else None


def times(fns: dict[str, Any], *, mode: str, rep_ms: float) -> dict[str, Timing]:
    """Each contender runs once, so that it must work."""
    for call in fns.values():
        call()
    return {who: Timing.from_samples([10.0 if who == "ours" else 19.0] * 3) for who in fns}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)
    monkeypatch.setattr(gated, "compile_ours", lambda cases, backward: None)
    monkeypatch.setitem(sys.modules["cute_attn"].__dict__, "chunk_gated_delta_rule", plain)
    monkeypatch.setattr(problem, "time_cuda_interleaved", times)
    monkeypatch.setattr(chunk, "measure_roofline", lambda **_: Roofline(3000.0, 2900.0))
    monkeypatch.setattr(chunk, "cases_of", lambda which, short: CASES[which])
    monkeypatch.setitem(chunk.GOALS, "forward", {(1, 2, 1, 70): 10.0, (2, 2, 1, 66): 9.0})
    monkeypatch.setitem(chunk.GOALS, "backward", {(1, 2, 1, 70): 9.0})


def cudnn(
    *, q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, a_log: torch.Tensor,
    initial_state: torch.Tensor, output_final_state: bool, safe_gate: bool, **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """cuDNN's function: packed tokens, and states with V first."""
    assert output_final_state and safe_gate
    rows = {name: x[None] for name, x in rest.items() if name in ("k", "g", "beta")}
    found = gated_delta_rule_reference(
        q=q[None], v=v[None], **rest | rows, A_log=a_log, use_gate_in_kernel=True,
        initial_state=initial_state, state_v_first=True, cu_seqlens=cu_seqlens,
        dtype=torch.float32,
    )  # fmt: skip
    return found.o[0].to(v.dtype), found.final_state


def flashinfer(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    cu_seqlens: torch.Tensor, initial_state: torch.Tensor, output_final_state: bool,
    output_state: torch.Tensor, max_seqlen: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashInfer's function: packed tokens, decays, and states with V first."""
    assert output_final_state and max_seqlen == cu_seqlens.diff().max()
    found = gated_delta_rule_reference(
        q=q[None], k=k[None], v=v[None], g=g[None].log(), beta=beta[None],
        initial_state=initial_state, state_v_first=True, cu_seqlens=cu_seqlens,
        dtype=torch.float32,
    )  # fmt: skip
    return found.o[0].to(v.dtype), output_state.copy_(found.final_state)


def run(tmp_path: Path, *argv: str) -> Any:
    assert main(["gdn", *argv, "--out", str(tmp_path), "--commit", "abc"]) == 0
    return json.loads(next(tmp_path.rglob("*.json")).read_text())


def test_both_passes(fake_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = {gated.PEER: plain, problem.CUDNN[True]: cudnn, gated.FLASHINFER: flashinfer}
    monkeypatch.setattr(problem, "peer", peers.get)
    report = run(tmp_path)
    for who in ("cudnn", "flashinfer"):
        assert [row[f"{who}_us"] for row in report["rows"]] == [19.0] * 4 + [None]
    assert [(r["pass"], r["heads"], r["mode"], r["fla_us"]) for r in report["rows"]] == [
        ("forward", 1, "do_bench", 19.0),
        ("forward", 1, "graph", 19.0),
        ("forward", 2, "do_bench", 19.0),
        ("forward", 2, "graph", 19.0),
        ("backward", 1, "do_bench", 19.0),
    ]
    assert {v["name"]: v["passed"] for v in report["verdicts"]} == {
        "forward 1/2 1x70: at most 10 us on an H200": True,
        "forward 2/2 1x66: at most 9 us on an H200": False,
        "backward 1/2 1x70: at most 9 us on an H200": False,
    }
    for name in ("ours dt_bias", "fla dt_bias", "cudnn final_state", "flashinfer final_state"):
        assert name in report["notes"][0]


def test_without_the_peer(fake_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(problem, "peer", lambda _: None)
    report = run(tmp_path, "--passes", "forward", "--mode", "graph", "--only", "H=1")
    (row,) = report["rows"]
    assert (row["pass"], row["fla_us"]) == ("forward", None)
    assert row["roofline_us"] == pytest.approx(CASES["forward"][0].fused_bytes / 3e6)
    assert "FLA was left out: flash-linear-attention cannot be imported" in report["notes"]


def test_bytes_are_those_of_the_pages() -> None:
    """MB at 16/64 and 16/32 heads, T = 8192, without states."""
    case = chunk.GatedCase(16, 64, 8192)
    assert (case.one_kernel_bytes - 2 * case.state) / 1e6 == pytest.approx(336, abs=3)
    moved = case.fused_bytes - 2 * case.state
    assert moved / 1e6 == pytest.approx(210 + 478, abs=12)
    assert chunk.BETWEEN == 17_424


def test_the_cases_have_goals() -> None:
    for which in chunk.PASSES:
        sizes = {
            (x.heads, x.heads_v, x.batch, x.tokens) for x in chunk.cases_of(which, short=False)
        }
        assert sizes >= set(chunk.GOALS[which])
        assert chunk.cases_of(which, short=True)
