"""Decode of multi-head latent attention in the emulator, with all checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.kernels.mla import heuristics, table
from cute_attn.kernels.mla.spec import GATHERED
from cute_attn.ops import mla
from cute_attn.ops.mla import plan_mla_decode

from .attention_cases import FULL
from .mla_cases import ARCH, Case, assert_agrees, run


def forget() -> None:
    """Forget the kernels that calls have chosen."""
    for operator in (mla.DECODE, mla.INTO):
        operator.ready.clear()


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Several tiles of rows have the kernel in turns, although there are few sequences."""
    monkeypatch.setattr(heuristics, "FEWEST_TILES", 2)
    forget()
    machine = Emulator(num_sms=4, schedule="adversarial")
    with cute_attn.emulated(ARCH, machine):
        yield machine
    forget()
    assert not machine.report.findings


def on(machine: dict[str, Any], args: dict[str, Any], **more: Any) -> Any:
    """The call on another emulator."""
    emulator = Emulator(**machine)
    with cute_attn.emulated(ARCH, emulator):
        found = run(args, **more)
    assert not emulator.report.findings
    return found


def same(x: Any, y: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


CASES = {
    "16 heads": Case((130, 0, 5)),
    # The first queries of the first sequence see no token.
    "2 tiles, 66 rows, pages of 1": Case((1, 70), queries=3, heads=22, page_size=1),
    "2 tiles, 66 rows": Case((1, 70), queries=3, heads=22, page_size=16),
    "2 tiles, causal, pages of 16": Case((150, 0, 3), queries=2, heads=40, page_size=16),
    "2 tiles, 128 heads": Case((200, 0, 5), heads=128),
    "4 tiles of rows": Case((70, 3), queries=3, heads=66, page_size=48),
    "pages of 1, 2 tiles of rows": Case((66, 0, 130), queries=2, heads=35, page_size=1),
    "pages of 3": Case((70, 0, 5), queries=3, page_size=3),
    "fp8, 2 tiles of rows": Case(
        (70, 0, 130), queries=2, heads=35, page_size=24, fp8=True, descale=0.3
    ),
    "fp8, 320 columns, float16": Case(
        (70, 200), queries=2, heads=3, head_dim=320, head_dim_v=256, dtype=torch.float16, fp8=True,
    ),
    "320 columns, float16": Case(
        (70, 129), queries=3, heads=7, head_dim=320, head_dim_v=256, dtype=torch.float16,
        page_size=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=pytest.mark.slow if n > 1 else ())
        for n, x in enumerate(CASES.values())
    ],
    ids=CASES,
)
def test_agrees_with_the_reference(emulator: Emulator, case: Case):
    args = case.arguments()
    assert_agrees(args, *run(args))


@pytest.mark.slow
def test_few_sequences_with_several_tiles_of_rows():
    """The kernel is that of a single tile of rows."""
    args = Case((150, 0, 700), queries=2, heads=40, page_size=16).arguments()
    for sms in (4, 16):
        assert_agrees(args, *on({"num_sms": sms, "schedule": "random", "seed": 5}, args))


def test_splits_and_groups_of_pieces(emulator: Emulator):
    """14 pieces are added up in groups of 12 and 2. The bits do not depend on the schedule, on the
    number of CTAs, nor on what else is in the batch."""
    args = Case((900, 100), heads=12).arguments()
    found = run(args, num_splits=14)
    assert_agrees(args, *found)
    assert same(found, on({"num_sms": 2, "schedule": "random", "seed": 3}, args, num_splits=14))
    alone = args | {name: args[name][:1] for name in ("q_nope", "q_rope", "block_table")}
    alone["cache_seqlens"] = args["cache_seqlens"][:1]
    assert same([x[:1] for x in found], run(alone, num_splits=14))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((70, 0, 3), heads=3, page_size=16, fp8=True, descale=0.3), id="fp8"),
        pytest.param(
            Case((70, 0, 3), heads=3, page_size=1), id="pages of 1", marks=pytest.mark.slow
        ),
    ],
)
def test_gathered_rows(emulator: Emulator, case: Case):
    args = case.arguments()
    assert_agrees(args, *run(args))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"page_size": 1}, {"page_size": 1, "queries": 6}, {"fp8": True, "descale": 1.7}],
    ids=["few rows", "many rows", "fp8"],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_gathered_rows_alone_in_the_batch(emulator: Emulator, more: dict[str, Any], splits: int):
    """The bits of a sequence do not depend on the batch, on the number of CTAs, nor on the
    schedule."""
    args = Case((330, 0, 70, 1), heads=12, **more).arguments()
    found = run(args, num_splits=splits)
    assert_agrees(args, *found)
    assert same(found, on({"num_sms": 9, "schedule": "random", "seed": 5}, args, num_splits=splits))
    for i in (0, 2):
        names = ("q_nope", "q_rope", "block_table", "cache_seqlens")
        alone = args | {name: args[name][i : i + 1] for name in names}
        assert same([x[i : i + 1] for x in found], run(alone, num_splits=splits))


