"""KDA's kernels within chunks, `prepare` and `chunk_intra`, in the emulator."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.emulator import Emulator
from cute_attn.kernels.delta.chunk.spec import CHUNK, IntraSpec, PrepareSpec
from cute_attn.kernels.delta.table import CHUNK_INTRA, PREPARE
from cute_attn.reference import kda
from tests.sweeps import slow

sys.path.insert(0, str(Path(__file__).parent))
from kda_tiles import slot_of, slots, split_beta, unpack

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
BF16, FP16, FP32 = NAMES
MATRICES = ("kd", "qg", "kg", "Akk", "Aqk")


@functools.cache
def function(kernel: Any, spec: Any, arch: str) -> Callable[..., None]:
    return Emulator().load(cache.compile(kernel, spec, arch=arch))


def offsets(lengths: list[int] | None) -> torch.Tensor | None:
    return None if lengths is None else torch.tensor([0, *accumulate(lengths)])


def draw(
    batch: int,
    tokens: int,
    heads_qk: int,
    heads: int,
    dim_k: int,
    dtype: torch.dtype = BF16,
    gate_dtype: torch.dtype = BF16,
    beta_dtype: torch.dtype = BF16,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": normal(batch, tokens, heads_qk, dim_k).to(dtype),
        "k": normal(batch, tokens, heads_qk, dim_k).to(dtype),
        "g": normal(batch, tokens, heads, dim_k).to(gate_dtype),
        "beta": normal(batch, tokens, heads).to(beta_dtype),
        "A_log": torch.rand(heads, generator=generator),
        "dt_bias": normal(heads, dim_k),
    }


# ---- prepare

# Tests that need no kernel of their own take this one: q and k of 64 elements, beta as it is given.
BETA_GIVEN: dict[str, Any] = {"beta_sigmoid": False}


def draw_given(
    batch: int, tokens: int, heads_qk: int, heads: int, dtype: torch.dtype = BF16
) -> dict[str, torch.Tensor]:
    """Inputs for `BETA_GIVEN`."""
    x = draw(batch, tokens, heads_qk, heads, 64, dtype, beta_dtype=FP32)
    return x | {"beta": x["beta"].sigmoid()}


# Or that of the operator's tests without a gate, norm or sigmoid: `kda_cases.DECAYS`.
ALL_GIVEN: dict[str, Any] = BETA_GIVEN | {"gate": "none", "l2norm": False, "arch": "sm_100a"}


def draw_all_given(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs for `ALL_GIVEN`, but for g."""
    x = draw(1, tokens, 1, 1, 128, dtype, FP32, FP32)
    unit = {name: kda.l2norm(x[name], FP32).to(dtype) for name in ("q", "k")}
    return x | unit | {"beta": x["beta"].sigmoid(), "A_log": None, "dt_bias": None}


