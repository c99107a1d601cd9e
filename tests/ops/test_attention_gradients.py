"""Gradients of attention on sm_100a agree with float64, and have exact properties.

All of it runs in the emulator, whose checks must find nothing. Outputs and workspaces hold NaN
before the kernels write them, and so do rows of no sequence.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cute_attn.reference.attention import visible

from .attention_cases import (
    CAPPED,
    CAUSAL,
    FULL,
    OTHER_ROUNDINGS,
    PLAIN,
    USED,
    VARLEN,
    WINDOW,
    Case,
    Kind,
    Machine,
    assert_no_worse,
    rows_of,
)
from .attention_gradient_cases import (
    GRADIENT_MACHINES,
    INPUTS,
    KINDS,
    UPSTREAMS,
    Upstream,
    assert_gradients_agree,
    exact_gradients,
    gradient_cases,
    gradients,
    independent,
    one_cluster,
    plain_gradients,
    same,
    wanted_on,
)

SINK = Kind(window_right=True, sink=torch.float32)
TENSORS = INPUTS[:3]
ADVERSARIAL = Machine(num_sms=4, schedule="adversarial", spurious_cancel=True)


def sweep(examples: int) -> Any:
    """A slow test, of so many cases in the full sweep."""

    def decorate(test: Any) -> Any:
        return pytest.mark.slow(settings(max_examples=examples if FULL else 6)(test))

    return decorate


def exactly_zero(x: torch.Tensor) -> bool:
    return not x.contiguous().view(torch.uint8).any()


def dense(*kinds: Kind) -> st.SearchStrategy[Case]:
    """Cases of one or two sequences of one length."""
    return st.builds(
        lambda kind, batch, sq, sk, **rest: Case(
            kind, lengths_q=(sq,) * batch, lengths_k=(sk,) * batch, **rest
        ),
        kind=st.sampled_from(kinds),
        batch=st.integers(1, 2),
        sq=st.integers(1, 300),
        sk=st.integers(1, 300),
        group=st.sampled_from((1, 3)),
        left=st.integers(0, 200),
        seed=st.integers(0, 2**31),
    )


# -- agreement


@pytest.mark.parametrize(
    ("case", "scheduler"),
    [
        pytest.param(
            Case(PLAIN, lengths_q=(140,), lengths_k=(300,), group=2, seed=1),
            "static",
            marks=pytest.mark.slow,
        ),
        (Case(CAUSAL, lengths_q=(200,), lengths_k=(140,), group=2, seed=2), "static"),
        pytest.param(
            Case(VARLEN, lengths_q=(70, 0, 130), lengths_k=(50, 30, 140), tail=9, seed=3),
            "clc",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dense", "causal", "varlen"],
)
def test_small_cases_agree_with_float64(case: Case, scheduler: str):
    """And are the same bit for bit in another schedule."""
    args = case.arguments()
    do, dlse = Upstream(of_lse=case.kind != PLAIN).gradients(args)
    found = gradients(args, do, dlse, scheduler, Machine(num_sms=5, seed=3))
    assert_gradients_agree(args, found, do, dlse)
    assert same(found, gradients(args, do, dlse, scheduler, ADVERSARIAL))


@sweep(320)
@given(
    case=gradient_cases(),
    upstream=UPSTREAMS,
    on=GRADIENT_MACHINES,
    scheduler=st.sampled_from(("static", "clc")),
    of=st.sampled_from((INPUTS, INPUTS, INPUTS, ("q",), ("k",), ("q", "learnable_sink"))),
)
def test_agrees_with_float64(
    case: Case, upstream: Upstream, on: Machine, scheduler: str, of: tuple[str, ...]
):
    args = case.arguments()
    do, dlse = upstream.gradients(args)
    wanted = wanted_on(on, of=of)
    assume(wanted)
    found = gradients(args, do, dlse, scheduler, on, wanted)
    assert_gradients_agree(args, found, do, dlse)


@sweep(40)
@given(case=gradient_cases(), upstream=UPSTREAMS, clusters=st.sampled_from((4, 9, 148)))
def test_no_schedule_or_scheduler_or_run_changes_a_bit(
    case: Case, upstream: Upstream, clusters: int
):
    """On one GPU. With another number of SMs the heads of a group may be split in other parts."""
    args = case.arguments()
    do, dlse = upstream.gradients(args)
    first = gradients(args, do, dlse, "static", Machine(clusters, "fair"))
    for schedule, scheduler, early in (
        ("fair", "static", False),
        ("adversarial", "static", False),
        ("random", "clc", True),
        ("adversarial", "clc", False),
    ):
        machine = Machine(clusters, schedule, seed=7, spurious_cancel=early)
        assert same(first, gradients(args, do, dlse, scheduler, machine, deterministic=early))


@sweep(30)
@given(case=gradient_cases(), upstream=UPSTREAMS)
def test_without_splits_the_number_of_sms_changes_no_bit(case: Case, upstream: Upstream):
    args = replace(case, heads_k=case.heads, group=1).arguments()
    do, dlse = upstream.gradients(args)
    args |= independent()
    first = gradients(args, do, dlse, on=Machine(4))
    for num_sms in (7, 148):
        assert same(first, gradients(args, do, dlse, "clc", Machine(num_sms, "adversarial")))


@sweep(30)
@given(case=gradient_cases(), layout=st.sampled_from(("heads_first", "fused", "gapped")))
def test_layouts_are_read_in_place(case: Case, layout: str):
    args, moved = (replace(case, layout=where).arguments() for where in ("contiguous", layout))
    (do, _), (moved_do, _) = (Upstream(where).gradients(args) for where in ("contiguous", layout))
    assert same(gradients(args, do), gradients(moved, moved_do))


@sweep(30)
@given(case=dense(CAUSAL, PLAIN, SINK), on=st.sampled_from((16, 40, 148)))
def test_splits_of_a_group_agree_with_float64(case: Case, on: int):
    case = replace(case, group=4, lengths_q=case.lengths_q[:1], lengths_k=case.lengths_k[:1])
    args = case.arguments()
    do, _ = Upstream().gradients(args)
    found = gradients(args, do, on=Machine(on))
    assert_gradients_agree(args, found, do)
    if not independent():
        assert same(found, gradients(args, do, on=Machine(4)), "q")


# -- exact properties


@sweep(30)
@given(
    case=dense(WINDOW, VARLEN),
    left=st.integers(0, 100),
    more=st.integers(1, 300),
    scheduler=st.sampled_from(("static", "clc")),
)
def test_keys_hidden_from_every_query_have_gradient_0(
    case: Case, left: int, more: int, scheduler: str
):
    """Keys left of the first query's window are hidden. In causal calls with more queries than
    keys, queries that see no key hide no key."""
    sq = case.lengths_q[0]
    lengths_k = tuple(sq + left + more for _ in case.lengths_k)
    kind = replace(WINDOW, varlen_q=case.kind.varlen_q, varlen_k=case.kind.varlen_k)
    args = replace(case, kind=kind, left=left, lengths_k=lengths_k).arguments()
    do, _ = Upstream().gradients(args)
    found = gradients(args, do, scheduler=scheduler)
    hidden = ~visible(sq, lengths_k[0], args["causal"], args["window_size"]).any(dim=0)
    assert hidden[:more].all()
    for _, at in rows_of(args):
        for name in ("k", "v"):
            assert exactly_zero(found[name][at][hidden])
    assert_gradients_agree(args, found, do)


@sweep(30)
@given(case=dense(PLAIN, CAUSAL, WINDOW, SINK), group=st.integers(2, 4))
def test_grouped_heads_are_the_sum_over_repeated_heads(case: Case, group: int):
    case = replace(case, group=group)
    args = case.arguments()
    args |= independent()
    do, _ = Upstream().gradients(args)
    repeated = {name: args[name].repeat_interleave(group, dim=2) for name in ("k", "v")}
    found, apart = gradients(args, do), gradients(args, do, **repeated)
    assert same(found, {**apart, "k": found["k"], "v": found["v"]}, "q")
    exact = exact_gradients(args, do)
    for name in ("k", "v"):
        added = apart[name].double().unflatten(2, (-1, group)).sum(3)
        plains = [added, *(plain_gradients(args, do, seed=n)[name] for n in range(2))]
        assert_no_worse(found[name], plains, exact[name])
        plains = [found[name], *plains[1:]]
        assert_no_worse(added, plains, exact[name])


@sweep(40)
@given(case=gradient_cases([k for k in KINDS if k.varlen_q and k.varlen_k]), upstream=UPSTREAMS)
def test_packed_sequences_are_sequences_alone(case: Case, upstream: Upstream):
    args = case.arguments()
    args |= independent()
    do, dlse = upstream.gradients(args)
    found = gradients(args, do, dlse, on=one_cluster())
    for b in range(case.batch):
        spans = {
            side: slice(*map(int, args[f"cu_seqlens_{side}"][b : b + 2])) for side in ("q", "k")
        }
        one = dict(args)
        for name, side in zip(TENSORS, ("q", "k", "k"), strict=True):
            one[name] = args[name][spans[side]]
        for side, span in spans.items():
            one[f"cu_seqlens_{side}"] = torch.tensor([0, span.stop - span.start], dtype=torch.int32)
            if f"seqused_{side}" in args:
                one[f"seqused_{side}"] = args[f"seqused_{side}"][b : b + 1]
        alone = gradients(
            one, do[spans["q"]], None if dlse is None else dlse[:, spans["q"]],
            on=one_cluster(), wanted=TENSORS,
        )  # fmt: skip
        for name, side in zip(TENSORS, ("q", "k", "k"), strict=True):
            assert torch.equal(found[name][spans[side]], alone[name])


@sweep(30)
@given(case=dense(VARLEN))
def test_packed_sequences_are_dense_sequences(case: Case):
    """Through kernels for dense tensors, which have other addresses and other bounds."""
    args = case.arguments() | independent()
    do, _ = Upstream().gradients(args)
    found = gradients(args, do)
    batch = case.batch
    tensors = {name: args[name].unflatten(0, (batch, -1)) for name in TENSORS}
    alone = gradients(
        {
            **tensors,
            **independent(),
            "causal": args["causal"],
            "window_size": args["window_size"],
        },
        do.unflatten(0, (batch, -1)),
    )
    assert same(found, {name: x.flatten(0, 1) for name, x in alone.items()})


@sweep(30)
@given(case=dense(WINDOW), more=st.integers(0, 2) | st.just(2**30 - 1))
def test_a_window_as_wide_as_the_sequence_is_none(case: Case, more: int):
    args = case.arguments() | {"causal": False} | independent()
    do, _ = Upstream().gradients(args)
    sq, sk = case.lengths_q[0], case.lengths_k[0]
    window = (min(sk - 1 + more, 2**30 - 1), min(sq - 1 + more, 2**30 - 1))
    free = gradients(args, do, window_size=(None, None))
    assert same(free, gradients(args, do, window_size=window))
    causal = gradients(args, do, window_size=(None, None), causal=True)
    assert same(causal, gradients(args, do, window_size=(window[0], 0)))


@sweep(30)
@given(case=dense(PLAIN, CAUSAL, WINDOW, SINK), upstream=UPSTREAMS)
def test_linear_in_the_gradients_of_the_outputs(case: Case, upstream: Upstream):
    args = case.arguments()
    do, dlse = upstream.gradients(args)
    found = gradients(args, do, dlse)
    doubled = gradients(args, 2 * do, None if dlse is None else 2 * dlse)
    assert same({name: 2 * x for name, x in found.items()}, doubled)
    generator = torch.Generator().manual_seed(upstream.seed)
    first, second = (
        torch.randint(-8, 9, do.shape, generator=generator).to(do.dtype) for _ in range(2)
    )
    summands = [gradients(args, x) for x in (first, second, first + second)]
    errors = [
        {
            name: max(
                (plain[name].double() - exact[name]).norm().item()
                for seed in range(OTHER_ROUNDINGS)
                for plain in (plain_gradients(args, x, seed=seed),)
            )
            for name in found
        }
        for x in (first, second, first + second)
        for exact in (exact_gradients(args, x),)
    ]
    for name in found:
        a, b, both = (x[name].double() for x in summands)
        assert (a + b - both).norm() <= 2 * sum(error[name] for error in errors)


@sweep(20)
@given(case=dense(PLAIN, CAUSAL, WINDOW), random=st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_gradients(case: Case, random: Any):
    case = replace(case, lengths_q=case.lengths_q[:1] * 3, lengths_k=case.lengths_k[:1] * 3)
    args = replace(case, group=1).arguments() | independent()
    do, _ = Upstream().gradients(args)
    order = random.sample(range(3), 3)
    found = gradients(args, do)
    permuted = gradients({**args, **{n: args[n][order] for n in TENSORS}}, do[order])
    assert same({name: x[order] for name, x in found.items()}, permuted)


# -- rows without keys, and values that are not finite


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CAUSAL, SINK, VARLEN, WINDOW], ids=str)
@pytest.mark.parametrize("lengths", [(300, 40), (257, 1), (129, 128), (40, 0)], ids=str)
def test_rows_that_see_no_key(kind: Kind, lengths: tuple[int, int]):
    """Their dq is 0, bit for bit, and the sink's gradient has their dlse."""
    sq, sk = lengths
    if not sk and not kind.varlen_k:
        pytest.skip("a dense call without keys launches nothing")
    case = Case(kind, lengths_q=(sq, sq), lengths_k=(sk, sk), left=3, seed=8)
    args = case.arguments()
    do, dlse = Upstream(of_lse=True).gradients(args)
    found = gradients(args, do, dlse, on=ADVERSARIAL)
    unseen = ~visible(sq, sk, args["causal"], args["window_size"]).any(dim=1)
    assert unseen[: sq - sk].all()
    for at, _ in rows_of(args):
        assert exactly_zero(found["q"][at][unseen])
    assert_gradients_agree(args, found, do, dlse)


