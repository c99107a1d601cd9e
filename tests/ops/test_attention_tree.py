"""Verification of a tree of drafted tokens: a mask of bits for the last keys of each query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn.kernels.attention import heuristics
from cute_attn.ops.attention import plan_attention

from .attention_cases import FULL, Case, Kind, Machine, Target, assert_agrees, on_target, run, same
from .attention_stand_ins import stand_ins
from .test_attention_fp8 import E4M3, in_fp8
from .test_attention_pages import in_pages, of_kind

ARCH = "sm_90a"
VERIFY = Kind(window_right=True, seqused_k=True, packed_heads=2)
PACKED = replace(VERIFY, varlen_q=True, lse=False)
ALL = -1  # all bits


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one K/V tile, so that short sequences have pieces too."""
    monkeypatch.setattr(heuristics, "LEAST_PIECE", 1)


def tree_of(parents: list[int]) -> list[int]:
    """The bits of each node of a tree: the node and its ancestors. The parent of node i is node
    parents[i - 1]; node 0 is the root."""
    bits = [1]
    for i, parent in enumerate(parents, 1):
        bits.append(bits[parent] | 1 << i)
    return bits


def signed(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - 2**64 if b >> 63 else b for b in bits], dtype=torch.int64)


def with_tree(args: dict[str, Any], seed: int, nodes: bool = True) -> dict[str, Any]:
    """The call's arguments with random bits; with `nodes`, with the bits of random trees."""
    generator = torch.Generator().manual_seed(seed)
    shape = args["q"].shape[:-2]
    if nodes and len(shape) == 2:
        parents = [
            [int(torch.randint(i, (), generator=generator)) for i in range(1, shape[1])]
            for _ in range(shape[0])
        ]
        bits = torch.stack([signed(tree_of(of_one)) for of_one in parents])
    else:
        halves = torch.randint(-(2**31), 2**31, (2, *shape), generator=generator)
        bits = halves[0] << 32 ^ halves[1]
    return args | {"tree_mask": bits}


@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_tree_in_pages(head_dim: int):
    """The keys of a tree lie in one K/V tile or in two. One sequence has fewer keys than queries. A
    mask with all bits is a causal mask."""
    with on_target(Target(ARCH, head_dim)):
        args = of_kind(VERIFY, (300, 3, 130), 7).arguments()
        for given in (with_tree(args, 1), args | {"tree_mask": torch.full((3, 7), ALL)}):
            found = run(in_pages(given, 16, 0), on=Machine(num_sms=5), num_splits=0)
            assert_agrees(given if given["tree_mask"][0, 0] != ALL else args, *found)


@pytest.mark.slow
def test_a_chain_has_the_bits_of_a_causal_call():
    with on_target(Target(ARCH, 64)):
        args = of_kind(VERIFY, (300, 3, 130), 7).arguments()
        chain = args | {"tree_mask": torch.full((3, 7), ALL)}
        assert same(args, run(args, num_splits=0), run(chain, num_splits=0))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@settings(max_examples=60 if FULL else 10)
