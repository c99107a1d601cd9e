"""FlashAttention 2's functions, `cute_attn.compat`, against the float64 reference, emulated."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import compat
from cute_attn.compat.kv_cache import Rotary
from cute_attn.emulator import Emulator
from tests.ops.attention_cases import assert_agrees, is_known
from tests.ops.attention_gradient_cases import assert_gradients_agree

HEAD_DIM = 64
ROWS = 32  # of a sequence in the caches, and of a page: one kernel serves both
ATTENTION = (
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
)
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

# flash_attn/flash_attn_interface.py of 2.8: names in their order, and defaults where there are any.
SIGNATURES = {
    "flash_attn_func": ("q", "k", "v", *ATTENTION),
    "flash_attn_kvpacked_func": ("q", "kv", *ATTENTION),
    "flash_attn_qkvpacked_func": ("qkv", *ATTENTION),
    "flash_attn_varlen_func": ("q", "k", "v", *LENGTHS, *ATTENTION, ("block_table", None)),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", *LENGTHS, *ATTENTION),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen", *ATTENTION),
    "flash_attn_with_kvcache": (
        "q",
        "k_cache",
        "v_cache",
        ("k", None),
        ("v", None),
        ("rotary_cos", None),
        ("rotary_sin", None),
        ("cache_seqlens", None),
        ("cache_batch_idx", None),
        ("cache_leftpad", None),
        ("block_table", None),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("rotary_interleaved", True),
        ("alibi_slopes", None),
        ("num_splits", 0),
        ("return_softmax_lse", False),
    ),
}


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    emulator = Emulator(num_sms=2)
    with cute_attn.emulated("sm_90a", emulator):
        yield
    assert all(map(is_known, emulator.report.findings)), emulator.report


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bits are the same, those of NaN too."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


# ---- what a caller sees before a kernel runs


def test_every_function_has_a_signature_to_compare_with():
    assert sorted(SIGNATURES) == sorted(compat.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flashattention_2(name: str):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    found = tuple(p.name if p.default is p.empty else (p.name, p.default) for p in parameters)
    assert found == SIGNATURES[name]


@pytest.mark.slow  # tests/test_repository.py looks at what the source imports
def test_import_loads_no_compiler():
    code = "import sys, cute_attn.compat.flash_attn_3; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert not {"cutlass", "tvm_ffi"} & set(loaded.stdout.decode().split())


def call(name: str, **changes: Any) -> Any:
    """A function, with small tensors for the arguments that have no default."""
    x = randn(1, 8, 2, HEAD_DIM)
    packed = x[0]
    arguments: dict[str, Any] = {
        "q": packed if "varlen" in name else x,
        "k": packed if "varlen" in name else x,
        "v": packed if "varlen" in name else x,
        "kv": torch.stack([packed, packed], 1) if "varlen" in name else torch.stack([x, x], 2),
        "qkv": torch.stack([packed] * 3, 1) if "varlen" in name else torch.stack([x] * 3, 2),
        "k_cache": randn(1, ROWS, 2, HEAD_DIM),
        "v_cache": randn(1, ROWS, 2, HEAD_DIM),
        "max_seqlen": 8,
        **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), int32(0, 8)),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 8),
    }
    required = {key: arguments[key] for key in SIGNATURES[name] if isinstance(key, str)}
    return getattr(compat, name)(**required | changes)


@pytest.mark.parametrize("name", [n for n in SIGNATURES if n != "flash_attn_with_kvcache"])
def test_dropout_is_refused(name: str):
    with pytest.raises(NotImplementedError, match=r"^dropout_p is 0\.1, must be 0"):
        call(name, dropout_p=0.1)


@pytest.mark.parametrize("name", SIGNATURES)
def test_slopes_are_refused(name: str):
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes is given"):
        call(name, alibi_slopes=torch.ones(2))


def test_head_dims_without_kernels_are_refused():
    x = randn(1, 8, 2, 96)
    with pytest.raises(NotImplementedError, match="head_dim of q is 96, there are kernels for"):
        compat.flash_attn_func(x, x, x)


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("flash_attn_qkvpacked_func", {"qkv": torch.ones(2, 8, 2, 2, 64)}, ValueError, "^qkv has"),
        ("flash_attn_kvpacked_func", {"kv": torch.ones(2, 8, 2, 64)}, ValueError, "^kv has shape"),
        ("flash_attn_varlen_qkvpacked_func", {"qkv": [1]}, TypeError, "^qkv must be a torch"),
        ("flash_attn_func", {"k": None}, TypeError, "^k must be a torch.Tensor"),
        ("flash_attn_func", {"window_size": (1, 2, 3)}, TypeError, "^window_size is"),
    ],
)
def test_bad_arguments(name: str, changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call(name, **changes)


ROW = randn(1, 2, 2, HEAD_DIM)
ANGLES = randn(ROWS, 16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": ROW, "cache_seqlens": 3}, ValueError, "^one of k and v is given"),
        ({"k": ROW, "v": ROW}, ValueError, "they need cache_seqlens"),
        ({"k": ROW[:, :1], "v": ROW, "cache_seqlens": 3}, ValueError, r"^v has shape \[1, 2, 2"),
        ({"k": ROW.half(), "v": ROW, "cache_seqlens": 3}, TypeError, "^k has dtype torch.float16"),
        ({"k": ROW, "v": ROW, "cache_seqlens": 31}, ValueError, "is 31, must be from 0 to 30: a"),
        ({"cache_seqlens": 33}, ValueError, "^cache_seqlens is 33, must be from 0 to 32"),
        ({"cache_seqlens": -1}, ValueError, "^cache_seqlens is -1"),
        ({"cache_seqlens": 1.5}, TypeError, "^cache_seqlens must be an int or a tensor"),
        ({"cache_seqlens": torch.tensor([3])}, TypeError, "^cache_seqlens has dtype torch.int64"),
        ({"cache_seqlens": int32(3, 3)}, ValueError, r"^cache_seqlens has shape \[2\]"),
        ({"k_cache": ROW[0]}, ValueError, "^k_cache has shape"),
        ({"k_cache": None}, TypeError, "^k_cache must be a torch.Tensor, got NoneType"),
        ({"k_cache": [1]}, TypeError, "^k_cache must be a torch.Tensor, got list"),
        ({"k_cache": ROW.to("meta")}, ValueError, "^k_cache is on meta, must be on the device"),
        ({"v_cache": ROW.half()}, TypeError, "^v_cache has dtype torch.float16"),
        ({"block_table": int32(0)}, ValueError, r"^block_table has shape \[1\], must be \[1, max"),
        (
            {"block_table": int32(0)[None], "cache_leftpad": int32(0)},
            NotImplementedError,
            "^cache_leftpad is given with block_table",
        ),
        (
            {"block_table": int32(0)[None], "cache_batch_idx": int32(0)},
            NotImplementedError,
            "^cache_batch_idx is given with block_table",
        ),
        (
            {"cache_batch_idx": int32(0), "cache_leftpad": int32(0)},
            NotImplementedError,
            "^cache_batch_idx is given with cache_leftpad",
        ),
        ({"rotary_cos": ANGLES, "rotary_sin": ANGLES}, ValueError, "needs k and v to be appended"),
        (
            {"k": ROW, "v": ROW, "cache_seqlens": 3, "rotary_cos": ANGLES},
            ValueError,
            "^one of rotary_cos and rotary_sin is given",
        ),
        (
            {
                "k": ROW,
                "v": ROW,
                "cache_seqlens": 3,
                "rotary_cos": ANGLES[:, :5],
                "rotary_sin": ANGLES,
            },
            ValueError,
            r"^rotary_cos has shape \[32, 5\]",
        ),
        (
            {"k": ROW, "v": ROW, "cache_seqlens": 3}
            | dict.fromkeys(("rotary_cos", "rotary_sin"), ANGLES[:4]),
            ValueError,
            "^rotary_cos has 4 positions, must have at least 5",
        ),
        ({"rotary_interleaved": 0.5}, TypeError, "^rotary_interleaved must be a bool"),
        ({"return_softmax_lse": ROW}, TypeError, "^return_softmax_lse must be a bool"),
        (
            {"k": ROW, "v": ROW, "cache_seqlens": 3}
            | dict.fromkeys(("k_cache", "v_cache"), ROW[:, :1].expand(1, ROWS, 2, HEAD_DIM)),
            ValueError,
            "^k_cache is expanded",
        ),
        (
            {
                "k_cache": randn(1, ROWS, HEAD_DIM, 2).mT,
                "v_cache": randn(1, ROWS, HEAD_DIM, 2).mT,
            },
            ValueError,
            "^k_cache has strides",
        ),
    ],
)
def test_bad_arguments_of_a_cache(changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call("flash_attn_with_kvcache", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_scale": -1.0}, "^softmax_scale is -1.0"),
        ({"window_size": (1, 2, 3)}, "^window_size is"),
        ({"num_splits": 257}, "^num_splits is 257"),
        ({"cache_batch_idx": int32(0)[None]}, "^cache_batch_idx has shape"),
        ({"q": randn(1, 8, 3, HEAD_DIM)}, "^q has 3 heads"),
        ({"q": randn(8 * 2 * HEAD_DIM + 1)[1:].view(1, 8, 2, HEAD_DIM)}, "^q starts at address"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_refused_call_leaves_the_cache_as_it_was(changes: dict[str, Any], message: str):
    caches = randn(1, ROWS, 2, HEAD_DIM), randn(1, ROWS, 2, HEAD_DIM, seed=1)
    before = [x.clone() for x in caches]
    given = {"k_cache": caches[0], "v_cache": caches[1], "k": ROW, "v": ROW, "cache_seqlens": 3}
    with pytest.raises((TypeError, ValueError), match=message):
        call("flash_attn_with_kvcache", **given | changes)
    assert all(map(same, caches, before))


def test_sequences_with_gaps_have_no_left_padding():
    cache = randn(2, 2 * ROWS, 2, HEAD_DIM)[:, ::2][:, :5]
    q = randn(2, 2, 2, HEAD_DIM)
    with pytest.raises(ValueError, match=r"^k_cache has strides"):
        compat.flash_attn_with_kvcache(q, cache, cache, cache_leftpad=int32(0, 1))


# ---- sequences of one length, and packed ones


def dense(heads: int = 2, heads_k: int = 2, **options: Any) -> dict[str, Any]:
    """Arguments of the reference."""
    q, k = randn(2, 24, heads, HEAD_DIM), randn(2, 24, heads_k, HEAD_DIM, seed=1)
    return {"q": q, "k": k, "v": randn(2, 24, heads_k, HEAD_DIM, seed=2), "causal": True} | options


def test_dense_functions_agree_with_the_reference():
    """All three, by position; an o alone is the o of the triple."""
    args = dense()
    q, k, v = args["q"], args["k"], args["v"]
    o, lse, probabilities = compat.flash_attn_func(
        q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, True
    )
    assert probabilities is None
    assert_agrees(args, o, lse)
    packed = [(torch.stack([q, k, v], 2),), (q, torch.stack([k, v], 2))]
    for function, given in zip(
        (compat.flash_attn_qkvpacked_func, compat.flash_attn_kvpacked_func), packed, strict=True
    ):
        results = function(*given, 0.0, None, True, (-1, -1), 0.0, None, False, True)
        assert torch.equal(results[0], o) and torch.equal(results[1], lse)
        assert results[2] is None


def test_a_last_dimension_with_gaps_is_copied():
    args = dense()
    spread = {name: args[name].mT.contiguous().mT for name in ("q", "k", "v")}
    assert spread["q"].stride(-1) != 1
    o, lse, _ = compat.flash_attn_func(**spread, causal=True, return_attn_probs=True)
    assert_agrees(args, o, lse)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (5, 3)},
        {"window_size": (-1, 3)},
        {"window_size": (5, -1)},
        {"causal": True, "window_size": (5, -1), "softcap": 3.0, "softmax_scale": 0.3},
    ],
    ids=str,
)
def test_options_agree_with_the_reference(options: dict[str, Any], dtype: torch.dtype):
    q = randn(2, 10, 4, HEAD_DIM, dtype=dtype)
    k, v = (randn(2, 21, 2, HEAD_DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    o = compat.flash_attn_func(q, k, v, **options)
    assert_agrees({"q": q, "k": k, "v": v} | options, o, None)
    o = compat.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)
    assert_agrees({"q": q, "k": k, "v": v} | options, o, None)


def test_packed_functions_agree_with_the_reference():
    q, k, v = (randn(24, 2, HEAD_DIM, seed=seed) for seed in range(3))
    bounds = int32(0, 7, 7, 24)
    args = {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "causal": True}
    o, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, bounds, bounds, 17, 17, 0.0, None, True, (-1, -1), 0.0, None, False, True
    )
    assert_agrees(args, o, lse)
    for function, given in (
        (compat.flash_attn_varlen_qkvpacked_func, (torch.stack([q, k, v], 1), bounds, 17)),
        (
            compat.flash_attn_varlen_kvpacked_func,
            (q, torch.stack([k, v], 1), bounds, bounds, 17, 17),
        ),
    ):
        results = function(*given, 0.0, None, True, (-1, -1), 0.0, None, False, True)
        assert torch.equal(results[0], o) and torch.equal(results[1], lse)


@pytest.mark.slow
def test_packed_queries_read_pages():
    table, lengths = int32(3, 1, 0, 2).view(2, 2), (35, 9)
    k, v = (randn(4, ROWS, 2, HEAD_DIM, seed=seed) for seed in (1, 2))
    q, bounds = randn(12, 4, HEAD_DIM), int32(0, 5, 12)
    cu_seqlens_k = int32(0, 35, 44)
    o = compat.flash_attn_varlen_func(
        q, k, v, bounds, cu_seqlens_k, 7, 35, causal=True, block_table=table
    )
    packed = {
        name: torch.cat([x[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate(lengths)])
        for name, x in (("k", k), ("v", v))
    }
    args = {"q": q, **packed, "cu_seqlens_q": bounds, "cu_seqlens_k": cu_seqlens_k, "causal": True}
    assert_agrees(args, o, None)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["one length", "varlen"])
def test_gradients_go_through_packed_tensors(packed: bool):
    if packed:
        qkv = randn(24, 3, 2, HEAD_DIM).requires_grad_()
        bounds = int32(0, 7, 24)
        o = compat.flash_attn_varlen_qkvpacked_func(qkv, bounds, 17, causal=True)
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    else:
        qkv = randn(2, 24, 3, 2, HEAD_DIM).requires_grad_()
        o = compat.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)
        lengths = {}
    do = randn(*o.shape, seed=3)
    o.backward(do)
    names = ("q", "k", "v")
    args = dict(zip(names, qkv.detach().unbind(-3), strict=True)) | lengths | {"causal": True}
    assert qkv.grad is not None
    assert_gradients_agree(args, dict(zip(names, qkv.grad.unbind(-3), strict=True)), do)


@pytest.mark.slow
def test_functions_compile_into_one_graph():
    args = dense()
    q, kv = args["q"], torch.stack([args["k"], args["v"]], 2).requires_grad_()

    def step(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return compat.flash_attn_kvpacked_func(q, kv, causal=True, deterministic=True)

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        o = function(q, kv)
        (gradient,) = torch.autograd.grad(o.float().square().sum(), kv)
        found.append((o, gradient))
    assert all(map(torch.equal, *found))


# ---- caches


class Cache:
    """k and v of a cache, NaN where nothing was written, and what it should become."""

    def __init__(self, slots: int, lengths: tuple[int, ...], table: list[list[int]]) -> None:
        """Row j of sequence b is row j % ROWS of slot table[b][j // ROWS]."""
        self.lengths, self.table = lengths, table
        self.k, self.v = (torch.full((slots, ROWS, 2, HEAD_DIM), math.nan).bfloat16() for _ in "kv")
        for b, length in enumerate(lengths):
            for x, seed in ((self.k, 10), (self.v, 20)):
                self._put(x, b, 0, randn(length, 2, HEAD_DIM, seed=seed + b))
        self.before = self.k.clone(), self.v.clone()

    def _put(self, x: torch.Tensor, b: int, first: int, rows: torch.Tensor) -> None:
        for j, row in enumerate(rows, first):
            x[self.table[b][j // ROWS], j % ROWS] = row

    def assert_appended(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """The new rows are in their places, and all others have their bits."""
        for x, before, new in ((self.k, self.before[0], k), (self.v, self.before[1], v)):
            expected = before.clone()
            for b, length in enumerate(self.lengths):
                self._put(expected, b, length, new[b])
            assert same(x, expected)

    def arguments(self, q: torch.Tensor, new: int, leftpad: tuple[int, ...] = ()) -> dict[str, Any]:
        """Of the reference: each sequence's rows, packed."""
        lengths = [n + new for n in self.lengths]
        skipped = leftpad or (0,) * len(lengths)
        rows = {
            name: torch.cat(
                [
                    x[self.table[b]].flatten(0, 1)[skip:n]
                    for b, (skip, n) in enumerate(zip(skipped, lengths, strict=True))
                ]
            )
            for name, x in (("k", self.k), ("v", self.v))
        }
        counts = torch.tensor([0, *lengths]) - torch.tensor([0, *skipped])
        bounds = counts.cumsum(0).to(torch.int32)
        return {"q": q, **rows, "cu_seqlens_k": bounds, "causal": True}


LENGTHS_BEFORE = (3, 21)


@pytest.mark.parametrize(
    "place", [pytest.param("slots", marks=pytest.mark.slow), "pages", "batch_idx"]
)
def test_new_rows_are_appended_and_seen(place: str):
    tables = {"slots": [[0], [1]], "batch_idx": [[3], [1]], "pages": [[4, 1], [0, 2]]}
    slots = {"slots": 3, "batch_idx": 5, "pages": 5}[place]
    lengths = (30, 21) if place == "pages" else LENGTHS_BEFORE
    cache = Cache(slots, lengths, tables[place])
    q = randn(2, 4, 2, HEAD_DIM)
    k, v = (randn(2, 4, 2, HEAD_DIM, seed=seed) for seed in (1, 2))
    where: dict[str, Any] = {}
    if place == "pages":
        where["block_table"] = torch.tensor(tables[place], dtype=torch.int32)
    elif place == "batch_idx":
        where["cache_batch_idx"] = int32(3, 1)
    o, lse = compat.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cache_seqlens=int32(*lengths), causal=True,
        return_softmax_lse=True, num_splits=1, **where,
    )  # fmt: skip
    cache.assert_appended(k, v)
    assert_agrees(cache.arguments(q, 4), o, lse)


@pytest.mark.slow
def test_left_padding_is_not_seen():
    cache, leftpad = Cache(2, LENGTHS_BEFORE, [[0], [1]]), (2, 20)
    for b, n in enumerate(leftpad):
        cache.k[b, :n] = cache.v[b, :n] = math.nan
    cache.before = cache.k.clone(), cache.v.clone()
    q = randn(2, 4, 2, HEAD_DIM)
    k, v = (randn(2, 4, 2, HEAD_DIM, seed=seed) for seed in (1, 2))
    o, lse = compat.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cache_seqlens=int32(*LENGTHS_BEFORE),
        cache_leftpad=int32(*leftpad), causal=True, return_softmax_lse=True,
    )  # fmt: skip
    cache.assert_appended(k, v)
    assert_agrees(cache.arguments(q, 4, leftpad), o, lse)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_a_cache_is_read_without_new_rows(splits: int):
    """By an int, by a tensor, and whole, in any number of splits; q that requires a gradient."""
    cache = Cache(2, (ROWS, ROWS), [[0], [1]])
    q = randn(2, 1, 4, HEAD_DIM).requires_grad_()
    by_int = compat.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=ROWS, num_splits=splits
    )
    by_tensor = compat.flash_attn_with_kvcache(
        q, cache.k, cache.v, None, None, None, None, int32(ROWS, ROWS), num_splits=splits
    )
    whole = compat.flash_attn_with_kvcache(q, cache.k, cache.v, num_splits=splits)
    assert isinstance(by_int, torch.Tensor) and not by_int.requires_grad
    assert torch.equal(by_int, by_tensor) and torch.equal(by_int, whole)
    assert_agrees(cache.arguments(q.detach(), 0), by_int, None)
    assert same(cache.k, cache.before[0])


def test_rotation_is_that_of_complex_numbers():
    """In float64: each pair of columns, times cos + i sin of its position."""
    x = randn(2, 3, 2, HEAD_DIM)
    angles = torch.rand(ROWS, 16, generator=torch.Generator().manual_seed(0)) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    at = torch.tensor([[5, 6, 7], [0, 1, 2]])
    for interleaved in (True, False):
        found = Rotary.of(x, cos, sin, interleaved)(x, at)
        columns = torch.arange(32).view(16, 2) if interleaved else torch.arange(32).view(2, 16).T
        pairs = torch.view_as_complex(x.double()[..., columns].contiguous())
        turn = torch.complex(cos.double(), sin.double())[at][:, :, None]
        exact = x.double().clone()
        exact[..., columns] = torch.view_as_real(pairs * turn)
        assert torch.equal(found[..., 32:], x[..., 32:])
        # One rounding to bfloat16, and those of float32.
        error = (found.double() - exact).abs()
        assert (error <= exact.abs() * 2**-8 + pairs.abs().max() * 2**-22).all()


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window_size": (7, 2)}], ids=str)
def test_rotated_rows_are_appended_and_seen(options: dict[str, Any], interleaved: bool):
    cache = Cache(2, LENGTHS_BEFORE, [[0], [1]])
    q = randn(2, 4, 2, HEAD_DIM)
    k, v = (randn(2, 4, 2, HEAD_DIM, seed=seed) for seed in (1, 2))
    angles = torch.rand(ROWS, 16) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    o = compat.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cos, sin, int32(*LENGTHS_BEFORE),
        rotary_interleaved=interleaved, **options,
    )  # fmt: skip
    rotary = Rotary(cos, sin, interleaved)
    at = torch.tensor(LENGTHS_BEFORE)[:, None] + torch.arange(4)
    cache.assert_appended(rotary(k, at), v)
    turned = rotary(q, at if options else at[:, :1])
    assert_agrees(cache.arguments(turned, 4) | {"causal": False} | options, o, None)