@pytest.mark.slow
@pytest.mark.parametrize("used", [(0,), (-3, 140, 0)], ids=str)
def test_sequences_without_a_used_key(used: tuple[int, ...]):
    """They have rows, but nothing in front of them is read."""
    case = Case(
        Kind(seqused_k=True), lengths_q=(20,) * len(used), lengths_k=(270,) * len(used),
        unused_k=tuple(270 - n for n in used), seed=7,
    )  # fmt: skip
    args = case.arguments()
    do, _ = Upstream().gradients(args)
    assert_gradients_agree(args, gradients(args, do), do)


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("kind", [CAPPED, USED], ids=["fp16", "bf16"])
def test_scores_that_saturate_the_softcap(kind: Kind, softcap: float, magnitude: float):
    """There the slope of the tanh, and with it the gradients of q and k, is 0.

    Of eight heads: the sink's gradient is a number for each, and where most slopes are 0, the
    largest error is that of one of few elements.
    """
    case = Case(
        kind, lengths_q=(70,), lengths_k=(140,), heads_k=8, left=90, softcap=softcap,
        magnitude=magnitude, seed=5,
    )  # fmt: skip
    args = case.arguments()
    do, dlse = Upstream(of_lse=True).gradients(args)
    found = gradients(args, do, dlse)
    assert_gradients_agree(args, found, do, dlse)


