"""KDA's recurrence over prepared chunks, alone, in the emulator."""

from __future__ import annotations

import math
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.emulator import Emulator
from cute_attn.kernels.kda.spec import RecurrenceSpec
from cute_attn.launch import KDA_RECURRENCE
from cute_attn.reference import kda

sys.path.insert(0, str(Path(__file__).parent))
from kda_tiles import prepared

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def inputs(
    lengths: list[int], packed: bool, heads: int, dim_k: int, dim_v: int, dtype: torch.dtype
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(lengths) + dim_k)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)]) if packed else None
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, *shape, generator=generator)

    return {
        "q": kda.l2norm(normal(dim_k)).to(dtype),
        "k": kda.l2norm(normal(dim_k)).to(dtype),
        "v": normal(dim_v).to(dtype),
        "g": -0.2 * torch.rand(batch, tokens, heads, dim_k, generator=generator),
        "beta": torch.rand(batch, tokens, heads, generator=generator),
        "initial_state": torch.randn(len(lengths), heads, dim_k, dim_v, generator=generator),
        "cu_seqlens": cu_seqlens,
    }


@pytest.mark.parametrize(
    ("arch", "copies", "products"),
    [
        ("sm_90a", "cp_async", "mma"),
        ("sm_90a", "bulk", "mma"),
        ("sm_90a", "bulk", "wgmma"),
        ("sm_100a", "bulk", "mma"),
    ],
)
@pytest.mark.parametrize(
    ("lengths", "packed", "dims", "dtype", "tile_v", "num_stages", "v_first", "initial"),
    [
        ([130], False, (128, 128), torch.bfloat16, 64, 2, False, True),
        ([1, 1], False, (128, 64), torch.float16, 64, 3, True, False),
        ([70, 0, 64, 1, 200], True, (64, 128), torch.bfloat16, 128, 2, True, True),
        ([65, 3], True, (64, 64), torch.bfloat16, 32, 1, False, True),
    ],
)
def test_it_continues_a_sequence_of_chunks(
    arch: str,
    copies: str,
    products: str,
    lengths: list[int],
    packed: bool,
    dims: tuple[int, int],
    dtype: torch.dtype,
    tile_v: int,
    num_stages: int,
    v_first: bool,
    initial: bool,
) -> None:
    heads = 2
    x = inputs(lengths, packed, heads, *dims, dtype)
    if products == "wgmma" and tile_v < 64:
        pytest.skip("a warpgroup has 64 columns of V")
    spec = RecurrenceSpec(
        dtype=NAMES[dtype],
        head_dim_k=dims[0],
        head_dim_v=dims[1],
        index_dtype="int64" if packed else "none",
        state_v_first=v_first,
        has_initial_state=initial,
        has_final_state=True,
        tile_v=tile_v,
        num_stages=num_stages,
        copies=copies,
        products=products,
    )
    tiles, decay = prepared(
        *(x[name].double() for name in ("q", "k", "g", "beta")), x["cu_seqlens"], dtype
    )
    state = x["initial_state"].transpose(-1, -2) if v_first else x["initial_state"]
    state = state.contiguous()
    o = torch.full_like(x["v"], math.nan)
    final_state = torch.full_like(state, math.nan)
    entry = cache.compile(KDA_RECURRENCE, spec, arch=arch)
    Emulator().load(entry)(
        x["v"], tiles, decay, o, state if initial else None, final_state, x["cu_seqlens"]
    )

    arguments = dict(x, initial_state=state if initial else None, state_v_first=v_first)
    exact = kda.kda_reference(**arguments)
    arguments |= {"dtype": torch.float32, "stage_dtype": dtype}
    plain = kda.kda_chunk_reference(**arguments)
    for ours, theirs, right in (
        (o, plain.o.to(dtype), exact.o),
        (final_state, plain.states.final_state, exact.final_state),
    ):
        error = (ours.double() - right).norm()
        assert error <= 2 * (theirs.double() - right).norm() + 1e-12 * right.norm()