def run_prepare(
    x: dict[str, Any],
    *,
    gate: str = "softplus",
    l2norm: bool = True,
    beta_sigmoid: bool = True,
    lower_bound: float = -5.0,
    beta_scale: float = 1.0,
    cu_seqlens: torch.Tensor | None = None,
    arch: str = "sm_90a",
    for_backward: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(tiles, decay), and with `spec.store_norms` the inverse norms; elements that were not written
    are NaN."""
    batch, tokens, heads, dim_k = x["g"].shape
    spec = PrepareSpec(
        dtype=NAMES[x["q"].dtype],
        head_dim_k=dim_k,
        head_dim_v=128,
        index_dtype="none" if cu_seqlens is None else str(cu_seqlens.dtype).removeprefix("torch."),
        gate_dtype=NAMES[x["g"].dtype],
        beta_dtype=NAMES[x["beta"].dtype],
        gate=gate,
        has_A_log=x["A_log"] is not None,
        has_dt_bias=x["dt_bias"] is not None,
        l2norm=l2norm,
        beta_sigmoid=beta_sigmoid,
        for_backward=for_backward,
    )
    count = slots(tokens, batch, cu_seqlens)
    tiles = torch.full((count, heads, spec.elements), math.nan, dtype=x["q"].dtype)
    decay = torch.full((count, heads, dim_k), math.nan)
    norms = None
    if spec.store_norms:
        norms = torch.full((count, x["q"].shape[2], 2 * CHUNK), math.nan)
    function(PREPARE, spec, arch)(
        *(x[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias")),
        *(cu_seqlens, tiles, decay, norms, dim_k**-0.5, lower_bound, beta_scale, None, None),
    )
    return (tiles, decay) if norms is None else (tiles, decay, norms)


def matrices_of(
    x: dict[str, Any],
    dtype: torch.dtype,
    *,
    gate: str = "softplus",
    l2norm: bool = True,
    beta_sigmoid: bool = True,
    lower_bound: float = -5.0,
    beta_scale: float = 1.0,
    cu_seqlens: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """What `prepare` is to leave, matrices as `[chunks, HV, rows, columns]`, in order of chunks.
    With float64 it is exact, with float32 what plain code makes of tensors of the inputs' dtype."""
    kept = None if dtype is torch.float64 else x["q"].dtype

    def stored(y: torch.Tensor) -> torch.Tensor:
        return y if kept is None else y.to(kept).to(dtype)

    q, k, g, beta = kda.prepare(
        *(x[name] for name in ("q", "k", "g", "beta")),
        use_qk_l2norm_in_kernel=l2norm,
        use_gate_in_kernel=gate != "none",
        use_beta_sigmoid_in_kernel=beta_sigmoid,
        allow_neg_eigval=beta_scale == 2.0,
        lower_bound=lower_bound if gate == "lower_bound" else None,
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        dtype=dtype,
    )
    # exp(-1000) is 0, and so is a state times that; beyond, sums would no longer be differences.
    g = g.clamp(min=-1000.0)
    q, k = stored(q), stored(k)
    heads, scale = g.shape[2], q.shape[-1] ** -0.5
    sums = kda.kda_gate_cumsum_reference(g, cu_seqlens=cu_seqlens, dtype=dtype)
    v = torch.zeros(*g.shape[:3], 1, dtype=dtype)
    intra = kda.kda_chunk_intra_reference(
        q, k, v, sums, beta, scale, cu_seqlens=cu_seqlens, dtype=dtype
    )
    result: dict[str, list[torch.Tensor]] = {name: [] for name in (*MATRICES, "decay")}
    for chunk in kda.chunks(q, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        size = chunk.rows.stop - chunk.rows.start
        k_c = kda.per_value_head(k[at], heads)
        m, _ = split_beta(beta[at], x["q"].dtype)
        columns, betas = (
            torch.nn.functional.pad(y.T, (0, CHUNK - size)).unsqueeze(0) for y in (m, beta[at])
        )
        m = m.unsqueeze(-1)
        for name, y in {
            "kd": torch.exp2(sums[at]) * k_c,
            "qg": scale * intra.qg[at],
            "kg": m * intra.kg[at],
            "Akk": intra.Akk[at] * betas / m,
            "Aqk": intra.Aqk[at] * columns,
        }.items():
            y = stored(y.transpose(0, 1))
            result[name].append(torch.nn.functional.pad(y, (0, 0, 0, CHUNK - size)))
        result["decay"].append(torch.exp2(sums[at][-1]))
    return {name: torch.stack(y) for name, y in result.items()}


def check_prepare(x: dict[str, Any], *, arch: str = "sm_90a", **options: Any) -> None:
    """Every matrix by the error rule, zeros past the end, and unused slots left alone."""
    cu_seqlens = options.get("cu_seqlens")
    _, tokens, _, dim_k = x["g"].shape
    tiles, decay = run_prepare(x, arch=arch, **options)
    exact = matrices_of(x, torch.float64, **options)
    plain = matrices_of(x, torch.float32, **options)
    chunks = list(kda.chunks(x["q"], cu_seqlens))
    used = [slot_of(chunk, tokens, cu_seqlens) for chunk in chunks]
    heads = tiles.shape[1]
    for name in MATRICES:
        ours = torch.stack(
            [torch.stack([unpack(tiles[s, h], dim_k)[name] for h in range(heads)]) for s in used]
        )
        for y, chunk in zip(ours, chunks, strict=True):
            size = chunk.rows.stop - chunk.rows.start
            if name == "Akk":  # past the end, only its diagonal may have elements
                y[:, range(size, CHUNK), range(size, CHUNK)] = 0
            assert not y[:, size:].any(), name
        check_error(name, ours, exact[name], plain[name])
        if name in ("Akk", "Aqk"):
            assert not ours.triu(1).any(), name
    # an error of 1e-5 in the sum of a chunk's gates is 1e-5 of the decay
    torch.testing.assert_close(decay[used].double(), exact["decay"], rtol=3e-5, atol=1e-30)
    unused = [s for s in range(len(tiles)) if s not in used]
    assert tiles[unused].isnan().all() and decay[unused].isnan().all()


def check_error(name: str, ours: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """At most twice the error of plain code, as a norm."""
    assert not ours.isnan().any(), name
    error, allowed = (ours.double() - exact).norm(), 2 * (plain.double() - exact).norm()
    assert error <= allowed, f"{name}: {error} above {allowed}"


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("tokens", "dim_k", "dtype", "gate_dtype", "beta_dtype", "gate"),
    [
        slow(130, 128, BF16, BF16, BF16, "softplus"),
        slow(95, 64, FP16, BF16, BF16, "lower_bound"),
        slow(64, 128, FP16, FP32, FP32, "lower_bound"),
        slow(1, 128, BF16, FP16, FP32, "none"),
        slow(17, 64, BF16, FP32, BF16, "softplus"),
    ],
)
def test_prepare(
    arch: str,
    tokens: int,
    dim_k: int,
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    beta_dtype: torch.dtype,
    gate: str,
) -> None:
    x: dict[str, Any] = draw(1, tokens, 1, 2, dim_k, dtype, gate_dtype, beta_dtype)
    if gate == "none":
        x |= {"A_log": None, "dt_bias": None, "g": -x["g"].abs()}
    check_prepare(x, gate=gate, arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_prepare_of_packed_sequences_is_that_of_each_alone(index_dtype: torch.dtype) -> None:
    lengths = [70, 0, 64, 1, 33]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=index_dtype)
    x = draw_given(1, sum(lengths), 1, 1)
    check_prepare(x, cu_seqlens=cu_seqlens, **BETA_GIVEN)
    tiles, decay = run_prepare(x, cu_seqlens=cu_seqlens, **BETA_GIVEN)
    for n, length in enumerate(lengths):
        if length == 0:
            continue
        start = int(cu_seqlens[n])
        alone: dict[str, Any] = {
            name: y[:, start : start + length] if name in ("q", "k", "g", "beta") else y
            for name, y in x.items()
        }
        first = start // CHUNK + n
        for whole, part in zip((tiles, decay), run_prepare(alone, **BETA_GIVEN), strict=True):
            assert torch.equal(whole[first : first + len(part)], part)


@pytest.mark.slow  # the operator's tests have grouped heads, too
def test_prepare_of_grouped_heads_is_that_of_repeated_ones() -> None:
    x = draw_given(2, 40, 2, 4)
    repeated = {**x, "q": kda.per_value_head(x["q"], 4), "k": kda.per_value_head(x["k"], 4)}
    grouped = run_prepare(x, **BETA_GIVEN)
    assert torch.equal(grouped[0], run_prepare(repeated, **BETA_GIVEN)[0])
    check_prepare(x, **BETA_GIVEN)


@pytest.mark.slow  # the operator's tests have such views, too
def test_prepare_of_strided_views_without_norms_and_with_beta_up_to_two() -> None:
    batch, tokens, heads, dim = 2, 20, 2, 64
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(batch, tokens, 3, heads, dim + 8, generator=generator) / 8
    q, k, g = packed.to(BF16)[..., :dim].unbind(2)
    beta = torch.randn(heads, tokens, batch, generator=generator).permute(2, 1, 0)
    x = {"q": q, "k": k, "g": g, "beta": beta, "A_log": torch.zeros(heads), "dt_bias": None}
    check_prepare(x, l2norm=False, beta_scale=2.0)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "smallest"), [(BF16, 2.0**-40), (FP16, 2.0**-14)])
