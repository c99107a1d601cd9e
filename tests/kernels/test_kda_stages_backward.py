"""The kernels of the backward of KDA's stages, each by itself, in the emulator.

What a kernel reads is what the stages before it give in float64, in the dtypes of memory; what it
gives is compared with `kda_stage_gradients` in float64, by the rule of `test_kda_stages_kernels`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.common.spec import smem_bytes
from cute_attn.kernels.delta import table
from cute_attn.kernels.delta.chunk.heuristics import delta_h_backward_config
from cute_attn.kernels.delta.chunk.spec import (
    DeltaHBackwardSpec,
    GateSpec,
    IntraBackwardSpec,
    OutputBackwardSpec,
    RecomputeBackwardSpec,
)
from cute_attn.reference import kda
from tests.kernels.machine_code import assert_sound

sys.path.insert(0, str(Path(__file__).parent))
import kda_stage_gradients as gradients
from test_kda_stages_kernels import (
    ARCHS,
    MAX_ERROR,
    Stages,
    check,
    gates,
    kernel,
    offsets,
    poisoned,
    shape_of,
    torch_dtype,
)

# The quick run puts all of them together (tests/ops/test_kda_stages_backward.py).
pytestmark = pytest.mark.slow


def check_sum(name: str, x: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Check a float32 sum of many terms, given in float64 and float32. It may err as plain PyTorch
    or by a rounding of each term."""
    error, of_plain = ((y.double() - exact.sum(0)).abs().max() for y in (x, plain.sum(0)))
    allowed = max(MAX_ERROR * of_plain, exact.abs().sum(0).max() * 2.0**-24)
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


