"""fused_recurrent_kda agrees with the float64 reference, and has exact properties.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
import cute_attn.cache
from cute_attn.ops.kda.recurrent import plan_fused_recurrent_kda
from cute_attn.reference.kda import kda_reference
from tests.sweeps import FULL

from .kda_decode_cases import packed
from .lightning_cases import assert_no_worse, few

Result = tuple[torch.Tensor, torch.Tensor]
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True)
class Kernel:
    """The parameters that are compiled in."""

    head_dim_k: int = 64
    head_dim_v: int = 64
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.bfloat16
    beta_dtype: torch.dtype = torch.bfloat16
    state_v_first: bool = False
    gate: str = "softplus"
    has_A_log: bool = True
    has_dt_bias: bool = True
    l2norm: bool = True
    beta_sigmoid: bool = True
    initial: bool = True
    index_dtype: torch.dtype | None = None  # of cu_seqlens

    def plan(self, arch: str) -> list[Any]:
        index = {None: "none", torch.int32: "int32", torch.int64: "int64"}
        return plan_fused_recurrent_kda(
            arch,
            dtype=NAMES[self.dtype],
            gate_dtype=NAMES[self.gate_dtype],
            beta_dtype=NAMES[self.beta_dtype],
            head_dim_k=self.head_dim_k,
            head_dim_v=self.head_dim_v,
            initial_state=self.initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.l2norm,
            use_gate_in_kernel=self.gate != "none",
            use_beta_sigmoid_in_kernel=self.beta_sigmoid,
            lower_bound=self.gate == "lower_bound",
            state_v_first=self.state_v_first,
            index_dtype=index[self.index_dtype],
            A_log=self.has_A_log,
            dt_bias=self.has_dt_bias,
        )


EMULATED = [
    Kernel(),
    Kernel(
        128, 64, gate_dtype=torch.float32, index_dtype=torch.int64, gate="none", beta_sigmoid=False
    ),
    Kernel(64, 128, torch.float16, state_v_first=True, gate="lower_bound", has_A_log=False),
    Kernel(dtype=torch.float32, gate_dtype=torch.float32, l2norm=False, initial=False),
    Kernel(state_v_first=True, index_dtype=torch.int32, has_dt_bias=False),
]
# Of calls that need a second kernel, with and without an initial state, or packed and not.
WITH_ANOTHER = {"varlen": [EMULATED[4]], "initial_state": [EMULATED[0], EMULATED[3]]}
OTHERS = [
    Kernel(k, v, dtype, beta_dtype=torch.float32, state_v_first=v_first, index_dtype=index)
    for (k, v), dtype, v_first, index in zip(
        itertools.product((64, 128, 256), (64, 128, 192, 256)),
        itertools.cycle((torch.bfloat16, torch.float16, torch.float32)),
        itertools.cycle((True, False)),
        itertools.cycle((None, None, torch.int64, torch.int32)),
        strict=False,
    )
]


@pytest.fixture(scope="module", autouse=True)
def compiled_beforehand() -> None:
    """Compile what is drawn on a GPU with all cores, not one at a time."""
    if torch.cuda.is_available():
        arch = cute_attn.cache.current_arch()
        cute_attn.warmup(r for kernel in EMULATED + OTHERS for r in kernel.plan(arch))


@dataclass(frozen=True)
class Case:
    """The parameters that hypothesis draws."""

    kernel: Kernel = Kernel()
    lengths: tuple[int, ...] = (5, 5)  # equal unless packed
    heads: int = 1
    group: int = 2
    packing: str = "separate"  # of q, k, v, g and beta: "separate", "packed" or "misaligned"
    neg_eigval: bool = False
    scale: float | None = None
    spread: float = 1.0  # of g
    seed: int = 0

    def inputs(self, device: str = "cuda") -> dict[str, Any]:
        kernel, heads, heads_v = self.kernel, self.heads, self.heads * self.group
        dim_k, dim_v = kernel.head_dim_k, kernel.head_dim_v
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        varlen = kernel.index_dtype is not None
        step = (1, sum(self.lengths)) if varlen else (len(self.lengths), self.lengths[0])
        q, k = normal(*step, heads, dim_k), normal(*step, heads, dim_k)
        if not kernel.l2norm:  # lest the state grows
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        g = self.spread * normal(*step, heads_v, dim_k)
        beta = normal(*step, heads_v)
        args: dict[str, Any] = {
            "q": q.to(kernel.dtype),
            "k": k.to(kernel.dtype),
            "v": normal(*step, heads_v, dim_v).to(kernel.dtype),
            "g": (-g.abs() if kernel.gate == "none" else g).to(kernel.gate_dtype),
            "beta": (beta if kernel.beta_sigmoid else beta.sigmoid()).to(kernel.beta_dtype),
        }
        if self.packing != "separate":
            args = packed(args, 1 if self.packing == "misaligned" else 8)
        matrix = (dim_v, dim_k) if kernel.state_v_first else (dim_k, dim_v)
        if kernel.initial:
            args["initial_state"] = normal(len(self.lengths), heads_v, *matrix)
        if kernel.gate != "none" and kernel.has_A_log:
            args["A_log"] = 0.5 * normal(heads_v)
        if kernel.gate != "none" and kernel.has_dt_bias:
            args["dt_bias"] = normal(heads_v * dim_k)
        if kernel.gate == "lower_bound":
            args["lower_bound"] = -5.0
        if varlen:
            offsets = [0, *itertools.accumulate(self.lengths)]
            args["cu_seqlens"] = torch.tensor(offsets, dtype=kernel.index_dtype, device=device)
        return args | {
            "scale": self.scale,
            "use_qk_l2norm_in_kernel": kernel.l2norm,
            "use_gate_in_kernel": kernel.gate != "none",
            "use_beta_sigmoid_in_kernel": kernel.beta_sigmoid,
            "allow_neg_eigval": self.neg_eigval and kernel.beta_sigmoid,
            "state_v_first": kernel.state_v_first,
        }


@st.composite
def cases(draw: st.DrawFn, device: str, varlen: bool | None = None, another: str = "") -> Case:
    """`another` is what the test's second kernel differs in: few have one in the emulator."""
    kernels = EMULATED if device == "cpu" else EMULATED + OTHERS
    if another and device == "cpu" and not FULL:
        kernels = WITH_ANOTHER[another]
    if varlen is not None:
        kernels = [kernel for kernel in kernels if (kernel.index_dtype is not None) == varlen]
    kernel = draw(st.sampled_from(kernels))
    longest = 6 if device == "cpu" else 70
    if kernel.index_dtype is None:
        lengths = [draw(st.integers(1, longest))] * draw(st.integers(1, 3))
    else:
        lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=4))
    return Case(
        kernel,
        lengths=tuple(lengths),
        heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        packing=draw(st.sampled_from(["separate", "packed", "misaligned"])),
        neg_eigval=draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.01, 2.0)),
        spread=draw(st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0])),
        seed=draw(st.integers(0, 2**31)),
    )