@pytest.mark.slow
def test_a_step_of_decoding_compiles_into_one_graph():
    q = randn(2, 1, 2, HEAD_DIM)
    k, v = (randn(2, 1, 2, HEAD_DIM, seed=seed) for seed in (1, 2))
    lengths, table = int32(30, 21), torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return compat.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = Cache(5, (30, 21), table.tolist())
        found.append(function(cache.k, cache.v))
        cache.assert_appended(k, v)
    assert torch.equal(*found)


@pytest.mark.gpu
def test_steps_of_decoding_in_a_graph():
    """A graph follows lengths and pages on the device, and appends to them."""
    head_dim = 256 if torch.cuda.get_device_capability()[0] == 10 else HEAD_DIM
    q = randn(2, 1, 2, head_dim).cuda()
    k, v = (randn(2, 1, 2, head_dim, seed=seed).cuda() for seed in (1, 2))
    lengths = int32(30, 5).cuda()
    table = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32, device="cuda")
    k_cache, v_cache = (randn(5, ROWS, 2, head_dim, seed=seed).cuda() for seed in (3, 4))

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return compat.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    step(k_cache.clone(), v_cache.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(k_cache, v_cache)
    for _ in range(4):
        before = k_cache.clone(), v_cache.clone()
        expected = step(*before)
        graph.replay()
        assert torch.equal(o, expected)
        assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])
        lengths += 1
