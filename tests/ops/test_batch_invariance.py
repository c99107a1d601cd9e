"""A request's bits do not depend on the batch: `batch_invariant` of the attention functions, and
the other operators, which need no argument for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import heuristics
from cute_attn.kernels.attention.configs import SM90, shapes
from cute_attn.ops.attention import plan_attention

from .attention_cases import (
    FULL,
    SM90_HEAD_DIMS,
    Machine,
    Target,
    allocate,
    is_known,
    on_target,
    target,
)
from .attention_gradient_cases import poisoned

GROUP, HEADS_K = 2, 2
PAGE = 16
MACHINE = Machine()


class Prompt(NamedTuple):
    """A sequence's `q`, `[queries, heads, head_dim]`, `k` and `v`, and the gradient of its o."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def prompt(queries: int, keys: int, seed: int = 0) -> Prompt:
    """A prompt whose scores grow from the last keys to the first, so that references move."""
    generator = torch.Generator().manual_seed(seed * 10_007 + queries * 101 + keys)
    head_dim, head_dim_v = target().head_dim, target().head_dim_v

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    growth = torch.linspace(5.0, 0.2, keys)[:, None, None]
    return Prompt(
        2 * normal(queries, GROUP * HEADS_K, head_dim).bfloat16(),
        (2 * growth * normal(keys, HEADS_K, head_dim)).bfloat16(),
        normal(keys, HEADS_K, head_dim_v).bfloat16(),
        normal(queries, GROUP * HEADS_K, head_dim_v).bfloat16(),
    )


def offsets(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=torch.int32)


def packed(prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Arguments of packed sequences, with rows of NaN behind the last."""

    def rows(name: str) -> Tensor:
        parts = [getattr(p, name) for p in prompts]
        total = sum(map(len, parts))
        whole = allocate((total + 9, *parts[0].shape[1:]), torch.bfloat16, "contiguous", "k")
        torch.cat(parts, out=whole[:total])
        return whole

    return {name: rows(name) for name in ("q", "k", "v")} | {
        "cu_seqlens_q": offsets(len(p.q) for p in prompts),
        "cu_seqlens_k": offsets(len(p.k) for p in prompts),
    }


def in_cache(prompts: Sequence[Prompt], room: int, pages: bool = False) -> dict[str, Tensor]:
    """Arguments of packed queries with a KV cache of `room` keys for each sequence, or in pages."""
    room = -(-room // PAGE) * PAGE
    args = packed(prompts)
    del args["cu_seqlens_k"]
    for name in ("k", "v"):
        shape = (len(prompts), room, *args[name].shape[1:])
        args[name] = allocate(shape, torch.bfloat16, "contiguous", "k")
        for own, p in zip(args[name], prompts, strict=True):
            own[: len(p.k)] = getattr(p, name)
    args["seqused_k"] = torch.tensor([len(p.k) for p in prompts], dtype=torch.int32)
    if pages:
        order = torch.arange(len(prompts) * room // PAGE, dtype=torch.int32).flip(0)
        for name in ("k", "v"):
            x = args[name].view(-1, PAGE, *args[name].shape[2:])
            args[name] = torch.empty_like(x)
            args[name][order.long()] = x
        args["page_table"] = order.view(len(prompts), -1)
    return args


def attend(
    args: dict[str, Any], on: Machine = MACHINE, **options: Any
) -> list[tuple[Tensor, Tensor | None]]:
    """(o, lse) of each sequence, with `batch_invariant` and all checks of the emulator."""
    emulator = Emulator(num_sms=on.num_sms, schedule=on.schedule, seed=on.seed)
    options = {"causal": True, "batch_invariant": True, "return_lse": True} | options
    with cute_attn.emulated(target().arch, emulator):
        o, lse = cute_attn.flash_attn_varlen_func(**args, **options)
    assert all(map(is_known, emulator.report.findings)), emulator.report
    of_sequences = itertools.pairwise(args["cu_seqlens_q"].tolist())
    return [(o[a:b], None if lse is None else lse[:, a:b]) for a, b in of_sequences]


def assert_same(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> None:
    """Bit for bit, as far as both have a log-sum-exp."""
    assert len(one[0]) == len(other[0])
    for x, y in zip(one, other, strict=True):
        if x is not None and y is not None:
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@contextmanager
def splits_of(keys: int) -> Iterator[None]:
    """Short splits, so that short sequences have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heuristics, "INVARIANT_SPLIT", keys)
        cute_attn.reload_settings()  # forgets plans of other splits
        yield
    cute_attn.reload_settings()


