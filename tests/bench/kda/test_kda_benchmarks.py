"""The benchmarks of KDA and the Gated Delta Net on the CPU, with plain PyTorch for kernels and
formulas for GPU times."""

import argparse
import functools
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cute_attn.bench.__main__ import main
from cute_attn.bench.gated_delta_rule import decode as gdn_decode
from cute_attn.bench.harness.roofline import Roofline
from cute_attn.bench.harness.timing import Timing
from cute_attn.bench.kda import cases as kda_cases
from cute_attn.bench.kda import chunk as kda_chunk
from cute_attn.bench.kda import decode as kda_decode
from cute_attn.bench.kda import fla_tuning, problem
from cute_attn.bench.kda import intra as kda_intra
from cute_attn.bench.kda import recompute as kda_recompute
from cute_attn.bench.kda import stage as kda_stage
from cute_attn.bench.kda.cases import Case, DecodeCase
from cute_attn.reference import kda as reference
from cute_attn.reference.gated_delta_rule import gated_delta_rule_decode_reference

DIMS = {"head_dim_k": 64, "head_dim_v": 64}
SMALL = [
    Case(2, 4, 70, **DIMS),
    Case(2, 2, 70, gate="softplus", **DIMS),
    Case(1, 2, 130, sequences=3, lengths="skewed", **DIMS),
]
PLAIN = {"dtype": torch.float32, "stage_dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(problem, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)


# ---- stand-ins for the kernels and for the peer


def plain_chunk(
    *, output_final_state, cu_seqlens_cpu=None, return_intermediate_states=False, **rest
):
    assert output_final_state
    stages = reference.kda_chunk_reference(**rest, **PLAIN)
    return stages.o.to(rest["v"].dtype), stages.states.final_state


def plain_intra(q, k, v, g, beta, scale=None):
    found = reference.kda_chunk_intra_reference(q, k, v, g, beta, scale, **PLAIN)
    rounded = {name: x.to(k.dtype) for name, x in found._asdict().items()}
    return reference.KdaIntra(**rounded | {"qg": None})


def plain_recompute(q, k, v, g, beta, Akk):
    assert q is None
    found = reference.kda_recompute_w_u_reference(k, k, v, g, beta, Akk, **PLAIN)
    w, u, _, kg = (x.to(k.dtype) for x in found)
    return w, u, None, kg


def plain_decode(q, k, v, g, beta, state, *, out, **rest):
    found = reference.kda_decode_reference(q, k, v, g, beta, state, **rest, dtype=torch.float32)
    state.copy_(found.state)
    return out.copy_(found.o)


def plain_gdn_decode(q, k, v, g, beta, state, *, out, **rest):
    found = gated_delta_rule_decode_reference(q, k, v, g, beta, state, **rest, dtype=torch.float32)
    if found.conv_state is not None:
        rest["conv_state"].copy_(found.conv_state)
    state.copy_(found.state)
    return out.copy_(found.o)


def fla_intra(q, k, v, gk, beta, scale, safe_gate):
    """Results in FLA's order, with garbage in elements that FLA does not write."""
    assert safe_gate
    Aqk, Akk, w, u, qg, kg = plain_intra(q, k, v, gk, beta, scale)
    rows = torch.arange(q.shape[1]) % 64
    later = (torch.arange(64) > rows[:, None])[:, None]
    return w, u, qg, kg, Aqk.masked_fill(later, torch.nan), Akk


def fla_recurrent(q, k, v, g, beta, initial_state, output_final_state, **rest):
    found = reference.kda_reference(
        q, k, v, g, beta, initial_state=initial_state, **rest, dtype=torch.float32
    )
    return found.o.to(v.dtype), found.final_state


PEER = {
    "fla.ops.kda:chunk_kda": plain_chunk,
    "fla.ops.kda.chunk_intra:chunk_kda_fwd_intra": fla_intra,
    "fla.ops.kda.wy_fast:recompute_w_u_fwd": lambda k, v, beta, A, gk: plain_recompute(
        None, k, v, gk, beta, A
    ),
    "fla.ops.kda:fused_recurrent_kda": fla_recurrent,
}


def install(monkeypatch, **functions):
    """Replace public functions of cute_attn and of cute_attn.ops.kda."""
    stages = ModuleType("cute_attn.ops.kda")
    for name, function in functions.items():
        monkeypatch.setitem(sys.modules["cute_attn"].__dict__, name, function)
        setattr(stages, name, function)
    monkeypatch.setitem(sys.modules, "cute_attn.ops.kda", stages)


@pytest.fixture
def contenders(monkeypatch):
    install(
        monkeypatch,
        chunk_kda=plain_chunk,
        kda_chunk_intra=plain_intra,
        kda_recompute_w_u=plain_recompute,
        kda_decode=plain_decode,
        gated_delta_rule_decode=plain_gdn_decode,
    )
    monkeypatch.setattr(problem, "peer", PEER.get)
    monkeypatch.setattr(problem, "compile_chunk", lambda cases, paths: None)
    monkeypatch.setattr(fla_tuning, "share_norms", lambda: None)


@pytest.fixture
def fake_gpu(monkeypatch, contenders):
    """Times come from a formula; each contender runs once, so that it must work."""

    def fake_times(fns, *, mode, rep_ms):
        for fn in fns.values():
            fn()
        us = {"ours": 10.0, "modular": 25.0, "fla": 19.0 if mode == "do_bench" else 12.0}
        us |= {"memcpy": 9.95 if mode == "do_bench" else 15.0, "kernel_copy": 9.8}
        return {name: Timing.from_samples([us[name]] * 3) for name in fns}

    monkeypatch.setattr(problem, "time_cuda_interleaved", fake_times)
    for module in (kda_chunk, kda_decode, kda_stage, gdn_decode):
        monkeypatch.setattr(module, "measure_roofline", lambda **_: Roofline(3000.0, 2900.0))


# ---- cases


def test_byte_counts_are_those_of_the_page():
    """The numbers of docs/kernels/kda.md for B = 1, T = 8192, 64 heads, in MB."""
    case = Case(64, 64, 8192)
    states = 2 * case.state
    assert round(case.intra_bytes / 1e6) == pytest.approx(673 + 537, abs=1)
    assert round(case.recompute_bytes / 1e6) == pytest.approx(606 + 403, abs=1)
    # The page has beta in float32 and no states.
    assert (case.one_kernel_bytes - states) / 1e6 == pytest.approx(539 + 134, abs=2)
    assert (case.fused_bytes - states) / 1e6 == pytest.approx(1080 + 675, abs=2)
    assert (case.modular_bytes - states) / 1e6 == pytest.approx(2083 + 1343, abs=6)
    assert DecodeCase(64, 64, 64).min_bytes / 64 / 1e6 == pytest.approx(8.47, abs=0.01)


@pytest.mark.parametrize("lengths", kda_cases.LENGTHS)
@pytest.mark.parametrize(("tokens", "sequences"), [(8192, 8), (32768, 20), (101, 7)])
def test_packed_sequences_fill_the_row(lengths, tokens, sequences):
    case = Case(1, 1, tokens, sequences=sequences, lengths=lengths)
    found = case.sequence_lengths(3)
    assert len(found) == sequences
    assert sum(found) == tokens
    assert min(found) >= 1
    if lengths == "uniform":
        assert max(found) - min(found) <= 1
    if lengths == "skewed":
        assert found[-1] == tokens // 2


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["T=130"], [2]),
        (["H=2,HV=2", "N=3"], [1, 2]),
        (["lengths=dense"], [0, 1]),
        (["gate=softplus,T=1"], []),
    ],
)
def test_only(only, expected):
    parser = argparse.ArgumentParser()
    kda_cases.add_arguments(parser, kda_cases.CHUNK_FILTERS)
    args = parser.parse_args(["--only", *only])
    assert kda_cases.chosen(SMALL, args.only) == [SMALL[i] for i in expected]


