"""The references themselves: against each other, closed forms, symmetries, and FLA's own."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_attn.reference.kda import (
    CHUNK,
    KdaRecords,
    KdaStages,
    kda_chunk_delta_h_reference,
    kda_chunk_gradients,
    kda_chunk_output_reference,
    kda_chunk_reference,
    kda_decode_reference,
    kda_gradients,
    kda_recompute_w_u_reference,
    kda_reference,
    l2norm,
    log_decay,
)

K, V = 6, 5  # of different size, so that a transposed state does not go unnoticed
IN_KERNEL: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def problem(
    seed: int, batch: int = 2, tokens: int = 70, heads: int = 2, group: int = 2
) -> dict[str, torch.Tensor]:
    """Keys of length 1, gates of at most 0, beta in 0 to 1, and a state to start from."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads_v = heads * group
    return {
        "q": normal(batch, tokens, heads, K),
        "k": torch.nn.functional.normalize(normal(batch, tokens, heads, K), dim=-1),
        "v": normal(batch, tokens, heads_v, V),
        "g": -normal(batch, tokens, heads_v, K).abs(),
        "beta": normal(batch, tokens, heads_v).sigmoid(),
        "initial_state": normal(batch, heads_v, K, V),
    }


def raw_problem(seed: int, **sizes: int) -> dict[str, Any]:
    """One whose gates, beta and norms are left to the kernel."""
    p: dict[str, Any] = problem(seed, **sizes)
    generator = torch.Generator().manual_seed(seed + 1)
    heads_v = p["v"].shape[2]
    for name, scale in (("g", 3.0), ("beta", 2.0), ("k", 4.0)):
        p[name] = scale * torch.randn(p[name].shape, generator=generator, dtype=torch.float64)
    parameters = {
        "A_log": torch.randn(heads_v, generator=generator, dtype=torch.float64),
        "dt_bias": torch.randn(heads_v * K, generator=generator, dtype=torch.float64),
    }
    return p | parameters | IN_KERNEL


def tokens_of(p: dict[str, Any], rows: slice, batch: slice = slice(None)) -> dict[str, Any]:
    """The problem with only these tokens."""
    return p | {name: p[name][batch, rows] for name in ("q", "k", "v", "g", "beta")}