@pytest.mark.slow
def test_all_page_sizes_of_a_pool_agree(emulator: Emulator):
    """One pool of rows, read as pages of 1 token and as pages of 16 by TMA: the bits are equal."""
    args = Case((70, 0, 3), heads=3, page_size=16).arguments()
    cache, table = args["kv_cache"], args["block_table"]
    rows = (table[:, :, None] * 16 + torch.arange(16)).flatten(1).int()
    assert same(run(args), run(args | {"kv_cache": cache.view(-1, 1, 576), "block_table": rows}))


def test_a_nan_of_fp8_reaches_only_its_sequence(emulator: Emulator):
    args = Case((70, 40, 3), heads=3, page_size=16, fp8=True, descale=0.3).arguments()
    args["kv_cache"][args["block_table"][1, 2], 7, 100] = math.nan
    o, lse = run(args)
    assert o[1].isnan().all() and lse[1].isnan().all()
    assert not o[[0, 2]].isnan().any() and not lse[[0, 2]].isnan().any()


def test_equal_shares_of_ragged_sequences(emulator: Emulator):
    """9 sequences on 4 CTAs: each CTA has about as many tiles of the cache, so some sequences are
    cut, and some have no tokens."""
    lengths = (130, 0, 64, 5, 330, 0, 65, 190, 0)
    args = Case(lengths, heads=3).arguments()
    found = run(args)
    assert_agrees(args, *found)
    assert same(found, on({"num_sms": 4, "schedule": "random", "seed": 7}, args))


@pytest.mark.slow
def test_equal_shares_of_groups_of_ctas(emulator: Emulator):
    """The 3 CTAs of a group have the 3 tiles of rows of a sequence. Of 7 CTAs one has no work."""
    args = Case((130, 0, 5, 700, 64), queries=3, heads=50, page_size=16).arguments()
    found = on({"num_sms": 7, "schedule": "random", "seed": 3}, args)
    assert_agrees(args, *found)
    assert same(found, on({"num_sms": 7, "schedule": "adversarial"}, args))


@pytest.mark.slow
def test_all_ctas_add_up_a_segment(emulator: Emulator):
    """With a CTA for each piece, CTAs wait for one another. The bits are those of other ways."""
    for case, splits in ((Case((900,), heads=12), 14), (Case((300,), queries=3, heads=30), 3)):
        args = case.arguments()
        found = on({"num_sms": 16, "schedule": "random", "seed": 2}, args, num_splits=splits)
        assert_agrees(args, *found)
        assert same(found, run(args, num_splits=splits))


@pytest.mark.slow
def test_sums_of_many_rows(emulator: Emulator):
    """More rows than are added up at a time, with one CTA and with several."""
    args = Case((300, 0, 9), queries=3, heads=14).arguments()
    found = run(args, num_splits=3)
    assert_agrees(args, *found)
    assert same(found, on({"num_sms": 1}, args, num_splits=3))
    assert_agrees(args, *run(args))


