"""The passes of KDA's backward, each alone, in the emulator: the state's, with its results of every
chunk, and the adjoint's."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cute_attn import cache
from cute_attn.emulator import Emulator, Names
from cute_attn.kernels.common.spec import smem_bytes
from cute_attn.kernels.delta.chunk.backward.adjoint_pass import KdaAdjointPass
from cute_attn.kernels.delta.chunk.fused.state_pass import KdaStatePass
from cute_attn.kernels.delta.chunk.heuristics import segments_config, state_pass_config
from cute_attn.kernels.delta.chunk.spec import (
    CHUNK,
    AdjointPassSpec,
    PassSpec,
    SegmentsSpec,
    StatePassSpec,
)
from cute_attn.kernels.delta.table import ADJOINT_PASS, SEGMENTS, STATE_PASS
from cute_attn.reference import kda
from tests.conftest import assert_no_race
from tests.kernels.machine_code import assert_sound
from tests.sweeps import slow

sys.path.insert(0, str(Path(__file__).parent))
from kda_tiles import matrix_of, prepared, slot_of, slots, split_beta, unpack
from test_kda_state_pass import NAMES, SHARED_BASE, inputs

BF16, FP16 = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """Sequences, and how a kernel is specialised."""

    lengths: list[int]
    packed: bool
    dims: tuple[int, int]
    dtype: torch.dtype
    v_first: bool = False
    initial: bool = True
    final: bool = True
    tile_v: int = 64
    num_stages: int = 2
    chunks_per_segment: int = 0

    def fields(self, copies: str, products: str) -> dict[str, Any]:
        return {
            "dtype": NAMES[self.dtype],
            "head_dim_k": self.dims[0],
            "head_dim_v": self.dims[1],
            "index_dtype": "int64" if self.packed else "none",
            "state_v_first": self.v_first,
            "has_initial_state": self.initial,
            "has_final_state": self.final,
            "tile_v": self.tile_v,
            "num_stages": self.num_stages,
            "copies": copies,
            "products": products,
            "segments": "none",
        }

    def laid_out(self, state: torch.Tensor) -> torch.Tensor:
        return (state.transpose(-1, -2) if self.v_first else state).contiguous()


QUICK = [
    Case([70], True, (128, 128), BF16, num_stages=3),
    Case([70, 0, 64, 1], True, (64, 128), BF16, v_first=True, tile_v=128, final=False),
]
SLOW = [
    Case([66, 0, 65, 1], True, (64, 64), BF16, v_first=True, chunks_per_segment=1),
    Case([1, 1], False, (128, 64), FP16, v_first=True, initial=False, num_stages=3),
    Case([65, 3], True, (64, 64), BF16, tile_v=32, num_stages=1),
    Case([65], False, (64, 256), FP16),
    Case([300], False, (128, 128), BF16, chunks_per_segment=2),
]

MACHINES = [
    ("sm_90a", "cp_async", "mma"),
    ("sm_90a", "bulk", "wgmma"),
    ("sm_100a", "bulk", "mma"),
]

everywhere = pytest.mark.parametrize(("arch", "copies", "products"), MACHINES)


@pytest.mark.in_turn("arch")
@everywhere
@pytest.mark.parametrize("case", [*QUICK, *map(slow, SLOW)])
def test_the_state_pass_keeps_what_a_backward_needs(
    arch: str, copies: str, products: str, case: Case
) -> None:
    if products == "wgmma" and case.tile_v < 64:
        pytest.skip("a warpgroup has 64 columns of V")
    x = inputs_of(case)
    spec = StatePassSpec(**case.fields(copies, products), store_states=True)
    heads, (dim_k, dim_v) = x["v"].shape[2], case.dims
    count = slots(x["v"].shape[1], len(x["v"]), x["cu_seqlens"])
    o = torch.full_like(x["v"], math.nan)
    states = torch.full((count, heads, dim_v * dim_k), math.nan, dtype=case.dtype)
    v_new = torch.full((count, heads, CHUNK * dim_v), math.nan, dtype=case.dtype)
    start = case.laid_out(x["initial_state"])
    final_state = torch.full_like(start, math.nan)
    run(
        spec, arch, x, x["v"], (o, states, v_new),
        (start if case.initial else None, final_state if case.final else None), case,
    )  # fmt: skip

    arguments = {name: x[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    arguments["initial_state"] = x["initial_state"] if case.initial else None
    exact = kda.kda_chunk_reference(**arguments)
    plain = kda.kda_chunk_reference(**arguments, dtype=torch.float32, stage_dtype=case.dtype)
    chunks = list(kda.chunks(x["q"], x["cu_seqlens"]))
    places = [slot_of(chunk, x["q"].shape[1], x["cu_seqlens"]) for chunk in chunks]
    check(
        torch.stack([per_head(states[p], dim_v).transpose(-1, -2) for p in places]),
        torch.stack([plain.states.h[chunk.state] for chunk in chunks]).to(case.dtype),
        torch.stack([exact.states.h[chunk.state] for chunk in chunks]),
    )
    ours = [per_head(v_new[p], CHUNK).transpose(0, 1) for p in places]
    of_tokens = [
        y[: chunk.rows.stop - chunk.rows.start] for y, chunk in zip(ours, chunks, strict=True)
    ]
    m, _ = split_beta(x["beta"].double().unsqueeze(-1), case.dtype)
    m = torch.cat([m[chunk.batch, chunk.rows] for chunk in chunks])
    check(
        torch.cat(of_tokens),
        (torch.cat([plain.states.v_new[chunk.batch, chunk.rows] for chunk in chunks]) / m).to(
            case.dtype
        ),
        torch.cat([exact.states.v_new[chunk.batch, chunk.rows] for chunk in chunks]) / m,
    )
    for y, part in zip(ours, of_tokens, strict=True):
        assert not y[len(part) :].any()
    check_untouched(places, states, v_new)
    if case.final:
        check(
            final_state,
            case.laid_out(plain.states.final_state),
            case.laid_out(exact.states.final_state),
        )
    check(o, plain.o.to(case.dtype), exact.o)


@pytest.mark.in_turn("arch")
@everywhere
@pytest.mark.parametrize("case", [*QUICK, *map(slow, SLOW)])
def test_the_adjoint_pass_is_the_gradient_of_the_recurrence(
    arch: str, copies: str, products: str, case: Case
) -> None:
    if products == "wgmma" and case.tile_v < 64:
        pytest.skip("a warpgroup has 64 columns of V")
    check_adjoints(AdjointPassSpec(**case.fields(copies, products)), arch, inputs_of(case), case)


@pytest.mark.parametrize("gates", ["near 0", slow("bounded"), slow("large"), "some huge"])
def test_gates_of_any_size_have_adjoints(gates: str) -> None:
    case = Case([66], False, (64, 64), BF16)
    x = inputs_of(case)
    uniform = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(2))
    x["g"] = {
        "near 0": -1e-6 * uniform,
        "bounded": -5 * uniform,
        "large": -20 * uniform,
        "some huge": torch.where(uniform < 0.02, -1000.0, -0.1 * uniform),
    }[gates]
    check_adjoints(AdjointPassSpec(**case.fields("bulk", "wgmma")), "sm_90a", x, case)


def check_adjoints(spec: AdjointPassSpec, arch: str, x: dict[str, Any], case: Case) -> None:
    heads, (dim_k, dim_v) = x["v"].shape[2], case.dims
    count = slots(x["v"].shape[1], len(x["v"]), x["cu_seqlens"])
    adjoints = torch.full((count, heads, dim_v * dim_k), math.nan, dtype=case.dtype)
    dfinal = x["dfinal"] if case.final else None
    start = None if dfinal is None else case.laid_out(dfinal)
    dinitial = torch.full_like(case.laid_out(x["dfinal"]), math.nan)
    dv = torch.full_like(x["v"], math.nan)
    run(
        spec, arch, x, x["do"], (dv, adjoints, None),
        (start, dinitial if case.initial else None), case,
    )  # fmt: skip

    chunks = list(kda.chunks(x["q"], x["cu_seqlens"]))
    places = [slot_of(chunk, x["q"].shape[1], x["cu_seqlens"]) for chunk in chunks]
    exact = exact_adjoints(x, dfinal)
    plain = plain_adjoints(x, dfinal, case.dtype)
    ours = torch.stack([per_head(adjoints[p], dim_v).transpose(-1, -2) for p in places])
    check(ours, plain.of_chunks.to(case.dtype), exact.of_chunks)
    check_untouched(places, adjoints)
    check(dv, plain.dv.to(case.dtype), exact.dv)
    if case.initial:
        check(dinitial, case.laid_out(plain.initial), case.laid_out(exact.initial))


def inputs_of(case: Case) -> dict[str, Any]:
    x = inputs(case.lengths, case.packed, 2, *case.dims, case.dtype)
    generator = torch.Generator().manual_seed(1)
    x["do"] = torch.randn(x["v"].shape, generator=generator).to(case.dtype)
    x["dfinal"] = torch.randn(x["initial_state"].shape, generator=generator)
    return x


def run(
    spec: PassSpec, arch: str, x: dict[str, Any], rows: torch.Tensor, results: tuple[Any, ...],
    ends: tuple[Any, Any], case: Case,
) -> None:  # fmt: skip
    """Run a pass in the emulator, in one or split in segments. Checks that it has no race."""
    kernel, definition = (
        (KdaStatePass, STATE_PASS)
        if isinstance(spec, StatePassSpec)
        else (KdaAdjointPass, ADJOINT_PASS)
    )
    tiles, decay = prepared(
        *(x[name].double() for name in ("q", "k", "g", "beta")), x["cu_seqlens"], case.dtype
    )
    emulator = Emulator(schedule="random", seed=0)

    def launch(segments: str, results: tuple[Any, ...], *workspace: Any) -> None:
        of_pass = replace(spec, segments=segments)
        names = Names(**kernel(of_pass).names(SHARED_BASE))
        emulator.load(cache.compile(definition, of_pass, arch=arch), names)(
            rows, tiles, decay, *results, *ends, x["cu_seqlens"], *workspace, None, None
        )

    length = case.chunks_per_segment
    if not length:
        launch("none", results, None, None, 0, 1)
    else:
        tokens, heads = rows.shape[1:3]
        count = -(-tokens // CHUNK) // length + 1
        states, transitions = (
            torch.full((len(case.lengths), count, heads, dim, spec.head_dim_k), math.nan)
            for dim in (spec.head_dim_v, spec.head_dim_k)
        )
        unused = results if isinstance(spec, StatePassSpec) else (results[0], None, None)
        launch("transitions", unused, states, transitions, length, count)
        dims: dict[str, Any] = {"head_dim_k": spec.head_dim_k, "head_dim_v": spec.head_dim_v}
        combine = SegmentsSpec(
            **dims, index_dtype=spec.index_dtype, **segments_config(arch=arch, **dims)
        )
        emulator.load(cache.compile(SEGMENTS, combine, arch=arch))(
            x["cu_seqlens"], states, transitions, tokens, length, None, None
        )
        launch("outputs", results, states, None, length, count)
    assert_no_race(emulator)


def per_head(elements: torch.Tensor, rows: int) -> torch.Tensor:
    """The matrices of a chunk's value heads, `[HV, rows, columns]`."""
    return torch.stack([matrix_of(x, rows) for x in elements])


