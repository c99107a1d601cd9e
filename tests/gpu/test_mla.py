"""Latent decode on a GPU: FlashMLA's shapes, options at random, and CUDA graphs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import cute_attn
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


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed: int) -> None:
    draw = random.Random(seed)
    head_dim, head_dim_v = draw.choice([(576, 512), (512, 512), (320, 256)])
    lengths = tuple(
        draw.choice([0, 1, 63, 64, 65, draw.randrange(5000)]) for _ in range(draw.randrange(1, 9))
    )
    case = Case(
        lengths, draw.randrange(1, 17), draw.choice([1, 3, 8, 12, 20, 128]),
        draw.choice([16, 32, 48, 64, 128, 256]), head_dim, head_dim_v,
        draw.choice([torch.bfloat16, torch.float16]), draw.random() < 0.7, seed=seed,
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