# -- attention

HEAD_DIMS = [64, *(pytest.param(n, marks=pytest.mark.slow) for n in SM90_HEAD_DIMS if n != 64)]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", SM90_HEAD_DIMS)
def test_alone_as_in_a_batch(head_dim: int):
    """In any order, with other hints, with and without a log-sum-exp, in a cache and in pages."""
    with on_target(Target("sm_90a", head_dim)):
        prompts = [prompt(70, 150), prompt(1, 140), prompt(3, 3)]
        batch = attend(packed(prompts), max_seqlen_q=500)
        for i, own in enumerate(prompts):
            assert_same(batch[i], attend(packed([own]), max_seqlen_q=len(own.q))[0])
        (last, first) = attend(packed([prompts[2], prompts[0]]), return_lse=False)
        assert_same(batch[2], last)
        assert_same(batch[0], first)
        for pages in (False, True):
            assert_same(batch[1], attend(in_cache(prompts[1:], 200, pages), max_seqlen_q=3)[0])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_chunks_and_decode_as_a_whole_prompt(head_dim: int):
    """With chunks of any length, and beside another prompt. Tokens around the K/V tiles' bound see
    few keys of the last tile, so their references move in the tile before, where other rows of a
    warp see a key for the first time."""
    with on_target(Target("sm_90a", head_dim)):
        whole, other = prompt(150, 150), prompt(20, 70)
        ((o, lse), _) = attend(in_cache([whole, other], 150), max_seqlen_q=150)
        assert lse is not None
        for chunks, most in (((0, 37, 101, 150), 500), ((129, 130, 135), 8)):
            for a, b in itertools.pairwise(chunks):
                part = Prompt(whole.q[a:b], whole.k[:b], whole.v[:b], whole.do[a:b])
                (own,) = attend(in_cache([part], 150), max_seqlen_q=most)
                assert_same((o[a:b], lse[:, a:b]), own)


@pytest.mark.slow
@pytest.mark.parametrize("sink", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "on", [Target("sm_90a", 64), pytest.param(Target("sm_100a", 256), marks=pytest.mark.slow)]
)
def test_splits_of_fixed_length(on: Target, sink: bool):
    """A decode step of a sequence alone, and beside a longer sequence, whose keys take more
    splits."""
    with on_target(on), splits_of(128):
        options: dict[str, Any] = {"num_splits": 0, "max_seqlen_q": 2}
        if sink:
            options["learnable_sink"] = torch.linspace(-1, 9, GROUP * HEADS_K)
        short, long = prompt(1, 300), prompt(2, 520)
        batch = attend(in_cache([long, short, prompt(1, 20)], 900), **options)
        alone = attend(in_cache([short], 300), **options, max_seqlen_k=300)
        assert_same(batch[1], alone[0])
        assert_same(batch[0], attend(in_cache([long], 600), Machine(num_sms=9), **options)[0])
        whole = attend(in_cache([short], 300), **options | {"num_splits": 1})
        assert torch.allclose(alone[0][0].float(), whole[0][0].float(), atol=0.02)


def test_splits_follow_from_the_call_alone():
    """Neither from the number of sequences nor from the GPU; long prompts have none."""
    fixed = {"window_left": None, "sink": False, "most": 256}
    splits = heuristics.invariant_splits
    assert splits(seqlen_k=1, few=True, **fixed) == 1
    assert splits(seqlen_k=5000, few=True, **fixed) == 5
    assert splits(seqlen_k=5000, few=False, **fixed) == 1
    assert splits(seqlen_k=10**6, few=True, **fixed) == 256
    assert splits(seqlen_k=5000, few=True, **fixed | {"window_left": 1000}) == 1
    assert splits(seqlen_k=5000, few=True, **fixed | {"window_left": 5000}) == 5
    assert splits(seqlen_k=5, few=True, **fixed | {"sink": True}) == 2
    for dims in shapes("forward", SM90):
        ((_, spec), _) = plan_attention(
            "sm_90a", head_dim=dims[0], head_dim_v=dims[1], short=True, few=True, seqused_k=True,
            num_splits=2, batch_invariant=True,
        )  # fmt: skip
        assert spec.split_key_tiles * spec.tile_n == heuristics.INVARIANT_SPLIT