class Adjoints(NamedTuple):
    """Gradients of the state at the end of each chunk, of the initial state and of v."""

    of_chunks: torch.Tensor  # [chunks, HV, K, V]
    initial: torch.Tensor
    dv: torch.Tensor


def exact_adjoints(x: dict[str, Any], dfinal: torch.Tensor | None) -> Adjoints:
    """Autograd through the token-by-token reference in float64. The recurrence is affine in the
    state and in v, so both may be 0."""
    dv = torch.full_like(x["v"], math.nan, dtype=torch.float64)
    gradient = torch.zeros_like(x["dfinal"], dtype=torch.float64)
    if dfinal is not None:
        gradient += dfinal
    adjoints = []
    for chunk in reversed(list(kda.chunks(x["q"], x["cu_seqlens"]))):
        after = gradient[chunk.sequence].clone()
        adjoints.append(after)
        rows = slice(chunk.batch, chunk.batch + 1), chunk.rows
        q, k, g, beta, do = (x[name][rows].double() for name in ("q", "k", "g", "beta", "do"))
        state = torch.zeros_like(after).unsqueeze(0).requires_grad_()
        v = torch.zeros_like(do).requires_grad_()
        got = kda.kda_reference(q, k, v, g, beta, initial_state=state)
        loss = (got.o * do).sum() + (got.final_state * after).sum()
        before, dv[rows] = torch.autograd.grad(loss, (state, v))
        gradient[chunk.sequence] = before[0]
    return Adjoints(torch.stack(adjoints[::-1]), gradient, dv)