@pytest.mark.slow
def test_slopes_of_the_softcap_too_small_for_float16():
    """P times the slope is at most 1e-5, and dS a multiple of it that float16 can say."""
    case = Case(
        CAPPED, lengths_q=(70,), lengths_k=(140,), heads_k=8, left=90, softcap=500.0,
        magnitude=1e5, seed=5,
    )  # fmt: skip
    args = case.arguments()
    do, _ = Upstream().gradients(args)
    found = gradients(args, do)
    assert_gradients_agree(args, found, do)


@pytest.mark.slow
@pytest.mark.parametrize("capped", [False, True], ids=["", "softcap"])
def test_probabilities_too_small_for_float16(capped: bool):
    """As those of long rows are: here nearly all of each row is the sink's."""
    kind = Kind(dtype=torch.float16, sink=torch.float32, softcap=capped)
    case = Case(kind, lengths_q=(70,), lengths_k=(140,), heads_k=2, softcap=50.0, seed=5)
    args = case.arguments()
    args["learnable_sink"].fill_(13.0)
    do, _ = Upstream().gradients(args)
    found = gradients(args, do)
    assert_gradients_agree(args, found, do)


@pytest.mark.slow
@pytest.mark.parametrize("tilt", [1.0, 8.0])
@pytest.mark.parametrize(
    ("magnitude", "scale"), [(1e4, None), (1e10, None), (1.0, 1e8), (1e-20, None), (1e-3, 100.0)]
)
def test_large_and_small_scores(magnitude: float, scale: float | None, tilt: float):
    case = Case(
        WINDOW, lengths_q=(130,), lengths_k=(300,), left=150, scale=scale, magnitude=magnitude,
        tilt=tilt, seed=3,
    )  # fmt: skip
    args = case.arguments()
    do, _ = Upstream().gradients(args)
    assert_gradients_agree(args, gradients(args, do), do)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("magnitude", [10.0, 1e3, 1e4])
