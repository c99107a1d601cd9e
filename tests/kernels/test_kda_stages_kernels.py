"""The kernels of the modular KDA path, each by itself, in the emulator.

What a kernel reads is what `cute_attn.reference.kda` gives for the stage before it, in the dtypes
of memory; what it gives is compared with the same stage's reference in float64. The error may be
twice that of the stage in float32, its results and the operands of its products rounded as here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.emulator import Emulator
from cute_attn.kernels.delta import table
from cute_attn.kernels.delta.chunk.spec import DeltaHSpec, GateSpec, OutputSpec, RecomputeSpec
from cute_attn.reference import kda
from tests.sweeps import slow

ARCHS = ("sm_90a", "sm_100a")
MAX_ERROR = 2.0  # times that of plain PyTorch
REAL = (torch.float64, torch.float32)  # the reference's arithmetic, and plain PyTorch's

# Empty sequences, one token, a chunk less one, a chunk, a chunk and one, and two and a half.
PACKED = (0, 0, 1, 64, 128, 193, 193, 353)


@functools.cache
def kernel(definition: cache.KernelDef, spec: Any, arch: str) -> Any:
    return Emulator(schedule="random", seed=3).load(cache.compile(definition, spec, arch=arch))


def poisoned(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), math.nan, dtype=dtype)


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def offsets(index_dtype: str) -> torch.Tensor | None:
    return None if index_dtype == "none" else torch.tensor(PACKED, dtype=torch_dtype(index_dtype))


def shape_of(index_dtype: str) -> tuple[int, int]:
    """B and T. Dense sequences end in a short chunk; packed ones leave tokens behind the last."""
    return (2, 101) if index_dtype == "none" else (1, PACKED[-1] + 5)


def check(name: str, x: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """The error rule holds, and elements that the reference leaves out are not written."""
    exact, plain = exact.double(), plain.to(x.dtype).double()
    defined = ~exact.isnan()
    assert torch.equal(~x.isnan(), defined), f"{name}: not where the reference is"
    error, allowed = ((y.double() - exact)[defined].abs().max() for y in (x, plain))
    assert error <= MAX_ERROR * allowed, f"{name}: error {error:.2e}, plain PyTorch's {allowed:.2e}"


def gates(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Natural logarithms of decays, most near 1, some down to -5, a few that leave nothing."""
    g = -(torch.rand(shape, generator=generator) ** 6) * 5.0
    rare = torch.rand(shape, generator=generator) < 0.002
    return torch.where(rare, torch.tensor(-100.0), g)