def test_prepare_may_keep_beta_away_from_zero(dtype: torch.dtype, smallest: float) -> None:
    """As if beta itself had been larger. A row past the end stays 0."""
    x = draw(1, 19, 1, 1, 64, dtype, BF16, FP32)
    options: dict[str, Any] = {"beta_sigmoid": False, "cu_seqlens": offsets([19])}
    given = torch.tensor([0.0, -0.0, 1e-30, -1e-30, smallest, -smallest, 0.99 * smallest, 1.0])
    kept = [smallest, smallest, smallest, -smallest, smallest, -smallest, smallest, 1.0]
    x["beta"].flatten()[: len(given)] = given
    y = dict(x, beta=x["beta"].clone())
    y["beta"].flatten()[: len(given)] = torch.tensor(kept)
    tiles = run_prepare(x, **options, for_backward=True)[0]
    assert torch.equal(tiles[:1], run_prepare(y, **options)[0][:1])
    assert not unpack(tiles[0, 0], 64)["kg"][19:].any()


@pytest.mark.parametrize("dtype", [BF16, slow(FP16)])
def test_the_inverse_has_no_error_of_beta(dtype: torch.dtype) -> None:
    """One beta for all tokens would have the same error in all of the diagonal."""
    x = draw(1, 19, 1, 1, 64, dtype, BF16, FP32)
    tiles, _ = run_prepare(x, beta_sigmoid=False, cu_seqlens=offsets([19]))
    diagonal = unpack(tiles[0, 0], 64)["Akk"].diagonal()[:19]
    _, p = split_beta(x["beta"].flatten(), dtype)
    assert torch.equal(diagonal.float(), p)


