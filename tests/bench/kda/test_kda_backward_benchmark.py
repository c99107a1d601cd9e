"""`kda-backward` on the CPU, with plain PyTorch for kernels and formulas for GPU times."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cute_attn.bench.__main__ import main
from cute_attn.bench.harness.report import Report
from cute_attn.bench.harness.roofline import Roofline
from cute_attn.bench.harness.timing import Timing
from cute_attn.bench.kda import backward, fla_tuning, problem, training, training_stages
from cute_attn.bench.kda.cases import Case
from cute_attn.reference import kda as reference

DIMS = {"head_dim_k": 64, "head_dim_v": 64}
SMALL = [Case(1, 2, 70, **DIMS), Case(1, 1, 100, sequences=3, lengths="skewed", **DIMS)]

MICROSECONDS = {  # of a call, by contender and what it computes
    "ours": {"forward": 10.0, "training_forward": 12.0, "backward": 24.0, "layers": 640.0},
    "fla": {"forward": 20.0, "training_forward": 20.0, "backward": 66.0, "layers": 1440.0},
}
KERNELS = {
    "ours": {"x_preparePKdaPrepare_object": 4.0, "xKdaGradients_object": 15.0, "SumPartials": 1.0},
    "fla": {"chunk_kda_bwd_kernel_dAv": 5.0, "recompute_w_u_fwd_kda_kernel": 8.0, "sum": 30.0},
}


def plain_chunk(*, output_final_state, disable_recompute, cu_seqlens_cpu=None, **rest):
    """The definition, differentiable, in float32."""
    assert not output_final_state
    o = reference.kda_reference(**rest, dtype=torch.float32).o
    return o.to(rest["v"].dtype), None


class Peer:
    """The same function, of which tests can change what its gradients are multiplied by."""

    factor = 1.0

    def __call__(self, **given):
        if torch.is_grad_enabled():
            given["v"] = given["v"] * 1.0
            given["v"].register_hook(lambda gradient: gradient * self.factor)
        return plain_chunk(**given)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(problem, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)
    monkeypatch.setitem(sys.modules["cute_attn"].__dict__, "chunk_kda", plain_chunk)


@pytest.fixture
def peer(monkeypatch):
    found = Peer()
    monkeypatch.setattr(problem, "peer", {"fla.ops.kda:chunk_kda": found}.get)
    return found


@pytest.fixture
def fake_gpu(monkeypatch, peer):
    """Times come from a table; every contender runs once, so that it must work."""

    def fake_times(fns, *, mode, rep_ms):
        found = {}
        for who, call in fns.items():
            call()
            name = getattr(call, "func", call).__name__
            us = MICROSECONDS[who]["layers" if name == "call" else name]
            assert mode == "do_bench" or name != "call"
            us -= 4.0 if (mode, name) == ("eager", "backward") else 0.0
            found[who] = Timing.from_samples([us] * 3)
        return found

    def fake_kernels(call):
        call()
        return KERNELS["ours" if call.func.__self__.function is plain_chunk else "fla"]

    def fake_memory(step):
        ours = step.function is plain_chunk
        kept = 400.0 if step.given["disable_recompute"] else 100.0
        return {"kept_mib": kept, "peak_mib": kept + (500.0 if ours else 450.0)}

    monkeypatch.setattr(problem, "time_cuda_interleaved", fake_times)
    monkeypatch.setattr(training, "kernel_times", fake_kernels)
    monkeypatch.setattr(training, "memory", fake_memory)
    monkeypatch.setattr(training, "compile_ours", lambda cases, keep: None)
    monkeypatch.setattr(training, "without_launches", lambda who: problem.freed())
    monkeypatch.setattr(fla_tuning, "share_norms", lambda: None)
    monkeypatch.setattr(backward, "measure_roofline", lambda **_: Roofline(3000.0, 2900.0))
    monkeypatch.setattr(backward, "all_cases", lambda: SMALL)
    monkeypatch.setattr(training, "LAYERS", 2)


def run(tmp_path, *argv):
    assert main(["kda-backward", *argv, "--out", str(tmp_path), "--commit", "abc"]) == 0
    return json.loads(next(tmp_path.rglob("*.json")).read_text())


# ---- cases


def test_the_issues_cases_are_all_there():
    cases = backward.all_cases()
    assert len(set(cases)) == len(cases)
    dense = {(c.heads, c.heads_v, c.tokens) for c in cases if not c.sequences}
    heads = {(12, 12), (32, 32), (64, 64), (96, 96), (32, 64)}
    assert dense == {(h, hv, 1024 * 2**i) for h, hv in heads for i in range(6)}
    assert {c.sequences for c in cases if c.sequences} == {8, 20}
    assert set(backward.short_cases()) <= set(cases)
    assert backward.MEMORY_CASE in cases


def test_byte_counts_are_those_of_the_page():
    """The numbers of docs/kernels/kda_backward.md for T = 8192, 64 heads, in MB, beta apart."""
    case = Case(64, 64, 8192)
    counts = {
        "prepare_bytes": 405 + 545,
        "adjoint_pass_bytes": 675 + 403,
        "gradients_bytes": 1347 + 403,
    }
    for name, expected in counts.items():
        assert getattr(case, name) / 1e6 == pytest.approx(expected, abs=3), name


# ---- agreement


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_contenders_compute_the_gradients(peer, case):
    given = training.arguments(case)
    errors = training.check_gradients(case, given, training.calls(given, with_peer=True))
    assert set(errors) == {f"{who} {name}" for who in ("ours", "fla") for name in training.INPUTS}
    assert all(error < 0.02 for error in errors.values())


@pytest.mark.parametrize("name", training.INPUTS)
def test_a_wrong_gradient_is_never_timed(peer, name):
    case = SMALL[0]
    given = training.arguments(case)
    right = training.calls(given, with_peer=False)["ours"]

    def wrong():
        found = right()
        return found | {name: found[name] * 1.3}

    with pytest.raises(problem.Disagreement, match=f"ours, gradients at B=1 .*: {name} has"):
        training.check_gradients(case, given, {"ours": wrong})
    with pytest.raises(problem.Disagreement, match=f"fla, gradients at B=1 .*: {name} differs"):
        training.check_beside(case, right(), {"fla": wrong})


def test_layers_feed_one_another(peer):
    """Two layers' gradients are those of the composed function."""
    given = training.arguments(SMALL[0])
    step = training.steps(given, with_peer=False)["ours"]
    dv, *others = step.layers(2)()
    first, second = step.fresh(), step.fresh()
    o = plain_chunk(**given | first)[0]
    o = plain_chunk(**given | second | {"v": o})[0]
    of_others = [layer[n] for layer in (first, second) for n in first if n != "v"]
    expected = torch.autograd.grad(o, [first["v"], *of_others], training.slope(given))
    assert len(others) == 2 * (len(training.INPUTS) - 1)
    assert all(map(torch.equal, (dv, *others), expected))