class Stages:
    """Inputs of all stages, and the reference's results."""

    def __init__(
        self,
        head_dim_k: int,
        head_dim_v: int,
        dtype: str,
        index_dtype: str,
        beta_dtype: str = "float32",
        heads_qk: int = 1,
        heads: int = 2,
        state_v_first: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(11)
        batch, tokens = shape_of(index_dtype)
        self.dtype, self.cu_seqlens = torch_dtype(dtype), offsets(index_dtype)
        self.scale = 0.21

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(batch, tokens, *shape, generator=generator)

        self.q, self.k = (kda.l2norm(random(heads_qk, head_dim_k)).to(self.dtype) for _ in range(2))
        self.v = random(heads, head_dim_v).to(self.dtype)
        self.beta = torch.sigmoid(random(heads)).to(torch_dtype(beta_dtype))
        self.g = kda.kda_gate_cumsum_reference(
            gates((batch, tokens, heads, head_dim_k), generator), cu_seqlens=self.cu_seqlens
        ).float()
        self.intra = self.intra_of()
        sequences = batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        matrix = (head_dim_v, head_dim_k) if state_v_first else (head_dim_k, head_dim_v)
        self.initial_state = torch.randn(sequences, heads, *matrix, generator=generator)
        self.state_v_first = state_v_first

    def intra_of(self) -> kda.KdaIntra:
        intra = kda.kda_chunk_intra_reference(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.scale,
            cu_seqlens=self.cu_seqlens,
        )
        return kda.KdaIntra(*(x.to(self.dtype) for x in intra))

    def states_of(
        self, initial_state: torch.Tensor | None, dtype: torch.dtype, plain: bool = False
    ) -> kda.KdaStates:
        """delta_h's results, `plain` as plain PyTorch has them in this dtype."""
        return kda.kda_chunk_delta_h_reference(
            self.intra.kg,
            self.intra.w,
            self.intra.u,
            self.g,
            initial_state,
            state_v_first=self.state_v_first,
            cu_seqlens=self.cu_seqlens,
            dtype=dtype,
            stage_dtype=self.dtype if plain else None,
        )


# -- gate_cumsum


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "spec",
    [
        GateSpec(128, "bfloat16", "softplus", True, True, "none"),
        GateSpec(64, "float32", "lower_bound", True, False, "int64"),
        slow(GateSpec(128, "float32", "lower_bound", False, True, "none")),
        GateSpec(128, "float32", "none", False, False, "int32"),
    ],
)
def test_gate_cumsum(spec: GateSpec, arch: str) -> None:
    generator = torch.Generator().manual_seed(5)
    batch, tokens = shape_of(spec.index_dtype)
    heads, cu_seqlens = 3, offsets(spec.index_dtype)
    shape = (batch, tokens, heads, spec.head_dim_k)
    g = torch.randn(shape, generator=generator).to(torch_dtype(spec.gate_dtype))
    if spec.gate == "none":
        g = gates(shape, generator)
    A_log = torch.randn(heads, generator=generator) if spec.has_A_log else None
    dt_bias = None
    if spec.has_dt_bias:
        dt_bias = torch.randn(heads, spec.head_dim_k, generator=generator)
    bound = -5.0

    def reference(dtype: torch.dtype) -> torch.Tensor:
        decay = g.to(dtype)
        if spec.gate != "none":
            lower_bound = bound if spec.gate == "lower_bound" else None
            decay = kda.log_decay(g, A_log, dt_bias, lower_bound, dtype)
        return kda.kda_gate_cumsum_reference(decay, cu_seqlens=cu_seqlens, dtype=dtype)

    out = poisoned(shape, torch.float32)
    kernel(table.GATE_CUMSUM, spec, arch)(g, A_log, dt_bias, cu_seqlens, out, bound)
    check("G", out, reference(torch.float64), reference(torch.float32))


@pytest.mark.parametrize("gate", [-1000.0, -math.inf])
def test_a_gate_that_leaves_nothing_is_a_finite_one(gate: float) -> None:
    spec = GateSpec(64, "float32", "none", False, False, "none")
    g = -torch.rand(1, 70, 1, 64, generator=torch.Generator().manual_seed(6))
    g[0, 20, 0, 3] = gate
    out = poisoned(g.shape, torch.float32)
    kernel(table.GATE_CUMSUM, spec, "sm_90a")(g, None, None, None, out, 0.0)
    limited = g.clamp(min=-128.0)
    check("G", out, *(kda.kda_gate_cumsum_reference(limited, dtype=d) for d in REAL))


# -- recompute_w_u


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "spec",
    [
        slow(RecomputeSpec("bfloat16", 128, 128, "none", "float32", False, True)),
        RecomputeSpec("bfloat16", 128, 64, "int32", "bfloat16", True, True),
        slow(RecomputeSpec("float16", 64, 128, "int64", "float32", False, False)),
        slow(RecomputeSpec("bfloat16", 64, 192, "int64", "float32", False, False)),
    ],
)
def test_recompute_w_u(spec: RecomputeSpec, arch: str) -> None:
    s = Stages(spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.index_dtype, spec.beta_dtype)
    w, qg, kg = (poisoned(s.g.shape, s.dtype) for _ in range(3))
    u = poisoned(s.v.shape, s.dtype)
    kernel(table.RECOMPUTE_W_U, spec, arch)(
        s.q if spec.store_qg else None,
        s.k,
        s.v,
        s.g,
        s.beta,
        s.intra.Akk,
        s.cu_seqlens,
        w,
        u,
        qg if spec.store_qg else None,
        kg if spec.store_kg else None,
    )
    arguments = (s.q, s.k, s.v, s.g, s.beta, s.intra.Akk)
    exact = kda.kda_recompute_w_u_reference(*arguments, cu_seqlens=s.cu_seqlens)
    plain = kda.kda_recompute_w_u_reference(
        *arguments, cu_seqlens=s.cu_seqlens, dtype=torch.float32, stage_dtype=s.dtype
    )
    asked = {"w": True, "u": True, "qg": spec.store_qg, "kg": spec.store_kg}
    for (name, wanted), x, *expected in zip(
        asked.items(), (w, u, qg, kg), exact, plain, strict=True
    ):
        if wanted:
            check(name, x, *expected)


