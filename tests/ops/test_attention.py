"""Attention agrees with the float64 reference, and has exact properties: on sm_100a here, and on
other targets in `test_attention_sm90`.

All of it runs in the emulator, whose checks must find nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn.emulation import current_emulation
from cute_attn.emulator import Emulator
from cute_attn.emulator.report import Report
from cute_attn.kernels.attention.spec import LARGEST_SCALE
from cute_attn.ops.operator import _is_refusal
from cute_attn.reference.attention import attention_reference

from .attention_cases import (
    BOTH_SCHEDULERS,
    CACHE,
    CAPPED,
    CAUSAL,
    EXP2_ERROR,
    FULL,
    MACHINES,
    PACKED_HEADS,
    PLAIN,
    USED,
    VARLEN,
    WINDOW,
    Case,
    Kind,
    Machine,
    assert_agrees,
    assert_no_worse,
    cases,
    reference_arguments,
    rows_of,
    run,
    same,
    target,
    valid,
)

ADVERSARIAL = Machine(num_sms=2, schedule="adversarial")
KEYS_AND_VALUES = ("k", "v")


def examples(few: int, many: int) -> settings:
    """How many cases a test draws in the usual sweep, and in the full one."""
    return settings(max_examples=many if FULL else few)


def dense_cases(*kinds: Kind, groups: tuple[int, ...] = (1, 3)) -> st.SearchStrategy[Case]:
    """Cases with sequences of one length. The kind says whether query heads are packed."""
    return st.builds(
        lambda kind, batch, sq, sk, group, **rest: Case(
            kind,
            lengths_q=(min(sq, 128 // kind.packed_heads) if kind.packed_heads > 1 else sq,) * batch,
            lengths_k=(sk,) * batch,
            group=group * kind.packed_heads,
            **rest,
        ),
        kind=st.sampled_from(kinds),
        batch=st.integers(1, 2),
        sq=st.integers(1, 300),
        sk=st.integers(1, 300),
        group=st.sampled_from(groups),
        left=st.integers(0, 200),
        tilt=st.sampled_from((1.0, 8.0)),
        seed=st.integers(0, 2**31),
    )


# -- agreement


@examples(5, 400)
@given(case=cases(), on=MACHINES)
def test_agrees_with_the_reference_on_both_schedulers(case: Case, on: Machine):
    args = case.arguments()
    static = run(args, "static", on)
    assert_agrees(args, *static)
    if case.kind in BOTH_SCHEDULERS:
        assert same(args, static, run(args, "clc", on))


@examples(2, 30)
@given(case=cases(BOTH_SCHEDULERS))
def test_no_schedule_changes_a_bit(case: Case):
    args = case.arguments()
    first = run(args, "static", Machine(schedule="fair"))
    for num_sms, schedule, scheduler in (
        (2, "adversarial", "static"),
        (3, "random", "static"),
        (2, "adversarial", "clc"),
        (7, "random", "clc"),
    ):
        machine = Machine(num_sms=num_sms, schedule=schedule, spurious_cancel=num_sms == 7)
        assert same(args, first, run(args, scheduler, machine))


@examples(2, 30)
@given(case=cases([PLAIN, WINDOW, VARLEN, CACHE]))
def test_layouts_are_read_in_place(case: Case):
    args = replace(case, layout="contiguous").arguments()
    first = run(args)
    for layout in ("heads_first", "fused", "gapped"):
        moved = replace(case, layout=layout).arguments()
        assert same(args, first, run(moved))
        for name in ("q", "k", "v"):
            counted = [torch.equal(args[name][at], moved[name][at]) for at in _rows(args, name)]
            assert all(counted)


def _rows(args: dict[str, Any], name: str) -> list[Any]:
    return [at[0 if name == "q" else 1] for at in rows_of(args)]


# -- what does not matter


@pytest.mark.slow
@examples(2, 40)
@given(case=dense_cases(CAUSAL, PACKED_HEADS), data=st.data())
def test_later_tokens_do_not_matter(case: Case, data: st.DataObject):
    """Neither what they are, nor whether there are any."""
    case = replace(case, lengths_k=case.lengths_q)
    args = case.arguments()
    o, lse = run(args)
    last = data.draw(st.integers(0, case.lengths_q[0] - 1))
    changed = dict(args)
    other = replace(case, seed=case.seed + 1).arguments()
    for name in ("q", "k", "v"):
        changed[name] = args[name].clone()
        changed[name][:, last + 1 :] = other[name][:, last + 1 :]
    if case.kind == PACKED_HEADS or case.group % 2:  # else it may be short enough to be packed
        cut = {name: args[name][:, : last + 1] for name in ("q", "k", "v")}
    for what in (changed, args | cut):
        again, lse_again = run(what)
        assert torch.equal(o[:, : last + 1], again[:, : last + 1])
        assert torch.equal(lse[..., : last + 1], lse_again[..., : last + 1])


@examples(2, 40)
@given(case=dense_cases(PLAIN, CAUSAL, WINDOW, PACKED_HEADS, groups=(1, 3, 5)))
def test_grouped_heads_are_repeated_heads(case: Case):
    """Packed into one tile, or not."""
    args = case.arguments()
    repeated = {name: args[name].repeat_interleave(case.group, dim=2) for name in KEYS_AND_VALUES}
    assert same(args, run(args), run(args, **repeated))


@examples(2, 40)
@given(case=cases([VARLEN, USED, CACHE]))
def test_packed_sequences_are_sequences_alone(case: Case):
    args = case.arguments()
    o, lse = run(args)
    for b in range(case.batch):
        one = _alone(args, b)
        o_alone, lse_alone = run(one)
        (got, got_lse), (expected, expected_lse) = (
            valid(a, *result)
            for a, result in (
                (one, (o_alone, lse_alone)),
                (one, (o[_span(args, "q", b)], lse[:, _span(args, "q", b)])),
            )
        )
        assert torch.equal(got, expected) and torch.equal(got_lse, expected_lse)


def _span(args: dict[str, Any], side: str, b: int) -> slice:
    offsets = args[f"cu_seqlens_{side}"]
    return slice(int(offsets[b]), int(offsets[b + 1]))


def _alone(args: dict[str, Any], b: int) -> dict[str, Any]:
    """The call for sequence b by itself, as a batch of one."""
    one = dict(args)
    for side, names in (("q", ("q",)), ("k", KEYS_AND_VALUES)):
        offsets = args.get(f"cu_seqlens_{side}")
        for name in names:
            at = slice(b, b + 1) if offsets is None else _span(args, side, b)
            one[name] = args[name][at]
        if offsets is not None:
            span = _span(args, side, b)
            one[f"cu_seqlens_{side}"] = torch.tensor([0, span.stop - span.start], dtype=torch.int32)
        if f"seqused_{side}" in args:
            one[f"seqused_{side}"] = args[f"seqused_{side}"][b : b + 1]
    return one


@examples(2, 40)
@given(case=cases([VARLEN]))
def test_packed_sequences_are_dense_sequences(case: Case):
    """Through the kernel for dense tensors, which has other addresses and other bounds."""
    case = replace(case, group=3 if case.group > 1 else 1)  # neither kernel packs heads
    args = case.arguments()
    o, lse = run(args)
    for at_q, at_k in rows_of(args):
        dense = {"q": args["q"][at_q][None]} | {n: args[n][at_k][None] for n in KEYS_AND_VALUES}
        rest = ("causal", "window_size", "softmax_scale", "return_lse")
        dense |= {name: args[name] for name in rest if name in args}
        o_alone, lse_alone = run(dense)
        assert torch.equal(o[at_q], o_alone[0])
        assert torch.equal(lse[:, at_q], lse_alone[0])


@examples(2, 40)
@given(case=dense_cases(WINDOW), more=st.integers(0, 2) | st.just(2**30 - 1))
def test_a_window_as_wide_as_the_sequence_is_none(case: Case, more: int):
    args = case.arguments()
    wide = args | {"causal": False}
    sq, sk = case.lengths_q[0], case.lengths_k[0]
    window = (min(sk - 1 + more, 2**30 - 1), min(sq - 1 + more, 2**30 - 1))
    free = run(wide, window_size=(None, None))
    assert same(args, free, run(wide, window_size=window))
    causal = run(wide, window_size=(None, None), causal=True)
    assert same(args, causal, run(wide, window_size=(window[0], 0)))


@pytest.mark.slow  # test_batch_invariance has quick ones
@examples(2, 40)
@given(case=dense_cases(PLAIN, WINDOW, CAPPED), random=st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result(case: Case, random: Any):
    case = replace(
        case, lengths_q=case.lengths_q[:1] * 3, lengths_k=(min(case.lengths_k[0], 128),) * 3,
        group=1,
    )  # fmt: skip
    args = case.arguments()
    order = random.sample(range(3), 3)
    o, lse = run(args)
    o_permuted, lse_permuted = run(args, **{name: args[name][order] for name in ("q", "k", "v")})
    assert torch.equal(o[order], o_permuted)
    if lse is not None:
        assert torch.equal(lse[order], lse_permuted)


@examples(2, 30)
@given(case=cases([CACHE, USED]))
def test_rows_of_no_sequence_do_not_matter(case: Case):
    """They hold NaN in every other test: here they hold something else."""
    args = case.arguments()
    finite = {name: args[name].nan_to_num(3.0) for name in ("q", "k", "v")}
    assert same(args, run(args), run(args, **finite))


# -- what follows from the formula


@examples(2, 40)
@given(
    case=dense_cases(PLAIN, CAUSAL, WINDOW, PACKED_HEADS), random=st.randoms(use_true_random=False)
)
def test_linear_in_v(case: Case, random: Any):
    args = case.arguments()
    o, lse = run(args)
    dims = target().head_dim_v
    order = random.sample(range(dims), dims)
    doubled, lse_doubled = run(args, v=2 * args["v"])
    permuted, _ = run(args, v=args["v"][..., order])
    assert torch.equal(doubled, 2 * o) and torch.equal(lse_doubled, lse)
    assert torch.equal(permuted, o[..., order])
    first, second = (torch.randint(-8, 9, args["v"].shape).to(o.dtype) for _ in range(2))
    a, b, both = (run(args, v=v)[0].double() for v in (first, second, first + second))
    # Each result is rounded once; float32 sums differ by less than a hundredth of that.
    allowed = 0.505 * torch.finfo(o.dtype).eps * (a.abs() + b.abs() + both.abs()) + 1e-5
    assert ((a + b - both).abs() <= allowed).all()


@examples(2, 40)
@given(case=cases([CACHE, USED, PLAIN, WINDOW]))
def test_lse_says_how_much_went_to_the_keys(case: Case):
    """With v of ones the output is the probabilities' sum: 1 less what the sink takes."""
    args = case.arguments()
    args["v"] = torch.where(args["v"].isnan(), args["v"], 1.0)
    o, lse = valid(args, *run(args))
    expected = torch.ones(o.shape[:2], dtype=torch.float64)
    if "learnable_sink" in args:
        expected -= torch.exp(args["learnable_sink"].double() - lse.double())
    expected[lse == -math.inf] = 0.0
    # Each probability is rounded once, and the output once.
    allowed = torch.finfo(o.dtype).eps + 2 * EXP2_ERROR
    assert ((o.double() - expected[..., None]).abs() <= allowed).all()


