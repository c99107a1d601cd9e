"""`attention` on the CPU, with plain PyTorch for kernels and a table for GPU times."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn.bench.__main__ import main
from cute_attn.bench.attention import agreement, cases, operators, problem
from cute_attn.bench.attention.cases import CUDNN, FA2, FA3, FA3_PLANNED, FA4, Case
from cute_attn.bench.harness.agreement import Disagreement
from cute_attn.bench.harness.roofline import Roofline
from cute_attn.bench.harness.timing import Timing, time_rested
from cute_attn.reference.attention import attention_reference

SMALL = [
    Case("forward", 16, 2, 40, 40, 2, 1, True),
    Case("forward", 16, 1, 24, 24, 4, 2, False),
    Case("backward", 16, 1, 24, 24, 4, 2, True),
    Case("batches", 16, 3, 1, 64, 4, 2, False),
    Case("batches", 16, 3, 1, 64, 4, 2, False, 16),
    Case("pages", 16, 2, 32, 32, 4, 2, True, 16),
    Case("decode", 16, 3, 2, 40, 4, 2, True, 16, lengths=(3, 40, 17), kind="speculative"),
    Case(
        "decode", 16, 3, 1, 40, 4, 2, False, 16, lengths=(3, 40, 17), kv_dtype="float8_e4m3fn",
        kind="fp8",
    ),
]  # fmt: skip
MICROSECONDS = {
    "ours": 2.0, "contiguous": 1.9, FA4: 3.0, CUDNN: 2.5, FA2: 4.0, "kernel_copy": 1.8,
    "memcpy": 1.7, cases.WIDE: 3.5, FA3: 2.8, FA3_PLANNED: 2.4,
}  # fmt: skip


def low(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    o, _ = attention_reference(q, k, v, dtype=torch.float32, **options)
    return o.to(q.dtype)


def dense(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[torch.Tensor, None]:
    return low(q, k, v, causal=causal), None


def varlen(
    q: Any, k: Any, v: Any, *, page_table: Any = None, num_splits: int = 1, **options: Any
) -> Any:
    del num_splits
    if page_table is not None:
        k, v = (x[page_table.long()].flatten(1, 2) for x in (k, v))
    return low(q, k, v, **options), None


def fa3_cache(q: Any, k: Any, v: Any, *, cache_seqlens: Any, causal: bool, **plan: Any) -> Any:
    assert plan in ({}, {"scheduler_metadata": "planned"})
    return low(q, k, v, seqused_k=cache_seqlens, causal=causal)


def fa3_plan(*sizes: Any, causal: bool) -> str:
    assert sizes[:-1] == (3, 2, 48, 4, 2, 16) and causal  # 48: whole pages
    return "planned"


PEER_FUNCTIONS = problem.peer_functions
PEERS = {
    "dense": dense, "varlen": varlen, "fa3_dense": dense, "fa3_cache": fa3_cache,
    "fa3_plan": fa3_plan,
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "DEVICE", "cpu")
    monkeypatch.setattr(problem, "CHECKED_TOKENS", 24)
    monkeypatch.setattr(problem, "with_kernel", lambda found: (found, []))
    monkeypatch.setattr(problem, "compile_all", lambda found: None)
    monkeypatch.setattr(problem, "capturable", lambda case, calls: (calls, []))
    monkeypatch.setattr(problem, "peer_functions", lambda: (PEERS, []))
    monkeypatch.setattr(
        problem, "_sdpa", lambda who, q, k, v, case: low(q, k, v, causal=case.causal)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)
    package = sys.modules["cute_attn"].__dict__
    monkeypatch.setitem(package, "flash_attn_func", dense)
    monkeypatch.setitem(package, "flash_attn_varlen_func", varlen)
    monkeypatch.setattr(operators, "measure_roofline", lambda **_: Roofline(3000.0, 2900.0, 700.0))
    monkeypatch.setattr(operators, "all_cases", lambda: SMALL)
    monkeypatch.setattr(operators, "time_rested", fake_times)


def fake_times(calls: Any, **_: Any) -> dict[str, Timing]:
    for call in calls.values():
        call()
    return {who: Timing.from_samples([MICROSECONDS[who]] * 3) for who in calls}


def run(tmp_path: Path, *argv: str, code: int = 0) -> Any:
    assert main(["attention", *argv, "--out", str(tmp_path), "--commit", "abc"]) == code
    return {path.stem: json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}


@pytest.mark.parametrize(
    "name", ["flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface"]
)
def test_flash_attention_3_is_a_peer_under_each_of_its_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType(name)
    for function in ("flash_attn_func", "flash_attn_with_kvcache", "get_scheduler_metadata"):
        setattr(module, function, function)
    for other in ("flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, other, None)
    for config in ("fa3_fwd_config", "flash_attn_config"):
        monkeypatch.setitem(sys.modules, config, types.ModuleType(config))
    monkeypatch.setitem(sys.modules, name, module)
    found, notes = PEER_FUNCTIONS()
    assert found["fa3_dense"] == "flash_attn_func" and found["fa3_plan"] == "get_scheduler_metadata"
    assert not any("FlashAttention-3" in note for note in notes)


def test_a_missing_flash_attention_3_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface",
        "fa3_fwd_config",
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, None)
    found, notes = PEER_FUNCTIONS()
    assert "fa3_dense" not in found
    assert sum("FlashAttention-3 was left out" in note for note in notes) == 1


# ---- cases


def test_the_issues_cases_are_all_there():
    found = cases.all_cases()
    assert len(set(found)) == len(found)
    whole = {(c.part, c.head_dim, c.seqlen_q, c.group, c.causal) for c in found if not c.cached}
    assert len(whole) == 2 * 3 * 7 * 3 * 2 + 2 * 3
    wide = [c for c in found if c.head_dim == 512]
    assert {(c.part, c.seqlen_k) for c in wide} >= {("forward", 4096), ("forward", 16384)}
    assert sum(c.part == "batches" and c.kv_bytes > 128 * 10**6 for c in wide) == 9
    assert {c.batch * c.seqlen_q for c in found if not c.cached} == {16384, 32768}
    batches = {(c.batch, c.seqlen_k) for c in found if c.part == "batches"}
    assert {b for b, _ in batches} >= {1, 256} and {s for _, s in batches} >= {1024, 131072}
    assert all(c.group == 8 for c in found if c.part in ("batches", "pages"))
    assert {c.page_size for c in found if c.part == "batches"} == {0, 1, 16, 48, 64}
    decode = [c for c in found if c.part == "decode"]
    assert {c.kv_dtype for c in decode} == {"", "float8_e4m3fn", "float8_e5m2"}
    assert {c.seqlen_q for c in decode if c.kind == "speculative"} == {2, 4, 8, 16}
    assert {c.page_size for c in decode if c.kind == "page 1"} == {1}
    for ragged, equal in cases.RAGGED.items():
        keys, same = cases.CACHES[ragged], cases.CACHES[equal]
        assert len(keys) == len(same) and len(set(same)) == 1
        assert abs(sum(same) / sum(keys) - 1) < 0.001
    assert set(cases.short_cases()) <= set(found)


def test_counts():
    case = Case("forward", 128, 4, 4096, 4096, 16, 4, True)
    assert case.flops == 4 * 4 * 16 * 4096**2 * 128 / 2 and case.heads_k == 4
    decode = Case("batches", 128, 2, 1, 1000, 16, 8, False)
    assert decode.kv_bytes == 2 * 2 * 1000 * 2 * 128 * 2
    assert decode.min_bytes == decode.kv_bytes + 2 * 2 * 16 * 128 * 2
    assert decode.plan["short"] and decode.plan["seqused_k"] and decode.plan["page_size"] is None
    assert (decode.plan["num_splits"], case.plan["num_splits"]) == (0, 1)
    fp8 = replace(decode, part="decode", kv_dtype="float8_e5m2")
    assert fp8.kv_bytes == decode.kv_bytes // 2 and fp8.plan["kv_dtype"] == "float8_e5m2"
    ragged = replace(decode, part="decode", lengths=(1000, 200))
    assert ragged.kv_bytes == 2 * 1200 * 2 * 128 * 2 and ragged.memory_bytes > ragged.min_bytes


# ---- agreement


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_wrong_contender_is_never_timed(case: Case):
    given = problem.make_inputs(case)
    if case.part == "backward":
        found, _ = problem.backward_calls(case, given, None)
        wrong = {who: (lambda: [2 * x for x in found["ours"]()]) for who in (FA4, CUDNN)}
        timed, notes = problem.agreeing_gradients(case, {**found, **wrong})
        assert list(timed) == ["ours"] and "dq differs from ours by" in notes[0]
        return
    contenders = problem.calls(case, given, PEERS)
    timed, errors, notes = problem.agreeing(case, given, contenders)
    assert list(timed) == list(contenders) and not notes
    assert errors["ours"] < 1.01 and all(errors[who] < 0.01 for who in errors if who in cases.PEERS)
    last = (case.batch - 1, case.seqlen_q - 1, case.heads - 1)

    def spoiled() -> torch.Tensor:
        o = problem.output(contenders["ours"]()).clone()
        o[last] += 1.0
        return o

    timed, _, notes = problem.agreeing(case, given, contenders | {FA4: spoiled})
    assert FA4 not in timed and f"not timed: {FA4} at {case.part}" in notes[0]
    with pytest.raises(Disagreement, match="an error of"):
        problem.agreeing(case, given, contenders | {"ours": spoiled})


def test_blocks_of_rows_have_the_first_and_the_last():
    assert agreement._blocks(2500, None) == [(0, 1024), (1024, 2048), (2048, 2500)]
    found = agreement._blocks(2**15, 3)
    assert len(found) == 3 and found[0][0] == 0 and found[-1][1] == 2**15
    q, k, v = torch.randn(3, 1, 40, 2, 16)
    (head,) = agreement.expected_in(q, k, v, [(0, 1)], causal=True)
    whole = attention_reference(q, k, v, causal=True)[0]
    torch.testing.assert_close(head.exact, whole[0, :, 1])


def test_gradients_are_held_to_the_rule(monkeypatch: pytest.MonkeyPatch):
    errors = problem.check_gradients(SMALL[2])
    assert set(errors) == {"dq", "dk", "dv"}
    monkeypatch.setattr(
        problem, "calls", lambda case, x, _: {"ours": lambda: 1.1 * low(x.q, x.k, x.v)}
    )
    with pytest.raises(Disagreement, match="dq has"):
        problem.check_gradients(SMALL[2])


# ---- the command


def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kept = run(tmp_path)
    assert set(kept) == {f"attention-{part}" for part in operators.PARTS}
    assert {report["benchmark"] for report in kept.values()} == set(kept)
    found = kept["attention-forward"]
    assert [row["seqlen"] for row in found["rows"]] == [40, 24]
    row = found["rows"][0]
    assert row["tflops"] == pytest.approx(SMALL[0].flops / 2.0 / 1e6)
    assert row["share_of_matmul"] == pytest.approx(row["tflops"] / 700)
    assert row["speedup_vs_fa4"] == 1.5 and row["speedup_vs_best"] == 1.25
    assert (row["fa3_us"], row["speedup_vs_fa3"]) == (2.8, 1.4)
    backward, decode, batches, pages = (
        kept[f"attention-{x}"] for x in ("backward", "decode", "batches", "pages")
    )
    assert "fa3_us" not in backward["rows"][0]
    assert backward["parts"] == [] and backward["title"] == "Softmax attention, bfloat16: Backward"
    assert all("batches, " in verdict["name"] for verdict in batches["verdicts"])
    assert backward["rows"][0]["fa2_us"] == 4.0 and backward["rows"][0]["mode"] == "do_bench"
    contiguous, paged = batches["rows"]
    assert contiguous["cudnn_us"] == 2.5 and paged["cudnn_us"] is None
    assert (paged["mode"], paged["flush"]) == ("graph", "read") and paged["speedup_vs_fa4"] == 1.5
    assert paged["copy_us"] == MICROSECONDS["kernel_copy"]
    assert paged["share_of_copy"] == pytest.approx(SMALL[4].min_bytes / 2.0 / 1e3 / 3000)
    assert pages["rows"][0]["loss_pct"] == pytest.approx(100 * (2.0 / 1.9 - 1))
    several, fp8 = decode["rows"]
    assert (several["queries"], several["kind"]) == (2, "speculative")
    assert several["speedup_vs_fa3"] == 1.4 and several["speedup_vs_fa3_planned"] == 1.2
    assert several["bfloat16_us"] is None and several["fa4_us"] == 3.0
    assert fp8["speedup_vs_bfloat16"] == 1.75 and fp8["kv_dtype"] == "float8_e4m3fn"
    assert fp8["fa3_us"] is None and fp8["copy_us"] == MICROSECONDS["kernel_copy"]
    assert fp8["share_of_copy"] == pytest.approx(SMALL[7].min_bytes / 2.0 / 1e3 / 3000)
    assert "largest errors" in found["notes"][0]
    assert "forward: head_dim=16" in capsys.readouterr().err


def test_a_missing_backward_is_reported_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def forward_only(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        if q.requires_grad:
            raise NotImplementedError("there is no attention backward")
        return dense(q, k, v, causal=causal)

    monkeypatch.setitem(sys.modules["cute_attn"].__dict__, "flash_attn_func", forward_only)
    found = run(tmp_path, "--part", "backward")["attention-backward"]
    (row,) = found["rows"]
    assert row["time_us"] is None and row["fa4_us"] is None
    assert "backward: there is no attention backward" in found["notes"]
    assert found["succeeded"]


def test_a_wrong_result_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrong = lambda q, k, v, *, causal: (low(q, k, v, causal=False), None)  # noqa: E731
    monkeypatch.setitem(sys.modules["cute_attn"].__dict__, "flash_attn_func", wrong)
    found = run(tmp_path, "--part", "forward", "--no-peer", code=1)["attention-forward"]
    assert [row["causal"] for row in found["rows"]] == [False]
    assert any(note.startswith("FAILED: forward: head_dim=16, batch=2") for note in found["notes"])


def test_an_interrupted_run_reports_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = problem.make_inputs

    def interrupted(case: Case, *seed: int) -> Any:
        if case == SMALL[1]:
            raise KeyboardInterrupt
        return made(case, *seed)

    monkeypatch.setattr(problem, "make_inputs", interrupted)
    found = run(tmp_path, "--no-peer")["attention-forward"]
    assert len(found["rows"]) == 1 and found["rows"][0]["fa4_us"] is None
    assert "interrupted: 1 of 8 cases are done" in found["notes"]


# ---- verdicts


def whole(**columns: Any) -> dict[str, Any]:
    timings = {who: Timing.from_samples([us]) for who, us in MICROSECONDS.items()}
    case = Case("forward", 256, 4, 4096, 4096, 8, 1, True)
    row = cases.whole_row(case, timings, Roofline(3000.0, 2900.0, 700.0))
    return row | {"mode": "do_bench"} | columns


def test_targets():
    found = cases.verdicts({"forward": [whole(), whole(seqlen=2048), whole(head_dim=64)]})
    assert [(v.name.rpartition(": ")[2], v.passed) for v in found] == [
        ("speedup_vs_fa4 at least 1.05", True),
        ("speedup_vs_cudnn at least 1.15", True),
        ("speedup_vs_best at least 1", True),
    ]
    rows = [whole(seqlen=16384, causal=False, tflops=559.0), whole(head_dim=128, time_us=None)]
    assert [v.passed for v in cases.verdicts({"backward": rows})] == [False, False, None]
    batches = {"head_dim": 64, "batch": 64, "keys": 8192, "kv_mib": 62.0, "time_us": 1.0}
    batches |= {"share_of_copy": 0.89, "speedup_vs_fa4": None, "page_size": 64}
    assert [v.passed for v in cases.verdicts({"batches": [batches]})] == [False, None]
    assert len(cases.verdicts({"batches": [batches | {"kv_mib": 61.0}]})) == 1
    small = [batches | {"page_size": size, "time_us": us} for size, us in ((1, 1.17), (48, 1.18))]
    judged = cases.verdicts({"batches": [batches, *small]})
    assert [v.passed for v in judged] == [False, None, True, None, False, None]
    pages = {"head_dim": 64, "page_size": 64, "loss_pct": 5.1}
    judged = cases.verdicts({"pages": [pages, pages | {"page_size": 16}]})
    assert [v.passed for v in judged] == [False]


def step(kind: str, keys: str, **columns: Any) -> dict[str, Any]:
    row = {"head_dim": 128, "batch": 8, "kind": kind, "keys": keys, "queries": 1, "page_size": 64}
    row |= {"kv_dtype": "bfloat16", "kv_mib": 64.0, "time_us": 10.0, "share_of_copy": 0.87}
    row |= {f"speedup_vs_{who}": None for who in ("fa3", "fa3_planned", "fa4", "bfloat16")}
    return row | {"mode": "graph", "flush": "read"} | columns


def verdicts_on_last(*rows: dict[str, Any]) -> dict[str, bool | None]:
    """The verdicts on the last row by what they ask; peers without a time are left out."""
    found = cases.verdicts({"decode": list(rows)})
    label = cases._label(rows[-1])
    of_last = [v for v in found if v.passed is not None and label in v.name]
    return {v.name.rpartition(": ")[2]: v.passed for v in of_last}


def test_targets_of_decode():
    equal = step("equal", "32 of 4605", time_us=8.0)
    assert verdicts_on_last(equal) == {}
    ragged = step("ragged", "32 of 1k to 8k")
    share, beside = "share_of_copy at least", "at most 1.2 times keys=32 of 4605 queries=1"
    assert verdicts_on_last(equal, ragged) == {beside: False}
    found = verdicts_on_last(equal, ragged | {"kv_mib": 128.0})
    assert found == {beside: False, f"{share} 0.85": True}
    large = ragged | {"kv_mib": 256.0, "time_us": 9.5, "speedup_vs_fa3": 0.99}
    found = verdicts_on_last(equal, large)
    assert found == {beside: True, f"{share} 0.9": False, "speedup_vs_fa3 at least 1": False}
    few = step("few bytes", "8 of 2k", time_us=27.1)
    assert verdicts_on_last(few) == {"at most 27 us": False}
    assert verdicts_on_last(few | {"head_dim": 64}) == {}
    one = step("equal", "32 of 8k", time_us=9.5)
    queries = step("speculative", "32 of 8k", queries=8)
    assert verdicts_on_last(one, queries) == {"at most 1.06 times keys=32 of 8k queries=1": True}
    page = step("page 1", "32 of 8k", page_size=1, time_us=11.5)
    assert verdicts_on_last(one, page) == {"share_of_large_pages at least 0.85": False}
    fp8 = step("fp8", "32 of 8k", kv_dtype="float8_e4m3fn", speedup_vs_bfloat16=1.69)
    assert verdicts_on_last(one, fp8) == {"speedup_vs_bfloat16 at least 1.7": False}


def test_a_case_without_a_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr("cute_attn.cache.current_arch", lambda: "sm_100a")
    found = [case for case in cases.short_cases() if case.part == "forward"]
    there_is, notes = problem.with_kernel(found)
    assert {case.head_dim for case in there_is} == {256}
    assert "forward, head_dim 64: there is no attention forward for head_dim 64" in notes[0]


def test_plots_need_two_lengths():
    roofline = Roofline(3000.0, 2900.0, 700.0)
    assert cases.whole_plots([whole()], roofline) == []
    (plot,) = cases.whole_plots([whole(), whole(seqlen=8192, fa2_tflops=None)], roofline)
    assert plot.where == {"head_dim": 256, "causal": True, "heads_k": 8, "mode": "do_bench"}
    assert plot.ys == ("tflops", "fa4_tflops", "fa3_tflops", "cudnn_tflops", "fa2_tflops")


def test_timings_are_rested_and_in_turns():
    said: list[Any] = []

    class Device:
        def synchronize(self) -> None:
            pass

        def do_bench(self, fn: Any, warmup_ms: float, rep_ms: float) -> list[float]:
            said.append(fn())
            return [float(len(said))] * 3

    fns = {"a": lambda: "a", "b": lambda: "b"}
    found = time_rested(fns, rest_s=0.5, device=Device(), sleep=said.append)  # type: ignore[arg-type]
    assert said == [x for who in "abbaab" for x in (0.5, who)]
    assert found["a"].median_us == 8.0 and found["b"].median_us == 6.0