def gradients(prompts: Sequence[Prompt], **options: Any) -> list[tuple[Tensor, ...]]:
    """dq, dk and dv of each sequence."""
    args = packed(prompts)
    leaves = [args[name].requires_grad_() for name in ("q", "k", "v")]
    do = torch.zeros(len(args["q"]), *prompts[0].do.shape[1:], dtype=torch.bfloat16)
    torch.cat([p.do for p in prompts], out=do[: -9 or None])
    emulator = Emulator(num_sms=4)
    with cute_attn.emulated(target().arch, emulator), poisoned():
        o, _ = cute_attn.flash_attn_varlen_func(
            **args, causal=True, batch_invariant=True, **options
        )
        torch.autograd.backward([o], [do])
    assert all(map(is_known, emulator.report.findings)), emulator.report
    of_q, of_k = (itertools.pairwise(args[f"cu_seqlens_{x}"].tolist()) for x in "qk")
    dq, dk, dv = (leaf.grad for leaf in leaves)
    return [(dq[a:b], dk[c:d], dv[c:d]) for (a, b), (c, d) in zip(of_q, of_k, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "on", [*(Target("sm_90a", n) for n in (64, 128, 192, 256)), Target("sm_100a", 256)]
)
def test_gradients_alone_as_in_a_batch(on: Target):
    with on_target(on):
        prompts = [prompt(40, 140), prompt(70, 70)]
        batch = gradients(prompts)
        for i, own in enumerate(prompts):
            (alone,) = gradients([own], max_seqlen_q=len(own.q))
            for x, y in zip(batch[i], alone, strict=True):
                assert torch.equal(x, y)
                assert x.any()


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", SM90_HEAD_DIMS)
@settings(max_examples=60 if FULL else 10)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 2, 8, 33, 130]), st.sampled_from([0, 1, 15, 100, 300])),
        min_size=2,
        max_size=4,
    ),
    window=st.sampled_from([(None, None), (3, None), (100, None), (None, 0), (40, 7)]),
    softcap=st.sampled_from([0.0, 20.0]),
    num_splits=st.sampled_from([0, 1]),
    room=st.integers(430, 900),
    num_sms=st.sampled_from([1, 3, 20]),
    seed=st.integers(0, 2**20),
)
def test_any_batch(
    head_dim: int, lengths: list[tuple[int, int]], window: tuple[int | None, int | None],
    softcap: float, num_splits: int, room: int, num_sms: int, seed: int,
):  # fmt: skip
    """Sequences with one and with many queries, so also calls with few and with many rows. With
    splits, all calls have few rows."""
    if num_splits == 0:
        lengths = [(min(q, 8), k) for q, k in lengths]
    most = 8 if num_splits == 0 else 200
    options = {
        "causal": window == (None, None), "window_size": window, "softcap": softcap,
        "num_splits": num_splits,
    }  # fmt: skip
    with on_target(Target("sm_90a", head_dim)), splits_of(128):
        prompts = [prompt(q, q + k, seed + i) for i, (q, k) in enumerate(lengths)]
        on = Machine(num_sms=num_sms, seed=seed % 1000)
        batch = attend(in_cache(prompts, room), on, max_seqlen_q=most, **options)
        for i, own in enumerate(prompts):
            (alone,) = attend(in_cache([own], len(own.k)), max_seqlen_q=len(own.q), **options)
            assert_same(batch[i], alone)


@pytest.mark.slow
def test_a_whole_prompt_on_blackwell():
    with on_target(Target("sm_100a", 256)):
        prompts = [prompt(70, 150), prompt(1, 140)]
        batch = attend(packed(prompts), max_seqlen_q=500)
        for i, own in enumerate(prompts):
            assert_same(batch[i], attend(packed([own]), max_seqlen_q=len(own.q))[0])
        part = Prompt(*(x[33:] for x in prompts[0][:1]), *prompts[0][1:])
        (own_lse,) = attend(in_cache([part], 150), max_seqlen_q=37)
        assert_same((batch[0][0][33:], batch[0][1][:, 33:]), own_lse)