@pytest.mark.in_turn("value")
@pytest.mark.parametrize(
    "kind", [PLAIN, CAUSAL, WINDOW, VARLEN], ids=["plain", "causal", "window", "varlen"]
)
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_special_values_in_q_and_k_propagate_like_the_reference(kind: Kind, value: float):
    """-inf in k makes scores of -inf for q > 0; NaN or inf in sight makes the row NaN."""
    case = Case(kind, lengths_q=(130,), lengths_k=(200,), left=100, seed=5)
    args = case.arguments()
    args["q"][..., 0] = args["q"][..., 0].abs() + 0.1
    token = (0,) if args["k"].dim() == 4 else ()
    for at in (3, 60, 131, 199):
        args["k"][(*token, at, 0, 0)] = value
    if value != -math.inf:
        args["q"][(*token, 77, 0, 5)] = value
    o, lse = run(args, on=ADVERSARIAL)
    exact, exact_lse = attention_reference(**reference_arguments(args))
    assert torch.equal(o.isnan(), exact.isnan())
    assert torch.equal(lse.isnan(), exact_lse.isnan())
    assert not o.isinf().any() and not lse.isinf().any()
    if value == -math.inf:
        assert_agrees(args, o, lse)


def test_scores_of_minus_infinity_alone_are_no_keys():
    case = Case(PLAIN, lengths_q=(3,), lengths_k=(150,))
    args = case.arguments()
    args["q"].abs_()
    args["k"][:] = -math.inf
    o, lse = run(args)
    assert not o.any()
    assert (lse == -math.inf).all()


