"""The Lightning benchmarks on the CPU, with formulas for GPU times."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cute_attn.bench import launch_overhead
from cute_attn.bench.__main__ import main
from cute_attn.bench.attention import problem as attention_problem
from cute_attn.bench.harness.agreement import ROWS
from cute_attn.bench.harness.registry import Unavailable
from cute_attn.bench.harness.roofline import Roofline, copies, copy_columns, gbps
from cute_attn.bench.harness.timing import Timing
from cute_attn.bench.lightning import decode as lightning_decode
from cute_attn.bench.lightning import problem
from cute_attn.bench.lightning.decode import verdicts
from cute_attn.reference.lightning import lightning_attn_decode_reference

SMALL = {"heads": 2, "head_dim_k": 64, "head_dim_v": 128}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(problem, "DEVICE", "cpu")


def plain_ours(q, k, v, state, decay, *, softmax_scale, out, state_layout, **_):
    result, new_state = lightning_attn_decode_reference(
        q, k, v, state, decay,
        softmax_scale=softmax_scale, state_layout=state_layout, dtype=torch.float32,
    )  # fmt: skip
    state.copy_(new_state)
    return out.copy_(result)


def plain_fla(q, k, v, *, g_gamma, scale, initial_state, output_final_state):
    """FLA's operator by its documentation: q, k, v are [B, T, H, D], the state [N, H, K, V]."""
    assert output_final_state
    assert initial_state.dtype == torch.float32
    state, outs = initial_state, []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = (x[:, t].float() for x in (q, k, v))
        state = state * g_gamma.exp()[:, None, None] + k_t[..., :, None] * v_t[..., None, :]
        outs.append((state * (scale * q_t)[..., None]).sum(-2))
    return torch.stack(outs, 1), state


@pytest.fixture
def contenders(monkeypatch):
    """Plain stand-ins for the public operator and for FLA."""
    monkeypatch.setitem(sys.modules["cute_attn"].__dict__, "lightning_attn_decode", plain_ours)
    module = ModuleType("fla.ops.common.fused_recurrent")
    module.fused_recurrent_fwd = plain_fla
    tuned = SimpleNamespace(best_config="num_warps: 4")
    module.fused_recurrent_fwd_kernel = SimpleNamespace(fn=tuned)
    for name in ("fla", "fla.ops", "fla.ops.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_bytes_that_any_implementation_must_move():
    case = problem.Case(batch=64)
    state = 64 * 64 * 128 * 128 * 4
    assert case.min_bytes == 2 * state + 64 * 64 * 4 * 128 * 2 + 64 * 4
    half = problem.Case(batch=64, state_dtype="bfloat16")
    assert case.min_bytes - half.min_bytes == state
    longer = problem.Case(batch=64, tokens=4)
    assert longer.min_bytes - case.min_bytes == 3 * 64 * 64 * 4 * 128 * 2


def test_inputs_are_fresh_random_and_poisoned():
    case = problem.Case(batch=2, **SMALL, state_layout="kv")
    first, again, other = (problem.make_inputs(case, seed) for seed in (1, 1, 2))
    assert first.state.shape == (2, 2, 64, 128)
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)
    assert first.out.isnan().all()
    assert (first.decay > 0).all()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_both_contenders_compute_the_operator(contenders, tokens, state_layout, state_dtype):
    case = problem.Case(
        batch=ROWS + 1, **SMALL,
        tokens=tokens, state_layout=state_layout, state_dtype=state_dtype,
    )  # fmt: skip
    found = problem.check_agreement(case, seed=3)
    assert set(found) == {"ours", "fla"}
    assert 0 < found["ours"].output_error < 4e-3  # bf16 output
    assert 0 < found["fla"].output_error < 1e-6  # float32 output
    assert found["ours"].state_error < (1e-6 if state_dtype == "float32" else 4e-3)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, state: out[0, 0, 0].fill_(float("nan")),
        lambda out, state: state[0, 0, 0, 0].add_(1.0),
        lambda out, state: out.mul_(1.01),
        lambda out, state: state.copy_(state.roll(1, 0)),
    ],
)
def test_a_wrong_result_is_never_timed(contenders, monkeypatch, spoil):
    def spoiled(*args, out, **kwargs):
        plain_ours(*args, out=out, **kwargs)
        spoil(out, args[3])

    monkeypatch.setitem(sys.modules["cute_attn"].__dict__, "lightning_attn_decode", spoiled)
    with pytest.raises(problem.Disagreement, match="ours against the float64 reference"):
        problem.check_agreement(problem.Case(batch=2, **SMALL), seed=4)