def packed(p: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """The first tokens of the first batch as sequences of these lengths."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    p = tokens_of(p, slice(0, sum(lengths)), slice(0, 1)) | {"cu_seqlens": cu_seqlens}
    generator = torch.Generator().manual_seed(sum(lengths))
    shape = (len(lengths), p["v"].shape[2], K, V)
    return p | {"initial_state": torch.randn(shape, generator=generator, dtype=torch.float64)}


def assert_stages_agree(p: dict[str, Any]) -> KdaStages:
    """Check that chunks and token by token agree; return the chunks' stages."""
    expected, stages = kda_reference(**p), kda_chunk_reference(**p)
    torch.testing.assert_close(stages.o, expected.o)
    torch.testing.assert_close(stages.states.final_state, expected.final_state)
    torch.testing.assert_close(stages.states.h, expected.h)
    return stages


def assert_no_worse(theirs: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """The error rule for kernels, here for definitions in float32."""
    error, granted = ((x.double() - exact).norm() for x in (theirs, plain))
    assert error <= 2 * granted + torch.finfo(torch.float32).eps * exact.norm()


# ---- token by token


def test_tokens_are_affine_maps_of_the_state():
    """S_t = M_t S_(t-1) + beta_t k_t v_t^T, with M_t = (I - beta_t k_t k_t^T) Diag(exp(g_t))."""
    p = problem(0, tokens=5, group=1)
    result = kda_reference(**p, scale=0.3)
    for b in range(2):
        for h in range(2):
            s = p["initial_state"][b, h]
            for t in range(5):
                k, beta = p["k"][b, t, h], p["beta"][b, t, h]
                m = (torch.eye(K) - beta * torch.outer(k, k)) @ torch.diag(p["g"][b, t, h].exp())
                s = m @ s + beta * torch.outer(k, p["v"][b, t, h])
                torch.testing.assert_close(result.o[b, t, h], 0.3 * s.T @ p["q"][b, t, h])
            torch.testing.assert_close(result.final_state[b, h], s)


def test_the_delta_rule_replaces_what_a_key_recalls():
    """Without forgetting, and beta = 1, a key recalls the last value that it was given."""
    keys = torch.eye(K, dtype=torch.float64)[[0, 1, 2, 1]]
    values = torch.randn(4, V, dtype=torch.float64)
    result = kda_reference(
        q=keys[[0, 0, 1, 1]].view(1, 4, 1, K),
        k=keys.view(1, 4, 1, K),
        v=values.view(1, 4, 1, V),
        g=torch.zeros(1, 4, 1, K, dtype=torch.float64),
        beta=torch.ones(1, 4, 1, dtype=torch.float64),
        scale=1.0,
    )
    torch.testing.assert_close(result.o[0, :, 0], values[[0, 0, 1, 3]])


def test_default_scale_is_that_of_attention():
    p = problem(1, tokens=3)
    torch.testing.assert_close(kda_reference(**p).o, kda_reference(**p, scale=K**-0.5).o)


def test_no_initial_state_is_zero():
    p = problem(2, tokens=3)
    zero = torch.zeros_like(p.pop("initial_state"))
    assert torch.equal(kda_reference(**p).o, kda_reference(**p, initial_state=zero).o)


@pytest.mark.parametrize("split", [1, 37, CHUNK, 130])
def test_two_runs_chained_are_one(split: int):
    p = problem(3, tokens=140)
    whole = kda_reference(**p)
    first = kda_reference(**tokens_of(p, slice(0, split)))
    rest = tokens_of(p, slice(split, None)) | {"initial_state": first.final_state}
    second = kda_reference(**rest)
    assert torch.equal(whole.o, torch.cat([first.o, second.o], dim=1))
    assert torch.equal(whole.final_state, second.final_state)


def test_intermediate_states_are_those_at_the_start_of_each_chunk():
    p = problem(4, tokens=130)
    result = kda_reference(**p)
    assert result.h.shape == (2, 3, 4, K, V)
    for i in range(3):
        before = kda_reference(**tokens_of(p, slice(0, i * CHUNK)))
        assert torch.equal(result.h[:, i], before.final_state)


@pytest.mark.parametrize("run", [kda_reference, kda_chunk_reference])
def test_grouped_value_heads_are_repeated_heads(run: Any):
    p = raw_problem(5, heads=2, group=3)
    repeated = p | {name: p[name].repeat_interleave(3, dim=2) for name in ("q", "k")}
    torch.testing.assert_close(run(**p).o, run(**repeated).o, rtol=0, atol=0)


def test_heads_that_do_not_divide_are_refused():
    p = problem(6, heads=2, group=2)
    with pytest.raises(AssertionError, match="3 value heads cannot share 2"):
        kda_reference(**(p | {name: p[name][:, :, :3] for name in ("v", "g", "beta")}))


LENGTHS = [[3, 0, 64, 1, 65], [0, 5], [5, 0], [0], [128, 2]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_sequences_are_each_alone(lengths: list[int]):
    p = packed(raw_problem(7, tokens=140), lengths)
    result = kda_reference(**p)
    stages = assert_stages_agree(p)
    assert result.h.shape[1] == sum(math.ceil(length / CHUNK) for length in lengths)
    start = chunk = 0
    for n, length in enumerate(lengths):
        alone = tokens_of(p, slice(start, start + length)) | {
            "cu_seqlens": None,
            "initial_state": p["initial_state"][n : n + 1],
        }
        expected, expected_stages = kda_reference(**alone), kda_chunk_reference(**alone)
        rows, count = slice(start, start + length), expected.h.shape[1]
        assert torch.equal(result.o[:, rows], expected.o)
        assert torch.equal(result.final_state[n : n + 1], expected.final_state)
        assert torch.equal(result.h[:, chunk : chunk + count], expected.h)
        torch.testing.assert_close(stages.g[:, rows], expected_stages.g)
        for name, x in expected_stages.intra._asdict().items():
            torch.testing.assert_close(getattr(stages.intra, name)[:, rows], x)
        start, chunk = start + length, chunk + count
    assert chunk == result.h.shape[1]


def test_tokens_of_no_sequence_are_undefined():
    p = packed(problem(8), [3, 4])
    outside = {name: torch.nn.functional.pad(p[name], (0, 0, 0, 0, 0, 2)) for name in "qkvg"}
    outside["beta"] = torch.nn.functional.pad(p["beta"], (0, 0, 0, 2))
    o = kda_reference(**(p | outside)).o
    assert torch.equal(o[:, :7], kda_reference(**p).o)
    assert o[:, 7:].isnan().all()
    assert kda_chunk_reference(**(p | outside)).o[:, 7:].isnan().all()


@pytest.mark.parametrize("run", [kda_reference, kda_chunk_reference])
def test_layouts_are_transposes(run: Any):
    p = problem(9)
    transposed = p | {"initial_state": p["initial_state"].mT, "state_v_first": True}
    one, other = run(**p), run(**transposed)
    torch.testing.assert_close(one.o, other.o)
    if isinstance(one, KdaStages):
        one, other = one.states, other.states
    torch.testing.assert_close(one.final_state, other.final_state.mT)
    torch.testing.assert_close(one.h, other.h.mT)


# ---- what is done to the inputs


def test_gate():
    g = torch.tensor([-1e3, -2.0, 0.0, 3.0, 1e3], dtype=torch.float64).expand(2, 5)
    A_log = torch.tensor([0.0, math.log(2)], dtype=torch.float64)
    gate = log_decay(g, A_log)
    expected = [0.0, -math.log(1 + math.exp(-2)), -math.log(2), -math.log(1 + math.exp(3)), -1e3]
    torch.testing.assert_close(gate[0], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(gate[1], 2 * gate[0])
    shifted = log_decay(g - 1, A_log, dt_bias=torch.ones(10))
    torch.testing.assert_close(shifted, gate)


def test_gate_with_a_lower_bound():
    g = torch.tensor([-1e3, -2.0, 0.0, 3.0, 1e3], dtype=torch.float64).expand(2, 5)
    gate = log_decay(g, lower_bound=-5.0)
    expected = [0.0, -5 / (1 + math.exp(2)), -2.5, -5 / (1 + math.exp(-3)), -5.0]
    torch.testing.assert_close(gate[0], torch.tensor(expected, dtype=torch.float64))
    A_log = torch.tensor([0.0, math.log(2)], dtype=torch.float64)
    bias = torch.full((2, 5), 0.5)
    steeper = log_decay(g, A_log, bias, lower_bound=-5.0)
    torch.testing.assert_close(steeper[0], log_decay(g + 0.5, lower_bound=-5.0)[0])
    torch.testing.assert_close(steeper[1], log_decay(2 * (g + 0.5), lower_bound=-5.0)[1])


def test_l2norm():
    torch.testing.assert_close(l2norm(torch.tensor([3.0, 4.0])).norm(), torch.tensor(1.0).double())
    assert torch.equal(l2norm(torch.zeros(3)), torch.zeros(3, dtype=torch.float64))
    epsilon = torch.tensor([1e-3, 0.0], dtype=torch.float64)  # as large as what is added to it
    torch.testing.assert_close(l2norm(epsilon)[0], torch.tensor(2**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_in_kernel_is_the_same_as_before_it(lower_bound: float | None, allow_neg_eigval: bool):
    p = raw_problem(10) | {"lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
    prepared = {name: p[name] for name in ("v", "initial_state")}
    prepared |= {name: l2norm(p[name]) for name in ("q", "k")}
    prepared["g"] = log_decay(p["g"], p["A_log"], p["dt_bias"], lower_bound)
    prepared["beta"] = (1 + allow_neg_eigval) * p["beta"].sigmoid()
    torch.testing.assert_close(kda_reference(**p).o, kda_reference(**prepared).o)


def test_negative_eigenvalues_need_the_sigmoid():
    with pytest.raises(AssertionError):
        kda_reference(**problem(11), allow_neg_eigval=True)


# ---- a chunk at a time


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    sizes = {"heads": draw(st.integers(1, 2)), "group": draw(st.integers(1, 3))}
    tokens = draw(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 128, 150]))
    p = raw_problem(draw(st.integers(0, 2**31)), batch=1, tokens=tokens, **sizes)
    if draw(st.booleans()):  # gates as they come, from no decay to nothing left
        scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 5.0, 100.0]))
        p |= {"g": -scale * p["g"].abs(), "use_gate_in_kernel": False}
    else:
        p["lower_bound"] = draw(st.sampled_from([None, -1.0, -5.0]))
        p["A_log"] = p["A_log"] + draw(st.sampled_from([0.0, 4.0]))
    p["allow_neg_eigval"] = draw(st.booleans())
    p["scale"] = draw(st.none() | st.floats(0.01, 2.0))
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=3)))
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
        p = packed(p, lengths)
    return p