@pytest.mark.slow  # the backward reads the norms in quick tests
@pytest.mark.parametrize("dtype", [BF16, slow(FP16)])
def test_prepare_may_store_the_inverse_norms(dtype: torch.dtype) -> None:
    """Once for a group of value heads, and those of rows of any length. Everything else is as
    without them."""
    lengths = [70, 0, 3]
    cu_seqlens = offsets(lengths)
    x = draw(1, 73, 2, 4, 64, dtype, BF16, FP32)
    x["q"][:, :2] *= 1e-4
    x["k"][:, 1] = 0
    if dtype is BF16:
        x["q"][:, 3], x["k"][:, 5] = 1e15 * x["q"][:, 3], 1e12 * x["k"][:, 5]
    options: dict[str, Any] = {"beta_sigmoid": False, "cu_seqlens": cu_seqlens}
    tiles, decay, norms = run_prepare(x, **options, for_backward=True)
    plain = run_prepare(x, **options)
    assert torch.equal(tiles.view(torch.int16), plain[0].view(torch.int16))
    assert torch.equal(decay.view(torch.int32), plain[1].view(torch.int32))
    used = []
    for chunk in kda.chunks(x["q"], cu_seqlens):
        slot = slot_of(chunk, 73, cu_seqlens)
        used.append(slot)
        for ours, name in zip(norms[slot].view(2, 2, CHUNK).unbind(1), "qk", strict=True):
            rows = x[name][chunk.batch, chunk.rows].double()
            exact = (rows.square().sum(-1) + 1e-6).rsqrt().T
            torch.testing.assert_close(ours[:, : len(rows)].double(), exact, rtol=1e-6, atol=0)
            assert ours.isfinite().all()
    assert norms[[s for s in range(len(norms)) if s not in used]].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, slow(FP16)])
@pytest.mark.parametrize(
    ("name", "gates"),
    [
        ("bound", lambda u: torch.full_like(u, -5.0)),
        ("slight", lambda u: -0.05 * u),
        ("none", lambda u: torch.zeros_like(u)),
        ("rare", lambda u: torch.where(u < 0.02, -1000.0, -0.01)),
        ("infinite", lambda u: torch.where(u < 0.02, -math.inf, -u)),
        ("steep", lambda u: -300.0 * u),
        ("growing", lambda u: 0.1 * u),
    ],
)
def test_prepare_at_extreme_gates(
    name: str, gates: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x = draw_all_given(80, dtype)
    g = gates(torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(2)))
    check_prepare({**x, "g": g}, **ALL_GIVEN, cu_seqlens=offsets([80]))


@pytest.mark.parametrize(
    ("gate", "bound", "dtype"),
    [
        ("softplus", -5.0, BF16),
        slow("softplus", -5.0, FP16),
        *(
            param
            for bound in (-5.0, -300.0)
            for param in (slow("lower_bound", bound, BF16), slow("lower_bound", bound, FP16))
        ),
    ],
)
def test_prepare_of_steep_gates(gate: str, bound: float, dtype: torch.dtype) -> None:
    """Inputs for which most decays are 1, or next to nothing; A_log of -100 is a rate of 0."""
    x = draw_given(1, 70, 1, 2, dtype)
    x["g"] = 10 * x["g"]
    x["A_log"] = torch.tensor([1.0, -100.0])
    check_prepare(x, gate=gate, lower_bound=bound, **BETA_GIVEN)


def test_the_inverse_for_equal_keys() -> None:
    """Where powers of L reach 9e17; nothing is forgotten, beta is 1."""
    x = draw_all_given(64, BF16)
    x["k"] = x["k"][:, :1].expand(-1, 64, -1, -1).contiguous()
    x["g"], x["beta"] = torch.zeros_like(x["g"]), torch.ones_like(x["beta"])
    check_prepare(x, **ALL_GIVEN, cu_seqlens=offsets([64]))


def test_no_token_sees_a_later_one() -> None:
    """kd, qg, Aqk and Akk of the tokens before a change stay the same, bit by bit."""
    x = draw_given(1, 64, 1, 1)
    tiles = run_prepare(x, **BETA_GIVEN)[0]
    changed = {name: y.clone() for name, y in x.items()}
    for name in ("q", "k", "g", "beta"):
        changed[name][:, 37:] *= -0.5
    other = run_prepare(changed, **BETA_GIVEN)[0]
    for name in ("kd", "qg", "Akk", "Aqk"):
        before, after = (unpack(y[0, 0], 64)[name][:37] for y in (tiles, other))
        assert torch.equal(before, after), name


