"""KDA's last kernel of the backward, alone, in the emulator."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.emulator import Emulator
from cute_attn.kernels.common.spec import smem_bytes
from cute_attn.kernels.delta.chunk.heuristics import gradients_config
from cute_attn.kernels.delta.chunk.spec import GradientsSpec
from cute_attn.kernels.delta.table import GRADIENTS
from cute_attn.reference import kda
from tests.kernels.machine_code import assert_sound
from tests.sweeps import slow

sys.path.insert(0, str(Path(__file__).parent))
from kda_gradients import (
    Passes,
    exact,
    gradients,
    pack_norms,
    pack_rows,
    pack_states,
    passes,
    slots,
)

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
BF16, FP16, FP32 = NAMES
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
BOUNDED = IN_KERNEL | {"lower_bound": -5.0, "allow_neg_eigval": True}


@functools.cache
def function(spec: GradientsSpec, arch: str) -> Callable[..., None]:
    return Emulator().load(cache.compile(GRADIENTS, spec, arch=arch))


class Problem:
    """A call's tensors, and the results of the kernels before this one, in float64."""

    def __init__(
        self,
        lengths: list[int],
        heads: tuple[int, int] = (1, 1),
        dims: tuple[int, int] = (64, 64),
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (BF16, FP32, FP32),
        gates: float = 0.2,
        seed: int = 0,
        **options: Any,
    ):
        """lengths: of packed sequences if there are several.
        dtypes: of q, g and beta.
        gates: their magnitude."""
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, gate_dtype, beta_dtype = dtypes
        self.options = options
        packed = len(lengths) > 1
        tokens, (heads_qk, heads_v), (dim_k, dim_v) = sum(lengths), heads, dims

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(1, tokens, *shape, generator=self.generator)

        q, k = normal(heads_qk, dim_k), normal(heads_qk, dim_k)
        if not options.get("use_qk_l2norm_in_kernel"):
            q, k = (kda.l2norm(x, FP32) for x in (q, k))
        g, beta = gates * normal(heads_v, dim_k), normal(heads_v)
        in_kernel = options.get("use_gate_in_kernel")
        if not in_kernel:
            g = -g.abs()
        if not options.get("use_beta_sigmoid_in_kernel"):
            beta = beta.sigmoid()
        self.x: dict[str, Any] = {
            "q": q.to(self.dtype),
            "k": k.to(self.dtype),
            "v": normal(heads_v, dim_v).to(self.dtype),
            "g": g.to(gate_dtype),
            "beta": beta.to(beta_dtype),
            "initial_state": torch.randn(
                len(lengths), heads_v, dim_k, dim_v, generator=self.generator
            ),
            "cu_seqlens": torch.tensor([0, *accumulate(lengths)]) if packed else None,
        }
        if in_kernel:
            self.x["A_log"] = torch.rand(heads_v, generator=self.generator)
            self.x["dt_bias"] = torch.randn(heads_v, dim_k, generator=self.generator)
        self.do = normal(heads_v, dim_v).to(self.dtype)
        self.dfinal = torch.randn(self.x["initial_state"].shape, generator=self.generator)

    def spec(self, **config: Any) -> GradientsSpec:
        x, options, gate = self.x, self.options, "none"
        if options.get("use_gate_in_kernel"):
            gate = "softplus" if options.get("lower_bound") is None else "lower_bound"
        return GradientsSpec(
            dtype=NAMES[self.dtype],
            head_dim_k=x["k"].shape[-1],
            head_dim_v=x["v"].shape[-1],
            index_dtype="none" if x["cu_seqlens"] is None else "int64",
            gate_dtype=NAMES[x["g"].dtype],
            beta_dtype=NAMES[x["beta"].dtype],
            gate=gate,
            has_A_log="A_log" in x,
            has_dt_bias="dt_bias" in x,
            l2norm=bool(options.get("use_qk_l2norm_in_kernel")),
            beta_sigmoid=bool(options.get("use_beta_sigmoid_in_kernel")),
            grouped=self.grouped,
            **config,
        )

    @property
    def grouped(self) -> bool:
        return bool(self.x["v"].shape[2] > self.x["k"].shape[2])

    def passes(self) -> Passes:
        return passes(self.x, self.options, self.do, self.dfinal, self.dtype)

    def run(
        self,
        found: Passes,
        *,
        arch: str = "sm_90a",
        **tuning: Any,
    ) -> dict[str, torch.Tensor]:
        """The kernel's results; what it does not write is NaN."""
        x, dtype = self.x, self.dtype
        batch, tokens, heads, dim_k = x["g"].shape
        dims = {"head_dim_k": dim_k, "head_dim_v": x["v"].shape[-1]}
        spec = self.spec(**(gradients_config(arch=arch, **dims) | tuning))
        count = slots(tokens, batch, x["cu_seqlens"])

        def empty(*shape: int, like: torch.dtype = FP32) -> torch.Tensor:
            return torch.full(shape, math.nan, dtype=like)

        out = {name: torch.full_like(x[name], math.nan) for name in ("q", "k", "g", "beta")}
        out["v"] = found.dr.to(dtype)
        if "A_log" in x:
            out["A_log"] = empty(count, spec.cluster, heads)
        if "dt_bias" in x:
            out["dt_bias"] = empty(count, heads, dim_k)
        function(spec, arch)(
            *(x.get(name) for name in ("q", "k", "g", "beta", "A_log", "dt_bias")),
            pack_norms(x, count) if spec.l2norm else None,
            self.do,
            pack_states(found.states, count, heads, dtype),
            pack_states(found.adjoints, count, heads, dtype),
            pack_rows({at: y / found.m[at] for at, y in found.v_new.items()}, count, heads, dtype),
            *(out.get(name) for name in ("v", "q", "k", "g", "beta", "A_log", "dt_bias")),
            x["cu_seqlens"],
            self.options.get("scale") or dim_k**-0.5,
            self.options.get("lower_bound") or 0.0,
            2.0 if self.options.get("allow_neg_eigval") else 1.0,
        )
        for name in ("A_log", "dt_bias"):
            if name in out:
                out[name] = out[name].sum(0 if name == "dt_bias" else (0, 1))
        return out

    def check(self, *, arch: str = "sm_90a", **tuning: Any) -> dict[str, torch.Tensor]:
        """Run the kernel, and compare its errors with those of plain PyTorch."""
        found = self.passes()
        ours = self.run(found, arch=arch, **tuning)
        right = exact(self.x, self.options, self.do, self.dfinal)
        plain = gradients(self.x, self.options, self.do, found, FP32, self.dtype)
        for name, y in ours.items():
            theirs = plain[name].to(y.dtype).double()
            limit = 2 * (theirs - right[name]).norm() + 1e-7 * right[name].norm()
            assert (y.double() - right[name]).norm() <= limit, name
        return ours