def test_special_values_in_v_propagate_like_the_reference():
    case = Case(PLAIN, lengths_q=(3,), lengths_k=(150,))
    args = case.arguments()
    args["v"][0, 4, 0, 7], args["v"][0, 140, 0, 8], args["v"][0, 140, 0, 9] = (
        math.nan,
        math.inf,
        -math.inf,
    )
    o, _ = run(args)
    exact, _ = attention_reference(**reference_arguments(args))
    for special in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(special(o), special(exact))


# -- scores of any finite size


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (CACHE, 8000.0),
        (CACHE, 20003.0),
        (CACHE, 50003.0),
        (PLAIN, 30001.0),
        (PLAIN, 1e10),
        (PLAIN, 1e18),
    ],
)
def test_the_only_key_gets_everything_whatever_its_score(kind: Kind, value: float):
    args = Case(kind, lengths_q=(1,), lengths_k=(1,), group=kind.packed_heads).arguments()
    args["q"].fill_(value)
    args["k"].fill_(value)
    assert_agrees(args, *run(args))
    args["k"].neg_()
    assert_agrees(args, *run(args))


@pytest.mark.in_turn("tilt")
@pytest.mark.parametrize("tilt", [1.0, 8.0])
@pytest.mark.parametrize(
    ("kind", "magnitude", "scale"),
    [
        (PLAIN, 1e4, None),
        (PLAIN, 1e10, None),
        (PLAIN, 1.0, 1e8),
        (PLAIN, 1.0, 1e35),
        (PLAIN, 1e32, 100.0),
        (PLAIN, 1e-37, LARGEST_SCALE),
        (PLAIN, 1e34, 2.0**-126),
        (WINDOW, 1e8, None),
        pytest.param(PACKED_HEADS, 1e6, None, marks=pytest.mark.slow),  # CACHE packs heads too
        (CACHE, 1e6, None),
        (CACHE, 1.0, 1e8),
    ],
)
def test_large_scores_agree_with_the_reference(
    kind: Kind, magnitude: float, scale: float | None, tilt: float
):
    case = Case(
        kind, lengths_q=(70,), lengths_k=(300,), group=kind.packed_heads, left=150, scale=scale,
        magnitude=magnitude, tilt=tilt, seed=3,
    )  # fmt: skip
    args = case.arguments()
    assert all(args[name].isfinite().all() for name in "qk")
    assert_agrees(args, *run(args))