@pytest.mark.slow
def test_pieces_and_groups_of_two_tiles(emulator: Emulator):
    args = Case((900, 100), heads=100).arguments()
    found = run(args, num_splits=14)
    assert_agrees(args, *found)
    assert same(found, on({"num_sms": 2, "schedule": "random", "seed": 3}, args, num_splits=14))
    assert_agrees(args, *on({"num_sms": 6, "schedule": "random", "seed": 4}, args))


@pytest.mark.slow
def test_pieces_balance_the_ctas(emulator: Emulator):
    """With num_splits of 0, a long sequence among short sequences is cut."""
    args = Case((700, 3, 0, 130), heads=5).arguments()
    found = run(args)
    assert_agrees(args, *found)
    assert len(emulator.report.launches) == 1
    assert same(found, on({"num_sms": 4, "schedule": "random", "seed": 5}, args))


def test_a_long_sequence_has_a_piece_for_each_cta(monkeypatch: pytest.MonkeyPatch):
    """32 tiles of the cache and 8 CTAs: pieces of 4 tiles, not of 5."""
    kept = []

    def nan(shape: tuple[int, ...], strides: tuple[int, ...], **options: Any) -> torch.Tensor:
        kept.append(torch.full(shape, torch.nan, **options))
        return kept[-1]

    monkeypatch.setattr(torch, "empty_strided", nan)
    args = Case((2048,), heads=2).arguments()
    assert_agrees(args, *on({"num_sms": 8}, args))
    (parts,) = kept
    log_sums = parts[:, 0, 512]
    assert int((~log_sums.isnan()).sum()) == 8 and log_sums[:8].isfinite().all()


@pytest.mark.slow
def test_out_and_lse_are_optional(emulator: Emulator):
    args = Case((65,), head_axis=True).arguments()
    o, lse = run(args)
    alone, nothing = cute_attn.mla_decode(**args)
    assert nothing is None and torch.equal(alone, o)
    with_sum, log_sum = cute_attn.mla_decode(**args, return_lse=True)
    assert torch.equal(with_sum, o) and log_sum is not None and torch.equal(log_sum, lse)


def test_no_sequence_has_tokens(emulator: Emulator):
    o, lse = run(Case((0, 0)).arguments())
    assert (o == 0).all() and (lse == -torch.inf).all()


@pytest.mark.slow
def test_fewer_tokens_than_queries(emulator: Emulator):
    """The first queries see no token."""
    args = Case((1, 2), queries=3, heads=2, page_size=16).arguments()
    o, lse = run(args)
    assert_agrees(args, o, lse)
    assert (o[0, :2] == 0).all() and (lse[0, :, :2] == -torch.inf).all()


def test_no_causal_mask(emulator: Emulator):
    args = Case((66, 5), queries=4, heads=3, causal=False).arguments()
    assert_agrees(args, *run(args))


