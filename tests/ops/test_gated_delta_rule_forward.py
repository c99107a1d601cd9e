"""The kernels of the chunked Gated Delta Net's forward, launched by `ChunkForward`."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from cute_attn import launch
from cute_attn.emulation import emulated
from cute_attn.emulator import Emulator
from cute_attn.kernels.delta.chunk.heuristics import MOST_STAGES, in_one_kernel
from cute_attn.kernels.delta.chunk.spec import (
    HeadForwardSpec,
    HeadPassSpec,
    HeadPrepareSpec,
    InputsSpec,
)
from cute_attn.kernels.delta.table import HEAD_FORWARD, HEAD_PREPARE, HEAD_STATE_PASS, PREPARE
from cute_attn.ops.gated_delta_rule import chunk_forward
from cute_attn.ops.gated_delta_rule.chunk_forward import ChunkForward, prepare_heads
from cute_attn.ops.gated_delta_rule.chunk_plan import plan_chunk_gated_delta_rule
from cute_attn.ops.kda import chunk_passes
from cute_attn.ops.kda.chunk_passes import empty_states, empty_v_new
from cute_attn.reference.gated_delta_rule import (
    gated_delta_rule_chunk_reference,
    gated_delta_rule_reference,
)
from tests.sweeps import slow

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def more(**case: Any) -> Any:
    """A case of the sweep."""
    return slow(case)


def gates(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Natural logarithms of decays."""
    if kind == "raw":
        return torch.randn(shape, generator=generator)
    largest = {"none": 0.0, "weak": 0.01, "middle": 0.2, "strong": 8.0, "mixed": 0.05}[kind]
    g = -largest * torch.rand(shape, generator=generator)
    if kind == "mixed":
        tokens = shape[1]
        g[:, tokens // 3, 0] = -math.inf
        g[:, tokens // 2 : tokens // 2 + 9, -1] = -100.0
        g[:, 0] = -3.0
    return g


def inputs(
    lengths: list[int],
    *,
    packed: bool = False,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    gate: str = "middle",
    g_dtype: torch.dtype = torch.float32,
    l2norm: bool = True,
    sigmoid: bool = True,
    initial: bool = True,
    v_first: bool = False,
    scale: float | None = None,
    similar: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """The arguments of `gated_delta_rule_reference`."""
    generator = torch.Generator().manual_seed(seed + sum(lengths))
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    heads_qk, heads_v = heads
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) if packed else None

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator)

    q, k = normal(heads_qk, dims[0]), normal(heads_qk, dims[0])
    if similar:  # corrections of similar keys cancel
        k = 0.1 * k + torch.randn(heads_qk, dims[0], generator=generator)
    if not l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta = normal(heads_v) + (4.0 if similar else 0.0)
    initial_state = None
    if initial:
        matrix = dims[::-1] if v_first else dims
        initial_state = torch.randn(len(lengths), heads_v, *matrix, generator=generator)
    raw = gate == "raw"
    return {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(heads_v, dims[1]).to(dtype),
        "g": gates(gate, (batch, tokens, heads_v), generator).to(g_dtype),
        "beta": beta if sigmoid else torch.sigmoid(beta),
        "scale": scale,
        "initial_state": initial_state,
        "use_qk_l2norm_in_kernel": l2norm,
        "use_gate_in_kernel": raw,
        "use_beta_sigmoid_in_kernel": sigmoid,
        "state_v_first": v_first,
        "cu_seqlens": cu_seqlens,
        "A_log": torch.randn(heads_v, generator=generator) if raw else None,
        "dt_bias": torch.randn(heads_v, generator=generator) if raw else None,
    }


def options(x: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the call's plan."""
    return {
        "dtype": NAMES[x["q"].dtype],
        "gate_dtype": NAMES[x["g"].dtype],
        "beta_dtype": NAMES[x["beta"].dtype],
        "head_dim_k": x["q"].shape[-1],
        "head_dim_v": x["v"].shape[-1],
        "initial_state": x["initial_state"] is not None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": x["use_qk_l2norm_in_kernel"],
        "use_gate_in_kernel": x["use_gate_in_kernel"],
        "use_beta_sigmoid_in_kernel": x["use_beta_sigmoid_in_kernel"],
        "state_v_first": x["state_v_first"],
        "index_dtype": "none" if x["cu_seqlens"] is None else "int32",
    }


def empty_results(x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """o and final_state full of NaN."""
    q, v, cu_seqlens = x["q"], x["v"], x["cu_seqlens"]
    sequences = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    matrix = q.shape[-1], v.shape[-1]
    matrix = matrix[::-1] if x["state_v_first"] else matrix
    o = torch.full(v.shape, math.nan, dtype=v.dtype)
    return o, torch.full((sequences, v.shape[2], *matrix), math.nan)


def forward(x: dict[str, Any], arch: str, *, split: bool = False) -> dict[str, torch.Tensor | None]:
    """Run the kernels in the emulator, with all its checks, on results full of NaN."""
    q, v, cu_seqlens = x["q"], x["v"], x["cu_seqlens"]
    o, final_state = empty_results(x)
    with emulated(arch, Emulator(num_sms=132)):
        requests = plan_chunk_gated_delta_rule(arch, **options(x), split=split)
        assert (requests[0][0] is HEAD_FORWARD) == (arch == "sm_90a")
        assert (requests[0][0] is PREPARE) == (arch != "sm_90a")
        scale = q.shape[-1] ** -0.5 if x["scale"] is None else x["scale"]
        ChunkForward.load(q.device, requests).run(
            q, x["k"], v, x["g"], x["beta"], x["A_log"], x["dt_bias"], cu_seqlens, scale, 1.0,
            (o, None, None), (x["initial_state"], final_state),
        )  # fmt: skip
    return {"o": o, "final_state": final_state}


def check(x: dict[str, Any], arch: str, **options: Any) -> None:
    """Compare with float64: the error is at most twice the error of plain PyTorch."""
    ours = forward(x, arch, **options)
    exact = gated_delta_rule_reference(**x)
    # Plain chunked code has NaN where g is -inf; a decay of exp(-128) is as good as 0.
    x = x | {"g": x["g"].clamp(min=-128.0)}
    plain = gated_delta_rule_chunk_reference(**x, dtype=torch.float32, stage_dtype=x["q"].dtype)
    for mine, theirs, right in (
        (ours["o"], plain.o.to(x["q"].dtype), exact.o),
        (ours["final_state"], plain.states.final_state, exact.final_state),
    ):
        assert mine is not None
        error = (mine.double() - right).norm()
        assert error <= 2 * (theirs.double() - right).norm() + 1e-12 * right.norm()


@pytest.mark.parametrize(
    "case",
    [
        {"lengths": [130], "gate": "mixed", "heads": (1, 4)},
        more(lengths=[1, 1], gate="weak", l2norm=False, sigmoid=False, initial=False),
        {"lengths": [70, 0, 64, 1, 130], "packed": True, "gate": "raw", "v_first": True},
        more(lengths=[65], dtype=torch.float16, gate="mixed"),
        more(lengths=[192], similar=True, gate="weak"),
        {"lengths": [100], "dims": (128, 128), "heads": (2, 2), "gate": "strong"},
        more(lengths=[200], dims=(128, 128), heads=(2, 4), gate="mixed"),
        more(lengths=[200], dims=(128, 128), heads=(1, 8), gate="weak", dtype=torch.float16),
        more(lengths=[63], dims=(128, 64), heads=(1, 9), gate="raw", g_dtype=torch.bfloat16),
        more(lengths=[64, 64], dims=(64, 128), gate="none", scale=3.0),
        more(lengths=[64], dims=(128, 256), gate="middle"),
        more(lengths=[130, 130], dims=(128, 192), gate="mixed"),
        more(lengths=[70, 0, 66], packed=True, dims=(64, 192), v_first=True, heads=(1, 1)),
        more(lengths=[0, 200, 0, 1, 63, 65, 0], packed=True, dims=(128, 128), gate="mixed"),
        more(lengths=[90], l2norm=False, gate="mixed", dtype=torch.float16, sigmoid=False),
    ],
)
def test_the_fast_path(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_forward, "in_one_kernel", lambda *_, **__: True)
    check(inputs(**case), "sm_90a")


Results = tuple[torch.Tensor | None, ...]  # o, states, v_new and the final state


def two_kernels(x: dict[str, Any], spec: HeadForwardSpec, results: Results) -> None:
    """Run `prepare` and `state_pass` on the call of a kernel with this spec."""
    of_inputs = {f.name: getattr(spec, f.name) for f in fields(InputsSpec)}
    of_pass = {f.name: getattr(spec, f.name) for f in fields(HeadPassSpec)}
    q, v, cu_seqlens = x["q"], x["v"], x["cu_seqlens"]
    prepare, state_pass = (
        launch.get_for(q.device, *request)
        for request in (
            (HEAD_PREPARE, HeadPrepareSpec(**of_inputs, ctas_per_sm=2)),
            (HEAD_STATE_PASS, HeadPassSpec(**of_pass | {"num_stages": MOST_STAGES})),
        )
    )
    inputs = q, x["k"], x["g"], x["beta"], x["A_log"], x["dt_bias"], cu_seqlens
    records = prepare_heads(prepare, inputs, v, None, q.shape[-1] ** -0.5, 1.0, 132)
    *written, final_state = results
    state_pass(
        q, x["k"], v, *records, *written, x["initial_state"], final_state, cu_seqlens, None, None,
        0, 1, None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        more(lengths=[1, 0, 140], packed=True, dims=(128, 128), heads=(1, 1)),
        more(lengths=[700], dims=(128, 128), gate="raw"),
        more(lengths=[129, 129], dims=(128, 64), gate="mixed", v_first=True),
        more(lengths=[200], dims=(64, 128), gate="strong", l2norm=False),
        more(lengths=[200], dims=(128, 256), gate="weak", dtype=torch.float16, sigmoid=False),
    ],
)
def test_one_kernel_has_the_bits_of_two(case: dict[str, Any]) -> None:
    """Products have the same order, also those that a backward reads: states and v_new."""
    x = inputs(**case)
    q, v, cu_seqlens = x["q"], x["v"], x["cu_seqlens"]
    keeps = v.dtype is torch.bfloat16
    found: list[Results] = []
    with emulated("sm_90a", Emulator(num_sms=132)):
        (kernel, spec), *_ = plan_chunk_gated_delta_rule(
            "sm_90a", **options(x), gradient=keeps, split=False
        )
        assert kernel is HEAD_FORWARD
        for one in (True, False):
            o, final_state = empty_results(x)
            kept = (
                (empty_states(q, v, cu_seqlens).zero_(), empty_v_new(q, v, cu_seqlens).zero_())
                if keeps
                else (None, None)
            )
            results = o, *kept, final_state
            if one:
                forward = launch.get_for(q.device, kernel, spec)
                forward(
                    q, x["k"], v, x["g"], x["beta"], x["A_log"], x["dt_bias"], o, *kept,
                    x["initial_state"], final_state, cu_seqlens, q.shape[-1] ** -0.5, 1.0,
                )  # fmt: skip
            else:
                two_kernels(x, spec, results)
            found.append(results)
    for name, mine, theirs in zip(("o", "states", "v_new", "final_state"), *found, strict=True):
        if mine is not None and theirs is not None:
            assert torch.equal(mine, theirs), name
            assert mine.abs().sum() > 0


@pytest.mark.parametrize(
    ("sizes", "dims", "one"),
    [
        ((1, 8192, 64), (128, 128), True),  # 128 CTAs
        ((1, 8192, 32), (128, 128), False),  # 64 CTAs
        ((4, 8192, 32), (128, 128), True),
        ((4, 8192, 32), (64, 64), True),
        ((4, 8192, 32), (64, 128), False),  # each CTA would prepare all chunks
        ((4, 8192, 32), (128, 256), False),
        ((4, 8192, 32), (128, 192), False),  # as above
        ((64, 8192, 32), (128, 128), False),  # two chunks a sequence
    ],
)
def test_which_calls_take_one_kernel(
    sizes: tuple[int, int, int], dims: tuple[int, int], one: bool
) -> None:
    (_, spec), *_ = plan_chunk_gated_delta_rule(
        "sm_90a", head_dim_k=dims[0], head_dim_v=dims[1], split=False
    )
    sequences, tokens, heads = sizes
    chosen = in_one_kernel(spec, sequences=sequences, tokens=tokens, heads=heads, num_sms=132)
    assert chosen == one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decays": "channel"}, "decays is channel, must be head"),
        ({"segments": "outputs"}, "segments is outputs, dependent is False, must be none"),
        ({"dependent": True}, "segments is none, dependent is True, must be none"),
        ({"num_stages": 6}, "num_stages is 6, must be 2 to 5"),
    ],
)
def test_the_whole_forward_refuses(changes: dict[str, Any], message: str) -> None:
    (_, spec), *_ = plan_chunk_gated_delta_rule("sm_90a", split=False)
    with pytest.raises(ValueError, match=message):
        replace(spec, **changes)


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        slow(
            {"lengths": [70, 0, 64], "packed": True, "gate": "raw", "heads": (1, 2)},
            "sm_100a",
        ),
        slow({"lengths": [130], "gate": "mixed"}, "sm_80"),
        slow(
            {"lengths": [100], "gate": "raw", "dims": (128, 128), "g_dtype": torch.bfloat16},
            "sm_120a",
        ),
    ],
)
def test_kdas_kernels_with_one_decay_a_head(case: dict[str, Any], arch: str) -> None:
    check(inputs(**case), arch)