def test_a_filter_of_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["kda-intra", "--only", "N=8"])
    assert "'N=8' is not NAME=VALUE" in capsys.readouterr().err


def test_what_does_not_fit_is_left_out_and_named():
    small, large = Case(64, 128, 512, batch=2), Case(64, 128, 32768, batch=2)
    fit, (note,) = kda_cases.that_fit([small, large], 40 * 2**30)
    assert fit == [small]
    assert "T=32768" in note
    assert kda_cases.that_fit([large], 80 * 2**30) == ([large], [])


def test_the_issues_cases_are_all_there():
    cases = kda_chunk.all_cases()
    assert len(set(cases)) == len(cases)
    dense = {(c.heads, c.heads_v, c.tokens) for c in cases if not c.sequences}
    assert {h for h, hv, _ in dense if h == hv} == {12, 32, 64, 96}
    assert {t for h, hv, t in dense if (h, hv) == (32, 64)} == {512 * 2**i for i in range(7)}
    packed = {(c.sequences, c.lengths) for c in cases if c.sequences}
    assert packed == {(n, how) for n in (8, 20) for how in ("uniform", "skewed", "random")}
    assert set(kda_chunk.short_cases()) <= set(cases)


def test_the_kernels_of_all_cases_are_made_ready(monkeypatch):
    import cute_attn.cache

    asked = []
    monkeypatch.setattr(cute_attn.cache, "current_arch", lambda: "sm_90a")
    monkeypatch.setitem(vars(cute_attn), "warmup", asked.extend)
    problem.compile_chunk([Case(64, 64, 512), Case(12, 12, 8192, gate="softplus")], ("fused",))
    gates = {spec.gate for kernel, spec in asked if kernel.name == "kda_prepare"}
    assert gates == {"lower_bound", "softplus"}
    assert {spec.index_dtype for kernel, spec in asked if kernel.name == "kda_state_pass"} == {
        "none"
    }