class Problem(Stages):
    """Inputs of all stages, and what the stages give for them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        generator = torch.Generator().manual_seed(12)
        states = self.states_of(self.initial_state, torch.float64)
        self.h, self.v_new = states.h.to(self.dtype).contiguous(), states.v_new.to(self.dtype)
        self.do = torch.randn(self.v.shape, generator=generator).to(self.dtype)
        self.dv = (torch.randn(self.v.shape, generator=generator) / 4).to(self.dtype)
        self.dfinal_state = torch.randn(self.initial_state.shape, generator=generator)
        states = gradients.delta_h(
            *(self.intra.qg, self.intra.kg, self.intra.w, self.g, self.do, self.dv),
            self.dfinal_state,
            self.scale,
            state_v_first=self.state_v_first,
            cu_seqlens=self.cu_seqlens,
        )
        self.dh, self.du = states.dh.to(self.dtype).contiguous(), states.dv.to(self.dtype)
        self.of_scores = (*self.v.shape[:3], kda.CHUNK)
        # flash-linear-attention leaves what is above the diagonal as it was
        self.Aqk_unmasked = self.intra.Aqk.clone()
        for chunk in kda.chunks(self.v, self.cu_seqlens):
            rows = self.Aqk_unmasked[chunk.batch, chunk.rows].transpose(0, 1)
            rows[torch.ones(rows.shape[1:]).triu(1).bool().expand_as(rows)] = math.nan

    def both(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """The results in float64, and those of plain PyTorch."""
        named["cu_seqlens"] = self.cu_seqlens
        exact = function(*arguments, **named)
        return exact, function(*arguments, **named, dtype=torch.float32, stage_dtype=self.dtype)


# -- gate_cumsum


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "spec",
    [
        GateSpec(128, "bfloat16", "softplus", True, True, "none"),
        GateSpec(64, "float32", "lower_bound", True, True, "int64"),
        GateSpec(128, "float32", "softplus", True, False, "int32"),
        GateSpec(128, "float32", "lower_bound", False, True, "none"),
        GateSpec(128, "float16", "none", False, False, "int32"),
    ],
)
def test_gate_cumsum(spec: GateSpec, arch: str) -> None:
    generator = torch.Generator().manual_seed(5)
    batch, tokens = shape_of(spec.index_dtype)
    heads, cu_seqlens = 3, offsets(spec.index_dtype)
    shape = (batch, tokens, heads, spec.head_dim_k)
    dG = torch.randn(shape, generator=generator)
    g = torch.randn(shape, generator=generator).to(torch_dtype(spec.gate_dtype))
    if spec.gate == "none":
        g = gates(shape, generator).to(g.dtype)
    A_log = torch.randn(heads, generator=generator) if spec.has_A_log else None
    dt_bias = None
    if spec.has_dt_bias:
        dt_bias = torch.randn(heads, spec.head_dim_k, generator=generator)
    slots = batch * 2 if cu_seqlens is None else tokens // 64 + len(cu_seqlens) - 1
    dA_log = poisoned((slots, 1, heads), torch.float32) if spec.has_A_log else None
    ddt_bias = None
    if dt_bias is not None:
        ddt_bias = poisoned((slots, *dt_bias.shape), torch.float32)
    dg = poisoned(shape, g.dtype)
    bound = -5.0
    kernel(table.GATE_CUMSUM_BACKWARD, spec, arch)(
        dG, g, A_log, dt_bias, cu_seqlens, dg, dA_log, ddt_bias, bound
    )
    exact, plain = (
        gradients.gate_cumsum(
            dG,
            g,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=bound if spec.gate == "lower_bound" else None,
            use_gate_in_kernel=spec.gate != "none",
            cu_seqlens=cu_seqlens,
            dtype=dtype,
        )
        for dtype in (torch.float64, torch.float32)
    )
    check("dg", dg, exact.dg, plain.dg)
    for name, parts in (("dA_log", dA_log), ("ddt_bias", ddt_bias)):
        if parts is not None:
            terms = [getattr(y, name) for y in (exact, plain)]
            if name == "dA_log":
                terms = [y.transpose(1, 2).flatten(0, 1) for y in terms]
            check_sum(name, parts.sum(0).view(terms[0].shape[1:]), *terms)


# -- output


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "spec",
    [
        OutputBackwardSpec("bfloat16", 128, "int32"),
        OutputBackwardSpec("float16", 64, "none"),
        OutputBackwardSpec("bfloat16", 256, "int64"),
        pytest.param(OutputBackwardSpec("bfloat16", 192, "int64"), marks=pytest.mark.slow),
    ],
)
def test_output(spec: OutputBackwardSpec, arch: str) -> None:
    s = Problem(64, spec.head_dim_v, spec.dtype, spec.index_dtype)
    dAqk, dv = poisoned(s.of_scores, torch.float32), poisoned(s.v.shape, s.dtype)
    kernel(table.OUTPUT_BACKWARD, spec, arch)(
        s.v_new, s.Aqk_unmasked, s.do, s.cu_seqlens, dAqk, dv, s.scale
    )
    exact, plain = s.both(gradients.output, s.v_new, s.intra.Aqk, s.do, s.scale)
    check("dAqk", dAqk, exact.dAqk, plain.dAqk)
    check("dv", dv, exact.dv, plain.dv)


# -- delta_h


@pytest.mark.parametrize(("arch", "products"), [("sm_90a", "wgmma"), ("sm_100a", "mma")])
@pytest.mark.parametrize(
    "spec",
    [
        DeltaHBackwardSpec("bfloat16", 64, 64, "int32", False, True, True, 64, 2),
        DeltaHBackwardSpec("bfloat16", 128, 128, "none", True, True, True, 64, 2),
        DeltaHBackwardSpec("float16", 128, 64, "int64", True, False, True, 64, 1),
        DeltaHBackwardSpec("float16", 64, 128, "none", False, True, False, 64, 1),
    ],
)
def test_delta_h(spec: DeltaHBackwardSpec, arch: str, products: str) -> None:
    spec = dataclasses.replace(spec, products=products)
    s = Problem(
        spec.head_dim_k,
        spec.head_dim_v,
        spec.dtype,
        spec.index_dtype,
        state_v_first=spec.state_v_first,
    )
    dfinal_state = s.dfinal_state if spec.has_final_state else None
    arguments = (s.intra.qg, s.intra.kg, s.intra.w, s.g, s.do, s.dv, dfinal_state)
    exact, plain = s.both(gradients.delta_h, *arguments, s.scale, state_v_first=spec.state_v_first)
    dh, du = poisoned(s.h.shape, s.dtype), poisoned(s.v.shape, s.dtype)
    dinitial_state = None
    if spec.has_initial_state:
        dinitial_state = poisoned(s.initial_state.shape, torch.float32)
    kernel(table.DELTA_H_BACKWARD, spec, arch)(
        *arguments, s.cu_seqlens, dh, dinitial_state, du, s.scale
    )
    check("dh", dh, exact.dh, plain.dh)
    check("dv", du, exact.dv, plain.dv)
    if dinitial_state is not None:
        check("dinitial_state", dinitial_state, exact.dinitial_state, plain.dinitial_state)


# -- recompute_w_u


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "spec",
    [
        RecomputeBackwardSpec("bfloat16", 64, 64, "int32", "float32", False),
        RecomputeBackwardSpec("bfloat16", 128, 128, "none", "bfloat16", False),
        RecomputeBackwardSpec("float16", 128, 64, "int64", "float32", True),
        RecomputeBackwardSpec("float16", 64, 256, "none", "float16", True),
    ],
)
def test_recompute_w_u(spec: RecomputeBackwardSpec, arch: str) -> None:
    s = Problem(
        spec.head_dim_k,
        spec.head_dim_v,
        spec.dtype,
        spec.index_dtype,
        spec.beta_dtype,
        state_v_first=spec.state_v_first,
    )
    arguments = (s.q, s.k, s.v, s.v_new, s.g, s.beta, s.intra.Akk, s.h, s.do, s.dh, s.du)
    exact, plain = s.both(
        gradients.recompute_w_u, *arguments, s.scale, state_v_first=spec.state_v_first
    )
    dq, dk, dg = (poisoned(s.g.shape, torch.float32) for _ in range(3))
    found = gradients.RecomputedGradients(
        dq,
        dk,
        poisoned(s.v.shape, s.dtype),
        poisoned(s.beta.shape, torch.float32),
        dg,
        poisoned(s.of_scores, torch.float32),
    )
    kernel(table.RECOMPUTE_W_U_BACKWARD, spec, arch)(*arguments, s.cu_seqlens, *found, s.scale)
    for name in found._fields:
        check(name, *(getattr(x, name) for x in (found, exact, plain)))


# -- intra


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "spec",
    [
        IntraBackwardSpec("bfloat16", 64, "int32", "float32", True),
        IntraBackwardSpec("bfloat16", 128, "none", "bfloat16", False),
        IntraBackwardSpec("float16", 128, "int64", "float32", True),
    ],
)
def test_intra(spec: IntraBackwardSpec, arch: str) -> None:
    heads_qk = 1 if spec.grouped else 2
    s = Problem(
        spec.head_dim_k, 64, spec.dtype, spec.index_dtype, spec.beta_dtype, heads_qk=heads_qk
    )
    generator = torch.Generator().manual_seed(13)
    dA = [torch.randn(s.of_scores, generator=generator) for _ in range(2)]
    others = [
        torch.randn(shape, generator=generator)
        for shape in (s.g.shape, s.g.shape, s.beta.shape, s.g.shape)
    ]
    arguments = (s.q, s.k, s.g, s.beta, *dA, *others)
    exact, plain = (
        gradients.intra(*arguments, cu_seqlens=s.cu_seqlens, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    found = gradients.IntraGradients(*(poisoned(x.shape, torch.float32) for x in exact))
    kernel(table.INTRA_BACKWARD, spec, arch)(*arguments, s.cu_seqlens, *found)
    for name in found._fields:
        check(name, *(getattr(x, name) for x in (found, exact, plain)))


# -- machine code

# Bytes at K = V = 128: in a loop with `mma.sync`, and with registers for two CTAs an SM.
SPILLED = {"kda_delta_h_backward": 128, "kda_intra_backward": 448}


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"])
def test_kernels_compile_and_fit(arch: str) -> None:
    dims: dict[str, Any] = {"head_dim_k": 128, "head_dim_v": 128}
    tuned = delta_h_backward_config(arch=arch, **dims)
    few = ("bfloat16", 128, "int32", "float32")
    of_state = ("bfloat16", 128, 128, "int32")
    for definition, spec in (
        (table.OUTPUT_BACKWARD, OutputBackwardSpec("bfloat16", 128, "int32")),
        (table.DELTA_H_BACKWARD, DeltaHBackwardSpec(*of_state, True, True, True, **tuned)),
        (table.RECOMPUTE_W_U_BACKWARD, RecomputeBackwardSpec(*of_state, "float32", False)),
        (table.RECOMPUTE_W_U_BACKWARD, RecomputeBackwardSpec(*of_state, "float32", True)),
        (table.INTRA_BACKWARD, IntraBackwardSpec(*few, False)),
        (table.INTRA_BACKWARD, IntraBackwardSpec(*few, True)),
        (table.GATE_CUMSUM_BACKWARD, GateSpec(128, "bfloat16", "softplus", True, True, "int32")),
    ):
        entry = cache.compile(definition, spec, arch=arch)
        assert_sound(entry)
        for use in entry.kernels:
            assert (use.spills or 0) <= SPILLED.get(definition.name, 0), f"{spec}: {use.spills}"
            shared = use.static_shared + (use.dynamic_shared or 0)
            assert shared <= smem_bytes(arch) + 1024, f"{spec}: {shared} bytes of shared memory"