def test_repeats_is_by_bits():
    x = {"q": torch.tensor([1.0, 2.0]), "k": torch.tensor([3.0])}
    assert training.repeats(x, {name: t.clone() for name, t in x.items()})
    assert not training.repeats(x, x | {"k": torch.tensor([3.0000002])})


# ---- kernels


def test_rows_of_kernels():
    case = Case(64, 64, 8192)
    roofline = Roofline(3000.0, 2900.0)
    rows = {row["kernel"]: row for row in backward.kernel_rows(case, KERNELS["ours"], roofline)}
    assert {name: row["time_us"] for name, row in rows.items()} == {
        "prepare": 4.0, "gradients": 15.0, "others": 1.0,
    }  # fmt: skip
    assert rows["prepare"]["floor_us"] == pytest.approx(case.prepare_bytes / 3e6)
    assert rows["prepare"]["share_of_floor"] == pytest.approx(case.prepare_bytes / 3e6 / 4.0)


def test_rows_of_groups():
    assert [
        (row["group"], row["time_us"], row["fla_us"], row["speedup_vs_fla"])
        for row in backward.group_rows(KERNELS)
    ] == [
        ("records, states again", 4.0, 8.0, 2.0),
        ("gradients of states", 0.0, 5.0, None),
        ("gradients of tokens and parameters", 16.0, 30.0, 1.875),
    ]
    ours = backward.group_rows({"ours": KERNELS["ours"]})
    assert all(row["fla_us"] is None and row["speedup_vs_fla"] is None for row in ours)


# ---- the command