# -- delta_h


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize(("arch", "products"), [("sm_90a", "wgmma"), ("sm_100a", "mma")])
@pytest.mark.parametrize(
    "spec",
    [
        DeltaHSpec("bfloat16", 128, 128, "int32", False, True, True, True, 64, 2),
        slow(DeltaHSpec("bfloat16", 128, 128, "none", True, True, True, True, 64, 4)),
        slow(DeltaHSpec("float16", 128, 64, "int64", True, False, True, True, 64, 2)),
        DeltaHSpec("float16", 64, 128, "none", False, False, False, False, 64, 1),
    ],
)
def test_delta_h(spec: DeltaHSpec, arch: str, products: str) -> None:
    spec = dataclasses.replace(spec, products=products)
    s = Stages(
        spec.head_dim_k,
        spec.head_dim_v,
        spec.dtype,
        spec.index_dtype,
        state_v_first=spec.state_v_first,
    )
    initial_state = s.initial_state if spec.has_initial_state else None
    exact = s.states_of(initial_state, torch.float64)
    plain = s.states_of(initial_state, torch.float32, plain=True)
    h = poisoned(exact.h.shape, s.dtype)
    v_new = poisoned(s.v.shape, s.dtype)
    final_state = poisoned(exact.final_state.shape, torch.float32)
    kernel(table.DELTA_H, spec, arch)(
        s.intra.kg,
        s.intra.w,
        s.intra.u,
        s.g,
        initial_state,
        s.cu_seqlens,
        h,
        v_new if spec.store_v_new else None,
        final_state if spec.has_final_state else None,
    )
    check("h", h, exact.h, plain.h)
    if spec.store_v_new:
        check("v_new", v_new, exact.v_new, plain.v_new)
    if spec.has_final_state:
        check("final_state", final_state, exact.final_state, plain.final_state)


# -- output


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "spec",
    [
        slow(OutputSpec("bfloat16", 128, 128, "none", False, False, 128)),
        slow(OutputSpec("bfloat16", 128, 128, "int64", True, True, 64)),
        OutputSpec("float16", 64, 128, "int32", False, True, 128),
        slow(OutputSpec("float16", 128, 64, "int32", True, False, 64)),
        slow(OutputSpec("bfloat16", 128, 192, "int32", True, False, 64)),
    ],
)
def test_output(spec: OutputSpec, arch: str) -> None:
    s = Stages(
        spec.head_dim_k,
        spec.head_dim_v,
        spec.dtype,
        spec.index_dtype,
        state_v_first=spec.state_v_first,
    )
    states = s.states_of(s.initial_state, torch.float64)
    v_new, h = states.v_new.to(s.dtype), states.h.to(s.dtype).contiguous()
    # flash-linear-attention leaves what is above the diagonal as it was
    Aqk = s.intra.Aqk.clone()
    for chunk in kda.chunks(s.q, s.cu_seqlens):
        rows = Aqk[chunk.batch, chunk.rows].transpose(0, 1)
        rows[torch.ones(rows.shape[1:]).triu(1).bool().expand_as(rows)] = math.nan
    o = poisoned(s.v.shape, s.dtype)
    q = (s.q * 7.5).to(s.dtype) if spec.l2norm else s.q
    kernel(table.OUTPUT, spec, arch)(q, v_new, s.g, Aqk, h, s.cu_seqlens, o, s.scale)

    def reference(dtype: torch.dtype, stage_dtype: torch.dtype | None = None) -> torch.Tensor:
        return kda.kda_chunk_output_reference(
            kda.l2norm(q, dtype).to(stage_dtype or dtype) if spec.l2norm else q,
            v_new,
            s.g,
            s.intra.Aqk,
            h,
            s.scale,
            state_v_first=spec.state_v_first,
            cu_seqlens=s.cu_seqlens,
            dtype=dtype,
            stage_dtype=stage_dtype,
        )

    check("o", o, reference(torch.float64), reference(torch.float32, s.dtype))