# ---- agreement


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_chunk_contenders_compute_the_operator(contenders, case):
    arguments = problem.chunk_arguments(case, 5)
    errors = problem.check_chunk(case, arguments, problem.chunk_calls(arguments, with_peer=True))
    assert set(errors) == {"ours o", "ours final_state", "fla o", "fla final_state"}
    assert all(0 < error < 0.02 for error in errors.values())


@pytest.mark.parametrize("stage", ["intra", "recompute"])
def test_stage_contenders_compute_the_operator(contenders, stage):
    case = Case(1, 2, 70, batch=2, **DIMS)
    arguments = problem.stage_arguments(case, 5)
    make = {"intra": problem.intra_calls, "recompute": problem.recompute_calls}[stage]
    errors = problem.check_stage(stage, case, arguments, make(arguments, with_peer=True))
    tensors = {"w", "u", "kg"} | ({"Aqk", "Akk"} if stage == "intra" else set())
    assert set(errors) == {f"{who} {name}" for who in ("ours", "fla") for name in tensors}
    assert all(0 < error < 0.02 for error in errors.values())


@pytest.mark.parametrize("slots", ["batch", "random"])
def test_decode_contenders_compute_the_operator(contenders, slots):
    case = DecodeCase(3, 2, 4, **DIMS, slots=slots)
    arguments = problem.decode_arguments(case, 5)
    before = arguments["state"].clone()
    errors = problem.check_decode(case, arguments, problem.decode_calls(arguments, with_peer=True))
    assert set(errors) == {"ours o", "ours state", "fla o", "fla state"}
    assert not torch.equal(before, arguments["state"])


