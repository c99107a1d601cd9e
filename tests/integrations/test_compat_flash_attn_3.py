"""FlashAttention 3's functions, `cute_attn.compat.flash_attn_3`, in the emulator.

`test_compat` has the cases of a cache, which both share.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from cute_attn.compat import flash_attn_3
from tests.ops.attention_cases import assert_agrees

from .test_compat import HEAD_DIM, ROWS, Cache, dense, emulated, int32, randn

__all__ = ["emulated"]  # a fixture of all tests

FLOAT8 = (("q_descale", None), ("k_descale", None), ("v_descale", None))
WINDOW = (("window_size", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0))
SCALE = (("softmax_scale", None), ("causal", False))
TUNING = (("pack_gqa", None), ("deterministic", False), ("sm_margin", 0))
PROBABILITIES = ("return_attn_probs", False)

# hopper/flash_attn_interface.py: names in their order, and defaults where there are any.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "flash_attn_func": (
        "q", "k", "v", *SCALE, ("qv", None), *FLOAT8, *WINDOW, ("num_splits", 1), *TUNING,
        PROBABILITIES,
    ),
    "flash_attn_qkvpacked_func": (
        "qkv", *SCALE, *FLOAT8, *WINDOW, ("deterministic", False), ("num_heads_q", None),
        ("sm_margin", 0), PROBABILITIES,
    ),
    "flash_attn_varlen_func": (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
        ("seqused_q", None), ("seqused_k", None), *SCALE, ("qv", None), *FLOAT8, *WINDOW,
        ("num_splits", 1), *TUNING, PROBABILITIES,
    ),
    "flash_attn_with_kvcache": (
        "q", "k_cache", "v_cache", ("k", None), ("v", None), ("qv", None), ("rotary_cos", None),
        ("rotary_sin", None), ("cache_seqlens", None), ("cache_batch_idx", None),
        ("cache_leftpad", None), ("page_table", None), ("cu_seqlens_q", None),
        ("cu_seqlens_k_new", None), ("max_seqlen_q", None), ("rotary_seqlens", None), *FLOAT8,
        *SCALE, *WINDOW, ("rotary_interleaved", True), ("scheduler_metadata", None),
        ("num_splits", 0), ("pack_gqa", None), ("sm_margin", 0), ("return_softmax_lse", False),
    ),
}  # fmt: skip


def test_every_function_has_a_signature_to_compare_with():
    assert sorted(SIGNATURES) == sorted(flash_attn_3.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flashattention_3(name: str):
    parameters = inspect.signature(getattr(flash_attn_3, name)).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    found = tuple(p.name if p.default is p.empty else (p.name, p.default) for p in parameters)
    assert found == SIGNATURES[name]


ABSENT = ("qv", "q_descale", "attention_chunk", "rotary_seqlens")


FACTORS = ("k_descale", "v_descale")


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, signature in SIGNATURES.items()
        for argument in (*ABSENT, *(FACTORS if "qkvpacked" in name else ()))
        if argument in dict(p for p in signature if not isinstance(p, str))
    ],
)
def test_what_has_no_kernel_is_refused(name: str, argument: str):
    x, bounds = randn(1, 16, 2, HEAD_DIM), int32(0, 16)
    given: dict[str, Any] = {
        "flash_attn_func": {"q": x, "k": x, "v": x},
        "flash_attn_qkvpacked_func": {"qkv": torch.stack([x, x, x], 2)},
        "flash_attn_with_kvcache": {"q": x, "k_cache": x, "v_cache": x},
        "flash_attn_varlen_func": {
            **dict.fromkeys(("q", "k", "v"), x[0]),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), bounds),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 16),
        },
    }[name]
    given[argument] = 8 if argument == "attention_chunk" else torch.ones(1)
    with pytest.raises(NotImplementedError, match=f"^{argument} is (8|given)"):
        getattr(flash_attn_3, name)(**given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens_k_new": int32(0, 1)}, NotImplementedError, "^cu_seqlens_k_new is given"),
        ({"page_table": int32(0)}, ValueError, r"^page_table has shape \[1\], must be \[1, max"),
        (
            {"page_table": int32(0)[None], "cache_leftpad": int32(0)},
            NotImplementedError,
            "^cache_leftpad is given with page_table",
        ),
        ({"cu_seqlens_q": int32(0, 1)}, ValueError, r"^q has shape \[1, 1, 2, 64\], must have 3"),
        (
            {
                "q": randn(1, 2, HEAD_DIM),
                "cu_seqlens_q": int32(0, 1),
                "rotary_cos": randn(ROWS, 16),
                "rotary_sin": randn(ROWS, 16),
            },
            NotImplementedError,
            "^rotary_cos is given with cu_seqlens_q",
        ),
    ],
)
def test_bad_arguments_of_a_cache(changes: dict[str, Any], error: type[Exception], message: str):
    row, cache = randn(1, 1, 2, HEAD_DIM), randn(1, ROWS, 2, HEAD_DIM)
    given: dict[str, Any] = {"q": row, "k": row, "v": row, "cache_seqlens": 3}
    with pytest.raises(error, match=message):
        flash_attn_3.flash_attn_with_kvcache(
            k_cache=cache, v_cache=cache.clone(), **given | changes
        )


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^qkv has shape .*, by num_heads_q$"):
        flash_attn_3.flash_attn_qkvpacked_func(randn(1, 8, 7, HEAD_DIM), num_heads_q=4)


@pytest.mark.slow
def test_functions_agree_with_the_reference():
    """By position; packed tensors give the same bits."""
    args = dense(heads=4)
    q, k, v = args["q"], args["k"], args["v"]
    o, lse = flash_attn_3.flash_attn_func(q, k, v, None, True, return_attn_probs=True)
    assert_agrees(args, o, lse)
    alone = flash_attn_3.flash_attn_func(q, k, v, None, True, None, None, None, None, (-1, -1))
    assert isinstance(alone, torch.Tensor)
    assert_agrees(args, alone, None)
    packed = flash_attn_3.flash_attn_qkvpacked_func(
        torch.cat([q, k, v], 2), None, True, num_heads_q=4
    )
    assert torch.equal(packed, alone)
    three = flash_attn_3.flash_attn_qkvpacked_func(torch.stack([k, k, v], 2), causal=True)
    assert_agrees(args | {"q": k}, three, None)

    bounds, used = int32(0, 24, 48), int32(24, 11)
    rows = {name: args[name].flatten(0, 1) for name in ("q", "k", "v")}
    o, lse = flash_attn_3.flash_attn_varlen_func(
        *rows.values(), bounds, bounds, 24, 24, used, used, None, True, return_attn_probs=True
    )
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "seqused_q": used, "seqused_k": used}
    assert_agrees(rows | lengths | {"causal": True}, o, lse)


@pytest.mark.slow
@pytest.mark.parametrize("new", [0, 2])
def test_packed_queries_see_pages(new: int):
    """As SGLang calls it: lengths and pages on the device, queries packed."""
    table = [[4, 1], [0, 2]]
    cache = Cache(5, (30, 21), table)
    q, bounds = randn(6, 2, HEAD_DIM), int32(0, 2, 6)
    k, v = (randn(2, new, 2, HEAD_DIM, seed=seed) for seed in (1, 2))
    o, lse = flash_attn_3.flash_attn_with_kvcache(
        q, cache.k, cache.v, *((k, v) if new else ()), cache_seqlens=int32(30, 21),
        page_table=torch.tensor(table, dtype=torch.int32), cu_seqlens_q=bounds,
        cu_seqlens_k_new=None if new else int32(0, 30, 51), max_seqlen_q=4, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    cache.assert_appended(k, v)
    assert_agrees(cache.arguments(q, new) | {"cu_seqlens_q": bounds}, o, lse)


def in_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


@pytest.mark.slow
@pytest.mark.parametrize("new", [0, 2])
def test_an_fp8_cache(new: int):
    """New rows of k and v have the dtype of the cache, and the factors are the kernel's."""
    table = [[4, 1], [0, 2]]
    cache = Cache(5, (30, 21), table)
    cache.k, cache.v = in_fp8(cache.k), in_fp8(cache.v)
    cache.before = cache.k.clone(), cache.v.clone()
    q = randn(2, 2, 2, HEAD_DIM)
    k, v = (in_fp8(randn(2, new, 2, HEAD_DIM, seed=seed)) for seed in (1, 2))
    factors = {"k_descale": torch.rand(2, 2) + 0.5, "v_descale": torch.tensor(1.5)}
    o, lse = flash_attn_3.flash_attn_with_kvcache(
        q, cache.k, cache.v, *((k, v) if new else ()), cache_seqlens=int32(30, 21),
        page_table=torch.tensor(table, dtype=torch.int32), causal=True, return_softmax_lse=True,
        **factors,
    )  # fmt: skip
    cache.assert_appended(k, v)
    assert_agrees(cache.arguments(q, new) | factors, o, lse)


def test_rotated_keys_are_not_rounded_twice():
    row, cache = randn(1, 1, 2, HEAD_DIM), in_fp8(randn(1, ROWS, 2, HEAD_DIM))
    turns = {"rotary_cos": randn(ROWS, 16), "rotary_sin": randn(ROWS, 16)}
    with pytest.raises(NotImplementedError, match=r"^rotary_cos is given with a cache of .*e4m3fn"):
        flash_attn_3.flash_attn_with_kvcache(
            row, cache, cache.clone(), in_fp8(row), in_fp8(row), cache_seqlens=3, **turns
        )