@pytest.mark.parametrize(
    ("lengths", "dims", "options"),
    [
        ([70], (8, 8), {}),
        ([33, 0, 64, 1], (8, 16), IN_KERNEL),
        ([70], (8, 8), BOUNDED | {"scale": 0.7}),
    ],
)
def test_the_formulas_are_those_of_autograd(
    lengths: list[int], dims: tuple[int, int], options: dict[str, Any]
) -> None:
    problem = Problem(lengths, (1, 2), dims, **options)
    problem.x["beta"][:, ::5] = -40.0 if options else 0.0
    x = {
        name: y.double() if name != "cu_seqlens" and y is not None else y
        for name, y in problem.x.items()
    }
    found = gradients(x, options, problem.do.double(), problem.passes())
    right = exact(x, options, problem.do, problem.dfinal)
    for name, y in found.items():
        assert torch.allclose(y, right[name], rtol=1e-9, atol=1e-9), name


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("lengths", "heads", "dims", "dtypes", "gates", "options"),
    [
        ([65, 0, 1], (1, 2), (128, 128), (BF16, BF16, BF16), 1.0, IN_KERNEL),
        slow([65], (1, 1), (64, 64), (FP16, FP32, FP32), 5.0, {}),
        slow([70], (2, 2), (128, 64), (BF16, FP32, BF16), 0.2, {}),
        slow([130], (1, 1), (64, 128), (FP16, FP16, FP16), 1.0, BOUNDED),
        slow([9], (1, 3), (128, 256), (BF16, FP16, FP32), 1.0, BOUNDED | {"scale": 0.3}),
        slow([64], (1, 2), (64, 256), (FP16, BF16, FP32), 1.0, IN_KERNEL),
    ],
)
def test_gradients(
    arch: str,
    lengths: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtypes: Any,
    gates: float,
    options: dict[str, Any],
) -> None:
    Problem(lengths, heads, dims, dtypes, gates, **options).check(arch=arch)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "gates",
    [
        *(pytest.param(gates, marks=pytest.mark.slow) for gates in ("0", "-1e-6", "-5")),
        *("mixed", "some are -1000", "large, then small"),
    ],
)
def test_gates_of_any_size(gates: str, dtype: torch.dtype) -> None:
    problem = Problem([64], dtypes=(dtype, FP32, FP32))
    g = problem.x["g"]
    chosen = torch.rand(g.shape, generator=problem.generator)
    if gates == "mixed":
        g.copy_(-20 * chosen**4)
    elif gates == "some are -1000":
        g[chosen < 0.02] = -1000.0
    elif gates == "large, then small":
        g[:, 5] = g[:, 30] = -90.0
    else:
        g.fill_(float(gates))
    problem.check()