def plain_adjoints(x: dict[str, Any], dfinal: torch.Tensor | None, dtype: torch.dtype) -> Adjoints:
    """The adjoints in plain float32 code by chunks, with operands of products rounded to
    `dtype`."""

    def stored(y: torch.Tensor) -> torch.Tensor:
        return y.to(dtype).float()

    tiles, decay = prepared(
        *(x[name].double() for name in ("q", "k", "g", "beta")), x["cu_seqlens"], dtype
    )
    tokens, _, dim_k = x["g"].shape[1:]
    dv = torch.full_like(x["v"], math.nan, dtype=torch.float32)
    gradient = torch.zeros_like(x["dfinal"]) if dfinal is None else dfinal.clone()
    adjoints = []
    for chunk in reversed(list(kda.chunks(x["q"], x["cu_seqlens"]))):
        after = gradient[chunk.sequence].clone()
        adjoints.append(after)
        slot = slot_of(chunk, tokens, x["cu_seqlens"])
        do = x["do"][chunk.batch, chunk.rows].float().transpose(0, 1)
        for head, record in enumerate(tiles[slot].float()):
            m = {name: y[: do.shape[1]] for name, y in unpack(record, dim_k).items()}
            aqk, akk = (m[name][:, : do.shape[1]] for name in ("Aqk", "Akk"))
            dv_new = aqk.T @ do[head] + m["kg"] @ stored(after[head])
            dr = akk.T @ stored(dv_new)
            dv[chunk.batch, chunk.rows, head] = dr
            gradient[chunk.sequence, head] = (
                decay[slot, head].unsqueeze(-1) * after[head]
                + m["qg"].T @ do[head]
                - m["kd"].T @ stored(dr)
            )
    return Adjoints(torch.stack(adjoints[::-1]), gradient, dv)