@pytest.mark.parametrize("tilt", [1.0, 8.0])
def test_large_scores_without_a_mask(dtype: torch.dtype, magnitude: float, tilt: float):
    """With one multiply-add for an exponent, the gradient of v errs by up to 18 times the plain
    error."""
    kind = replace(PLAIN, dtype=dtype)
    case = Case(kind, lengths_q=(128,), lengths_k=(256,), magnitude=magnitude, tilt=tilt, seed=3)
    args = case.arguments()
    do, _ = Upstream().gradients(args)
    assert_gradients_agree(args, gradients(args, do), do)


SPECIAL = [
    *itertools.product(("q", "k", "v", "do"), (math.nan, math.inf)),
    ("k", -math.inf),
    ("lse", math.nan),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), SPECIAL, ids=str)
def test_special_values_that_every_row_sees_propagate_like_the_definition(name: str, value: float):
    """Without a mask, gradients are NaN or infinite exactly where those of the definition are."""
    case = Case(PLAIN, lengths_q=(130,), lengths_k=(200,), seed=5)
    args = case.arguments()
    do, dlse = Upstream(of_lse=True).gradients(args)
    assert dlse is not None
    args["q"][..., 0] = args["q"][..., 0].abs() + 0.1
    if name == "lse":
        dlse[0, 0, 77] = value
    else:
        tensors = {**args, "do": do}
        tensors[name][0, 77, 0, 0] = value
    found = gradients(args, do, dlse, on=ADVERSARIAL)
    exact = exact_gradients(args, do, dlse)
    for tensor, gradient in found.items():
        true = exact[tensor]
        assert true is not None
        assert torch.equal(gradient.isfinite(), true.isfinite()), tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_a_nan_stays_in_its_head_and_sequence(name: str):
    """Within them it may reach hidden pairs that share a tile with it."""
    args = Case(CAUSAL, lengths_q=(140,) * 2, lengths_k=(150,) * 2, heads_k=2, seed=9).arguments()
    do, _ = Upstream().gradients(args)
    clean = gradients(args, do)
    tensors = {**args, "do": do}
    tensors[name] = tensors[name].clone()
    tensors[name][0, 70, 0, 3] = math.nan
    changed_do = tensors.pop("do")
    found = gradients(tensors, changed_do)
    assert found["q"][0, :, 0].isnan().any()
    for tensor, gradient in found.items():
        assert torch.equal(gradient[1], clean[tensor][1])
        assert torch.equal(gradient[0, :, 1], clean[tensor][0, :, 1])