def test_beta_near_0() -> None:
    problem = Problem([40])
    problem.x["beta"][:, ::3] = 0.0
    problem.x["beta"][:, 1::6] = 1e-20
    ours = problem.check()
    assert not ours["v"][:, ::3].any()
    assert ours["beta"][:, ::3].all()


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
def test_beta_near_0_in_a_cluster(arch: str) -> None:
    """Both CTAs of a cluster read dv, of which the first rewrites rows: the emulator finds a race
    unless that waits for the second."""
    dtypes = (BF16, BF16, BF16)
    problem = Problem([65, 0, 1], (1, 2), (128, 128), dtypes, 1.0, **IN_KERNEL)
    problem.x["beta"][:, ::3] = -40.0
    problem.check(arch=arch)


@pytest.mark.slow
def test_long_rows() -> None:
    """Rows of q and k of any length, where the kernel normalises them."""
    short = Problem([29, 1], **IN_KERNEL)
    long = Problem([29, 1], **IN_KERNEL)
    for name, factor in (("q", 2.0**55), ("k", 2.0**40)):
        short.x[name][:, ::2] *= 2.0**5
        long.x[name][:, ::2] *= factor
    found = short.passes()
    ours, of_short = long.run(found), short.run(found)
    for name in ("g", "beta", "v", "A_log", "dt_bias"):
        assert torch.allclose(ours[name].float(), of_short[name].float(), rtol=1e-3, atol=1e-6)
    for name, factor in (("q", 2.0**50), ("k", 2.0**35)):
        assert torch.allclose(ours[name][:, ::2].float() * factor, of_short[name][:, ::2].float())


def test_a_gradient_of_q_does_not_depend_on_later_tokens() -> None:
    problem = Problem([64])
    problem.x["g"][:, 40:44] = -60.0
    found = problem.passes()
    first = problem.run(found)
    problem.x["g"][:, 44:] = -1000.0
    problem.x["k"][:, 44:] += 1.0
    assert torch.equal(problem.run(found)["q"][:, :44], first["q"][:, :44])


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "options"), [((1, 1), IN_KERNEL), ((1, 3), {})])
def test_tuning_changes_no_bit(heads: tuple[int, int], options: dict[str, Any]) -> None:
    """Where all rows are in range, or none: CTAs decide that for their channels."""
    problem = Problem([70], heads, (128, 128), **options)
    found = problem.passes()
    one = problem.run(found)
    for other in ({"copies": "cp_async"}, {"cluster": 1}, {"cluster": 1, "copies": "cp_async"}):
        two = problem.run(found, **other)
        for name, y in one.items():
            if name == "A_log":
                assert torch.allclose(y, two[name], rtol=1e-6)
            else:
                assert torch.equal(y, two[name]), name


@pytest.mark.parametrize(
    ("heads", "dims"),
    [((1, 2), (128, 128)), slow((1, 1), (64, 64))],  # the first has a kernel of test_gradients
)
def test_a_slot_without_a_chunk_adds_nothing_to_the_sums(
    heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    dtypes = (BF16, BF16, BF16)
    Problem([3, 0, 0, 2], heads, dims, dtypes, **IN_KERNEL).check(arch="sm_90a")


@pytest.mark.parametrize(
    ("arch", "grouped", "spilled"),
    [
        slow("sm_80", False, 0),
        slow("sm_90a", False, 40),
        slow("sm_100a", False, 580),
        slow("sm_120a", False, 844),
        ("sm_90a", True, 760),
        slow("sm_100a", True, 1300),
    ],
)
def test_machine_code_at_128(arch: str, grouped: bool, spilled: int) -> None:
    """The kernel fits, reads no register that was never set, and spills no more than is known."""
    problem = Problem([1, 1], (1, 1 + grouped), (128, 128), (BF16, BF16, BF16), **IN_KERNEL)
    config = gradients_config(arch=arch, head_dim_k=128, head_dim_v=128)
    entry = cache.compile(GRADIENTS, problem.spec(**config), arch=arch)
    assert_sound(entry)
    (use,) = entry.kernels
    assert (use.spills or 0) <= spilled
    assert use.static_shared + (use.dynamic_shared or 0) <= smem_bytes(arch) + 1024


def test_a_cluster_shares_128_channels() -> None:
    with pytest.raises(ValueError, match="cluster is 2, must be 1 at head_dim_k=64"):
        Problem([1]).spec(cluster=2, copies="bulk")


def test_it_says_where_it_does_not_fit() -> None:
    with pytest.raises(NotImplementedError, match="head_dim_k=128 does not fit sm_86"):
        gradients_config(arch="sm_86", head_dim_k=128, head_dim_v=128)
    config = gradients_config(arch="sm_86", head_dim_k=64, head_dim_v=64)
    assert config == {"cluster": 1, "copies": "cp_async"}