def test_without_fla_the_benchmark_is_unavailable(monkeypatch):
    for name in {"fla", *(name for name in sys.modules if name.startswith("fla."))}:
        monkeypatch.setitem(sys.modules, name, None)
    case = problem.Case(batch=1, **SMALL)
    with pytest.raises(Unavailable, match="flash-linear-attention"):
        problem.fla(case, problem.make_inputs(case, 1))


@pytest.mark.parametrize("name", ["memcpy", "kernel_copy"])
def test_a_copy_moves_the_same_bytes(name):
    case = problem.Case(batch=1, **SMALL)
    copied = copies(case.min_bytes, "cpu")[name]()
    assert 2 * copied.numel() * copied.element_size() == pytest.approx(case.min_bytes, abs=8)
    assert not copied.isnan().any()


@pytest.mark.parametrize(("mode", "copy_us"), [("do_bench", 10.0), ("graph", 9.0)])
def test_the_copy_in_a_graph_is_a_kernel(mode, copy_us):
    us = {"ours": 10.8, "memcpy": 10.0, "kernel_copy": 9.0}
    columns = copy_columns({name: Timing.from_samples([x]) for name, x in us.items()}, mode)
    assert columns == {"copy_us": copy_us, "time_to_copy_ratio": pytest.approx(10.8 / copy_us)}


def test_gbps():
    assert gbps(3e9, 1e6) == 3.0
    assert Roofline(3000.0, 2900.0).copy_gbps == 3000.0
    assert Roofline(3000.0, 3100.0).to_dict()["copy_gbps"] == 3100.0


def row(batch, time_us, *, fla_us=200.0, ratio=1.0, mode="graph", spread=0.1):
    return {
        "batch": batch, "mode": mode, "flush": "zero", "time_us": time_us,
        "p20_us": time_us - spread / 2, "p80_us": time_us + spread / 2,
        "gbps": batch / time_us, "share_of_copy": 0.98, "share_of_copy_fla": 0.9,
        "copy_us": time_us / ratio, "time_to_copy_ratio": ratio,
        "speedup_vs_fla": fla_us / time_us,
    }  # fmt: skip


def outcome(rows, **kwargs):
    kwargs = {"standard": True, "partition": False, **kwargs}
    return {verdict.name: verdict for verdict in verdicts(rows, **kwargs)}


def test_verdicts_on_the_whole_gpu():
    times = [(1, 10), (8, 41), (32, 90), (64, 180)]
    rows = [
        made
        for mode in ("do_bench", "graph")
        for made in (*(row(*t, mode=mode) for t in times), row(128, 350, ratio=1.02, mode=mode))
    ]
    found = outcome(rows)
    assert {name: verdict.passed for name, verdict in found.items()} == {
        # a call's time, host included, is what do_bench sees
        "batch 1: speedup_vs_fla at least 5 (do_bench, flush zero)": True,
        "batch 8: speedup_vs_fla at least 5 (do_bench, flush zero)": False,
        "batch 64 (do_bench, flush zero): time_to_copy_ratio at most 1.01": True,
        "batch 128 (do_bench, flush zero): time_to_copy_ratio at most 1.01": False,
        "time grows with the batch (do_bench, flush zero)": True,
        "batch 64 (graph, flush zero): time_to_copy_ratio at most 1.01": True,
        "batch 128 (graph, flush zero): time_to_copy_ratio at most 1.01": False,
        "time grows with the batch (graph, flush zero)": True,
    }


