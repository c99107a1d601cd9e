"""KDA's pass of the state through prepared chunks, alone, in the emulator."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.emulator import Emulator, Names
from cute_attn.kernels.delta.chunk.fused.state_pass import KdaStatePass
from cute_attn.kernels.delta.chunk.spec import CHUNK, SegmentsSpec, StatePassSpec
from cute_attn.kernels.delta.table import SEGMENTS, STATE_PASS
from cute_attn.reference import kda
from tests.sweeps import slow

sys.path.insert(0, str(Path(__file__).parent))
from kda_tiles import prepared

SHARED_BASE = 1024  # where a CTA's shared memory starts: the first KiB is the system's
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


@pytest.mark.in_turn("arch")
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
    spec = StatePassSpec(
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
        segments="none",
    )
    check(spec, arch, x, dtype, state_v_first=v_first, initial=initial)


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize(
    ("arch", "products"), [("sm_90a", "mma"), ("sm_90a", "wgmma"), ("sm_100a", "mma")]
)
@pytest.mark.parametrize(
    ("lengths", "packed", "dims", "v_first", "initial", "chunks_per_segment"),
    [
        slow([500], False, (128, 128), False, True, 2),
        ([130, 130], False, (64, 128), True, False, 1),
        slow([400, 0, 129, 64, 1], True, (128, 64), True, True, 2),
    ],
)
def test_a_sequence_may_be_split(
    arch: str,
    products: str,
    lengths: list[int],
    packed: bool,
    dims: tuple[int, int],
    v_first: bool,
    initial: bool,
    chunks_per_segment: int,
) -> None:
    dtype = torch.bfloat16
    x = inputs(lengths, packed, 2, *dims, dtype)
    spec = StatePassSpec(
        dtype=NAMES[dtype],
        head_dim_k=dims[0],
        head_dim_v=dims[1],
        index_dtype="int64" if packed else "none",
        state_v_first=v_first,
        has_initial_state=initial,
        has_final_state=True,
        tile_v=64,
        num_stages=2,
        copies="bulk",
        products=products,
        segments="none",
    )
    check(
        spec, arch, x, dtype,
        state_v_first=v_first, initial=initial, chunks_per_segment=chunks_per_segment,
    )  # fmt: skip


def test_two_ctas_share_copies() -> None:
    """In segments, on sm_90a, the two CTAs of a value head are a cluster. The kernels start before
    the previous kernel's end, which the emulator does not do."""
    x = inputs([130], False, 1, 128, 128, torch.bfloat16)
    spec = StatePassSpec(
        dtype="bfloat16",
        head_dim_k=128,
        head_dim_v=128,
        index_dtype="none",
        state_v_first=False,
        has_initial_state=True,
        has_final_state=True,
        tile_v=64,
        num_stages=3,
        copies="bulk",
        products="wgmma",
        segments="none",
        cluster=2,
        dependent=True,
    )
    check(
        spec, "sm_90a", x, torch.bfloat16,
        state_v_first=False, initial=True, chunks_per_segment=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim_k": 64}, "cluster is 2, must be 1 at head_dim_k=64, head_dim_v=128"),
        ({"head_dim_v": 64}, "cluster is 2, must be 1 at head_dim_k=128, head_dim_v=64"),
        ({"tile_v": 128}, "cluster is 2, must be 1 with copies='bulk', tile_v=128"),
        ({"copies": "cp_async"}, "cluster is 2, must be 1 with copies='cp_async', tile_v=64"),
        ({"cluster": 3}, "cluster is 3"),
    ],
    ids=str,
)
def test_which_ctas_can_share_copies(changes: dict[str, Any], message: str) -> None:
    shared = {
        "dtype": "bfloat16", "head_dim_k": 128, "head_dim_v": 128, "index_dtype": "none",
        "state_v_first": False, "has_initial_state": False, "has_final_state": False, "tile_v": 64,
        "num_stages": 3, "copies": "bulk", "products": "mma", "segments": "none", "cluster": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(message)):
        StatePassSpec(**shared | changes)


def check(
    spec: StatePassSpec,
    arch: str,
    x: dict[str, Any],
    dtype: torch.dtype,
    *,
    state_v_first: bool,
    initial: bool,
    chunks_per_segment: int = 0,
) -> None:
    tiles, decay = prepared(
        *(x[name].double() for name in ("q", "k", "g", "beta")), x["cu_seqlens"], dtype
    )
    state = x["initial_state"].transpose(-1, -2) if state_v_first else x["initial_state"]
    state = state.contiguous()
    o = torch.full_like(x["v"], math.nan)
    final_state = torch.full_like(state, math.nan)
    emulator = Emulator()

    def run(segments: str, *workspace: Any) -> None:
        of_pass = replace(spec, segments=segments)
        names = Names(**KdaStatePass(of_pass).names(SHARED_BASE))
        emulator.load(cache.compile(STATE_PASS, of_pass, arch=arch), names)(
            x["v"], tiles, decay, o, None, None, state if initial else None, final_state,
            x["cu_seqlens"], *workspace, None, None,
        )  # fmt: skip

    if not chunks_per_segment:
        run("none", None, None, 0, 1)
    else:
        tokens, heads = x["v"].shape[1:3]
        count = -(-tokens // CHUNK) // chunks_per_segment + 1
        states, transitions = (
            torch.full((len(state), count, heads, dim, spec.head_dim_k), math.nan)
            for dim in (spec.head_dim_v, spec.head_dim_k)
        )
        run("transitions", states, transitions, chunks_per_segment, count)
        combine = SegmentsSpec(
            head_dim_k=spec.head_dim_k,
            head_dim_v=spec.head_dim_v,
            index_dtype=spec.index_dtype,
            tile_v=16 * chunks_per_segment,
            num_stages=chunks_per_segment,
            dependent=spec.dependent,
        )
        emulator.load(cache.compile(SEGMENTS, combine, arch=arch))(
            x["cu_seqlens"], states, transitions, tokens, chunks_per_segment, None, None
        )
        run("outputs", states, None, chunks_per_segment, count)

    arguments = dict(x, initial_state=state if initial else None, state_v_first=state_v_first)
    exact = kda.kda_reference(**arguments)
    arguments |= {"dtype": torch.float32, "stage_dtype": dtype}
    plain = kda.kda_chunk_reference(**arguments)
    for ours, theirs, right in (
        (o, plain.o.to(dtype), exact.o),
        (final_state, plain.states.final_state, exact.final_state),
    ):
        error = (ours.double() - right).norm()
        assert error <= 2 * (theirs.double() - right).norm() + 1e-12 * right.norm()


def test_names_follow_from_what_is_declared() -> None:
    spec = StatePassSpec(
        dtype="bfloat16",
        head_dim_k=128,
        head_dim_v=128,
        index_dtype="none",
        state_v_first=False,
        has_initial_state=False,
        has_final_state=False,
        tile_v=64,
        num_stages=2,
        copies="bulk",
        products="mma",
        segments="none",
    )
    kernel = KdaStatePass(spec)
    names = kernel.names(SHARED_BASE)
    assert names["warps"] == {"state": (0, 3), "load": (4, 4)}
    shared = names["shared"]
    assert shared["chunk[1].kg"] == (SHARED_BASE + kernel.stage_bytes + 32768, 16384, 16384)
    barriers = SHARED_BASE + 2 * kernel.stage_bytes
    assert shared["chunk_full"] == (barriers, 16, 8)
    assert shared["chunk_empty"] == (barriers + 16, 16, 8)
    assert [kernel.pipeline[name].arrivals for name in ("chunk_full", "chunk_empty")] == [33, 4]