def run(args: dict[str, Any]) -> Result:
    o, final_state = cute_attn.fused_recurrent_kda(**args, output_final_state=True)
    assert final_state is not None
    return o, final_state


def assert_agrees(args: dict[str, Any], result: Result) -> None:
    exact, plain = kda_reference(**args), kda_reference(**args, dtype=torch.float32)
    o, final_state = result
    assert o.dtype == args["q"].dtype
    assert o.shape == args["v"].shape
    assert o.is_contiguous()
    assert final_state.dtype == torch.float32
    assert_no_worse(o, plain.o.to(o.dtype), exact.o)
    assert_no_worse(final_state, plain.final_state, exact.final_state)


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_agrees_with_the_reference(device: str, data: st.DataObject):
    args = data.draw(cases(device)).inputs(device)
    assert_agrees(args, run(args))


@pytest.mark.everywhere
def test_a_long_memory_does_not_drift(device: str):
    """Decays that float32 holds nearly exactly, the same at every token. Roundings of the state's
    elements average out over its columns, but errors of a decay add up."""
    args = Case(EMULATED[1], lengths=(48,), heads=1, group=1).inputs(device)
    args["g"] = -(torch.arange(1.0, 129.0, device=device) * 2.0**-24).expand(args["g"].shape)
    args["beta"].zero_()
    args["initial_state"].abs_().add_(1.0)
    _, state = run(args)
    exact, plain = kda_reference(**args), kda_reference(**args, dtype=torch.float32)
    states = state, plain.final_state, exact.final_state
    assert_no_worse(*(x.double().mean(-1) for x in states))


@pytest.mark.everywhere
def test_a_small_scale_of_long_rows(device: str):
    """The product of the scale and a row's inverse norm is below the numbers of float32."""
    args = Case(EMULATED[1], lengths=(5,), scale=1e-30).inputs(device)
    args["q"] *= 1e18
    assert_agrees(args, run(args))