def test_gdn_decode_computes_the_operator(contenders):
    case = DecodeCase(3, 2, 4, **DIMS, decays="head", convolution=True)
    arguments = problem.decode_arguments(case, 5)
    assert arguments["g"].shape == (3, 4) and arguments["dt_bias"].shape == (4,)
    calls = problem.decode_calls(arguments, with_peer=False)
    errors = problem.check_decode(case, arguments, calls)
    assert set(errors) == {"ours o", "ours state", "ours conv_state"}
    assert errors["ours conv_state"] == 0
    kept = arguments | {"conv_state": arguments["conv_state"].clone()}
    with pytest.raises(problem.Disagreement, match="conv_state has a relative error"):
        problem.check_decode(case, arguments, {"ours": lambda: plain_gdn_decode(**kept)})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda o, state: o[0, 0, 0, 0].fill_(float("nan")),
        lambda o, state: o.mul_(1.02),
        lambda o, state: state[-1].mul_(1.01),
        lambda o, state: o[:, 64:].copy_(o[:, :-64].clone()),
    ],
)
@pytest.mark.parametrize("who", ["ours", "fla"])
def test_a_wrong_result_is_never_timed(contenders, monkeypatch, spoil, who):
    """The peer's result may be less exact; it is refused if it computes something else."""
    case = SMALL[2]
    arguments = problem.chunk_arguments(case, 5)
    calls = problem.chunk_calls(arguments, with_peer=True)
    right = calls[who]

    def wrong():
        o, state = right()
        for _ in range(1 if who == "ours" else 40):
            spoil(o, state)
        return o, state

    with pytest.raises(problem.Disagreement, match=f"{who}, chunk_kda at B=1 H=1 HV=2 T=130 in 3"):
        problem.check_chunk(case, arguments, calls | {who: wrong})


def test_a_peer_that_fails_or_disagrees_is_left_out(contenders):
    case = SMALL[0]
    arguments = problem.chunk_arguments(case, 5)
    calls = problem.chunk_calls(arguments, with_peer=True)

    def fails():
        raise RuntimeError("out of resource: shared memory\nmore")

    def disagrees():
        return tuple(1.2 * x for x in calls["ours"]())

    reasons = {
        fails: "which failed: out of resource: shared memory",
        disagrees: f"chunk_kda at {case}: o has a relative error of",
    }
    for peer, reason in reasons.items():
        check = functools.partial(problem.check_chunk, case, arguments)
        errors, rest, (note,) = problem.agreed(check, calls | {"fla": peer})
        assert list(rest) == ["ours"]
        assert set(errors) == {"ours o", "ours final_state"}
        assert note.startswith(f"not timed: fla, {reason}")
        with pytest.raises((RuntimeError, problem.Disagreement)):
            problem.agreed(check, calls | {"ours": peer})


@pytest.mark.parametrize("name", ["Aqk", "Akk", "kg"])
def test_a_wrong_stage_is_never_timed(contenders, monkeypatch, name):
    def wrong(*args, **kwargs):
        found = plain_intra(*args, **kwargs)
        getattr(found, name)[0, 63] *= 1.1
        return found

    install(monkeypatch, kda_chunk_intra=wrong)
    case = Case(1, 2, 70, **DIMS)
    arguments = problem.stage_arguments(case, 5)
    calls = problem.intra_calls(arguments, with_peer=True)
    with pytest.raises(problem.Disagreement, match=f"ours, intra at .*: {name} has"):
        problem.check_stage("intra", case, arguments, calls)


def test_some_heads_are_the_first_and_the_last():
    assert problem.some_heads(1, 3) == ([0], [0, 1, 2])
    assert problem.some_heads(12, 12) == ([0, 11], [0, 11])
    assert problem.some_heads(32, 64) == ([0, 31], [0, 1, 62, 63])