def test_verdicts_on_a_part_of_the_gpu_show_both_shares():
    found = outcome([row(32, 100), row(64, 160), row(128, 180)], partition=True)
    met, missed, _ = found.values()
    assert (met.passed, missed.passed) == (True, False)
    assert missed.name.startswith("batch 128: speedup_vs_fla at least 1.2")
    assert missed.detail == "1.111; share of copy 0.980, FLA 0.900"


def test_other_sizes_have_no_targets():
    assert list(outcome([row(1, 10), row(64, 180)], standard=False)) == [
        "time grows with the batch (graph, flush zero)"
    ]


def test_each_mode_is_judged_by_itself():
    rows = [row(1, 10), row(1, 80, mode="eager"), row(2, 20), row(2, 70, mode="eager")]
    found = outcome(rows, standard=False)
    assert found["time grows with the batch (graph, flush zero)"].passed
    eager = found["time grows with the batch (eager, flush zero)"]
    assert not eager.passed
    assert "80.00 us at batch 1, 70.00 us at 2" in eager.detail


def test_a_cliff_is_in_the_detail_though_time_grows():
    (found,) = outcome([row(1, 10), row(2, 20), row(3, 45), row(4, 60)], standard=False).values()
    assert found.passed
    assert found.detail == "smallest step of GB/s is -33.3%, from batch 2 to 3"


def test_one_batch_cannot_grow():
    (found,) = outcome([row(1, 10)], standard=False).values()
    assert found.passed is None


@pytest.fixture
def fake_gpu(monkeypatch, contenders):
    """Times come from a formula; each contender runs once, so that it must work."""

    def fake_times(fns, *, mode, flush, rep_ms, **_):
        for fn in fns.values():
            fn()
        times = {"ours": 10.0, "fla": 60.0, "memcpy": 9.5, "kernel_copy": 9.0}
        return {
            name: Timing.from_samples([times.get(name, 11.0) * scale for scale in (1, 1.01, 1.02)])
            for name in fns
        }

    monkeypatch.setattr(lightning_decode, "time_cuda_interleaved", fake_times)
    monkeypatch.setattr(
        lightning_decode, "measure_roofline", lambda **_: Roofline(3020.0, 2950.0, 700.0)
    )
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_the_whole_benchmark(fake_gpu, tmp_path, capsys):
    argv = [
        "lightning-decode", "--short", "--batches", "3", "1", "--heads", "2", "--head-dim", "64",
        "--flush", "zero", "read", "--out", str(tmp_path), "--commit", "abc",
    ]  # fmt: skip
    assert main(argv) == 0
    report = json.loads(next(tmp_path.rglob("lightning-decode-short*.json")).read_text())
    assert [(r["batch"], r["mode"], r["flush"]) for r in report["rows"]] == [
        (batch, mode, flush)
        for batch in (1, 3)
        for mode, flush in (
            ("do_bench", "zero"),  # which has no other flush
            ("eager", "zero"),
            ("eager", "read"),
            ("graph", "zero"),
            ("graph", "read"),
        )
    ]
    first = report["rows"][0]
    assert first["time_us"] == pytest.approx(10.1)
    assert first["speedup_vs_fla"] == pytest.approx(6.0)
    expected = problem.Case(batch=1, heads=2, head_dim_k=64, head_dim_v=64).min_bytes / 10.1 / 1e3
    assert first["gbps"] == pytest.approx(expected)
    assert first["share_of_copy"] == pytest.approx(expected / 3020)
    assert first["copy_us"] == pytest.approx(9.595)
    assert report["environment"]["commit"] == "abc"
    assert any("float64" in note for note in report["notes"])
    assert "num_warps: 4" in " ".join(report["notes"])
    assert "lightning-decode" in capsys.readouterr().out
    command = report["environment"]["command"]
    assert "--batches 3 1" in command and str(tmp_path) not in command


