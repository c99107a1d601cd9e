"""Keys in parts, each for a CTA of its own, and their combination."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn import cache
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention.heuristics import num_splits_of_forward
from cute_attn.kernels.attention.spec import CombineSpec
from cute_attn.kernels.attention.table import COMBINE
from cute_attn.ops.attention import plan_attention, plan_attention_combine
from cute_attn.ops.attention.arguments import MAX_SPLITS
from cute_attn.reference.attention import attention_reference

from .attention_cases import (
    CACHE,
    CAPPED,
    CAUSAL,
    FULL,
    SM90_HEAD_DIMS,
    USED,
    VARLEN,
    WINDOW,
    Case,
    Kind,
    Machine,
    Target,
    assert_agrees,
    cases,
    is_known,
    on_target,
    reference_arguments,
    run,
    same,
)
from .attention_stand_ins import stand_ins
from .test_attention_pages import in_pages, of_kind

ARCH = "sm_90a"


@pytest.mark.slow  # `make gpu-check` covers Hopper; the next tests are quick
@pytest.mark.parametrize(
    ("head_dim", "case", "splits"),
    [
        (64, Case(CACHE, (1, 0, 3), (700,) * 3, unused_k=(0, 9, 699), group=2), 5),
        (256, Case(CAUSAL, (70,), (300,), heads_k=2), 3),
    ],
    ids=["decode", "prefill"],
)
def test_splits_agree_with_the_reference(head_dim: int, case: Case, splits: int):
    with on_target(Target(ARCH, head_dim)):
        args = case.arguments()
        first = run(args, on=Machine(num_sms=2, schedule="adversarial"), num_splits=splits)
        assert_agrees(args, *first)
        assert same(args, first, run(args, on=Machine(num_sms=7), num_splits=splits))


@pytest.mark.parametrize(
    "value", [-math.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (math.nan, math.inf))]
)
def test_special_values_of_the_sink_propagate_like_the_reference(value: float):
    """The second sequence has no key: its output is 0 and its log-sum-exp the sink."""
    with on_target(Target(ARCH, 64)):
        args = Case(CACHE, (3, 3), (300,) * 2, unused_k=(0, 300), group=2).arguments()
        args["learnable_sink"][1] = value
        o, lse = run(args, num_splits=3)
        exact, exact_lse = attention_reference(**reference_arguments(args))
        assert lse is not None
        assert torch.equal(o.isnan(), exact.isnan())
        assert not o[3:].any()
        assert torch.equal(lse.isnan(), exact_lse.isnan())
        assert torch.equal(lse[:, 3:].nan_to_num(), exact_lse[:, 3:].float().nan_to_num())
        if value == -math.inf:
            assert_agrees(args, o, lse)


BLACKWELL = Target("sm_100a", 256)


def test_splits_agree_with_the_reference_on_blackwell():
    """The second sequence has no key, and one key tile is left for three splits of the first."""
    case = Case(CACHE, (1, 2), (200,) * 2, unused_k=(90, 200), group=2)
    with on_target(BLACKWELL):
        args = case.arguments()
        on = Machine(num_sms=4, schedule="adversarial")
        out = torch.full_like(args["q"], math.nan)
        result = run(args, on=on, num_splits=3, out=out)
        assert result[0] is out
        assert_agrees(args, *result)


@pytest.mark.slow
@pytest.mark.parametrize("target", [Target(ARCH, 64), BLACKWELL], ids=["hopper", "blackwell"])
def test_pages_change_no_bit_of_splits(target: Target):
    with on_target(target):
        kind = Kind(seqused_k=True, window_right=True, packed_heads=2)
        args = of_kind(kind, (700, 1, 0, 333), 3).arguments()
        whole = run(args, num_splits=3)
        assert_agrees(args, *whole)
        assert same(args, whole, run(in_pages(args, 16, 0), num_splits=3))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["static", "clc"])
def test_nothing_but_the_number_of_splits_changes_a_bit(scheduler: str):
    with on_target(BLACKWELL):
        args = Case(CAUSAL, (300,), (700,), heads_k=2).arguments()
        first = run(args, num_splits=3)
        assert_agrees(args, *first)
        for seed, sms in enumerate((2, 4, 7)):
            on = Machine(num_sms=sms, seed=seed, spurious_cancel=bool(seed % 2))
            assert same(args, first, run(args, scheduler, on, num_splits=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [*(Target(ARCH, head_dim) for head_dim in SM90_HEAD_DIMS), BLACKWELL],
    ids=[*map(str, SM90_HEAD_DIMS), "blackwell"],
)
@settings(max_examples=150 if FULL else 25)
@given(
    case=cases([CAUSAL, WINDOW, VARLEN, CACHE, CAPPED, USED]),
    splits=st.sampled_from([2, 3, 8, 40]),
    scheduler=st.sampled_from(["static", "clc"]),
    num_sms=st.integers(2, 7),
    schedule=st.sampled_from(["random", "adversarial"]),
)
def test_any_number_of_splits(
    target: Target, case: Case, splits: int, scheduler: str, num_sms: int, schedule: str
):
    with on_target(target):
        args = case.arguments()
        on = Machine(num_sms=num_sms, schedule=schedule, seed=case.seed)
        assert_agrees(args, *run(args, scheduler, on, num_splits=splits))


@pytest.mark.slow
@pytest.mark.parametrize("target", [Target(ARCH, 64), Target(ARCH, 256), BLACKWELL], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_a_decoding_request_has_the_same_bits_in_every_batch(target: Target, splits: int):
    """Alone, where a tile has few rows, and beside a longer request, where heads share none."""
    kind = Kind(varlen_q=True, seqused_k=True, window_right=True)
    with on_target(target):
        alone = Case(kind, (1,), (500,), group=4).arguments()
        both = Case(kind, (1, 140), (500,) * 2, unused_k=(0, 300), group=4).arguments()
        for name in ("q", "k", "v"):
            both[name][0] = alone[name][0]
        o, lse = run(alone, num_splits=splits, max_seqlen_q=1)
        o_both, lse_both = run(both, num_splits=splits, max_seqlen_q=140)
        assert lse is not None and lse_both is not None
        assert torch.equal(o[0], o_both[0]) and torch.equal(lse[:, 0], lse_both[:, 0])


@pytest.mark.slow
def test_more_queries_have_the_same_bits_in_every_batch_on_blackwell():
    """The last K/V tile has 3 keys, which the first 2 queries do not see; maxima move in the next.
    On Hopper, rows of a warp with such queries have other bits."""
    kind = Kind(dtype=torch.float16, varlen_q=True, seqused_k=True, window_right=True)
    with on_target(BLACKWELL):
        args = Case(kind, (5,), (259,), heads_k=2, group=4, magnitude=9.0).arguments()
        alone = run(args, max_seqlen_q=5)
        assert_agrees(args, *alone)
        assert same(args, alone, run(args, max_seqlen_q=140))


# -- the combination


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_partial_results_beyond_two_to_the_31_elements(arch: str):
    """The kernel alone: the combination would read all of them. Memory not touched costs none."""
    splits, rows, count, head_dim = 256, 34000, 70, 256
    (kernel, spec), _ = plan_attention(
        arch, head_dim=head_dim, varlen_q=True, varlen_k=True, num_splits=2, short=False
    )
    first = rows - count - 1
    used = slice(first, first + count)
    q = torch.empty(rows, 1, head_dim, dtype=torch.bfloat16)
    q[used] = torch.randn(count, 1, head_dim)
    k, v = torch.randn(2, 300, 1, head_dim).bfloat16()
    o, lse = torch.empty(splits, *q.shape), torch.empty(splits, rows, 1)
    starts = (torch.tensor(x, dtype=torch.int32) for x in ((first, used.stop), (0, len(k))))
    counter = (torch.zeros(1, dtype=torch.int32), None) if arch == "sm_90a" else ()
    emulator = Emulator()
    emulator.load(cache.compile(kernel, spec, arch=arch))(
        q, k, v, o, lse.mT, None, *starts, None, None, None, head_dim**-0.5, 1.0, 0, 0, 4, *counter
    )
    assert all(map(is_known, emulator.report.findings)), emulator.report
    weights = (lse[:, used] - lse[:, used].logsumexp(0)).exp()[..., None]
    found = (weights * o[:, used]).sum(0)
    scores = q[used, 0].double() @ k[:, 0].double().T * head_dim**-0.5
    expected = scores.softmax(-1) @ v[:, 0].double()
    # P is rounded to bfloat16.
    error = (found[:, 0].double() - expected).norm() / expected.norm()
    assert error <= 2**-8


def combined(o: torch.Tensor, lse: torch.Tensor, **options: Any) -> Any:
    emulator = Emulator()
    with cute_attn.emulated(ARCH, emulator):
        result = cute_attn.flash_attn_combine(o, lse, **options)
    assert not emulator.report.findings, emulator.report
    return result


@pytest.mark.parametrize(
    "shape",
    [
        (70, 4, 3, 64),
        pytest.param((5, 2, 3, 2, 128), marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1, 256), marks=pytest.mark.slow),
        pytest.param((3, 2, 5, 2, 512), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_combines_as_the_formula_says(shape: tuple[int, ...]):
    o, lse = torch.randn(shape), 5 * torch.randn(shape[:-1])
    lse[0, 0] = -math.inf
    o[0, 0] = math.nan  # which is not read
    exact_lse = lse.double().logsumexp(0)
    weights = (lse.double() - exact_lse).exp().nan_to_num(0.0)
    exact = (weights[..., None] * o.double().nan_to_num(0.0)).sum(0)
    plain_lse = lse.logsumexp(0)
    plain = ((lse - plain_lse).exp().nan_to_num(0.0)[..., None] * o.nan_to_num(0.0)).sum(0)
    out, found = combined(o, lse)
    assert torch.equal(found == -math.inf, exact_lse == -math.inf)
    seen = exact_lse.isfinite()
    for ours, theirs, true in (
        (out, plain, exact),
        (found[seen], plain_lse[seen], exact_lse[seen]),
    ):
        error, allowed = ((x.double() - true).norm() for x in (ours, theirs))
        assert error <= 2 * allowed + torch.finfo(torch.float32).eps * true.norm()
    rounded, none = combined(o, lse, out_dtype=torch.bfloat16, return_lse=False)
    assert none is None and torch.equal(rounded, out.bfloat16())


@pytest.mark.slow
def test_attention_over_parts_of_the_keys_is_attention_over_all():
    """As a cascade does it. tests/distributed has the quick test, over ranks."""
    with on_target(Target(ARCH, 128)):
        args = Case(lengths_q=(9,), lengths_k=(150,), heads_k=2).arguments()
        whole = run(args)
        parts = [
            run(args, **{name: args[name][:, part] for name in ("k", "v")})
            for part in (slice(0, 60), slice(60, 150))
        ]
    o = torch.stack([o.float() for o, _ in parts])
    lse = torch.stack([lse.mT for _, lse in parts if lse is not None])
    out, found = combined(o, lse, out_dtype=torch.bfloat16)
    torch.testing.assert_close(out, whole[0], rtol=2**-6, atol=2**-9)
    torch.testing.assert_close(found.mT, whole[1], rtol=1e-5, atol=1e-5)


def test_strides_are_free():
    o, lse = torch.randn(3, 2, 5, 2, 64), torch.randn(3, 2, 2, 5).mT
    expected = combined(o, lse.contiguous())
    odd = torch.randn(3, 2, 5, 2, 66)[..., :64].copy_(o)
    for a, b in zip(combined(odd, lse), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out_partial": torch.zeros(3, 2, 5, 4, 96)}, NotImplementedError, "head_dim .* is 96"),
        ({"out_partial": torch.zeros(5, 4, 64)}, ValueError, "out_partial has shape"),
        ({"out_partial": torch.zeros(0, 2, 5, 4, 64)}, ValueError, "has 0 splits"),
        ({"out_partial": torch.zeros(3, 2, 5, 4, 64).half()}, TypeError, "out_partial has dtype"),
        ({"lse_partial": torch.zeros(3, 2, 4, 5)}, ValueError, r"must be \[3, 2, 5, 4\]"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype is torch.int32"),
        ({"out_dtype": ["float32"]}, TypeError, r"out_dtype is \['float32'\]"),
        ({"return_lse": "yes"}, TypeError, "return_lse"),
    ],
)
def test_bad_arguments_of_the_combination(
    change: dict[str, Any], error: type[Exception], message: str
):
    good = {"out_partial": torch.zeros(3, 2, 5, 4, 64), "lse_partial": torch.zeros(3, 2, 5, 4)}
    with cute_attn.emulated(ARCH), pytest.raises(error, match=message):
        cute_attn.flash_attn_combine(**good | change)


def test_the_combination_reads_nothing_before_the_kernel_in_front_is_done():
    """The emulator runs one kernel after the other, and does not see it."""
    spec = CombineSpec("bfloat16", 64, sink_dtype="float32", lse=True, dependent=True)
    ptx = cache.compile(COMBINE, spec, arch=ARCH).read("kernel.ptx").decode()
    first, *rest = ptx.split("griddepcontrol.wait")
    assert len(rest) == 1
    assert "ld.global" in rest[0] and "ld.global" not in first and "st.global" not in first


def test_a_plan_names_the_kernel_of_a_call_of_its_own():
    with stand_ins() as found, cute_attn.emulated(ARCH):
        for dtype, lse in ((torch.float32, True), (torch.float16, False)):
            o, of_parts = torch.randn(2, 1, 3, 2, 64), torch.randn(2, 1, 3, 2)
            cute_attn.flash_attn_combine(o, of_parts, out_dtype=dtype, return_lse=lse)
    planned = [
        *plan_attention_combine(ARCH, head_dim=64),
        *plan_attention_combine(ARCH, head_dim=64, out_dtype="float16", return_lse=False),
    ]
    assert [spec for _, spec, _ in found.launched] == [spec for _, spec in planned]
    assert [kernel for kernel, _ in planned] == [COMBINE, COMBINE]
    with pytest.raises(NotImplementedError, match="head_dim is 96, there are kernels for"):
        plan_attention_combine(ARCH, head_dim=96)


# -- the number of splits


HOPPER_GPU = {"arch": ARCH, "head_dim": 128, "clusters": 132}
BLACKWELL_GPU = {"arch": "sm_100a", "head_dim": 256, "clusters": 74}


def chosen(gpu: dict[str, Any], **changed: Any) -> int:
    shape = {
        "rows": 1,
        "batch": 1,
        "heads": 16,
        "heads_k": 2,
        "short": True,
        "few": True,
        "seqlen_k": 32768,
    }
    return num_splits_of_forward(**gpu | shape | changed)


@pytest.mark.parametrize("gpu", [HOPPER_GPU, BLACKWELL_GPU], ids=lambda gpu: gpu["arch"])
def test_few_queries_with_many_keys_are_split(gpu: dict[str, Any]):
    assert chosen(gpu) > 30
    assert chosen(gpu, seqlen_k=128) == 1
    assert chosen(gpu, batch=64, rows=64) == 1
    assert 1 < chosen(gpu, batch=8, rows=8) < 16
    assert chosen(gpu, seqlen_k=10**7) <= 128
    assert chosen(gpu, heads=0, heads_k=0) == chosen(gpu, rows=0) == 1


@pytest.mark.parametrize(
    ("num_splits", "error", "message"),
    [
        (MAX_SPLITS + 1, ValueError, f"num_splits is {MAX_SPLITS + 1}, must be at most"),
        (-1, ValueError, "num_splits is -1, must be at least 0"),
        (1.0, TypeError, "num_splits must be an int"),
    ],
)
def test_bad_numbers_of_splits(num_splits: Any, error: type[Exception], message: str):
    args = Case(lengths_q=(2,), lengths_k=(3,)).arguments()
    with cute_attn.emulated(ARCH), pytest.raises(error, match=message):
        cute_attn.flash_attn_func(args["q"], args["k"], args["v"], num_splits=num_splits)


@pytest.mark.parametrize(("arch", "head_dim"), [(ARCH, 128), ("sm_100a", 256)])
def test_a_plan_has_what_both_kinds_of_calls_need(arch: str, head_dim: int):
    planned = plan_attention(arch, head_dim=head_dim, num_splits=0, return_lse=True)
    few = arch == ARCH  # there is a small tile for few rows, whose long sequences have pieces
    kinds = ([(False, False), (True, False)] + [(False, True)] * few) * (1 + few)
    found = [(spec.split, spec.scheduler == "pieces") for _, spec in planned[:-1]]
    assert found == kinds
    assert [kernel.name for kernel, _ in planned][-1] == "combine"