@given(problems())
def test_chunks_are_the_recurrence(p: dict[str, Any]):
    assert_stages_agree(p)


def test_stages_run_alone_are_the_stages():
    p = raw_problem(12)
    stages = kda_chunk_reference(**p)
    q, k, beta, g, intra, states, o = stages
    again = kda_recompute_w_u_reference(q, k, p["v"], g, beta, intra.Akk)
    for x, y in zip(again, intra[2:], strict=True):
        assert torch.equal(x, y)
    _, v_new, _ = kda_chunk_delta_h_reference(intra.kg, intra.w, intra.u, g, p["initial_state"])
    assert torch.equal(v_new, states.v_new)
    assert torch.equal(kda_chunk_output_reference(q, v_new, g, intra.Aqk, states.h), o)


def test_shapes_of_the_stages():
    p = problem(13, tokens=70, heads=2, group=2)
    stages = kda_chunk_reference(**p)
    shapes = {name: tuple(x.shape[2:]) for name, x in stages.intra._asdict().items()}
    assert shapes == {"Aqk": (4, CHUNK), "Akk": (4, CHUNK)} | {
        "w": (4, K),
        "u": (4, V),
        "qg": (4, K),
        "kg": (4, K),
    }
    assert stages.g.shape == (2, 70, 4, K)
    assert stages.states.h.shape == (2, 2, 4, K, V)
    # Nothing above the diagonal, in the last chunk's 6 rows too.
    for x in (stages.intra.Aqk, stages.intra.Akk):
        first, last = x[:, :CHUNK].transpose(1, 2), x[:, CHUNK:].transpose(1, 2)
        assert not first.triu(1).any()
        assert not last.triu(1).any()


