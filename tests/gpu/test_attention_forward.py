"""Softmax attention's forward on a GPU, at real sizes; tests/ops has its properties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn import cache
from cute_attn.kernels.attention import table
from cute_attn.ops.attention.support import page_step
from tests.ops import attention_grid as grid
from tests.ops.attention_cases import (
    CACHE,
    CAPPED,
    CAUSAL,
    FULL,
    PACKED_HEADS,
    PLAIN,
    SOME,
    USED,
    VARLEN,
    WINDOW,
    Case,
    Kind,
    Target,
    assert_agrees,
    head_dim_v_of,
    on_target,
    same,
)
from tests.ops.test_attention_pages import in_pages, of_kind
from tests.ops.test_attention_pieces import of_steps, steps_of_lengths
from tests.ops.test_batch_invariance import Prompt, in_cache, packed, prompt

ARCH = cache.current_arch() if torch.cuda.is_available() else "sm_90a"
HEAD_DIMS = table.head_dims("forward", (ARCH,))

pytestmark = [
    pytest.mark.skipif(not HEAD_DIMS, reason="there is no kernel for this GPU"),
    pytest.mark.usefixtures("no_gradients"),
]


# Tests that take long run at some head dimensions, and at all of them as slow tests.
at_some_head_dims = pytest.mark.parametrize(
    "head_dim",
    [
        pytest.param(dim, marks=() if dim in (64, 256, 576) else pytest.mark.slow)
        for dim in HEAD_DIMS or [256]
    ],
    indirect=True,
)


@pytest.fixture(scope="module", params=HEAD_DIMS or [256])
def head_dim(request: pytest.FixtureRequest) -> Iterator[int]:
    with on_target(Target(ARCH, request.param)):
        yield request.param


def on_gpu(args: dict[str, Any]) -> dict[str, Any]:
    """Strides and all: a view moves with the memory that it is a view of."""
    moved = {}
    for name, x in args.items():
        if isinstance(x, torch.Tensor):
            whole = (x if x._base is None else x._base).cuda()
            x = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        moved[name] = x
    return moved


def call(args: dict[str, Any], **options: Any) -> Any:
    varlen = any(name.startswith(("cu_", "seqused_")) for name in args)
    function = cute_attn.flash_attn_varlen_func if varlen else cute_attn.flash_attn_func
    return function(**args | options)


LARGE = {
    "dense": Case(PLAIN, (3000,), (3000,), heads_k=4),
    "causal, grouped": Case(CAUSAL, (2049,) * 2, (4100,) * 2, heads_k=2, group=3),
    "window": Case(WINDOW, (2500,), (2500,), heads_k=4, left=700, right=3),
    "packed sequences": Case(VARLEN, (1, 0, 1500, 700), (900, 300, 1500, 1701), heads_k=4, tail=9),
    "packed heads": Case(PACKED_HEADS, (100,), (5000,), heads_k=3, group=4),
    "decode": Case(CACHE, (1, 3, 0, 2) * 8, (3000,) * 32, (), (0, 2999, 17, 3000) * 8, 4, 2),
    "softcap": Case(CAPPED, (1100,), (1300,), heads_k=3, left=900, softcap=20.0),
    "used": Case(USED, (900, 70), (1000, 300), (100, 0), (3, 299), 4, left=400),
}


@pytest.mark.parametrize("name", LARGE)
def test_agrees_with_the_reference(head_dim: int, name: str):
    args = on_gpu(LARGE[name].arguments())
    first = call(args)
    assert_agrees(args, *first)
    for _ in range(5):
        assert same(args, first, call(args))


@settings(max_examples=100 if FULL else 10)
@given(
    kind=st.sampled_from(SOME),
    lengths=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=1, max_size=4),
    group=st.sampled_from([1, 3]),
    left=st.integers(0, 500),
    tilt=st.sampled_from([1.0, 8.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    head_dim: int, kind: Kind, lengths: list[tuple[int, int]], group: int, **rest: Any
):
    def of(side: int, varlen: bool) -> tuple[int, ...]:
        values = [max(1, pair[side]) for pair in lengths]
        return tuple(pair[side] for pair in lengths) if varlen else (values[0],) * len(values)

    case = Case(
        kind, of(0, kind.varlen_q), of(1, kind.varlen_k), group=group * kind.packed_heads, **rest
    )
    args = on_gpu(case.arguments())
    assert_agrees(args, *call(args))


@pytest.mark.parametrize("page_size", [1, 4, 16, 33, 64, 256])
def test_pages_change_no_bit(head_dim: int, page_size: int):
    if page_size % page_step(torch.device("cuda")):
        pytest.skip("the kernel for this GPU takes multiples of 16")
    case = of_kind(Kind(seqused_k=True, window_right=True), (3000, 1, 0, 777), 70, heads_k=3)
    args = case.arguments()
    whole = call(on_gpu(args))
    assert_agrees(on_gpu(args), *whole)
    assert same(args, whole, call(on_gpu(in_pages(args, page_size, 0))))


@pytest.mark.parametrize("splits", [0, 2, 7, 128])
def test_splits(head_dim: int, splits: int):
    args = on_gpu(LARGE["decode"].arguments())
    first = call(args, num_splits=splits)
    assert_agrees(args, *first)
    assert same(args, first, call(args, num_splits=splits))
    args = on_gpu(Case(CAUSAL, (130,), (9000,), heads_k=2).arguments())
    assert_agrees(args, *call(args, num_splits=splits))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["causal, grouped", "decode", "packed heads"])
def test_out_gets_the_same_bits(head_dim: int, name: str, splits: int):
    args = on_gpu(LARGE[name].arguments())
    expected = call(args, num_splits=splits)
    head_dim_v = head_dim_v_of(head_dim)
    whole = torch.full((*args["q"].shape[:-1], head_dim_v + 8), torch.nan, device="cuda")
    out = whole.to(args["q"].dtype)[..., :head_dim_v]
    for to in (out, torch.full_like(out, torch.nan, memory_format=torch.contiguous_format)):
        for _ in range(2):  # the first call is cold
            result = call(args, num_splits=splits, out=to)
            assert result[0] is to and same(args, expected, result)
    assert out._base is not None and out._base[..., head_dim_v:].isnan().all()


# -- FlashAttention-4's grids, whole or drawn from: see attention_grid


@pytest.mark.slow
@pytest.mark.parametrize("shape", grid.DENSE_SHAPES, ids=str)
def test_the_dense_grid(head_dim: int, shape: tuple[int, int]):
    for point in grid.drawn(grid.dense_points(shape)):
        grid.check(point, head_dim, "cuda", call)


@pytest.mark.slow
@pytest.mark.parametrize("shape", grid.VARLEN_SHAPES, ids=str)
def test_the_grid_of_packed_sequences(head_dim: int, shape: tuple[int, int]):
    for point in grid.drawn(grid.varlen_points(shape)):
        grid.check(point, head_dim, "cuda", call)


@pytest.mark.slow
@pytest.mark.parametrize("shape", grid.CACHE_SHAPES, ids=str)
def test_the_grid_of_caches(head_dim: int, shape: tuple[int, int]):
    step = page_step(torch.device("cuda"))
    points = [point for point in grid.cache_points(shape) if point.page_size % step == 0]
    for point in grid.drawn(points):
        grid.check(point, head_dim, "cuda", call)


@pytest.mark.slow
@pytest.mark.parametrize("point", grid.PAGED_POINTS, ids=str)
def test_the_grid_of_pages(point: grid.Point):
    with on_target(Target(ARCH, 256)):
        grid.check(point, 256, "cuda", call)


LATENT_SHAPES = (
    (1, 1), (3, 3), (3, 128), (128, 3), (256, 256), (1025, 255), (255, 1025), (1024, 1024),
    (1023, 1024), (1024, 1023), (2048, 2048), (1, 8192), (4096, 4096),
)  # fmt: skip


@pytest.mark.skipif(
    not table.has("forward", ARCH, 576, 512), reason="there is no kernel for this GPU"
)
@pytest.mark.parametrize("columns", [576, 512])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(x, id=str(x), marks=pytest.mark.slow if n % 6 else ())
        for n, x in enumerate(LATENT_SHAPES)
    ],
)
def test_the_cases_of_absorbed_latent_attention(shape: tuple[int, int], causal: bool, columns: int):
    """The shapes, heads, sinks and splits of FlashAttention-4's tests/cute/test_flash_attn_mla.py:
    v is a view of k, with 64 columns less or all of k's, and all heads share one K/V head."""
    queries, keys = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        found = torch.randn(shape, generator=generator, device="cuda")
        return found.bfloat16()

    for heads, sink in ((16, False), (128, True)):
        if queries * keys * heads > 2**28:
            continue
        batch = max(1, min(12, 2**26 // (queries * keys * heads)))  # the reference is in float64
        k = normal(batch, keys, 1, columns)
        args = {
            "q": normal(batch, queries, heads, columns), "k": k, "v": k[..., :512],
            "causal": causal,
        }  # fmt: skip
        if sink:
            args["learnable_sink"] = normal(heads)
        for splits in (1, 3):
            found = call(args, num_splits=splits, return_lse=True)
            assert_agrees(args, *found)
            assert same(args, found, call(args, num_splits=splits, return_lse=True))


def test_streams_do_not_share_tiles(head_dim: int):
    """Launches that overlap have counters of their own."""
    cases = [Case(CAUSAL, (1500,), (1500,), heads_k=6, seed=seed) for seed in range(3)]
    given = [on_gpu(case.arguments()) for case in cases]
    expected = [call(args) for args in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in given]
    for _ in range(20):
        for args, stream, found in zip(given, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(call(args))
    torch.cuda.synchronize()
    for args, one, found in zip(given, expected, results, strict=True):
        assert all(same(args, one, other) for other in found)


@at_some_head_dims
def test_bits_do_not_depend_on_the_batch(head_dim: int):
    """At real sizes: alone and in a batch, in chunks, and in decode with splits."""
    lengths = [(700, 1500), (1, 4000), (3000, 3000), (65, 65)]
    prompts = [prompt(*n) for n in lengths]
    options = {"causal": True, "batch_invariant": True}

    def bits(args: dict[str, Any], **more: Any) -> list[torch.Tensor]:
        o, _ = call(on_gpu(args), **options | more)
        starts = args["cu_seqlens_q"].tolist()
        return [o[a:b].view(torch.int16) for a, b in itertools.pairwise(starts)]

    batch = bits(packed(prompts), max_seqlen_q=3000, return_lse=True)
    for i, own in enumerate(prompts):
        for lse in (True, False):
            (alone,) = bits(packed([own]), max_seqlen_q=len(own.q), return_lse=lse)
            assert torch.equal(alone, batch[i])
    whole = prompts[2]
    for a, b in itertools.pairwise((0, 777, 1500, 1501, 2990, 3000)):
        part = Prompt(whole.q[a:b], whole.k[:b], whole.v[:b], whole.do[a:b])
        (chunk,) = bits(in_cache([part], 3000), max_seqlen_q=b - a)
        assert torch.equal(chunk, batch[2][a:b])
    steps = [prompt(1, n) for n in (5000, 1, 1024, 1025, 3000)]
    decode = {"num_splits": 0, "max_seqlen_q": 1}
    batch = bits(in_cache(steps, 9000), **decode)
    for i, own in enumerate(steps):
        assert torch.equal(bits(in_cache([own], len(own.k)), **decode)[0], batch[i])


@pytest.mark.parametrize("splits", [1, 0])
def test_a_graph_follows_lengths_and_pages(head_dim: int, splits: int):
    """Captured once, it serves other lengths and another page table. Two graphs overlap."""
    lengths = [(900, 30, 512), (1, 1000, 0)]
    calls = [
        in_pages(of_kind(Kind(seqused_k=True), n, 1, heads_k=2, group=1).arguments(), 64, seed)
        for seed, n in enumerate(lengths)
    ]
    pages = max(len(args["k"]) for args in calls)
    columns = max(args["page_table"].shape[1] for args in calls)
    for args in calls:
        for name in ("k", "v"):
            args[name] = torch.nn.functional.pad(args[name], (0,) * 7 + (pages - len(args[name]),))
        more = columns - args["page_table"].shape[1]
        args["page_table"] = torch.nn.functional.pad(args["page_table"], (0, more), value=-7)
    first, second = map(on_gpu, calls)
    expected = [[x.clone() for x in call(args, num_splits=splits)] for args in (first, second)]
    buffers = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in first.items()}
    graphs, results = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(call(buffers, num_splits=splits))
        graphs.append(graph)
    for args, true in zip((first, second), expected, strict=True):
        for name, x in args.items():
            if isinstance(x, torch.Tensor):
                buffers[name].copy_(x)
        torch.cuda.synchronize()
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        torch.cuda.synchronize()
        for found in results:
            assert all(map(torch.equal, found, true))


@pytest.mark.skipif(not ARCH.startswith("sm_90"), reason="only Hopper has pieces")
@at_some_head_dims
@pytest.mark.parametrize(("batch", "examples"), [(2, 20), (40, 10), (300, 3)])
def test_a_graph_with_pieces_follows_any_lengths(head_dim: int, batch: int, examples: int):
    """Also none, all keys in one sequence, and more sequences than CTAs. The counters must be 0
    after each replay, or the next replay is wrong."""

    @settings(max_examples=5 * examples if FULL else examples)
    @given(steps=steps_of_lengths(batch, 3000 if batch < 10 else 200), seed=st.integers(0, 2**20))
    def follows(steps: list[list[int]], seed: int) -> None:
        whole, calls = ([on_gpu(args) for args in found] for found in of_steps(steps, 2, seed))
        buffers = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in calls[0].items()}
        call(buffers, num_splits=0)  # loads the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call(buffers, num_splits=0)

        def replay(args: dict[str, Any]) -> Any:
            for name, x in args.items():
                if isinstance(x, torch.Tensor):
                    buffers[name].copy_(x)
            for x in found:
                x.fill_(math.nan)
            graph.replay()
            return tuple(x.clone() for x in found)

        results = [replay(args) for args in calls]
        for exact, result in zip(whole, results, strict=True):
            assert_agrees(exact, *result)
        for exact, args, result in reversed(list(zip(whole, calls, results, strict=True))):
            assert same(exact, result, replay(args))

    follows()


def test_compiled_code_and_no_synchronisation(head_dim: int):
    args = on_gpu(LARGE["decode"].arguments())
    expected = call(args)
    compiled = torch.compile(lambda: call(args), fullgraph=True)
    assert same(args, expected, compiled())
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(args)
        call(args, num_splits=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_combines_as_plain_pytorch_does():
    o, lse = torch.randn(9, 3, 200, 5, 128).cuda(), 4 * torch.randn(9, 3, 200, 5).cuda()
    out, found = cute_attn.flash_attn_combine(o, lse)
    for ours, true in (
        (found, lse.double().logsumexp(0)),
        (out, (lse.double().softmax(0)[..., None] * o.double()).sum(0)),
    ):
        assert (ours.double() - true).norm() <= 4 * torch.finfo(torch.float32).eps * true.norm()