def check(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error of plain code, as a norm."""
    assert not ours.isnan().any()
    error, allowed = (ours.double() - exact).norm(), 2 * (plain.double() - exact).norm()
    assert error <= allowed + 1e-12 * exact.norm(), f"{error} above {allowed}"


def check_untouched(places: list[int], *tensors: torch.Tensor) -> None:
    """Slots that are nobody's were not written."""
    unused = [p for p in range(len(tensors[0])) if p not in places]
    assert all(x[unused].isnan().all() for x in tensors)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", *map(slow, ("sm_80", "sm_86", "sm_120a"))])
@pytest.mark.parametrize(
    ("dims", "segments"),
    [
        ((128, 128), "none"),
        slow((128, 128), "transitions"),
        slow((128, 128), "outputs"),
        slow((64, 64), "none"),
        slow((128, 256), "none"),
    ],
)
def test_no_pass_spills(arch: str, dims: tuple[int, int], segments: str) -> None:
    fields = Case([1], True, dims, BF16).fields("bulk", "mma")
    config = state_pass_config(arch=arch, head_dim_k=dims[0], head_dim_v=dims[1])
    fields |= config | {"segments": segments}
    for definition, spec in (
        (ADJOINT_PASS, AdjointPassSpec(**fields)),
        (STATE_PASS, StatePassSpec(**fields, store_states=True)),
    ):
        entry = cache.compile(definition, spec, arch=arch)
        assert_sound(entry)
        for use in entry.kernels:
            assert not use.spills, f"{spec} spills {use.spills} bytes"
            assert use.static_shared + (use.dynamic_shared or 0) <= smem_bytes(arch) + 1024
