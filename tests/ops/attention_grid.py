"""The grids of FlashAttention-4's tests of its forward, as parameters of ours.

Their lengths, numbers of heads and sequences, masks, softcap, sinks, pages and splits are those of
its tests/cute/test_flash_attn.py (of 15 August 2026). Left out is what has no counterpart here:
head dimensions other than 64, 128 and 256; those of v that differ from q's, but for 192 and 128;
and qv. A bound of -1, an offset there, is no bound here: these points have -2 instead.

Results are compared by the error rule with the reference, and, where PyTorch has the function, with
its scaled_dot_product_attention in float64: a second opinion of what the masks mean.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from .attention_cases import (
    FULL,
    assert_agrees,
    assert_no_worse,
    attention_in_low_precision,
    head_dim_v_of,
)
from .test_attention_pages import in_pages

HEADS = 6
HEADS_K = (6, 3, 1)
SPLITS = (1, 3)
SOFTCAPS = (0.0, 15.0)
MASKS = ("full", "causal", "local", "local right", "local left")
DENSE_MASKS = ("full", "causal", "local", "negative right", "negative left")
DRAWN = 12  # points of each shape; HYPOTHESIS_PROFILE=full takes them all

DENSE_SHAPES = (
    (1, 1), (3, 3), (64, 32), (64, 128), (64, 1), (128, 128), (128, 192), (256, 256), (255, 256),
    (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256), (256, 512),
    (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048),
    (4096, 4096), (4224, 4224),
)  # fmt: skip
VARLEN_SHAPES = (
    (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203), (128, 217), (113, 211),
    (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024),
    (1024, 1023), (2048, 2048), (64, 1), (255, 256), (4096, 4096), (4224, 4224),
)  # fmt: skip
CACHE_SHAPES = (
    (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000),
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A point of a grid.

    Attributes:
        mask: a name of `MASKS`, or "causal local"; bounds of a window are random.
        lengths: of packed sequences: "full", at most 20 less than that ("random"), or at least a
            third of it; None: not packed.
        zeros_q, zeros_k: every fifth sequence, and the last one, is empty.
        packed_q, packed_k: q and k are packed, rather than padded with seqused_q and seqused_k.
        page_size: of k, with seqused_k; 0: no pages.
    """

    seqlen_q: int
    seqlen_k: int
    batch: int
    heads_k: int
    mask: str
    splits: int
    softcap: float = 0.0
    sink: bool = False
    lengths: str | None = None
    zeros_q: bool = False
    zeros_k: bool = False
    packed_q: bool = True
    packed_k: bool = False
    seqused_k: bool = False
    page_size: int = 0
    heads: int = HEADS


def drawn(points: list[Point]) -> list[Point]:
    """All points, or some, in which every value of a parameter is likely to occur."""
    if FULL or len(points) <= DRAWN:
        return points
    return random.Random(str(points[0])).sample(points, DRAWN)


def dense_points(shape: tuple[int, int]) -> list[Point]:
    batch = 9 if shape[1] <= 2048 else 2
    return [
        Point(*shape, batch, *rest)
        for rest in itertools.product(HEADS_K, DENSE_MASKS, SPLITS, SOFTCAPS, (False, True))
    ]


def varlen_points(shape: tuple[int, int]) -> list[Point]:
    batch, flags = 49 if shape[0] <= 512 else 7, (False, True)
    values = HEADS_K, MASKS, SPLITS, SOFTCAPS, ("random", "third", "full"), *[flags] * 4
    return [
        Point(
            *shape, batch, heads_k, mask, splits, softcap, False, lengths, zeros_q, zeros_k,
            packed_q, packed_k, not packed_k,
        )
        for heads_k, mask, splits, softcap, lengths, zeros_q, zeros_k, packed_q, packed_k in (
            itertools.product(*values)
        )
    ]  # fmt: skip


def cache_points(shape: tuple[int, int]) -> list[Point]:
    masks = ("full", "causal", "local", "causal local")
    return [
        Point(
            *shape, 5, heads_k, mask, splits, 0.0, sink, "random" if packed_q else None,
            seqused_k=True, page_size=page_size,
        )
        for heads_k, mask, splits, sink, packed_q, page_size in itertools.product(
            HEADS_K, masks, SPLITS, (False, True), (False, True), (0, 1, 4, 128)
        )
        if not page_size or shape[1] % page_size == 0
    ]  # fmt: skip


# Of pages of 128 rows at head_dim 256.
PAGED_POINTS = [
    Point(
        rows, rows, 2, heads_k, "full", splits, lengths="full", seqused_k=True, page_size=128,
        heads=16,
    )
    for rows, heads_k in ((128, 16), (512, 16), (2048, 16), (512, 2), (512, 4), (512, 8))
    for splits in SPLITS
]  # fmt: skip