STAIRS_SCALE = 2.0**-6


def stairs(kind: Kind, downwards: bool, seed: int) -> dict[str, Any]:
    """A call whose scores are exact in float32, from -2^29 to 2^29: multiples of 64, so that
    scaled they differ by 1 and more. The maximum of a row moves in many steps, unless downwards;
    rows next to one another have maxima of all sizes."""
    case = Case(
        kind, lengths_q=(70,), lengths_k=(400,), group=kind.packed_heads, left=300,
        scale=STAIRS_SCALE, softcap=2.0**13, seed=seed,
    )  # fmt: skip
    args = case.arguments()
    generator = torch.Generator().manual_seed(seed)
    for at_q, at_k in rows_of(args):
        q, k = args["q"][at_q], args["k"][at_k]
        q.zero_()
        k.zero_()
        rows, keys = torch.arange(len(q)), torch.arange(len(k))
        q[..., 0] = (2.0 ** (rows % 16))[:, None]
        q[..., 1] = 64.0
        exponents = (keys // 14) % 15
        steps = torch.where(keys < 210, 2.0 ** (14 - exponents), -(2.0**exponents))
        k[..., 0] = (steps.flip(0) if downwards else steps)[:, None]
        k[..., 1] = torch.randint(-6, 1, (len(k), 1), generator=generator).float()
    if "learnable_sink" in args:  # as high as the largest score of the rows whose q is largest
        args["learnable_sink"].fill_(2.0**13 if kind.softcap else 2.0**23)
    return args


@pytest.mark.in_turn("downwards")
@pytest.mark.parametrize("downwards", [False, True])
@pytest.mark.parametrize(
    "kind", [PLAIN, WINDOW, VARLEN, CACHE], ids=["plain", "window", "varlen", "cache"]
)
def test_large_scores_that_differ_by_little_are_told_apart(kind: Kind, downwards: bool):
    args = stairs(kind, downwards, seed=11)
    o, lse = run(args)
    assert_agrees(args, o, lse)
    _, exact_lse = attention_reference(**reference_arguments(args))
    ours, exact = valid(args, o, lse, exact_lse)[1:]
    allowed = EXP2_ERROR + 2.0**-23 * exact.abs()
    assert ((ours.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(CAPPED, marks=pytest.mark.slow, id="capped"), pytest.param(USED, id="used")],
)
def test_a_large_softcap_that_scores_reach(kind: Kind):
    args = stairs(kind, False, seed=12)
    for at_q, at_k in rows_of(args):
        args["q"][at_q][..., 0] = 2.0**15
        keys = args["k"][at_k]
        keys[..., 0] = 2.0**14 * torch.where(torch.arange(len(keys)) % 3 == 0, 1.0, -1.0)[:, None]
    assert_agrees(args, *run(args))


def test_a_row_does_not_depend_on_how_large_its_neighbours_are():
    args = stairs(PLAIN, False, seed=13)
    o, lse = run(args)
    args["q"][:, 1::2, :, 0] = 1.0
    other_o, other_lse = run(args)
    assert torch.equal(o[:, ::2], other_o[:, ::2])
    assert torch.equal(lse[..., ::2], other_lse[..., ::2])


@pytest.mark.parametrize(
    ("value", "keys"), list(itertools.product((math.nan, math.inf, -math.inf), (90, 0)))
)
def test_special_values_of_the_sink_propagate_like_the_reference(value: float, keys: int):
    case = Case(CACHE, lengths_q=(20,), lengths_k=(90,), unused_k=(90 - keys,), group=2)
    args = case.arguments()
    args["learnable_sink"][1] = value
    o, lse = run(args)
    exact, exact_lse = attention_reference(**reference_arguments(args))
    assert torch.equal(o.isnan(), exact.isnan())
    assert torch.equal(lse.isnan(), exact_lse.isnan())
    if value == -math.inf:
        assert_agrees(args, o, lse)


def test_scaled_scores_beyond_float32_leave_the_output_right():
    """Only the log-sum-exp is beyond it, too."""
    case = Case(PLAIN, lengths_q=(40,), lengths_k=(200,), magnitude=1e30, scale=1e30, seed=4)
    args = case.arguments()
    o, lse = run(args)
    exact, exact_lse = attention_reference(**reference_arguments(args))
    assert_no_worse(o, [exact.to(o.dtype)], exact, torch.finfo(o.dtype).eps / 2)
    assert lse.isinf().all() and torch.equal(lse, exact_lse.float())


# -- sizes


def test_more_sequences_than_a_warp_has_lanes():
    lengths = tuple(itertools.islice(itertools.cycle((1, 0, 3, 2, 0, 1)), 75))
    keys = tuple(1 + n % 5 for n in range(75))
    case = Case(replace(CACHE), lengths, (5,) * 75, unused_k=tuple(5 - n for n in keys), group=2)
    args = case.arguments()
    for scheduler in ("static", "clc"):
        assert_agrees(args, *run(args, scheduler, Machine(num_sms=6, spurious_cancel=True)))


def test_as_many_heads_in_a_tile_as_there_may_be():
    """A CTA then has two tokens, and the other CTA's may lie in the next sequence."""
    most = target().most_packed_heads
    kind = Kind(varlen_q=True, packed_heads=most)
    for lengths in ((1,), (1, 2, 1), (3,)):
        case = Case(kind, lengths, (5,) * len(lengths), group=most)
        args = case.arguments()
        assert_agrees(args, *run(args))


@pytest.mark.parametrize("scheduler", ["static", "clc"])
def test_many_more_tiles_than_clusters(scheduler: str):
    kind = CAUSAL if scheduler == "static" else CACHE
    args = Case(kind, (5,) * 5, (7,) * 5, heads_k=7, group=kind.packed_heads).arguments()
    for machine in (ADVERSARIAL, Machine(num_sms=5, spurious_cancel=True)):
        assert_agrees(args, *run(args, scheduler, machine))


@pytest.mark.parametrize("side", ["q", "k"])
def test_tensors_beyond_two_to_the_31_elements(side: str):
    """Two sequences that lie further apart than 32 bits can say. Memory not touched costs none."""
    args = Case(PLAIN, lengths_q=(3,) * 2, lengths_k=(140,) * 2).arguments()
    far = dict(args)
    for name in ("q",) if side == "q" else KEYS_AND_VALUES:
        x = args[name]
        apart = 2**31 + 2**16
        memory = torch.empty(apart + x[0].numel(), dtype=x.dtype)
        far[name] = memory.as_strided(x.shape, (apart, *x.stride()[1:]))
        far[name].copy_(x)
    assert same(args, run(args), run(far))


# -- the operator


def test_a_dimension_of_one_element_may_have_any_stride():
    args = Case(PLAIN, lengths_q=(5,), lengths_k=(7,)).arguments()
    odd = {
        name: args[name].as_strided(args[name].shape, (3, args[name].shape[-1], 1, 1))
        for name in ("q", "k", "v")
    }
    assert same(args, run(args), run(args, **odd))


def test_the_registered_operator_is_well_behaved():
    args = Case(CAUSAL, lengths_q=(5,), lengths_k=(7,)).arguments()
    with cute_attn.emulated(target().arch, Emulator()):
        torch.library.opcheck(
            torch.ops.cute_attn.flash_attn.default,
            (args["q"], args["k"], args["v"]),
            {"causal": True, "return_lse": True},
        )


def test_compiled_code_calls_the_kernel():
    args = Case(CAUSAL, lengths_q=(5,), lengths_k=(7,)).arguments()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        return cute_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with cute_attn.emulated(target().arch, Emulator()) as emulator:
        result = compiled(*(args[name] for name in ("q", "k", "v")))
    assert emulator.report.launches
    assert same(args, run(args), result)


REFUSED: dict[str, tuple[int, Callable[[int], torch.Tensor]]] = {
    "q-head_dim": (0, lambda d: torch.zeros(1, 5, 2, d // 2, dtype=torch.bfloat16)),
    "q-strides": (0, lambda d: torch.zeros(1, 5, 2, d + 4, dtype=torch.bfloat16)[..., :d]),
    "q-address": (0, lambda d: torch.zeros(10 * d + 1, dtype=torch.bfloat16)[1:].view(1, 5, 2, d)),
    "q-dtype": (0, lambda d: torch.zeros(1, 5, 2, d, dtype=torch.float16)),
    "q-rank": (0, lambda d: torch.zeros(5, 2, d, dtype=torch.bfloat16)),
    "k-batch": (1, lambda d: torch.zeros(2, 7, 2, d, dtype=torch.bfloat16)),
    "k-dtype": (1, lambda d: torch.zeros(1, 7, 2, d, dtype=torch.float16)),
    "v-rows": (2, lambda d: torch.zeros(1, 8, 2, d, dtype=torch.bfloat16)),
    "v-heads": (2, lambda d: torch.zeros(1, 7, 1, d, dtype=torch.bfloat16)),
    "v-strides": (2, lambda d: torch.zeros(1, 7, 2, 2 * d, dtype=torch.bfloat16)[..., ::2]),
    "out-dtype": (3, lambda d: torch.zeros(1, 5, 2, d, dtype=torch.float16)),
    "out-rows": (3, lambda d: torch.zeros(1, 6, 2, d, dtype=torch.bfloat16)),
    "out-rank": (3, lambda d: torch.zeros(5, 2, d, dtype=torch.bfloat16)),
    "out-address": (
        3, lambda d: torch.zeros(10 * d + 1, dtype=torch.bfloat16)[1:].view(1, 5, 2, d)
    ),
}  # fmt: skip


@contextmanager
def compiled_forward() -> Iterator[tuple[Callable[..., None], Report]]:
    """The plain forward as the cache gives it, for q, k, v, out and lse, and what it launched."""
    kernel, spec = PLAIN.request("static")
    more: tuple[Any, ...] = (*[None] * 6, 0.0625, 1.0, 0, 0, 2)
    if spec.scheduler == "counter":
        # The counter; no parts, k_descale, v_descale and tree_mask.
        more = (*more, torch.zeros(1, dtype=torch.int32), *[None] * 4)
    with cute_attn.emulated(target().arch, Emulator()) as emulator:
        emulation = current_emulation()
        assert emulation is not None
        function = emulation.function(kernel, spec)
        yield (lambda *tensors: function(*tensors, *more)), emulator.report


@pytest.mark.parametrize("what", REFUSED)
def test_the_compiled_host_code_refuses_what_the_warm_path_leaves_to_it(what: str):
    """On a GPU the operator's own checks run only once it has refused."""
    columns = [target().head_dim] * 2 + [target().head_dim_v] * 2
    q, k, v, o = (
        torch.zeros(1, n, 2, dims, dtype=torch.bfloat16)
        for n, dims in zip((5, 7, 7, 5), columns, strict=True)
    )
    tensors = [q, k, v, o, torch.empty(1, 2, 5)]
    with compiled_forward() as (forward, report):
        forward(*tensors)
        assert len(report.launches) == 1
        position, bad = REFUSED[what]
        tensors[position] = bad(columns[position])
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            forward(*tensors)
        assert len(report.launches) == 1


@pytest.mark.parametrize("other", ["q", "v", "lse"])
def test_the_compiled_host_code_refuses_out_over_other_tensors(other: str):
    of_q, of_v = target().head_dim, target().head_dim_v
    memory = torch.zeros(20 * of_q, dtype=torch.bfloat16)
    q, k, v, o = (torch.zeros(1, 5, 2, n, dtype=torch.bfloat16) for n in (of_q, of_q, of_v, of_v))
    lse = torch.empty(1, 2, 5)
    if other == "lse":
        lse = o.view(torch.float32).flatten()[:10].view(1, 2, 5)
    else:  # by one token
        o = memory[: o.numel()].view(o.shape)
        last = memory[8 * of_v :]
        q, v = (
            last[: x.numel()].view(x.shape) if name == other else x
            for name, x in (("q", q), ("v", v))
        )
    with compiled_forward() as (forward, report):
        # The error's name where the compiler is loaded, else its number.
        with pytest.raises(Exception, match=r"cudaErrorInvalidValue|Error Code: 1$") as raised:
            forward(q, k, v, o, lse)
        assert _is_refusal(raised.value)
        assert not report.launches
        forward(q, k, v, torch.zeros_like(o), torch.empty(1, 2, 5))
        assert len(report.launches) == 1
