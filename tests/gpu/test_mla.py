"""Latent decode on a GPU: the cases of FlashMLA's own test, options at random, and CUDA graphs."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from cute_attn.kernels.mla.spec import ARCHS
from tests.ops.mla_cases import Case, assert_agrees, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason=f"the kernel is for {ARCHS}",
    ),
]

SEQUENCES, HEADS = 3, 4  # how many are compared with float64; the others repeat them


def lengths_of(batch: int, mean: int, varlen: bool, seed: int) -> tuple[int, ...]:
    """Lengths as in FlashMLA's tests: normal, with a few zeros."""
    if not varlen:
        return (mean,) * batch
    draw = random.Random(seed)
    found = [max(0, int(draw.gauss(mean, mean / 2))) for _ in range(batch)]
    return (0, *found[1:])


def part(args: dict[str, Any], o: torch.Tensor, lse: torch.Tensor) -> tuple[Any, ...]:
    """Some sequences and heads of a call and of its results."""
    heads = slice(None, None, max(1, o.shape[2] // HEADS))
    few = {name: args[name][:SEQUENCES] for name in ("block_table", "cache_seqlens")}
    for name in ("q_nope", "q_rope"):
        if args[name] is not None:
            few[name] = args[name][:SEQUENCES, :, heads]
    return args | few, o[:SEQUENCES, :, heads], lse[:SEQUENCES, heads]


@pytest.mark.parametrize("varlen", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize(("batch", "mean"), [(128, 1024), (32, 4096), (6, 16384)])
def test_shapes_of_flash_mla(batch: int, mean: int, heads: int, queries: int, varlen: bool) -> None:
    case = Case(lengths_of(batch, mean, varlen, heads + queries), queries, heads)
    args = case.arguments("cuda")
    for splits in (0, 1):
        o, lse = run(args, num_splits=splits)
        assert o.isfinite().all()
        assert_agrees(*part(args, o, lse))
        again = run(args, num_splits=splits)
        assert torch.equal(o, again[0]) and torch.equal(lse, again[1])


def check_as_flash_mla(
    batch: int, queries: int, heads: int, mean: int, *, ragged: bool, causal: bool, empty: bool,
) -> None:  # fmt: skip
    """A case of its tests/test_flash_mla_dense_decoding.py, in its call form: 512 + 64 columns,
    small numbers, pages of 64 tokens in random order. Unused rows hold NaN, and unused entries of
    the table no page's number. With `empty` about half of the sequences have no token."""
    draw = random.Random(str((batch, queries, heads, mean, ragged, causal)))
    generator = torch.Generator("cuda").manual_seed(draw.randrange(2**31))
    lengths = [mean] * batch
    if ragged:
        lengths = [max(int(draw.normalvariate(mean, mean / 2)), queries) for _ in lengths]
    if empty:
        lengths = [draw.choice([0, n]) for n in lengths]
    pages = 4 * -(-max(lengths) // 256)

    def normal(*shape: int) -> torch.Tensor:
        found = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return (found / 10).clamp_(-1, 1)

    q, cache = normal(batch, queries, heads, 576), normal(batch * pages, 64, 1, 576)
    table = torch.randperm(batch * pages, generator=generator, device="cuda").int()
    table = table.view(batch, pages)
    for own, n in zip(table, lengths, strict=True):
        used = -(-n // 64)
        cache[own[used:].long()] = math.nan
        if n % 64:
            cache[own[used - 1], n % 64 :] = math.nan
        own[used:] = 2147480000
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    plan, splits = get_mla_metadata()
    o, lse = flash_mla_with_kvcache(q, cache, table, seqlens, 512, plan, splits, causal=causal)
    args = {
        "q_nope": q[..., :512], "q_rope": q[..., 512:], "kv_cache": cache, "block_table": table,
        "cache_seqlens": seqlens, "softmax_scale": 576**-0.5, "causal": causal, "head_dim_v": 512,
    }  # fmt: skip
    assert o.isfinite().all()
    assert_agrees(*part(args, o, lse))


@pytest.mark.parametrize(
    ("heads", "queries"),
    [
        pytest.param(*x, marks=() if x in ((3, 1), (126, 4), (128, 2)) else pytest.mark.slow)
        for x in itertools.product((1, 3, 9, 63, 64, 126, 128), (1, 2, 4))
    ],
)
def test_the_correctness_cases_of_flash_mla(heads: int, queries: int) -> None:
    for batch, mean, ragged, causal in itertools.product(
        (1, 2, 6, 64), (20, 140, 4096), (False, True), (False, True)
    ):
        check_as_flash_mla(batch, queries, heads, mean, ragged=ragged, causal=causal, empty=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 126, 128])
def test_the_cases_of_flash_mla_with_empty_sequences(heads: int, causal: bool) -> None:
    check_as_flash_mla(128, 2, heads, 4096, ragged=True, causal=causal, empty=True)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("mean", [4096, 8192, 16384, 32768])
def test_the_timed_cases_of_flash_mla(mean: int, queries: int) -> None:
    for causal in (False, True):
        check_as_flash_mla(128, queries, 128, mean, ragged=True, causal=causal, empty=False)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("batch", "mean"), [(128, 1024), (6, 16384)])
def test_pages_of_one_token(batch: int, mean: int, heads: int, fp8: bool) -> None:
    case = Case(lengths_of(batch, mean, True, heads), 1, heads, page_size=1, fp8=fp8)
    args = case.arguments("cuda")
    o, lse = run(args)
    assert_agrees(*part(args, o, lse))
    again = run(args)
    assert torch.equal(o, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 60))]
)
def test_random_calls(seed: int) -> None:
    draw = random.Random(seed)
    head_dim, head_dim_v = draw.choice([(576, 512), (512, 512), (320, 256)])
    lengths = tuple(
        draw.choice([0, 1, 63, 64, 65, draw.randrange(5000)]) for _ in range(draw.randrange(1, 9))
    )
    case = Case(
        lengths, draw.randrange(1, 17), draw.choice([1, 3, 8, 12, 20, 128]),
        draw.choice([1, 1, 2, 7, 16, 32, 48, 64, 128, 256]), head_dim, head_dim_v,
        draw.choice([torch.bfloat16, torch.float16]), draw.random() < 0.7, seed=seed,
        **draw.choice([{}, {"fp8": True}, {"fp8": True, "descale": 0.3}]),
    )  # fmt: skip
    args = case.arguments("cuda")
    splits = draw.choice([0, 0, 1, 2, 13])
    o, lse = run(args, num_splits=splits)
    assert_agrees(*part(args, o, lse))
    if splits:  # the bits of a sequence do not depend on the batch
        alone = args | {
            name: args[name][-1:] for name in ("q_nope", "block_table", "cache_seqlens")
        }
        if args["q_rope"] is not None:
            alone["q_rope"] = args["q_rope"][-1:]
        assert torch.equal(run(alone, num_splits=splits)[0], o[-1:])


def test_a_long_sequence_is_added_up_in_groups() -> None:
    args = Case((131072,), heads=12).arguments("cuda")
    o, lse = run(args)
    assert_agrees(*part(args, o, lse))


def test_a_graph_holds_for_other_lengths() -> None:
    args = Case((1000, 2000, 64)).arguments("cuda")
    out = torch.full_like(args["q_nope"], math.nan)
    cute_attn.mla_decode(**args, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cute_attn.mla_decode(**args, out=out)
    args["cache_seqlens"].copy_(torch.tensor([999, 0, 3], dtype=torch.int32))
    for _ in range(2):
        out.fill_(math.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, cute_attn.mla_decode(**args)[0])
