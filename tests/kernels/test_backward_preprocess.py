"""The backward's small kernels: row statistics and sums of partial results against float64, and
zeros in rows of no sequence."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import cache
from cute_attn.cache import KernelDef
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import table
from cute_attn.kernels.attention.heuristics import backward_spec
from cute_attn.kernels.attention.spec import PreprocessSpec
from cute_attn.kernels.attention.statistics import LSE, ORDER_COUNTERS, num_query_zeros, padded_rows
from cute_attn.kernels.attention.table import BACKWARD_PREPROCESS
from cute_attn.kernels.common.sum_partials_spec import SumPartialsSpec
from cute_attn.kernels.common.table import SUM_PARTIALS, ZERO_UNUSED
from cute_attn.kernels.common.zero_unused_spec import ZeroUnusedSpec

HEADS, HEAD_DIM, TILE = 3, 256, 128
DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def launch(kernel: KernelDef, spec: Any, *args: Any, arch: str = "sm_100a") -> None:
    emulator = Emulator()
    emulator.load(cache.compile(kernel, spec, arch=arch))(*args)
    assert emulator.report.findings == []


# seen_do, cu_seqlens_k, seqused_k, seqlen_k, window_right and window_left
NO_COPY = None, None, None, 0, 0, None


def of_sequence(x: Tensor, varlen: bool, sequence: int, rows: slice) -> Tensor:
    """Rows of o (rows, heads, columns) or lse (heads, rows) of a sequence."""
    if x.shape[-1] == HEAD_DIM:
        return x[rows] if varlen else x[sequence, rows]
    return x[:, rows] if varlen else x[sequence, :, rows]


@pytest.mark.parametrize(
    ("spec", "lengths"),
    [
        (PreprocessSpec("bfloat16", False, False, "none", False, sums=True), (130, 130)),
        (PreprocessSpec("float16", False, False, "bfloat16", True), (128,)),
        (PreprocessSpec("bfloat16", True, False, "float16", False), (0, 5, 129, 0, 128)),
        (
            PreprocessSpec("bfloat16", True, True, "none", True, sums=True, ordered=True),
            (3, 200, 70),
        ),
    ],
    ids=["dense, sums", "dense, sink, dlse", "packed, sink", "packed, seqused, dlse, sums"],
)
@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_statistics_of_rows(spec: PreprocessSpec, lengths: tuple[int, ...], arch: str) -> None:
    """Rows of no sequence hold NaN and are not read."""
    torch.manual_seed(0)
    dtype, sink_dtype = DTYPES[spec.dtype], DTYPES[spec.sink_dtype]
    starts = [0, *itertools.accumulate(lengths)]
    total, tail = starts[-1], 4
    shape = (total + tail, HEADS) if spec.varlen_q else (len(lengths), lengths[0], HEADS)
    lse_shape = shape[::-1] if spec.varlen_q else (shape[0], HEADS, shape[1])
    o = torch.randn(*shape, HEAD_DIM).to(dtype)
    do = torch.randn(*shape, HEAD_DIM + 8).to(dtype)[..., :HEAD_DIM]
    lse = torch.randn(lse_shape) * 3
    dlse = None
    if spec.dlse:  # of any strides, those of lse.sum() included
        dlse = (
            torch.randn(()).expand(lse_shape)
            if spec.varlen_q
            else torch.randn(*lse_shape, 2)[..., 0]
        )
    sink = torch.randn(HEADS).to(sink_dtype) if sink_dtype else None
    if sink is not None:
        sink[-1] = -math.inf
    # Rows that see no key.
    lse[..., ::7] = -math.inf if sink is None else sink.float()[:, None]
    for x, value in ((o, 0.0), (do, math.nan)):
        x.transpose(-3, -2)[..., ::7, :] = value
    used = [n // 2 + 1 for n in lengths] if spec.seqused_q else list(lengths)
    if spec.varlen_q:
        for x in (o, do):
            x[total:] = math.nan
    rows = padded_rows(shape[-2], len(lengths), spec.varlen_q)
    stats = torch.full((2, HEADS, rows), math.nan)
    size = num_query_zeros(HEADS, rows, ordered=spec.ordered)
    zeroed = torch.full((size,), -1, dtype=torch.int32) if spec.sums else None
    tiles = sum(-(-n // TILE) for n in lengths)
    if spec.varlen_q:
        tiles = (total + tail) // TILE + len(lengths)
    dsink = None if sink is None else torch.full((tiles, HEADS), math.nan)
    launch(
        BACKWARD_PREPROCESS, spec, o, do, lse, dlse, sink,
        torch.tensor(starts, dtype=torch.int32) if spec.varlen_q else None,
        torch.tensor(used, dtype=torch.int32) if spec.seqused_q else None,
        stats, zeroed, dsink, *NO_COPY, arch=arch,
    )  # fmt: skip

    expected = torch.full(stats.shape, math.nan, dtype=torch.float64)
    expected_dsink = torch.zeros(HEADS, dtype=torch.float64)
    for sequence, length in enumerate(used):
        start = starts[sequence] if spec.varlen_q else 0
        at = slice(start, start + length)
        x, dx, y = (of_sequence(t, spec.varlen_q, sequence, at).double() for t in (o, do, lse))
        delta = (x * dx).masked_fill(x == 0, 0.0).sum(-1).T
        if dlse is not None:
            delta -= of_sequence(dlse, spec.varlen_q, sequence, at).double()
        if sink is not None:
            expected_dsink -= (
                torch.where(y == sink[:, None], 1.0, (sink.double()[:, None] - y).exp())
                .mul(delta)
                .sum(-1)
            )
        first = (start + TILE * sequence) // TILE * TILE
        if not spec.varlen_q:
            first = sequence * -(-length // TILE) * TILE
        padded = slice(first, first + -(-length // TILE) * TILE)
        expected[0, :, padded], expected[1, :, padded] = math.inf, 0.0
        seen = ~y.isinf()
        expected[0, :, first : first + length] = torch.where(seen, y, math.inf)
        expected[1, :, first : first + length] = torch.where(seen, delta, 0.0)
    # Tiles of no sequence are not written.
    torch.testing.assert_close(stats.double(), expected, rtol=1e-6, atol=1e-4, equal_nan=True)
    if zeroed is not None:
        written = ~expected[0, :, ::TILE].isnan()
        if spec.ordered:
            counters = zeroed.view(HEADS, -1, ORDER_COUNTERS)
            assert torch.equal(counters, (written.int() - 1)[..., None].expand_as(counters))
        else:
            assert zeroed[0] == 0
            assert torch.equal(zeroed[1:].view(HEADS, -1), written.int() - 1)
    if dsink is not None:
        assert not dsink.isnan().any()
        torch.testing.assert_close(dsink.double().sum(0), expected_dsink, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("left", "right"), [(None, 0), (None, 40), (-30, 2**30), (-10, 60)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [("sm_90a", 64), pytest.param("sm_100a", 256, marks=pytest.mark.slow)],
)
def test_rows_that_see_no_key_are_0_in_the_copy_of_do(
    arch: str, head_dim: int, packed: bool, left: int | None, right: int
) -> None:
    """At the beginning of sequences, and with a negative left number at the end. Sequences have
    fewer keys than queries, as many, none, and a negative number of used keys.
    Rows of no sequence are not written."""
    spec = PreprocessSpec(
        "bfloat16", packed, packed, "none", False, head_dim, rows_without_keys=True,
        varlen_k=packed, seqused_k=True, negative_left=left is not None,
    )  # fmt: skip
    lengths, used_q = (200, 200, 200, 200), (200, 130, 200, 150)
    lengths_k, used_k = (90, 90, 90, 90), (90, 130, 0, -5)
    starts, starts_k = ([0, *itertools.accumulate(x)] for x in (lengths, lengths_k))
    rows = padded_rows(starts[-1] if packed else lengths[0], len(lengths), packed)
    shape = (starts[-1] + 3, HEADS) if packed else (len(lengths), lengths[0], HEADS)
    lse_shape = shape[::-1] if packed else (shape[0], HEADS, shape[1])
    torch.manual_seed(0)
    o, do = torch.randn(2, *shape, head_dim).bfloat16()
    written = torch.full_like(do, 7.0)

    def offsets(x: Any) -> Tensor | None:
        return torch.tensor(x, dtype=torch.int32) if packed else None

    expected = written.clone()
    for n in range(len(lengths)):
        start, count = (starts[n], used_q[n]) if packed else (0, lengths[n])
        keys = max(0, min(used_k[n], lengths_k[n]))
        unseen = min(count, max(0, count - keys - right))
        of, copy = (do, expected) if packed else (do[n], expected[n])
        copy[start : start + count] = of[start : start + count]
        copy[start : start + unseen] = 0.0
        of[start : start + unseen] = math.nan
        if left is not None:
            last = slice(start + (max(0, count + left) if keys else 0), start + count)
            copy[last], of[last] = 0.0, math.nan
    launch(
        BACKWARD_PREPROCESS, spec, o, do, torch.randn(lse_shape), None, None,
        offsets(starts), offsets(used_q), torch.empty(2, HEADS, rows), None, None, written,
        offsets(starts_k), torch.tensor(used_k, dtype=torch.int32), lengths_k[0], right, left,
        arch=arch,
    )  # fmt: skip
    assert torch.equal(written, expected)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (SumPartialsSpec("bfloat16", 4, 1), (3, 5, 256)),
        (SumPartialsSpec("float16", 1, 32), (70, 1, 13)),
        (SumPartialsSpec("float32", 1, 32), (1, 1, 3)),
    ],
    ids=["of splits", "of tiles", "one"],
)
def test_sums_of_partial_results(spec: SumPartialsSpec, shape: tuple[int, ...]) -> None:
    """Rounded once, and with the same bits on every schedule."""
    torch.manual_seed(0)
    partials = torch.randn(shape)
    dtype = getattr(torch, spec.dtype)
    results = []
    for arch in ("sm_90a", "sm_100a"):
        out = torch.full(shape[1:], math.nan, dtype=dtype)
        launch(SUM_PARTIALS, spec, partials, out, arch=arch)
        results.append(out)
    assert torch.equal(*results)
    exact = partials.double().sum(0)
    error = (results[0].double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("used", [None, (0, 3, 90, 200, 1)])
@pytest.mark.parametrize("tail", [0, 70])
def test_zeros_in_rows_of_no_packed_sequence(used: tuple[int, ...] | None, tail: int) -> None:
    """And in no other row, of tensors that share the sequences."""
    starts = torch.tensor([5, 5, 40, 130, 260, 261], dtype=torch.int32)
    x = torch.randint(1, 100, (2, int(starts[-1]) + tail, 8), dtype=torch.int32)
    expected = x.clone()
    expected[:, : starts[0]] = 0
    expected[:, starts[-1] :] = 0
    for i, count in enumerate(used or ()):
        expected[:, min(starts[i] + count, starts[i + 1]) : starts[i + 1]] = 0
    launch(
        ZERO_UNUSED, ZeroUnusedSpec(True, used is not None), x, starts,
        None if used is None else torch.tensor(used, dtype=torch.int32),
    )  # fmt: skip
    assert torch.equal(x, expected)


def test_zeros_in_unused_rows_of_a_batch() -> None:
    used = [0, 70, 130, 999, -1]
    x = torch.randint(1, 100, (10, 130, 4), dtype=torch.int32)
    expected = x.clone()
    for i in range(10):
        expected[i, max(0, used[i % 5]) :] = 0
    spec = ZeroUnusedSpec(False, True)
    launch(ZERO_UNUSED, spec, x, None, torch.tensor(used, dtype=torch.int32))
    assert torch.equal(x, expected)


def test_zeros_of_a_tensor_beyond_two_to_the_31_words() -> None:
    """Memory not touched costs none, in this test and the next one."""
    x = torch.empty(1, 2**14, 2**17, dtype=torch.int32)
    x[0, -2:] = 1
    starts = torch.tensor([0, x.shape[1] - 1], dtype=torch.int32)
    launch(ZERO_UNUSED, ZeroUnusedSpec(True, False), x, starts, None)
    assert (x[0, -2] == 1).all() and (x[0, -1] == 0).all()


@pytest.mark.slow
def test_sums_of_dq_beyond_two_to_the_31_elements() -> None:
    """The second head's sums begin beyond 2^31 elements, as with many short sequences, whose rows
    are padded."""
    flags = (
        "window_left",
        "window_right",
        "softcap",
        "varlen_q",
        "varlen_k",
        "seqused_q",
        "seqused_k",
    )
    plain = dict.fromkeys((*flags, "partial"), False) | {"dtype": "bfloat16"}
    spec = backward_spec("sm_90a", 64, of_keys=True, fused=True, **plain)
    q, k, v, do = torch.randn(4, 1, 5, 2, 64).bfloat16()
    stats = torch.zeros(2, 2, TILE)
    stats[LSE] = math.inf
    scores = torch.einsum("qhd,khd->hqk", q[0].float(), k[0].float()) / 8
    stats[LSE, :, :5] = scores.logsumexp(-1)
    sums = torch.empty(2, 2**25, 64)
    sums[:, :TILE] = math.nan
    zeroed = torch.zeros(num_query_zeros(*sums.shape[:2]), dtype=torch.int32)
    dk, dv = (torch.full_like(x, math.nan) for x in (k, v))
    launch(
        table.find("backward_fused", "sm_90a", 64).kernel, spec, q, k, v, do, stats,
        dk, dv, None, None, None, None, 0.125, 1.0, 0, 0, 1, 1, torch.zeros(1, dtype=torch.int32),
        sums, zeroed,
        arch="sm_90a",
    )  # fmt: skip
    p = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    ds = p * torch.einsum("qhd,khd->hqk", do[0].float(), v[0].float())
    expected = torch.einsum("hqk,khd->hqd", ds, k[0].float())
    # The order of a tile is that of the registers.
    found = sums[:, :TILE].flatten(1).sort().values
    padded = torch.nn.functional.pad(expected.flatten(1), (0, (TILE - 5) * 64)).sort().values
    torch.testing.assert_close(found, padded, rtol=2e-2, atol=2e-2)