@pytest.mark.parametrize(
    "case",
    [
        more(lengths=[330], gate="weak"),  # test_segments_from_zero has quick cases
        more(lengths=[500], dims=(128, 128), gate="mixed", heads=(1, 1)),
        more(lengths=[400, 0, 129, 64, 1], packed=True, dims=(128, 64), gate="middle"),
        more(lengths=[200, 200], dims=(64, 128), gate="strong", v_first=True),
    ],
)
def test_a_sequence_in_segments(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_passes, "chunks_per_segment", lambda *_, **__: 2)
    monkeypatch.setattr(chunk_passes, "chunks_per_start", lambda *_, **__: 2)
    check(inputs(**case), "sm_90a", split=True)


@pytest.mark.parametrize("one", [True, slow(False)])
def test_rows_of_other_sequences_do_not_leak(one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past a sequence's end may hold anything."""
    monkeypatch.setattr(chunk_forward, "in_one_kernel", lambda *_, **__: one)
    x = inputs([70, 64], packed=True, gate="middle")
    alone = {
        name: y[:, :70] if name in ("q", "k", "v", "g", "beta") else y for name, y in x.items()
    }
    alone |= {
        "cu_seqlens": torch.tensor([0, 70], dtype=torch.int32),
        "initial_state": x["initial_state"][:1],
    }
    for name in ("q", "k", "v"):
        x[name][:, 70:] = math.nan
    both, one = forward(x, "sm_90a"), forward(alone, "sm_90a")
    assert torch.equal(both["o"][:, :70], one["o"])
    assert torch.equal(both["final_state"][:1], one["final_state"])


@pytest.mark.parametrize(
    ("dims", "split"),
    [
        slow((64, 64), False),
        slow((128, 128), False),
        slow((128, 128), True),
    ],
)
def test_states_in_a_pool(
    dims: tuple[int, int], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_forward, "in_one_kernel", lambda *_, **__: True)
    monkeypatch.setattr(chunk_passes, "chunks_per_segment", lambda *_, **__: 1)
    monkeypatch.setattr(chunk_passes, "chunks_per_start", lambda *_, **__: 1)
    x = inputs([130, 0, 70], packed=True, dims=dims)
    pool = torch.randn(6, 2, *dims).to(torch.bfloat16)
    before = pool.clone()
    state_indices = torch.tensor([4, -1, 2], dtype=torch.int32)
    checkpoints = torch.tensor([[0, 1], [-1, -1], [5, -1]], dtype=torch.int32)
    fresh = torch.tensor([1, 1, 0], dtype=torch.uint8)
    o = torch.full_like(x["v"], math.nan)
    with emulated("sm_90a", Emulator(num_sms=132)):
        requests = plan_chunk_gated_delta_rule(
            "sm_90a",
            gate_dtype="float32",
            beta_dtype="float32",
            head_dim_k=dims[0],
            head_dim_v=dims[1],
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_indices=True,
            state_dtype="bfloat16",
            checkpoint_indices=True,
            has_initial_state=True,
            index_dtype="int32",
            split=split,
        )
        ChunkForward.load(o.device, requests).run(
            x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, x["cu_seqlens"],
            dims[0] ** -0.5, 1.0, (o,), (pool, state_indices, checkpoints, 1, fresh),
        )  # fmt: skip
    starts = torch.zeros(3, 2, *dims)
    starts[0] = before[4].float()
    exact = gated_delta_rule_reference(**x | {"initial_state": starts})
    first = {name: x[name][:, :64] for name in ("q", "k", "v", "g", "beta")}
    checkpoint = gated_delta_rule_reference(
        **x | first | {"initial_state": starts[:1], "cu_seqlens": None}
    )
    for ours, right in (
        (o, exact.o),
        (pool[4], exact.final_state[0]),
        (pool[2], exact.final_state[2]),
        (pool[0], checkpoint.final_state[0]),
    ):
        assert (ours.double() - right).norm() <= 2.0**-8 * right.norm()
    assert torch.equal(pool[3], before[3])  # no index names this slot