def test_without_the_package_there_is_no_peer(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert problem.peer("fla.ops.kda:chunk_kda") is None


def test_a_peer_that_cannot_be_captured_is_left_out(monkeypatch):
    def times(fns, *, mode, rep_ms):
        if "fla" in fns:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return {name: Timing.from_samples([1.0]) for name in fns}

    monkeypatch.setattr(problem, "time_cuda_interleaved", times)
    calls = {"ours": lambda: None, "fla": lambda: None}
    timings, (note,) = problem.time_calls(calls, "graph", 10.0)
    assert set(timings) == {"ours"}
    assert note.endswith("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError):
        problem.time_calls(calls, "do_bench", 10.0)


# ---- the commands


def run(tmp_path, *argv):
    assert main([*argv, "--out", str(tmp_path), "--commit", "abc"]) == 0
    return json.loads(next(tmp_path.rglob("*.json")).read_text())


def test_kda_chunk(fake_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kda_chunk, "all_cases", lambda: SMALL)
    monkeypatch.setattr(kda_chunk, "TARGET_TOKENS", 100)
    report = run(tmp_path, "kda-chunk", "--only", "T=130", "gate=softplus")
    assert [x.name for x in tmp_path.rglob("*.json")] == ["kda-chunk-part.json"]
    assert [(r["tokens"], r["mode"]) for r in report["rows"]] == [
        (70, "do_bench"), (70, "graph"), (130, "do_bench"), (130, "graph"),
    ]  # fmt: skip
    row = report["rows"][2]
    assert (row["heads"], row["heads_v"], row["sequences"], row["lengths"]) == (1, 2, 3, "skewed")
    assert row["speedup_vs_fla"] == pytest.approx(1.9)
    assert row["roofline_us"] == pytest.approx(SMALL[2].fused_bytes / 3e6)
    assert row["share_of_roofline"] == pytest.approx(row["roofline_us"] / 10)
    (verdict,) = report["verdicts"]
    assert verdict["passed"] is True
    assert verdict["name"] == "H=1 HV=2 T=130 in 3 skewed: speedup_vs_fla at least 1.6"
    assert verdict["detail"].endswith("the goal of 2 is missed")
    assert "float64" in report["notes"][0]
    assert "FLA's first call" in capsys.readouterr().err


def test_kda_chunk_without_the_peer(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(kda_chunk, "all_cases", lambda: [Case(1, 1, 70, **DIMS)])
    monkeypatch.setattr(kda_chunk, "TARGET_TOKENS", 70)
    report = run(tmp_path, "kda-chunk", "--only", "T=70", "--no-peer", "--mode", "do_bench")
    (row,) = report["rows"]
    assert row["fla_us"] is None
    (verdict,) = report["verdicts"]
    assert verdict["passed"] is None
    assert "FLA was left out (--no-peer)" in report["notes"]


def test_kda_chunk_by_both_paths(fake_gpu, monkeypatch, tmp_path):
    case = Case(1, 1, 70, **DIMS)
    monkeypatch.setattr(kda_chunk, "all_cases", lambda: [case])
    argv = ("--only", "T=70", "--path", "fused", "modular", "--mode", "graph")
    fused, modular = run(tmp_path, "kda-chunk", *argv)["rows"]
    assert (fused["path"], fused["time_us"], fused["fla_us"]) == ("fused", 10.0, 12.0)
    assert (modular["path"], modular["time_us"], modular["fla_us"]) == ("modular", 25.0, 12.0)
    assert fused["roofline_us"] == pytest.approx(case.fused_bytes / 3e6)
    assert modular["roofline_us"] == pytest.approx(case.modular_bytes / 3e6)


def test_the_fused_path_is_held_to_twice_the_peer():
    row = {
        **Case(64, 64, 8192).rows, "path": "fused", "mode": "do_bench",
        "time_us": 1000.0, "fla_us": 1900.0, "speedup_vs_fla": 1.9,
    }  # fmt: skip
    rows = [row, row | {"tokens": 2048}, row | {"gate": "softplus"}, row | {"mode": "graph"}]
    rows.append(row | {"path": "modular"})
    assert [(v.name, v.passed) for v in kda_chunk.verdicts(rows)] == [
        ("H=64 HV=64 T=8192: speedup_vs_fla at least 1.6", True),
        ("H=64 HV=64 T=8192: speedup_vs_fla at least 2", False),
    ]


@pytest.mark.parametrize(
    ("name", "module", "target", "met"),
    [("intra", kda_intra, 1.5, True), ("recompute", kda_recompute, 1.3, True)],
)
def test_kda_stages(fake_gpu, monkeypatch, tmp_path, name, module, target, met):
    monkeypatch.setattr(kda_stage, "HEADS", ((1, 1), (1, 2)))
    monkeypatch.setattr(kda_stage, "SHORT_TOKENS", (70,))
    assert target == module.TARGET
    report = run(tmp_path, f"kda-{name}", "--short")
    assert [(r["heads"], r["heads_v"], r["tokens"]) for r in report["rows"]] == [
        (1, 1, 70), (1, 2, 70),
    ]  # fmt: skip
    assert [v["passed"] for v in report["verdicts"]] == [met, met]
    assert f"at least {target}" in report["verdicts"][0]["name"]
    case = Case(1, 1, 70, batch=2)
    expected = case.intra_bytes if name == "intra" else case.recompute_bytes
    assert report["rows"][0]["roofline_us"] == pytest.approx(expected / 3e6)


def test_gdn_decode(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gdn_decode, "HEADS", ((1, 2),))
    monkeypatch.setattr(gdn_decode, "SHORT_BATCHES", (1, 32))
    report = run(tmp_path, "gdn-decode", "--short", "--no-peer")
    kinds = [("batch", False), ("random", False), ("random", True)]
    assert [(r["batch"], r["slots"], r["convolution"], r["mode"]) for r in report["rows"]] == [
        (batch, *kind, mode)
        for batch in (1, 32)
        for kind in kinds
        for mode in ("do_bench", "graph")
    ]
    found = {v["name"]: v["passed"] for v in report["verdicts"]}
    name = "B=32 H=1 HV=2 random slots (graph)"
    assert found[f"{name}: with the convolution at most 1.1 of the time without"]
    assert found[f"{name}: time_to_copy_ratio at most 1.01"] is False
    assert found["B=32 H=1 HV=2 batch slots (graph): speedup_vs_fla at least 1.1"] is None


def test_kda_decode(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(kda_decode, "SHORT_HEADS", ((1, 2),))
    monkeypatch.setattr(kda_decode, "SMALL_BATCH", 2)
    monkeypatch.setattr(kda_decode, "LARGE_BATCH", 3)
    monkeypatch.setattr(kda_decode, "SHORT_BATCHES", (2, 3))
    report = run(tmp_path, "kda-decode", "--short")
    assert [(r["batch"], r["slots"], r["mode"], r["fla_us"]) for r in report["rows"]] == [
        (2, "batch", "do_bench", 19.0), (2, "batch", "graph", 12.0),
        (2, "random", "do_bench", None), (2, "random", "graph", None),
        (3, "batch", "do_bench", 19.0), (3, "batch", "graph", 12.0),
        (3, "random", "do_bench", None), (3, "random", "graph", None),
    ]  # fmt: skip
    assert {v["name"]: v["passed"] for v in report["verdicts"]} == {
        "B=2 H=1 HV=2 batch slots (do_bench): speedup_vs_fla at least 4": False,
        "B=3 H=1 HV=2 batch slots (do_bench): time_to_copy_ratio at most 1.01": True,
        "B=3 H=1 HV=2 batch slots (do_bench): speedup_vs_fla at least 1.13": True,
        "B=3 H=1 HV=2 batch slots (graph): time_to_copy_ratio at most 1.01": False,
        "B=3 H=1 HV=2 random slots (do_bench): time_to_copy_ratio at most 1.01": True,
        "B=3 H=1 HV=2 random slots (graph): time_to_copy_ratio at most 1.01": False,
    }


def test_the_peers_kernels_are_compiled_by_processes(monkeypatch, tmp_path):
    """Every share of every case is compiled, by no more processes at once than requested."""
    program = (
        "import os, time, pathlib\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "mark = here / f'running-{{os.getpid()}}'\n"
        "mark.touch(); time.sleep(0.3)\n"
        "running = len(list(here.glob('running-*'))); mark.unlink()\n"
        'text = "{kind} {index}/{count} {tuned} {case!r}"\n'
        "text = f'{{running}} ' + text\n"
        "(here / f'done-{{os.getpid()}}').write_text(text)\n"
    )
    monkeypatch.setattr(fla_tuning, "_SHARE", program)
    cases = [Case(1, 1, 512), Case(2, 2, 512), Case(1, 1, 512, sequences=3, lengths="uniform")]
    fla_tuning.compile_peer("chunk", cases, jobs=6)
    found = [path.read_text().split(" ", 4) for path in tmp_path.glob("done-*")]
    assert sorted((share, tuned, case) for _, _, share, tuned, case in found) == sorted(
        (f"{i}/2", str(case is cases[2]), repr(case)) for case in cases for i in range(2)
    )
    assert max(int(running) for running, *_ in found) <= 6


class FakeTuner:
    """The part of Triton's autotuner that is used."""

    def __init__(self, name, keys, configs):
        self.base_fn = SimpleNamespace(__name__=name)
        self.keys, self.configs = keys, configs
        self.arg_names, self.compiled = ["x"], []
        self.fn = SimpleNamespace(run=self.compile)

    def prune_configs(self, kwargs):
        return [SimpleNamespace(all_kwargs=lambda n=n: {"num_warps": n}) for n in self.configs]

    def compile(self, *args, warmup, grid, num_warps):
        assert warmup
        self.compiled.append(num_warps)
        if num_warps == 4:
            raise RuntimeError("out of resources")


@pytest.mark.parametrize("tuned", [False, True])
def test_a_share_of_configurations(monkeypatch, tuned):
    triton = ModuleType("triton.runtime.autotuner")
    triton.Autotuner = type("Autotuner", (FakeTuner,), {})
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    tuners = [
        triton.Autotuner("gate", ["H", "IS_VARLEN"], [1, 2, 4, 8]),
        triton.Autotuner("output", ["H"], [2, 4, 8]),
    ]
    monkeypatch.setattr(
        fla_tuning, "warm", lambda kind, case: [t.run(1, grid=1, warmup=False) for t in tuners]
    )
    fla_tuning.compile_share("chunk", SMALL[0], 0, 2, tuned=tuned)
    assert [t.compiled for t in tuners] == [[1, 4], [] if tuned else [2, 8]]


def test_the_peers_tuning_is_kept_and_found_again(monkeypatch, tmp_path):
    cache = pytest.importorskip(
        "fla.ops.utils.cache", reason="needs flash-linear-attention", exc_type=ImportError
    )
    import triton

    monkeypatch.setattr(cache, "FLA_CACHE_MODE", cache.FlaCacheMode.STRICT)
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")
    monkeypatch.setenv("FLA_CONFIG_DIR", "")
    fla_tuning.use_tuning(tmp_path)

    @triton.jit
    def kernel(x, H):
        pass

    tuner = cache.fla_cache_autotune(configs=[triton.Config({"BK": 32})], key=["H"])(kernel)
    key = (64, "torch.bfloat16")
    tuner.cache[key] = triton.Config({"BK": 64}, num_warps=2, num_stages=3)
    fla_tuning.keep_tuning(tmp_path)
    found = cache.load_cached_config("kernel", cache.AutotuneKey(key))
    assert found == {"kwargs": {"BK": 64}, "num_warps": 2, "num_stages": 3, "num_ctas": 1}
    assert cache.load_cached_config("kernel", cache.AutotuneKey((12, "torch.bfloat16"))) is None


def test_what_other_processes_run_imports_what_exists():
    lines = [x for x in fla_tuning._SHARE.splitlines() if x.startswith(("from ", "import "))]
    assert any("cute_attn.bench" in line for line in lines)
    exec("\n".join(lines), {})