def test_w_and_u_say_what_a_chunk_does_to_the_state():
    """v_new, found from the state at the start of the chunk, is the correction of every token."""
    p = problem(14, tokens=CHUNK, group=1)
    stages = kda_chunk_reference(**p)
    for t in (0, 1, 40, 63):
        before = kda_reference(**tokens_of(p, slice(0, t))).final_state
        recalled = torch.einsum("bhk,bhkv->bhv", p["k"][:, t] * p["g"][:, t].exp(), before)
        expected = p["beta"][:, t].unsqueeze(-1) * (p["v"][:, t] - recalled)
        torch.testing.assert_close(stages.states.v_new[:, t], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gate", [-5.0, -1e3, -1e6])
def test_extreme_gates_stay_finite_and_exact(gate: float, dtype: torch.dtype):
    """A lower bound of -5 is e^-320 over a chunk; every sixth token forgets nothing."""
    p: dict[str, Any] = problem(15, tokens=2 * CHUNK)
    p["g"] = torch.full_like(p["g"], gate)
    p["g"][:, ::6] = 0.0
    exact = kda_reference(**p)
    stages = kda_chunk_reference(**p, dtype=dtype)
    for x in (*stages.intra, *stages.states, stages.o, stages.g):
        assert x.isfinite().all()
    if dtype == torch.float64:
        assert_stages_agree(p)
    elif gate == -5.0:  # sums of larger gates do not fit into float32
        assert_no_worse(stages.o, kda_reference(**p, dtype=dtype).o, exact.o)


def test_the_recurrence_takes_a_decay_of_zero():
    p = problem(16, tokens=3)
    p["g"][:, 1] = -math.inf
    late = tokens_of(p, slice(1, None)) | {"initial_state": None}
    torch.testing.assert_close(kda_reference(**p).o[:, 1:], kda_reference(**late).o)


def test_a_segment_is_an_affine_map_of_the_state():
    """M from the unit matrix without values, B from values alone: what parallel segments need."""
    p = problem(18, batch=1, tokens=2 * CHUNK + 9)
    intra, g = (stages := kda_chunk_reference(**p)).intra, stages.g
    heads = p["v"].shape[2]
    unit = torch.eye(K, dtype=torch.float64).expand(1, heads, K, K)
    no_values = torch.zeros(*g.shape[:3], K, dtype=torch.float64)
    m = kda_chunk_delta_h_reference(intra.kg, intra.w, no_values, g, unit).final_state
    b = kda_chunk_delta_h_reference(intra.kg, intra.w, intra.u, g).final_state
    torch.testing.assert_close(m @ p["initial_state"] + b, stages.states.final_state)
    assert (torch.linalg.matrix_norm(m, 2) <= 1).all()


def scores_by_halves(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, operand: torch.dtype
) -> torch.Tensor:
    """Aqk / scale as docs/kernels/kda.md plans it: products of operands of 16 bits.

    Every block of rows meets a block of earlier columns with the decay split in two, at the first
    of the rows, so that neither part is more than 1: 16 rows against all before their sub-chunk,
    and within it 8 against 8, 4 against 4, 2 against 2, 1 against 1.
    """
    scores = torch.diag((q * k).sum(dim=1))
    blocks = [(i, i + 16, 0) for i in range(16, CHUNK, 16)]
    for size in (8, 4, 2, 1):
        blocks += [(i, i + size, i - size) for i in range(size, CHUNK, 2 * size)]
    for first, end, start in blocks:
        rows = (q[first:end] * torch.exp2(g[first:end] - g[first])).to(operand).float()
        columns = (k[start:first] * torch.exp2(g[first] - g[start:first])).to(operand).float()
        scores[first:end, start:first] = rows @ columns.T
    return scores


GATES: dict[str, Any] = {
    "none": lambda x: 0 * x,
    "mild": lambda x: -0.05 * x.sigmoid(),
    "bounded": lambda x: -5 * x.sigmoid(),
    "at the bound": lambda x: -5 + 0 * x,
    "unbounded": lambda x: -16 * torch.nn.functional.softplus(x),
    "few and large": lambda x: torch.where(x > 2, -1000.0, -0.01),
}


@pytest.mark.parametrize("operand", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_scores_by_halves_keep_the_error_rule(gates: str, operand: torch.dtype):
    generator = torch.Generator().manual_seed(19)
    q, k, x = (torch.randn(CHUNK, 128, generator=generator) for _ in range(3))
    q, k = (l2norm(y).to(operand) for y in (q, k))
    g = GATES[gates](x).view(1, CHUNK, 1, 128)
    run = (q.view(1, CHUNK, 1, 128), k.view(1, CHUNK, 1, 128), torch.zeros(1, CHUNK, 1, 1))
    beta = torch.zeros(1, CHUNK, 1)
    exact = kda_chunk_reference(*run, g, beta, 1.0).intra.Aqk[0, :, 0]
    plain = kda_chunk_reference(*run, g, beta, 1.0, dtype=torch.float32, stage_dtype=operand)
    sums = plain.g[0, :, 0]
    halves = scores_by_halves(q.float(), k.float(), sums, operand).to(operand)
    assert_no_worse(halves, plain.intra.Aqk[0, :, 0], exact)


def test_stage_dtype_rounds_what_is_stored():
    p = raw_problem(17)
    exact = kda_chunk_reference(**p)
    same = kda_chunk_reference(**p, stage_dtype=torch.float64)
    rounded = kda_chunk_reference(**p, dtype=torch.float32, stage_dtype=torch.bfloat16)
    assert torch.equal(exact.o, same.o)
    for x in (*rounded.intra, rounded.states.h, rounded.states.v_new, rounded.q, rounded.k):
        assert torch.equal(x, x.bfloat16().float())
    for x in (rounded.g, rounded.states.final_state):
        assert not torch.equal(x, x.bfloat16().float())
    plain = kda_chunk_reference(**p, dtype=torch.float32)
    assert (rounded.o - exact.o).norm() > (plain.o - exact.o).norm()


# ---- gradients


DIFFERENTIATED: dict[str, Any] = {
    "plain": lambda: problem(40, tokens=70),
    "raw": lambda: raw_problem(41, tokens=5) | {"scale": 0.3},
    "bound": lambda: raw_problem(42, tokens=5) | {"lower_bound": -5.0, "allow_neg_eigval": True},
    "no A_log": lambda: raw_problem(43, tokens=5) | {"lower_bound": -5.0, "A_log": None},
    "packed": lambda: between(packed(raw_problem(44, tokens=80), [3, 0, 66])),
    "v first": lambda: v_first(problem(45, tokens=5)),
    "no state": lambda: problem(46, tokens=5) | {"initial_state": None},
}
OF_TOKENS = ("q", "k", "v", "g", "beta")
OF_ALL = ("A_log", "dt_bias", "initial_state")


def v_first(p: dict[str, Any]) -> dict[str, Any]:
    return p | {"initial_state": p["initial_state"].mT, "state_v_first": True}


def between(p: dict[str, Any]) -> dict[str, Any]:
    """Packed sequences between tokens of no sequence, which hold NaN."""
    x = p["cu_seqlens"] + 2
    padded = {}
    for name in OF_TOKENS:
        y = p[name]
        rows = torch.full((1, y.shape[1] + 5, *y.shape[2:]), math.nan, dtype=y.dtype)
        rows[:, 2 : 2 + y.shape[1]] = y
        padded[name] = rows
    return p | padded | {"cu_seqlens": x}


def weights(p: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random gradients of o and final_state; NaN for tokens of no sequence."""
    generator = torch.Generator().manual_seed(47)
    o, state, _ = kda_reference(**p)
    do, dstate = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (o, state))
    return torch.where(o.isnan(), math.nan, do), dstate


def used(p: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    return x if "cu_seqlens" not in p else x[:, p["cu_seqlens"][0] : p["cu_seqlens"][-1]]


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_the_slopes_in_random_directions(name: str):
    p = DIFFERENTIATED[name]()
    do, dstate = weights(p)

    def value(moved: dict[str, Any]) -> float:
        o, state, _ = kda_reference(**moved)
        return ((used(p, o) * used(p, do)).sum() + (state * dstate).sum()).item()

    found = kda_gradients(**p, do=do, dfinal_state=dstate)
    generator = torch.Generator().manual_seed(48)
    differentiated = 0
    for argument, gradient in zip((*OF_TOKENS, *OF_ALL), found, strict=True):
        x = p.get(argument)
        assert (gradient is None) == (x is None)
        if x is None or gradient is None:
            continue
        direction = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        low, high = (value(p | {argument: x + step * direction}) for step in (-1e-6, 1e-6))
        slope = (gradient * direction).sum().item()
        assert (high - low) / 2e-6 == pytest.approx(slope, rel=1e-6, abs=1e-6), argument
        differentiated += 1
    assert differentiated >= 5


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_by_chunks_are_gradients(name: str):
    p = DIFFERENTIATED[name]()
    do, dstate = weights(p)
    for pair in ((do, dstate), (do, None), (None, dstate), (None, None)):
        by_tokens, by_chunks = (
            run(**p, do=pair[0], dfinal_state=pair[1])
            for run in (kda_gradients, kda_chunk_gradients)
        )
        for x, y in zip(by_tokens, by_chunks, strict=True):
            torch.testing.assert_close(x, y)


def test_tokens_of_no_sequence_have_no_gradient():
    p = DIFFERENTIATED["packed"]()
    do, dstate = weights(p)
    found = kda_gradients(**p, do=do, dfinal_state=dstate)
    for x in found:
        assert x is not None and x.isfinite().all()
    for x in found[:5]:
        assert not x[:, :2].any() and not x[:, -3:].any() and x[:, 2:-3].any()


@pytest.mark.parametrize("gate", [-1e-6, -5.0, -1e3, -math.inf])
def test_gradients_of_gates_of_any_size_are_finite(gate: float):
    p = problem(49, tokens=CHUNK + 2)
    p["g"][:, 1::3] = gate
    do, dstate = weights(p)
    for x in kda_gradients(**p, do=do, dfinal_state=dstate):
        assert x is None or x.isfinite().all()


def test_a_parameter_without_a_gate_has_no_gradient():
    p = problem(50, tokens=3) | {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4, K)}
    found = kda_gradients(**p, do=torch.ones_like(p["v"]))
    assert found.dA_log is None and found.ddt_bias is None


def test_gradients_in_16_bits_are_rounded():
    p = problem(51)
    do, dstate = weights(p)
    exact = kda_gradients(**p, do=do, dfinal_state=dstate)
    errors = []
    for stage_dtype in (None, torch.float16, torch.bfloat16):
        found = kda_chunk_gradients(
            **p, do=do, dfinal_state=dstate, dtype=torch.float32, stage_dtype=stage_dtype
        )
        errors.append(
            [
                ((x - y).norm() / y.norm()).item()
                for x, y in zip(found, exact, strict=True)
                if x is not None and y is not None
            ]
        )
    for none, half, bfloat in zip(*errors, strict=True):
        assert none < 1e-5 < half < 3e-3 and half < bfloat < 3e-2


# ---- decoding


def decode_problem(seed: int, tokens: int) -> tuple[dict[str, Any], torch.Tensor, dict[str, Any]]:
    """Tokens, a pool of 7 slots, and what goes with every call."""
    p = raw_problem(seed, batch=3, tokens=tokens)
    names = ("q", "k", "v", "g", "beta")
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(7, 4, V, K, generator=generator, dtype=torch.float64)
    options = {name: p[name] for name in ("A_log", "dt_bias")} | {"lower_bound": -5.0}
    return {name: p[name] for name in names}, pool, options


def prefix(x: dict[str, Any], count: int) -> dict[str, Any]:
    return {name: y[:, :count] for name, y in x.items()}


@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_is_the_recurrence_on_slots(tokens: int):
    x, pool, options = decode_problem(20, tokens)
    slots = torch.tensor([5, -1, 2], dtype=torch.int32)
    o, state, records, *_ = kda_decode_reference(**x, state=pool, state_indices=slots, **options)
    assert records is None
    expected = kda_reference(
        **x, **options, **IN_KERNEL, initial_state=pool[slots], state_v_first=True
    )
    torch.testing.assert_close(o[[0, 2]], expected.o[[0, 2]], rtol=0, atol=0)
    torch.testing.assert_close(state[[5, 2]], expected.final_state[[0, 2]], rtol=0, atol=0)
    assert not o[1].any()
    assert torch.equal(state[[0, 1, 3, 4, 6]], pool[[0, 1, 3, 4, 6]])


def test_decode_of_one_token_needs_no_dimension_for_it():
    x, pool, options = decode_problem(21, 1)
    o, state, *_ = kda_decode_reference(**x, state=pool, **options)
    flat = {name: y.squeeze(1) for name, y in x.items()}
    flat_o, flat_state, *_ = kda_decode_reference(**flat, state=pool, **options)
    assert torch.equal(o.squeeze(1), flat_o)
    assert torch.equal(state, flat_state)


def test_decode_layouts_are_transposes():
    x, pool, options = decode_problem(22, 2)
    o, state, *_ = kda_decode_reference(**x, state=pool, **options)
    o_kv, state_kv, *_ = kda_decode_reference(**x, state=pool.mT, state_v_first=False, **options)
    torch.testing.assert_close(o, o_kv)
    torch.testing.assert_close(state, state_kv.mT)


def test_slots_past_the_pool_are_padding():
    x, pool, options = decode_problem(23, 1)
    slots = torch.tensor([0, 7, 2**31 - 1], dtype=torch.int32)
    o, state, *_ = kda_decode_reference(**x, state=pool, state_indices=slots, **options)
    assert not o[1:].any() and o[0].all()
    assert torch.equal(state[1:], pool[1:])


def test_decode_of_packed_sequences_is_decode_of_each():
    x, pool, options = decode_problem(25, 3)
    slots = torch.tensor([[1, 2], [3, 4], [0, 6]])
    flags = torch.tensor([True, True, False])
    packed = {name: torch.cat([y[0], y[2, :2], y[1, :1]])[None] for name, y in x.items()}
    call = options | {"pad_slot_id": 0, "state": pool}
    offsets = torch.tensor([0, 3, 3, 5])
    o, state, *_ = kda_decode_reference(
        **packed, **call, state_indices=slots, cu_seqlens=offsets, has_initial_state=flags
    )
    one = {name: y[:1] for name, y in x.items()}
    alone = kda_decode_reference(**one, **call, state_indices=slots[:1, :1])
    torch.testing.assert_close(o[:, :3], alone.o)
    two = kda_decode_reference(**prefix(one, 2), **call, state_indices=slots[:1, :1])
    torch.testing.assert_close(state[2], two.state[1])
    assert not o[:, 3:5].any() and o[:, 5:].isnan().all()  # slot 0 is padding
    assert torch.equal(state[[0, 3, 4, 5, 6]], pool[[0, 3, 4, 5, 6]])


def test_drafts_leave_the_pool_alone():
    x, pool, options = decode_problem(26, 2)
    drafts = torch.zeros(4, 3, *pool.shape[1:], dtype=pool.dtype)
    rows, slots = torch.tensor([2, -1, 0]), torch.tensor([5, 1, 2])
    found = kda_decode_reference(
        **x, **options, state=pool, state_indices=slots, draft_states=drafts, draft_indices=rows
    )
    assert torch.equal(found.state, pool) and not drafts.any()
    expected = kda_decode_reference(**x, **options, state=pool, state_indices=slots)
    torch.testing.assert_close(found.o, expected.o)
    torch.testing.assert_close(found.draft_states[[2, 0], 1], expected.state[[5, 2]])
    first = kda_decode_reference(**prefix(x, 1), **options, state=pool, state_indices=slots)
    torch.testing.assert_close(found.draft_states[[2, 0], 0], first.state[[5, 2]])
    assert not found.draft_states[[1, 3]].any() and not found.draft_states[:, 2].any()


def test_decode_changes_no_input():
    x, pool, options = decode_problem(24, 2)
    before = pool.clone()
    records = KdaRecords(*(torch.zeros(7, 2, *y.shape[2:]) for y in (x["k"], x["g"], x["v"])))
    count = torch.zeros(3, dtype=torch.int32)
    kda_decode_reference(**x, state=pool, **options)
    kda_decode_reference(**x, state=pool, records=records, num_accepted_tokens=count, **options)
    assert torch.equal(pool, before)
    assert not any(y.any() for y in records)


ROUNDS = [[3, 3, 1], [1, 1, 1], [2, 3, 3], [1, 2, 3]]


def committed(rounds: list[dict[str, Any]], accepted: list[int]) -> dict[str, Any]:
    """The tokens of all calls but the last that were accepted, in their order."""
    parts = [prefix(x, count) for x, count in zip(rounds, accepted, strict=True)]
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


@pytest.mark.parametrize("accepted", ROUNDS, ids=str)
def test_a_slot_for_each_position(accepted: list[int]):
    """Each call accepts some of the last call's 1 + 2 tokens, and equals decoding only those."""
    _, pool, options = decode_problem(30, 1)
    rounds = [decode_problem(31 + i, 3)[0] for i in range(4)]
    slots = torch.tensor([[0, 3, 6], [1, 4, -1], [-1, -1, -1]], dtype=torch.int32)
    start = pool[[0, 1]].clone()
    state = pool
    for i, x in enumerate(rounds):
        count = torch.tensor([accepted[i - 1], min(accepted[i - 1], 2), 1]) if i else None
        o, state, *_ = kda_decode_reference(
            **x, state=state, state_indices=slots, num_accepted_tokens=count, **options
        )
        past = [min(n, 2) for n in accepted[:i]]
        for row, counts in ((0, accepted[:i]), (1, past)):
            x_row = {name: y[row : row + 1] for name, y in x.items()}
            history = [{name: y[row : row + 1] for name, y in r.items()} for r in rounds[:i]]
            whole = {"initial_state": start[row : row + 1], "state_v_first": True}
            tokens = committed([*history, x_row], [*counts, 3])
            expected = kda_reference(**tokens, **options, **IN_KERNEL, **whole)
            torch.testing.assert_close(o[row], expected.o[0, -3:])
            last = 3 if row == 0 else 2  # the second sequence has no slot for its third token
            for t in range(last):
                tokens = committed([*history, prefix(x_row, t + 1)], [*counts, 3])
                expected = kda_reference(**tokens, **options, **IN_KERNEL, **whole)
                torch.testing.assert_close(state[slots[row, t]], expected.final_state[0])
        assert not o[2].any()
        assert torch.equal(state[[2, 5]], pool[[2, 5]])


@pytest.mark.parametrize(("count", "means"), [(0, 1), (-5, 1), (4, 3), (2**31 - 1, 3)])
def test_counts_of_slots_are_clamped(count: int, means: int):
    x, pool, options = decode_problem(40, 3)
    slots = torch.tensor([[0, 1, 2], [3, 4, 5], [-1, -1, -1]], dtype=torch.int32)
    options |= {"state": pool, "state_indices": slots}
    results = [
        kda_decode_reference(**x, num_accepted_tokens=torch.tensor([n, n, n]), **options)
        for n in (count, means)
    ]
    assert torch.equal(results[0].o, results[1].o)
    assert torch.equal(results[0].state, results[1].state)


def empty_records(x: dict[str, Any], drafts: int) -> KdaRecords:
    """NaN, so that reading one that was not written shows."""
    shapes = (y.shape[2:] for y in (x["k"], x["g"], x["v"]))
    return KdaRecords(*(torch.full((7, drafts, *s), math.nan).double() for s in shapes))


@pytest.mark.parametrize("accepted", [*ROUNDS, [0, 0, 2]], ids=str)
def test_a_checkpoint_and_records(accepted: list[int]):
    _, pool, options = decode_problem(50, 1)
    rounds = [decode_problem(51 + i, 3)[0] for i in range(4)]
    slots = torch.tensor([6, -1, 1], dtype=torch.int32)
    rows = [0, 2]
    state, records = pool, empty_records(rounds[0], 3)
    for i, x in enumerate(rounds):
        count = torch.full((3,), accepted[i - 1] if i else 0)
        o, state, kept, *_ = kda_decode_reference(
            **x,
            state=state,
            state_indices=slots,
            num_accepted_tokens=count,
            records=records,
            **options,
        )
        assert kept is not None
        records = kept
        whole = {"initial_state": pool[slots], "state_v_first": True}
        tokens = committed([*rounds[:i], x], [*accepted[:i], 3])
        expected = kda_reference(**tokens, **options, **IN_KERNEL, **whole)
        torch.testing.assert_close(o[rows], expected.o[rows, -3:])
        checkpoint = committed([*rounds[:i], x], [*accepted[:i], 0])
        expected = kda_reference(**checkpoint, **options, **IN_KERNEL, **whole)
        torch.testing.assert_close(state[slots[rows]], expected.final_state[rows])
        assert not o[1].any()
        assert torch.equal(state[[0, 2, 3, 4, 5]], pool[[0, 2, 3, 4, 5]])
        assert torch.equal(records.k[slots[rows]], x["k"][rows])
        assert torch.equal(records.g[slots[rows]], x["g"][rows])
        assert all(y[[0, 2, 3, 4, 5]].isnan().all() for y in records)


@pytest.mark.parametrize(("count", "means"), [(-1, 0), (-(2**31), 0), (3, 2), (2**31 - 1, 2)])
def test_counts_of_records_are_clamped(count: int, means: int):
    x, pool, options = decode_problem(60, 2)
    zeros = torch.zeros(3, dtype=torch.int64)
    drafted = kda_decode_reference(
        **x, state=pool, num_accepted_tokens=zeros, records=empty_records(x, 2), **options
    )
    results = [
        kda_decode_reference(
            **x, state=pool, num_accepted_tokens=zeros + n, records=drafted.records, **options
        )
        for n in (count, means)
    ]
    assert torch.equal(results[0].o[:3], results[1].o[:3])
    assert torch.equal(results[0].state, results[1].state)


def test_what_is_kept_has_been_rounded_to_its_dtype():
    x, pool, options = decode_problem(61, 2)
    count = torch.zeros(3, dtype=torch.int64)
    records = KdaRecords(*(y.bfloat16() for y in empty_records(x, 2)[:2]), empty_records(x, 2).u)
    _, state, kept, *_ = kda_decode_reference(
        **x,
        state=pool.bfloat16(),
        num_accepted_tokens=count,
        records=records,
        **options,
        dtype=torch.float32,
    )
    assert kept is not None and state.dtype == kept.k.dtype == torch.float32
    assert torch.equal(state, state.bfloat16().float())
    assert torch.equal(kept.g[:3], x["g"].float().bfloat16().float())
    assert not torch.equal(kept.u[:3], kept.u[:3].bfloat16().float())


# ---- against flash-linear-attention


@pytest.fixture(scope="module")
def fla_naive() -> ModuleType:
    """flash-linear-attention's plain definitions, loaded without the package, which needs
    triton."""
    spec = importlib.util.find_spec("fla")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        pytest.skip("needs flash-linear-attention, which is not installed")
    pytest.importorskip("einops")
    path = Path(folders[0]) / "ops" / "kda" / "naive.py"
    loader = importlib.util.spec_from_file_location("fla_ops_kda_naive", path)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


@pytest.mark.parametrize("group", [1, 2])
def test_fla_defines_the_same(fla_naive: ModuleType, group: int):
    p = {name: x.float() for name, x in problem(70, tokens=128, group=group).items()}
    exact, plain = kda_reference(**p), kda_reference(**p, dtype=torch.float32)
    o, state = fla_naive.naive_recurrent_kda(**p, output_final_state=True)
    assert_no_worse(o, plain.o, exact.o)
    assert_no_worse(state, plain.final_state, exact.final_state)
    o, state = fla_naive.naive_chunk_kda(**p, output_final_state=True)
    stages = kda_chunk_reference(**p, dtype=torch.float32)
    assert_no_worse(o, stages.o, exact.o)
    assert_no_worse(state, stages.states.final_state, exact.final_state)


def test_fla_defines_the_same_gate():
    gate = pytest.importorskip("fla.ops.kda.gate", reason="needs flash-linear-attention")
    p = {name: raw_problem(71)[name].float() for name in ("g", "A_log", "dt_bias")}
    exact, plain = log_decay(**p), log_decay(**p, dtype=torch.float32)
    assert_no_worse(gate.naive_kda_gate(**p), plain, exact)
    bounded = p | {"lower_bound": -5.0}
    exact, plain = log_decay(**bounded), log_decay(**bounded, dtype=torch.float32)
    assert_no_worse(gate.naive_kda_lowerbound_gate(**bounded), plain, exact)