# -- refusals


def test_what_depends_on_the_batch_is_refused():
    with on_target(Target("sm_90a", 64)):
        args = in_cache([prompt(1, 20)], 20)
        with pytest.raises(ValueError, match="num_splits is 3 with batch_invariant, must be 1"):
            attend(args, num_splits=3)
        with pytest.raises(ValueError, match="max_seqlen_q is not given as an int"):
            attend(args, num_splits=0)
        with pytest.raises(TypeError, match="batch_invariant"):
            attend(args, batch_invariant="yes")


# -- linear attention


def halves(x: Tensor, at: int) -> tuple[Tensor, Tensor]:
    return x[:, :at].contiguous(), x[:, at:].contiguous()


@pytest.mark.slow
def test_chunked_kda_alone_as_in_a_batch(monkeypatch: pytest.MonkeyPatch):
    """Without split sequences. A sequence may be cut at multiples of 64 tokens, as its state is
    float32."""
    monkeypatch.setenv("CUTE_ATTN_KDA_SPLIT", "0")
    cute_attn.reload_settings()
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lengths = (70, 140, 3)
    total = sum(lengths)
    rows = {
        "q": normal(1, total, 2, 64).bfloat16(),
        "k": normal(1, total, 2, 64).bfloat16(),
        "v": normal(1, total, 2, 64).bfloat16(),
        "g": -normal(1, total, 2, 64).abs(),
        "beta": torch.rand(1, total, 2, generator=generator).bfloat16(),
    }
    starts = offsets(lengths)
    first = normal(3, 2, 64, 64)

    def run(a: int, b: int, state: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
        emulator = Emulator(num_sms=4)
        with cute_attn.emulated("sm_90a", emulator):
            o, last = cute_attn.chunk_kda(
                **{name: x[:, a:b].contiguous() for name, x in rows.items()},
                initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
                cu_seqlens=cuts,
            )  # fmt: skip
        assert not emulator.report.findings
        assert last is not None
        return o, last

    try:
        batch, states = run(0, total, first, starts)
        for i, (a, b) in enumerate(itertools.pairwise(starts.tolist())):
            o, last = run(a, b, first[i : i + 1], offsets([b - a]))
            assert torch.equal(o, batch[:, a:b])
            assert torch.equal(last[0], states[i])
        a, b = lengths[0], lengths[0] + lengths[1]
        o1, middle = run(a, a + 64, first[1:2], offsets([64]))
        o2, last = run(a + 64, b, middle, offsets([b - a - 64]))
        assert torch.equal(torch.cat([o1, o2], 1), batch[:, a:b])
        assert torch.equal(last[0], states[1])
    finally:
        monkeypatch.undo()
        cute_attn.reload_settings()


@pytest.mark.parametrize("operator", ["fused_recurrent_kda", "lightning_attn_decode"])
def test_decode_alone_as_in_a_batch(operator: str):
    """In any order, and beside any other states."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    batch = 5
    rows = {name: normal(batch, 1, 2, 64).bfloat16() for name in ("q", "k", "v")}
    if operator == "fused_recurrent_kda":
        rows |= {"g": -normal(batch, 1, 2, 64).abs(), "beta": torch.rand(batch, 1, 2).bfloat16()}
    pool = normal(batch, 2, 64, 64)
    decay = torch.tensor([0.5, 0.9])

    def run(order: list[int]) -> tuple[Tensor, Tensor]:
        own = {name: x[order].contiguous() for name, x in rows.items()}
        state = pool[order].clone()
        emulator = Emulator(num_sms=4)
        with cute_attn.emulated("sm_90a", emulator):
            if operator == "fused_recurrent_kda":
                o, last = cute_attn.fused_recurrent_kda(
                    **own, initial_state=state, output_final_state=True
                )
                assert last is not None
                state = last
            else:
                o = cute_attn.lightning_attn_decode(**own, state=state, decay=decay)
        assert not emulator.report.findings
        return o, state

    o, states = run([*range(batch)])
    for order in ([3], [4, 0, 2]):
        own, own_states = run(order)
        assert torch.equal(own, o[order])
        assert torch.equal(own_states, states[order])