def test_a_disagreement_stops_the_benchmark(fake_gpu, monkeypatch, tmp_path):
    broken = lambda *args, **kwargs: None  # noqa: E731  (leaves the poison in out)
    monkeypatch.setitem(sys.modules["cute_attn"].__dict__, "lightning_attn_decode", broken)
    with pytest.raises(problem.Disagreement):
        main(["lightning-decode", "--batches", "1", "--heads", "2", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_the_partition_is_part_of_the_report(fake_gpu, monkeypatch, tmp_path):
    from contextlib import contextmanager

    from cute_attn.bench.harness import green_context

    @contextmanager
    def partition(num_sms):
        yield -(-num_sms // 8) * 8

    monkeypatch.setattr(green_context, "torch_sm_partition", partition)
    monkeypatch.setattr(green_context, "visible_sms", lambda *, graph: 80)
    asked = []

    def few_sms(case, inputs, num_sms):
        asked.append(num_sms)
        return whole_gpu(case, inputs)

    whole_gpu = problem.ours
    monkeypatch.setattr(problem, "ours", few_sms)
    argv = ["lightning-decode", "--sms", "78", "--batches", "1", "--heads", "2"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    assert set(asked) == {80}
    report = json.loads(next(tmp_path.rglob("lightning-decode-80sms*.json")).read_text())
    assert report["title"].endswith("on 80 SMs")
    assert report["parameters"]["partition_sms_seen_graph"] == 80


def test_variants_are_ranked_by_batch(fake_gpu, monkeypatch, tmp_path):
    def variants(case, inputs, vary, num_sms):
        assert vary == {"tile_v": [8, 16], "hints": ["none"]}
        assert num_sms is None
        call = problem.ours(case, inputs)
        return {"slow": call, "ours": call}, ["tile_v=16"]

    monkeypatch.setattr(problem, "variants", variants)
    argv = ["lightning-decode", "--variants", "tile_v=8,16", "hints=none", "--mode", "graph"]
    argv += ["--batches", "1", "2", "--heads", "2", "--out", str(tmp_path)]
    assert main(argv) == 0
    report = json.loads(next(tmp_path.rglob("lightning-decode-variants*.json")).read_text())
    assert [(r["batch"], r["config"]) for r in report["rows"]] == [
        (1, "ours"), (1, "slow"), (2, "ours"), (2, "slow"),
    ]  # fmt: skip
    assert report["verdicts"] == []
    assert "do not compile: tile_v=16" in report["notes"]


@pytest.mark.parametrize("wrong", [False, True])
def test_variants_are_checked_before_they_are_timed(monkeypatch, wrong):
    from cute_attn import cache

    case = problem.Case(batch=2, **SMALL)
    chosen = problem.plan(case, "sm_90a", 132)[1]

    def get(kernel, spec, arch):
        if spec.num_warps == 1 and spec != chosen:
            raise cache.CompileError("no registers left")

        def function(q, k, v, out, state, decay, *_):
            scale = case.head_dim_k**-0.5 * (1.01 if wrong else 1.0)
            plain_ours(q, k, v, state, decay, softmax_scale=scale, out=out, state_layout="vk")

        return function

    monkeypatch.setattr(cache, "current_arch", lambda: "sm_90a")
    monkeypatch.setattr(cache, "get", get)
    monkeypatch.setattr(cache, "warmup", lambda requests, arch: None, raising=False)
    inputs = problem.make_inputs(case, 5)
    vary = {"num_warps": [1, 2]}
    if wrong:
        with pytest.raises(problem.Disagreement, match="chosen against"):
            problem.variants(case, inputs, vary, 132)
    else:
        calls, refused = problem.variants(case, inputs, vary, 132)
        assert list(calls) == ["chosen", "num_warps=2"]
        assert refused == ["num_warps=1"]


def test_candidates_are_the_legal_combinations_and_the_chosen_spec():
    kernel, spec = problem.plan(problem.Case(batch=1), "sm_90a", 132)
    found = problem.candidates(kernel, spec, {"tile_v": [spec.tile_v, 3], "num_warps": [1, 2]})
    assert found.pop("chosen") == (kernel, spec)
    assert found  # tile_v=3 divides no head dimension, so only spec.tile_v is left
    for name, (_, candidate) in found.items():
        assert name == f"tile_v={spec.tile_v} num_warps={candidate.num_warps}"
    with pytest.raises(TypeError):
        problem.candidates(kernel, spec, {"no_such_field": [1]})


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_packages_own_candidates_are_of_both_kernels(dim):
    case = problem.Case(batch=1, head_dim_k=dim, head_dim_v=dim)
    found = problem.candidates(*problem.plan(case, "sm_90a", 132), {})
    kernels = {kernel.name for kernel, _ in found.values()}
    assert kernels == {"lightning_decode", "lightning_decode_pipelined"}
    loads = {spec.load for _, spec in found.values() if spec.persistent}
    assert loads == {"bulk", "cp_async"}


@pytest.mark.parametrize("text", ["tile_v", "tile_v="])
def test_a_variant_without_values_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["lightning-decode", "--variants", text])
    assert "FIELD=VALUE" in capsys.readouterr().err


def test_launch_paths_hand_over_the_documented_arguments(monkeypatch):
    """The order of the bare call's arguments is that of the kernel's own signature."""
    import inspect

    from cute_attn.kernels.lightning.decode import LightningDecode

    case = problem.Case(batch=1, **SMALL)
    inputs = problem.make_inputs(case, 1)
    seen = []
    problem.bare(lambda *args: seen.extend(args), inputs)()
    names = list(inspect.signature(LightningDecode.__call__).parameters)[1:]
    given = dict(zip(names, seen, strict=False))
    assert given["softmax_scale"] == inputs.softmax_scale
    expected = {"q": "q", "k": "k", "v": "v", "o": "out", "state": "state", "decay": "decay"}
    for parameter, attribute in expected.items():
        assert given[parameter] is getattr(inputs, attribute)
    rest = ("state_indices", "draft_k", "draft_v", "num_accepted")
    assert [given[name] for name in rest] == [None] * 4


def test_launch_overhead_compares_with_torch_mul(monkeypatch, tmp_path):
    def fake_time_host(fns, *, calls, batches, synchronize):
        durations = dict.fromkeys(fns, 6.0) | {launch_overhead.BASELINE: 7.5, "bare": 4.5}
        durations[launch_overhead.PUBLIC_ATTENTION] = 9.5
        return {name: Timing.from_samples([us] * batches) for name, us in durations.items()}

    monkeypatch.setattr(launch_overhead, "time_host", fake_time_host)
    monkeypatch.setattr(
        problem,
        "launch_paths",
        lambda case, inputs, public_name: dict.fromkeys((public_name, "bare")),
    )
    monkeypatch.setattr(attention_problem, "has_forward", lambda head_dim: head_dim == 256)
    monkeypatch.setattr(
        attention_problem, "launch_paths", lambda name, head_dim: dict.fromkeys([name])
    )
    monkeypatch.setattr(torch, "randn", cpu_randn(torch.randn))
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)
    assert main(["launch-overhead", "--short", "--out", str(tmp_path)]) == 0
    report = json.loads(next(tmp_path.rglob("launch-overhead*.json")).read_text())
    assert {r["grad_mode"] for r in report["rows"]} == {"inference", "grad"}
    ratios = {r["call"]: r["to_torch_mul_ratio"] for r in report["rows"]}
    assert ratios[launch_overhead.PUBLIC] == pytest.approx(0.8)
    assert ratios["bare"] == pytest.approx(0.6)
    assert report["parameters"]["attention_head_dim"] == 256
    assert [verdict["passed"] for verdict in report["verdicts"]] == [True, False] * 2


def cpu_randn(real):
    return lambda *shape, **options: real(*shape, **{**options, "device": "cpu"})