@given(
    kind=st.sampled_from([VERIFY, PACKED, replace(VERIFY, window_left=True, softcap=True)]),
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 16, 33, 64]), st.sampled_from([0, 1, 64, 90, 300])),
        min_size=1,
        max_size=4,
    ),
    heads_k=st.integers(1, 2),
    page_size=st.sampled_from([0, 1, 64]),
    num_splits=st.sampled_from([0, 1, 3]),
    fp8=st.booleans(),
    nodes=st.booleans(),
    schedule=st.sampled_from(["random", "adversarial"]),
    seed=st.integers(0, 2**31),
)
def test_any_tree(
    head_dim: int, kind: Kind, lengths: list[tuple[int, int]], heads_k: int, page_size: int,
    num_splits: int, fp8: bool, nodes: bool, schedule: str, seed: int,
):  # fmt: skip
    queries, keys = zip(*lengths, strict=True)
    if not kind.varlen_q:
        queries = (max(1, queries[0]),) * len(queries)
    most = max(1, *keys)
    case = Case(
        kind, queries, (most,) * len(keys), unused_k=tuple(most - n for n in keys),
        unused_q=(0,) * len(keys), heads_k=heads_k, group=2, left=70, seed=seed,
    )  # fmt: skip
    if not sum(queries):
        return
    with on_target(Target(ARCH, head_dim)):
        args = with_tree(case.arguments(), seed % 1000, nodes)
        if kind.varlen_q:
            args["max_seqlen_q"] = max(queries)
        if fp8:
            args = in_fp8(args, E4M3, "heads", seed)
        paged = in_pages(args, 64 if fp8 and page_size else page_size, seed) if page_size else args
        on = Machine(num_sms=3, schedule=schedule, seed=seed % 1000)
        assert_agrees(args, *run(paged, on=on, num_splits=num_splits))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_on_a_gpu(head_dim: int):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    kind = replace(VERIFY, packed_heads=8)
    with on_target(Target(ARCH, head_dim)):
        for queries, num_splits in ((7, 0), (16, 0), (64, 1), (33, 3)):
            lengths = (3000, 17, 0, 1300)
            args = with_tree(of_kind(kind, lengths, queries, heads_k=2).arguments(), queries)
            paged = {
                name: x.cuda() if isinstance(x, torch.Tensor) else x
                for name, x in in_pages(args, 64, 0).items()
            }
            o, lse = cute_attn.flash_attn_varlen_func(**paged, num_splits=num_splits)
            assert lse is not None
            assert_agrees(args, o.cpu(), lse.cpu())


# -- arguments


def call(**changes: Any) -> dict[str, Any]:
    """A good call on the CPU."""
    q, k = (torch.zeros(2, n, 2, 128, dtype=torch.bfloat16) for n in (5, 40))
    args = {"q": q, "k": k, "v": k, "seqused_k": torch.tensor([40, 9], dtype=torch.int32)}
    return args | {"causal": True, "tree_mask": torch.ones(2, 5, dtype=torch.int64)} | changes


def packed(**changes: Any) -> dict[str, Any]:
    args = call(tree_mask=torch.ones(10, dtype=torch.int64))
    bounds = torch.tensor([0, 5, 10], dtype=torch.int32)
    return args | {"q": args["q"].flatten(0, 1), "cu_seqlens_q": bounds} | changes


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (call(causal=False), ValueError, "tree_mask is given, and causal is False, must be True"),
        (call(tree_mask=torch.ones(2, 5)), TypeError, "tree_mask has dtype torch.float32, must be"),
        (
            call(tree_mask=torch.ones(10, dtype=torch.int64)), ValueError,
            r"tree_mask has shape \[10\], must be \[2, 5\]",
        ),
        (
            call(tree_mask=torch.ones(5, 2, dtype=torch.int64).mT), ValueError,
            "tree_mask has strides .*contiguous",
        ),
        (packed(), ValueError, "max_seqlen_q is None, must be an int of at most 64"),
        (packed(max_seqlen_q=65), ValueError, "max_seqlen_q is 65, must be an int of at most 64"),
        (packed(max_seqlen_q=5), None, ""),
        (call(), None, ""),
    ],
)  # fmt: skip
def test_arguments(args: dict[str, Any], error: type[Exception] | None, message: str):
    with stand_ins(), cute_attn.emulated(ARCH):
        if error is None:
            assert_agrees(args, *cute_attn.flash_attn_varlen_func(**args, return_lse=True))
            return
        for _ in range(2):  # also once kernels are loaded
            with pytest.raises(error, match=message):
                cute_attn.flash_attn_varlen_func(**args)


def test_what_has_no_kernel():
    q = torch.zeros(2, 5, 2, 256, dtype=torch.bfloat16)
    args = call(q=q, k=q, v=q, seqused_k=None)
    no_kernel = "tree_mask is given, and sm_100a has no kernel"
    with cute_attn.emulated("sm_100a"), pytest.raises(NotImplementedError, match=no_kernel):
        cute_attn.flash_attn_varlen_func(**args)
    with pytest.raises(NotImplementedError, match=no_kernel):
        plan_attention("sm_100a", causal=True, tree_mask=True)
    with pytest.raises(ValueError, match="tree_mask is True, it needs causal"):
        plan_attention(ARCH, tree_mask=True)
    args = call(q=call()["q"].requires_grad_())
    no_backward = "tree_mask has no backward"
    with cute_attn.emulated(ARCH), pytest.raises(NotImplementedError, match=no_backward):
        cute_attn.flash_attn_varlen_func(**args)