# ---- chunk_intra


def run_intra(
    x: dict[str, Any],
    v: torch.Tensor,
    sums: torch.Tensor,
    *,
    l2norm: bool = False,
    store_qg: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    arch: str = "sm_90a",
) -> dict[str, torch.Tensor]:
    batch, tokens, heads, dim_k = sums.shape
    dtype = v.dtype
    spec = IntraSpec(
        dtype=NAMES[dtype],
        head_dim_k=dim_k,
        head_dim_v=v.shape[-1],
        index_dtype="none" if cu_seqlens is None else "int64",
        beta_dtype=NAMES[x["beta"].dtype],
        l2norm=l2norm,
        store_qg=store_qg,
    )
    columns = {"Aqk": CHUNK, "Akk": CHUNK, "w": dim_k, "u": v.shape[-1], "qg": dim_k, "kg": dim_k}
    out = {
        name: torch.full((batch, tokens, heads, n), math.nan, dtype=dtype)
        for name, n in columns.items()
        if name != "qg" or store_qg
    }
    function(CHUNK_INTRA, spec, arch)(
        *(x["q"], x["k"], v, sums, x["beta"], cu_seqlens),
        *(out.get(name) for name in columns),
        dim_k**-0.5,
    )
    return out


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("lengths", "dims", "dtype", "gates", "makes"),
    [
        slow([70, 0, 1, 130], (128, 128), BF16, 0.2, "norms"),
        ([70], (64, 256), FP16, 5.0, "neither"),
        slow([130], (128, 128), BF16, 0.2, "qg"),
        slow([64], (128, 64), FP16, 5.0, "neither"),
        slow([70, 0, 1, 33], (64, 128), BF16, 0.2, "qg"),
        slow([9], (64, 64), FP16, 300.0, "neither"),
        slow([70], (128, 256), BF16, 0.2, "qg"),
        slow([70], (128, 128), BF16, 300.0, "norms"),
        slow([64], (64, 256), FP16, 5.0, "norms"),
        slow([70], (64, 192), BF16, 0.2, "neither"),
    ],
)
def test_chunk_intra(
    arch: str,
    lengths: list[int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    gates: float,
    makes: str,
) -> None:
    """q and k have length 1, or any length if the kernel normalises them."""
    heads, l2norm = 2, makes == "norms"
    cu_seqlens = offsets(lengths) if len(lengths) > 1 else None
    x = draw(1, sum(lengths), 1, heads, dims[0], dtype, FP32, BF16)
    normal = [kda.l2norm(x[name]) for name in ("q", "k")]
    rounded = [kda.l2norm(x[name], FP32).to(dtype) for name in ("q", "k")]
    if not l2norm:
        x["q"], x["k"] = normal = rounded
    x["beta"] = x["beta"].sigmoid()
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(1, sum(lengths), heads, dims[1], generator=generator).to(dtype)
    g = -gates * torch.rand(x["g"].shape, generator=generator)
    sums = kda.kda_gate_cumsum_reference(g, cu_seqlens=cu_seqlens).float()
    options = {"l2norm": l2norm, "store_qg": makes == "qg"}
    ours = run_intra(x, v, sums, **options, cu_seqlens=cu_seqlens, arch=arch)
    exact = kda.kda_chunk_intra_reference(*normal, v, sums, x["beta"], cu_seqlens=cu_seqlens)
    plain = kda.kda_chunk_intra_reference(
        *rounded, v, sums, x["beta"], cu_seqlens=cu_seqlens, dtype=FP32, stage_dtype=dtype
    )
    for name, y in ours.items():
        check_error(name, y, getattr(exact, name), getattr(plain, name))
    for chunk in kda.chunks(v, cu_seqlens):
        for name in ("Aqk", "Akk"):
            assert not ours[name][chunk.batch, chunk.rows].transpose(0, 1).triu(1).any(), name


@pytest.mark.slow  # the operator's tests have grouped heads, too
def test_chunk_intra_of_grouped_heads_is_that_of_repeated_ones() -> None:
    x = draw(2, 40, 2, 4, 64)
    v = x["g"]
    sums = -x["g"].float().abs().cumsum(1)
    repeated = {**x, "q": kda.per_value_head(x["q"], 4), "k": kda.per_value_head(x["k"], 4)}
    grouped, same = run_intra(x, v, sums), run_intra(repeated, v, sums)
    for name, y in grouped.items():
        assert torch.equal(y, same[name]), name