@pytest.mark.parametrize(
    "case",
    [
        Case((100, 20), heads=6),  # a kernel of other tests
        pytest.param(Case((100, 20), queries=2, heads=6, page_size=16), marks=pytest.mark.slow),
    ],
    ids=["one query", "two queries"],
)
def test_strides_of_views(emulator: Emulator, case: Case):
    """q as a batched product gives it, heads outside of queries, and pages inside of a pool."""
    args = case.arguments()
    found = run(args)
    q = args["q_nope"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    pool = torch.full((len(args["kv_cache"]), 3, *args["kv_cache"].shape[1:]), torch.nan)
    pool = pool.to(q.dtype)
    pool[:, 1] = args["kv_cache"]
    assert same(found, run(args | {"q_nope": q, "kv_cache": pool[:, 1]}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    [(576, 512, torch.bfloat16), (512, 512, torch.float16), (320, 256, torch.bfloat16)],
    ids=["576", "512", "320"],
)
@settings(max_examples=150 if FULL else 25)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 130, 300]), min_size=1, max_size=5),
    queries=st.integers(1, 16),
    heads=st.sampled_from([1, 2, 5, 8, 12, 16, 64, 128]),
    page_size=st.sampled_from([1, 1, 2, 3, 8, 16, 24, 48, 64, 100, 128]),
    fp8=st.booleans(),
    descale=st.sampled_from([None, 0.02, 3.7]),
    causal=st.booleans(),
    splits=st.sampled_from([0, 0, 1, 2, 5, 13]),
    least=st.sampled_from([1, 2]),
    num_sms=st.sampled_from([1, 2, 5]),
    schedule=st.sampled_from(["random", "adversarial"]),
    seed=st.integers(0, 2**31),
)
def test_any_call(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, lengths: list[int], queries: int,
    heads: int, page_size: int, fp8: bool, descale: float | None, causal: bool, splits: int,
    least: int, num_sms: int, schedule: str, seed: int,
):  # fmt: skip
    if queries * heads > 256:  # keep the emulation short
        queries = max(1, 256 // heads)
    case = Case(
        tuple(lengths), queries, heads, page_size, head_dim, head_dim_v, dtype, causal, seed=seed,
        fp8=fp8, descale=descale if fp8 else None,
    )  # fmt: skip
    args = case.arguments()
    before, heuristics.LEAST_KEY_TILES = heuristics.LEAST_KEY_TILES, least
    try:
        machine = {"num_sms": num_sms, "schedule": schedule, "seed": seed % 1000}
        assert_agrees(args, *on(machine, args, num_splits=splits))
    finally:
        heuristics.LEAST_KEY_TILES = before


# -- refusals ------------------------------------------------------------------------------------

Q = {"q_nope": (2, 1, 4, 512), "q_rope": (2, 1, 4, 64)}


def changed(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


FP8 = {"kv_cache": torch.zeros(4, 64, 576).to(torch.float8_e4m3fn)}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "three dimensions": (changed(q_nope=(2, 4, 512)), ValueError, "q_nope has shape [2, 4, 512]"),
    "rope": (changed(q_rope=(2, 1, 4, 32)), ValueError, "q_rope has shape [2, 1, 4, 32], must be"),
    "no rope": ({"q_rope": None}, ValueError, "q_rope is None, but tokens of kv_cache"),
    "too many heads": (
        changed(q_nope=(2, 1, 129, 512), q_rope=(2, 1, 129, 64)), ValueError,
        "q_nope has 129 heads, must have 1 to 128",
    ),
    "too many queries": (
        changed(q_nope=(2, 17, 4, 512), q_rope=(2, 17, 4, 64)), ValueError,
        "q_nope has 17 queries, must have 1 to 16",
    ),
    "no query": (
        changed(q_nope=(2, 0, 4, 512), q_rope=(2, 0, 4, 64)), ValueError, "q_nope has 0 queries",
    ),
    "two heads of the cache": (
        changed(kv_cache=(4, 64, 2, 576)), ValueError, "kv_cache has shape [4, 64, 2, 576]",
    ),
    "columns": (
        changed(kv_cache=(4, 64, 448)), NotImplementedError,
        "kv_cache has 448 columns and head_dim_v is 512, there are kernels for: 576",
    ),
    "no pages": (changed(kv_cache=(0, 64, 576)), ValueError, "kv_cache has 0 pages, must have at"),
    "page size": (
        changed(kv_cache=(4, 0, 576)), ValueError,
        "kv_cache has shape [4, 0, 576], must have pages of 1 token or more",
    ),
    "the other fp8": (
        {"kv_cache": torch.zeros(4, 64, 576).to(torch.float8_e5m2)}, NotImplementedError,
        "kv_cache has dtype torch.float8_e5m2, there are kernels for q_nope's dtype and "
        "(torch.float8_e4m3fn,)",
    ),
    "a factor without fp8": (
        {"kv_descale": torch.ones(1)}, ValueError,
        "kv_descale is given, and kv_cache has dtype torch.bfloat16: only an fp8 cache",
    ),
    "two factors": (
        FP8 | {"kv_descale": torch.ones(2)}, ValueError,
        "kv_descale has shape [2], must have a single number",
    ),
    "the factor's dtype": (
        FP8 | {"kv_descale": torch.ones(1).double()}, TypeError,
        "kv_descale has dtype torch.float64",
    ),
    "rows of fp8": (
        {"kv_cache": torch.zeros(4, 64, 584).to(torch.float8_e4m3fn)[..., :576]}, ValueError,
        "kv_cache has strides (37376, 584, 1)",
    ),
    "dtype": ({"kv_cache": torch.zeros(4, 64, 576)}, TypeError, "kv_cache has dtype torch.float32"),
    "lengths": (
        {"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, TypeError,
        "cache_seqlens has dtype torch.int64",
    ),
    "batch": (
        {"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError,
        "cache_seqlens has shape [3], must be [2]",
    ),
    "scale": ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0, must be positive"),
    "no scale": ({"softmax_scale": None}, TypeError, "softmax_scale must be a float"),
    "splits": ({"num_splits": 257}, ValueError, "num_splits is 257, must be at most 256"),
    "negative splits": ({"num_splits": -1}, ValueError, "num_splits is -1, must be at least 0"),
    "flag": ({"causal": "yes"}, TypeError, "causal must be a bool"),
    "out": (changed(out=(2, 1, 4, 256)), ValueError, "out has shape [2, 1, 4, 256], must be"),
    "table": (
        {"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_table has shape [2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(emulator: Emulator, name: str):
    change, error, message = REFUSED[name]
    args = Case((64, 64), heads=4).arguments() | {"kv_cache": torch.zeros(4, 64, 576).bfloat16()}
    with pytest.raises(error, match=re.escape(message)):
        cute_attn.mla_decode(**args | change)
    assert not emulator.report.launches


def test_other_architectures_are_refused():
    with (
        cute_attn.emulated("sm_100a"),
        pytest.raises(NotImplementedError, match="there is no mla_decode on sm_100a"),
    ):
        cute_attn.mla_decode(**Case((64,)).arguments())


def test_plans_depend_on_tiles_of_rows():
    """More than one tile of 64 rows has a kernel of its own, with many sequences."""
    (one,), (several, few) = plan_mla_decode(ARCH), plan_mla_decode(ARCH, queries=4, heads=64)
    assert one[0] == table.SM90_LATENT_DECODE and several[0] == table.SM90_LATENT_DECODE_TURNS
    assert not one[1].causal and several[1].causal
    assert plan_mla_decode(ARCH, heads=1) == plan_mla_decode(ARCH, heads=64) == [one]
    assert plan_mla_decode(ARCH, queries=3, heads=44) == [several, few]
    assert plan_mla_decode(ARCH, page_size=128) == [one]
    assert plan_mla_decode(ARCH, queries=2, heads=128) == [several, few]
    assert few == plan_mla_decode(ARCH, queries=4)[0]
    many, same = plan_mla_decode(ARCH, heads=128)
    assert many[0] == table.SM90_LATENT_DECODE_TURNS and same == one
    assert plan_mla_decode(ARCH, heads=65) == [many, same]
    assert plan_mla_decode(ARCH, heads=128, sequences=65) == [one]
    assert plan_mla_decode(ARCH, heads=128, sequences=66) == [many]
    (gathered,) = plan_mla_decode(ARCH, page_size=1)
    assert gathered[0] == one[0] and gathered[1].page_rows == GATHERED
    assert plan_mla_decode(ARCH, page_size=24) == plan_mla_decode(ARCH, page_size=2) == [gathered]
    fp8 = {"kv_dtype": "float8_e4m3fn"}
    (eight,) = plan_mla_decode(ARCH, page_size=1, **fp8)
    assert plan_mla_decode(ARCH, page_size=64, **fp8) == [eight]
    assert plan_mla_decode(ARCH, heads=128, **fp8) == [eight]
    assert eight[0] == table.SM90_LATENT_DECODE
    (narrow,) = plan_mla_decode(ARCH, heads=128, head_dim=320)
    assert narrow[0] == table.SM90_LATENT_DECODE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"page_size": 0}, "page_size is 0, must be positive"),
        ({"queries": 0}, "queries is 0, must be positive"),
        ({"sequences": -1}, "sequences is -1, must be positive"),
        ({"kv_dtype": "float8_e5m2"}, "kv_dtype is 'float8_e5m2', must be dtype or one of"),
        ({"kv_descale": True}, "kv_descale is True, only a cache of"),
    ],
)
def test_plans_refuse(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_mla_decode(ARCH, **given)
