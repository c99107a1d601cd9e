"""Latent decode: what its tests draw, run in the emulator, and compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cute_attn
from cute_attn.reference.mla import mla_decode_reference
from tests.ops.attention_cases import EXP2_ERROR, SCORE_ERROR

ARCH = "sm_90a"
SPARE = 2  # pages of no sequence, and entries of the table behind a sequence's pages


@dataclass(frozen=True)
class Case:
    """A call, but for `num_splits` and what is returned."""

    lengths: Sequence[int] = (130, 0, 5)
    queries: int = 1
    heads: int = 16
    page_size: int = 64
    head_dim: int = 576
    head_dim_v: int = 512
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    head_axis: bool = False  # the cache has a dimension of one head
    scale: float = 0.1
    fp8: bool = False  # the cache is float8_e4m3fn
    descale: float | None = None
    seed: int = 0

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Fresh random inputs. Unused rows and pages hold NaN, and entries of the table without a
        used token hold no page's number."""
        random = torch.Generator().manual_seed(self.seed)
        counts = [-(-n // self.page_size) for n in self.lengths]
        order = torch.randperm(sum(counts) + SPARE, generator=random).tolist()
        table = torch.full((len(counts), max(counts) + SPARE), -(2**20), dtype=torch.int32)
        pages = torch.full((len(order), self.page_size, self.head_dim), math.nan)
        free = iter(order)
        for sequence, (count, length) in enumerate(zip(counts, self.lengths, strict=True)):
            for j in range(count):
                page = table[sequence, j] = next(free)
                used = min(self.page_size, length - j * self.page_size)
                pages[page, :used] = torch.randn(used, self.head_dim, generator=random)
        # The caller's q is a view of a wider row.
        rows = torch.randn(
            len(counts), self.queries, self.heads, self.head_dim, generator=random
        ).to(device, self.dtype)
        rope = rows[..., self.head_dim_v :] if self.head_dim > self.head_dim_v else None
        cache = pages.to(device, torch.float8_e4m3fn if self.fp8 else self.dtype)
        factor = None
        if self.descale is not None:
            factor = torch.tensor([self.descale], device=device)
        return {
            "q_nope": rows[..., : self.head_dim_v],
            "q_rope": rope,
            "kv_cache": cache[:, :, None] if self.head_axis else cache,
            "block_table": table.to(device),
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32, device=device),
            "softmax_scale": self.scale,
            "causal": self.causal,
            "head_dim_v": self.head_dim_v,
            "kv_descale": factor,
        }


def run(args: dict[str, Any], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The call to an output that holds NaN, with lse."""
    q = args["q_nope"]
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device)
    o, lse = cute_attn.mla_decode(**args, return_lse=True, out=out, **more)
    assert o is out and lse is not None
    return o, lse


def assert_agrees(args: dict[str, Any], o: torch.Tensor, lse: torch.Tensor | None) -> None:
    """The error is at most twice that of plain code in the inputs' dtype."""
    exact, exact_lse = mla_decode_reference(**args)
    plain, _ = mla_decode_reference(**args, dtype=None)
    assert o.dtype == args["q_nope"].dtype and o.isfinite().all()
    seen = exact_lse.isfinite().transpose(1, 2)
    assert (o[~seen] == 0).all()
    ours, theirs = ((x[seen].double() - exact[seen]).norm().item() for x in (o, plain))
    assert ours <= 2 * theirs, f"error {ours:.3g}, plain {theirs:.3g}"
    # No row may be much worse than plain code's worst row.
    of_rows, of_plain = ((x.double() - exact).norm(dim=-1) for x in (o, plain))
    if seen.any():
        assert of_rows.max() <= 4 * of_plain.max()
    if lse is None:
        return
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    finite = exact_lse.isfinite()
    factor = args.get("kv_descale")
    scale = args["softmax_scale"] * (1.0 if factor is None else factor.item())
    products = scale * (args["q_nope"].double().norm(dim=-1).max().item() + 10)
    bound = EXP2_ERROR + SCORE_ERROR * products * 50
    assert ((lse - exact_lse)[finite].abs() <= bound).all()