def test_kda_backward(fake_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(backward, "TARGET_TOKENS", 100)
    monkeypatch.setattr(backward, "MEMORY_CASE", SMALL[0])
    report = run(tmp_path, "--recompute", "yes", "no")
    assert [
        (row["tokens"], row["disable_recompute"], row["mode"], row["backward_us"])
        for row in report["rows"]
    ] == [
        (tokens, keep, mode, us)
        for tokens in (70, 100)
        for keep in (False, True)
        for mode, us in (("do_bench", 24.0), ("eager", 20.0))
    ]
    row = report["rows"][0]
    assert row["bitwise_repeat"] is True
    assert row["backward_to_forward_ratio"] == pytest.approx(2.4)
    assert row["speedup_vs_fla"] == pytest.approx(2.75)
    assert (row["layer_us"], row["fla_layer_us"]) == (320.0, 720.0)
    where = "H=1 HV=1 T=100 in 3 skewed"
    assert {v["name"]: v["passed"] for v in report["verdicts"]} == {
        "repeated runs have the same bits": True,
        **{
            f"{where}{how}{what}": passed
            for how in ("", ", disable_recompute")
            for what, passed in (
                (", backward (do_bench): speedup_vs_fla at least 2.5", True),
                (", backward (eager): speedup_vs_fla at least 2.5", True),
                (", layer: speedup_vs_fla_layer at least 2.5", False),
                (", backward (do_bench): at most 2.5 of our forward", True),
                (", backward (eager): at most 2.5 of our forward", True),
            )
        },
        "disable_recompute=False: peak memory at most FLA's": False,
        "disable_recompute=True: peak memory at most FLA's": False,
    }
    assert [part["benchmark"] for part in report["parts"]] == [
        "kda-backward-kernels", "kda-backward-groups", "kda-backward-memory",
    ]  # fmt: skip
    assert {"gradients", "others"} <= {row["kernel"] for row in report["parts"][0]["rows"]}
    assert any("fla q" in note for note in report["notes"])
    assert "gradients 15" in capsys.readouterr().err
    text = Report.from_dict(report).to_markdown("kda-backward")
    assert "### Kernels of our backward" in text and "peak_mib" in text


def test_memory_alone(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(backward, "MEMORY_CASE", SMALL[0])
    report = run(tmp_path, "--memory")
    assert [(row["who"], row["disable_recompute"], row["peak_mib"]) for row in report["rows"]] == [
        ("ours", False, 600.0), ("fla", False, 550.0), ("ours", True, 900.0), ("fla", True, 850.0),
    ]  # fmt: skip
    assert [v["passed"] for v in report["verdicts"]] == [False, False]
    alone = run(tmp_path / "alone", "--memory", "--no-peer")
    assert [v["passed"] for v in alone["verdicts"]] == [None, None]


def test_kda_backward_without_the_peer(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(backward, "TARGET_TOKENS", 70)
    report = run(tmp_path, "--no-peer", "--only", "T=70", "--mode", "eager")
    (row,) = report["rows"]
    assert row["fla_backward_us"] is None and row["speedup_vs_fla"] is None
    passed = {v["name"].split(": ")[-1]: v["passed"] for v in report["verdicts"]}
    assert passed["speedup_vs_fla at least 2.5"] is None
    assert passed["at most 2.5 of our forward"] is True
    assert "FLA was left out (--no-peer)" in report["notes"]


def test_a_peer_whose_gradients_differ_is_not_timed(fake_gpu, peer, tmp_path):
    peer.factor = 1.2
    report = run(tmp_path, "--only", "T=70")
    assert report["rows"][0]["fla_backward_us"] is None
    assert any("not timed: fla, gradients at" in note for note in report["notes"])


def test_what_does_not_repeat_is_a_missed_target(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "repeats", lambda one, other: False)
    report = run(tmp_path, "--no-peer", "--only", "T=70")
    assert [(v["name"], v["passed"]) for v in report["verdicts"]] == [
        ("H=1 HV=2 T=70: repeated runs have the same bits", False)
    ]


def test_layers_that_do_not_fit_are_noted(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "LAYERS", 10**6)
    report = run(tmp_path, "--no-peer", "--only", "T=70")
    assert report["rows"][0]["layer_us"] is None
    assert any("no layers in a row for want of memory" in note for note in report["notes"])


def test_an_interrupted_run_reports_what_it_has(fake_gpu, monkeypatch, tmp_path):
    timed = backward.Timer.time

    def interrupted(self, case, **options):
        if self.rows:
            raise KeyboardInterrupt
        timed(self, case, **options)

    monkeypatch.setattr(backward.Timer, "time", interrupted)
    report = run(tmp_path, "--no-peer")
    assert len(report["rows"]) == len(backward.MODES)
    assert f"interrupted: {len(backward.MODES)} rows of {len(SMALL)} cases" in report["notes"]


# ---- the peer's autotuner


def test_the_norms_are_tuned_once(monkeypatch):
    norms = SimpleNamespace(keys=["D", "NB"], cache={(128, 8): "best"})
    others = SimpleNamespace(keys=["H"], cache={(64,): "other"})
    idle = SimpleNamespace(keys=["D", "NB"], cache={})
    monkeypatch.setattr(fla_tuning, "tuners", lambda: [norms, others, idle])
    fla_tuning.share_norms()
    assert (128, 2) in norms.cache and norms.cache[128, 2] == "best"
    assert dict(norms.cache) == {(128, 8): "best"}  # what `keep_tuning` keeps
    assert (12,) not in others.cache and (128, 2) not in idle.cache


def test_packed_sequences_take_what_was_chosen_for_the_nearest_dense_ones():
    tuner = SimpleNamespace(cache={(12, 12, False): "few", (64, 64, False): "many"})
    fla_tuning.share([tuner])
    assert tuner.cache[64, 64, True] == "many" and tuner.cache[12, 12, True] == "few"
    assert tuner.cache[64, 64, False] == "many"


def test_the_timing_of_a_configuration_is_bounded(monkeypatch):
    tuner, testing = ModuleType("triton.runtime.autotuner"), ModuleType("triton.testing")
    tuner.Autotuner = type("Autotuner", (), {"do_bench": None})
    testing.do_bench = lambda call, quantiles, warmup, rep: (call(), quantiles, warmup, rep)
    monkeypatch.setitem(sys.modules, tuner.__name__, tuner)
    monkeypatch.setitem(sys.modules, testing.__name__, testing)
    fla_tuning.bound_timing(20.0)
    found = tuner.Autotuner().do_bench(lambda: "ran", quantiles=(0.5,))
    assert found == ("ran", (0.5,), 5.0, 20.0)


def test_what_compiles_beforehand_has_the_cases_tokens_if_it_fits():
    case = Case(64, 64, 8192)
    assert fla_tuning.compile_tokens(case, 8) == 8192
    assert fla_tuning.compile_tokens(case, 1000) == fla_tuning.FEW_TOKENS


def test_kernels_are_not_launched_where_only_memory_counts(monkeypatch):
    tuner = ModuleType("triton.runtime.autotuner")
    tuner.Autotuner = type("Autotuner", (), {"run": lambda self: "ran"})
    monkeypatch.setitem(sys.modules, tuner.__name__, tuner)
    with training.without_launches("fla"):
        assert tuner.Autotuner().run() is None
    with training.without_launches("ours"):
        assert tuner.Autotuner().run() == "ran"
    assert tuner.Autotuner().run() == "ran"


def test_the_peer_is_tuned_by_a_training_step(monkeypatch, peer):
    ran = []
    monkeypatch.setattr(training.Step, "both", lambda self: ran.append(self.function))
    fla_tuning.warm("training", SMALL[0])
    assert ran == [peer]


# ---- the public stages


@pytest.fixture
def fake_stages(fake_gpu, monkeypatch):
    """Two stages, of which tests can change what the peer returns; the first has no peer."""
    result = torch.ones(3)
    theirs = [result]
    stages = {
        "output": training_stages.Stage(("dAqk",), {"ours": lambda: (result,)}),
        "gate_cumsum": training_stages.Stage(
            ("dg", "dA_log"), {"ours": lambda: (result, None), "fla": lambda: (theirs[0], result)}
        ),
    }
    monkeypatch.setattr(training_stages, "stages", lambda given, with_peer: stages)
    monkeypatch.setitem(MICROSECONDS["ours"], "<lambda>", 20.0)
    monkeypatch.setitem(MICROSECONDS["fla"], "<lambda>", 50.0)
    return theirs


def test_stages(fake_stages, tmp_path):
    report = run(tmp_path, "--stage", "--only", "T=70")
    (part,) = [part for part in report["parts"] if part["benchmark"] == "kda-backward-stages"]
    assert [(row["stage"], row["time_us"], row["fla_us"]) for row in part["rows"]] == [
        ("output", 20.0, None), ("gate_cumsum", 20.0, 50.0),
    ]  # fmt: skip
    assert part["rows"][1]["speedup_vs_fla"] == 2.5
    assert any("cuLA" in note for note in report["notes"])


def test_a_stage_that_differs_is_not_timed(fake_stages, tmp_path):
    fake_stages[0] = torch.tensor([1.0, 1.0, 1.2])
    report = run(tmp_path, "--stage", "--only", "T=70")
    (part,) = [part for part in report["parts"] if part["benchmark"] == "kda-backward-stages"]
    assert [row["fla_us"] for row in part["rows"]] == [None, None]
    assert any("fla, gate_cumsum backward: dg differs" in note for note in report["notes"])