# -- a point's call


def lengths_of(most: int, batch: int, mode: str, zeros: bool, numbers: random.Random) -> list[int]:
    least = {"full": most, "random": most - 20, "third": most // 3}[mode]
    found = [numbers.randint(max(0 if zeros else 1, least), most) for _ in range(batch)]
    if zeros:
        found = [0 if i % 5 == 0 or i == batch - 1 else n for i, n in enumerate(found)]
    return found


def arguments(point: Point, head_dim: int, device: str) -> dict[str, Any]:
    """Arguments of flash_attn_varlen_func, with contiguous k and v; rows of no sequence hold
    NaN."""
    numbers = random.Random(str(point))
    generator = torch.Generator(device).manual_seed(numbers.randrange(2**31))
    args: dict[str, Any] = {}

    def rows(side: str, seqlen: int, heads: int, dims: list[int]) -> list[Tensor]:
        """Tensors of one side, of these head dimensions, packed if the side is."""
        batch, packed = point.batch, point.packed_q if side == "q" else point.packed_k
        packed = packed and point.lengths is not None
        used = point.lengths is not None if side == "q" else point.seqused_k
        lengths = [seqlen] * batch
        if point.lengths is not None:
            zeros = point.zeros_q if side == "q" else point.zeros_k
            lengths = lengths_of(seqlen, batch, point.lengths, zeros, numbers)
        elif side == "k" and point.seqused_k:
            lengths = [numbers.randint(1, seqlen) for _ in range(batch)]
        shape = (sum(lengths),) if packed else (batch, seqlen)
        found = [
            torch.randn((*shape, heads, dim), generator=generator, device=device).bfloat16()
            for dim in dims
        ]
        if packed:
            bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            args[f"cu_seqlens_{side}"] = bounds.to(device)
        elif used:
            args[f"seqused_{side}"] = torch.tensor(lengths, dtype=torch.int32, device=device)
            for x in found:
                for own, length in zip(x, lengths, strict=True):
                    own[length:] = torch.nan
        return found

    (args["q"],) = rows("q", point.seqlen_q, point.heads, [head_dim])
    of_keys = [head_dim, head_dim_v_of(head_dim)]
    args["k"], args["v"] = rows("k", point.seqlen_k, point.heads_k, of_keys)
    if point.softcap:  # scores as large as the cap
        args["softcap"] = point.softcap
        args["q"] = args["q"] * (point.softcap / 4)
    if point.sink:
        args["learnable_sink"] = torch.randn(point.heads, generator=generator, device=device)
    left, right = (numbers.randrange(point.seqlen_k) for _ in range(2))
    if point.mask.startswith("negative"):
        left, right = (-2 if n == 1 else -n for n in (left, right))
    args["window_size"] = (
        left if point.mask in ("local", "local left", "causal local", "negative left") else None,
        right if point.mask in ("local", "local right", "negative right") else None,
    )
    args["causal"] = "causal" in point.mask
    return args


def check(point: Point, head_dim: int, device: str, call: Callable[..., Any]) -> None:
    """Compare the call of a point; `call` takes its arguments and more options."""
    args = arguments(point, head_dim, device)
    options: dict[str, Any] = {"num_splits": point.splits, "return_lse": True}
    given = args
    if point.page_size:
        on_cpu = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in args.items()}
        moved = in_pages(on_cpu, point.page_size, 0)
        given = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in moved.items()}
    o, lse = call(given, **options)
    assert_agrees(args, o, lse)
    packed = any(name.startswith(("cu_", "seqused")) for name in args)
    if not packed and not point.softcap and not point.sink:
        assert_sdpa_agrees(args, o)


def assert_sdpa_agrees(args: dict[str, Any], o: Tensor) -> None:
    """With PyTorch's function in float64, by the same rule."""
    q, k, v = (args[name].transpose(1, 2) for name in "qkv")
    rows, keys = q.shape[-2], k.shape[-2]
    (left, right), mask = args["window_size"], torch.ones(rows, keys, dtype=torch.bool)
    if args["causal"]:
        mask = causal_lower_right(rows, keys)._materialize("cpu")
    if left is not None:
        mask = mask.triu(keys - rows - left)
    if right is not None:
        mask = mask.tril(keys - rows + right)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), attn_mask=mask.to(q.device), enable_gqa=True
    ).transpose(1, 2)
    seen = mask.any(-1).to(q.device)
    plain, _ = attention_in_low_precision(**args)
    floor = torch.finfo(o.dtype).eps / 2
    assert_no_worse(*(x[:, seen] for x in (o, plain, exact)), floor)
    assert not o[:, ~seen].any()