# -- sizes


@pytest.mark.slow
def test_more_sequences_than_a_warp_has_lanes():
    lengths = tuple(itertools.islice(itertools.cycle((1, 0, 3, 2, 0, 1)), 75))
    keys = tuple(1 + n % 5 for n in range(75))
    kind = Kind(window_right=True, varlen_q=True, varlen_k=True, sink=torch.float32)
    args = Case(kind, lengths, keys, group=2, seed=4).arguments()
    do, dlse = Upstream(of_lse=True).gradients(args)
    for scheduler in ("static", "clc"):
        found = gradients(args, do, dlse, scheduler, Machine(9, spurious_cancel=True))
        assert_gradients_agree(args, found, do, dlse)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["static", "clc"])
def test_many_more_tiles_than_clusters(scheduler: str):
    args = Case(CAUSAL, lengths_q=(5,) * 5, lengths_k=(7,) * 5, heads_k=7).arguments()
    do, _ = Upstream().gradients(args)
    for machine in (ADVERSARIAL, Machine(9, spurious_cancel=True)):
        found = gradients(args, do, None, scheduler, machine)
        assert_gradients_agree(args, found, do)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_tensors_beyond_two_to_the_31_elements(name: str):
    """Two sequences that lie further apart than 32 bits can say. Memory not touched costs none."""
    args = Case(PLAIN, lengths_q=(3,) * 2, lengths_k=(140,) * 2).arguments()
    do, _ = Upstream().gradients(args)
    near = {**args, "do": do}
    x = near[name]
    apart = 2**31 + 2**16
    memory = torch.empty(apart + x[0].numel(), dtype=x.dtype)
    far = memory.as_strided(x.shape, (apart, *x.stride()[1:]))
    far.copy_(x)
    moved = {**near, name: far}
    moved_do = moved.pop("do")
    assert same(gradients(args, do), gradients(moved, moved_do))


@pytest.mark.slow
def test_rows_of_no_sequence_do_not_matter():
    """They hold NaN in every other test: here they hold something else."""
    case = Case(
        USED, lengths_q=(150, 70), lengths_k=(200, 90), unused_q=(30, 0), unused_k=(0, 41),
        left=60, softcap=5.0, tail=20, seed=6,
    )  # fmt: skip
    args = case.arguments()
    do, dlse = Upstream(of_lse=True).gradients(args)
    finite = {name: args[name].nan_to_num(3.0) for name in TENSORS}
    first = gradients(args, do, dlse)
    assert same(first, gradients(args, do.nan_to_num(3.0), dlse.nan_to_num(3.0), **finite))