@pytest.mark.everywhere(quick=False)
@few
@given(data=st.data())
def test_packed_sequences_are_each_alone_bitwise(device: str, data: st.DataObject):
    case = data.draw(cases(device, varlen=True, another="varlen"))
    args = case.inputs(device)
    o, final_state = run(args)
    offsets = args.pop("cu_seqlens").tolist()
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        alone = args | {name: args[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        if "initial_state" in args:
            alone["initial_state"] = args["initial_state"][n : n + 1]
        o_alone, state_alone = run(alone)
        assert torch.equal(o[:, start:end], o_alone)
        assert torch.equal(final_state[n : n + 1], state_alone)


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_two_runs_through_the_state_are_one_bitwise(device: str, data: st.DataObject):
    case = data.draw(cases(device, varlen=False, another="initial_state"))
    case = replace(case, kernel=replace(case.kernel, initial=True))
    args = case.inputs(device)
    o, final_state = run(args)
    at = data.draw(st.integers(0, case.lengths[0]))

    def part(tokens: slice) -> dict[str, Any]:
        return args | {name: args[name][:, tokens] for name in ("q", "k", "v", "g", "beta")}

    o_first, state = run(part(slice(0, at)))
    o_second, state = run(part(slice(at, None)) | {"initial_state": state})
    assert torch.equal(o, torch.cat([o_first, o_second], dim=1))
    assert torch.equal(final_state, state)


@pytest.mark.slow
@pytest.mark.everywhere
@settings(max_examples=10)
@given(data=st.data())
def test_grouped_heads_equal_repeated_heads_bitwise(device: str, data: st.DataObject):
    case = data.draw(cases(device))
    args = case.inputs(device)
    repeated = {name: args[name].repeat_interleave(case.group, dim=2) for name in ("q", "k")}
    assert all(map(torch.equal, run(args), run(args | repeated)))


@pytest.mark.slow
@pytest.mark.everywhere
@settings(max_examples=10)
@given(data=st.data())
def test_no_initial_state_is_one_of_zeros_bitwise(device: str, data: st.DataObject):
    case = data.draw(cases(device, another="initial_state"))
    args = case.inputs(device)
    matrix = (case.kernel.head_dim_k, case.kernel.head_dim_v)
    if case.kernel.state_v_first:
        matrix = matrix[::-1]
    shape = (len(case.lengths), case.heads * case.group, *matrix)
    args["initial_state"] = torch.zeros(shape, device=device)
    given_zeros = run(args)
    del args["initial_state"]
    assert all(map(torch.equal, given_zeros, run(args)))


@pytest.mark.everywhere
@pytest.mark.parametrize("index_dtype", [None, torch.int64], ids=["dense", "packed"])
def test_no_tokens_leave_the_initial_state(device: str, index_dtype: torch.dtype | None):
    case = Case(Kernel(index_dtype=index_dtype), lengths=(0, 0))
    args = case.inputs(device)
    o, final_state = run(args)
    assert o.numel() == 0
    assert torch.equal(final_state, args["initial_state"])
    del args["initial_state"]
    assert not run(args)[1].any()


@pytest.mark.everywhere
def test_no_sequences_are_no_work(device: str):
    args = Case().inputs(device)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        args[name] = args[name][:0]
    o, final_state = run(args)
    assert o.shape == (0, 5, 2, 64)
    assert final_state.shape == (0, 2, 64, 64)


@pytest.mark.everywhere
def test_the_final_state_is_given_only_if_asked_for(device: str):
    args = Case().inputs(device)
    o, none = cute_attn.fused_recurrent_kda(**args)
    assert none is None
    assert torch.equal(o, run(args)[0])


@pytest.mark.everywhere
def test_the_initial_state_is_left_alone(device: str):
    args = Case().inputs(device)
    before = args["initial_state"].clone()
    run(args)
    assert torch.equal(args["initial_state"], before)


@pytest.mark.everywhere
def test_parameters_and_states_of_other_forms_are_converted(device: str):
    args = Case().inputs(device)
    result = run(args)
    other = dict(args)
    other["A_log"] = args["A_log"].view(1, 1, -1, 1).double()
    other["dt_bias"] = args["dt_bias"].view(2, 64)
    assert all(map(torch.equal, result, run(other)))
    transposed = args["initial_state"].mT.contiguous().mT
    assert all(map(torch.equal, result, run(args | {"initial_state": transposed})))
    rounded = args["initial_state"].bfloat16()
    expected = run(args | {"initial_state": rounded.float()})
    assert all(map(torch.equal, expected, run(args | {"initial_state": rounded})))
    scattered = {name: args[name].mT.contiguous().mT for name in ("q", "k", "v", "g", "beta")}
    assert all(map(torch.equal, result, run(args | scattered)))


@pytest.mark.everywhere
def test_offsets_past_the_tokens_are_an_empty_sequence(device: str):
    """A caller's error must not cause a read of other memory."""
    case = Case(Kernel(index_dtype=torch.int32, state_v_first=True, has_dt_bias=False))
    case = replace(case, lengths=(3, 2))
    args = case.inputs(device)
    args["cu_seqlens"][2] = 1000
    _, final_state = run(args)
    assert torch.equal(final_state[1], args["initial_state"][1])
