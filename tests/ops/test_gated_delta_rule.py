"""chunk_gated_delta_rule agrees with the float64 reference, and so do its gradients.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule, where
the sweeps are smaller. The rule for errors is KDA's (`kda_cases`, `test_kda_gradients`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cute_attn
from cute_attn import launch
from cute_attn.emulator import Emulator
from cute_attn.ops.gated_delta_rule import chunk
from cute_attn.ops.kda import chunk_passes
from cute_attn.reference.kda import kda_chunk_reference, kda_reference

from .gated_delta_rule_cases import DECAYS, PACKED, PLAIN, SMALL, WIDE_V, Case, cases
from .kda_cases import (
    GATES,
    assert_agrees,
    assert_no_worse,
    bounded,
    definition,
    examples,
    plain,
    run,
    same,
    spans,
    tokens_of,
    valid,
)
from .test_kda_gradients import INPUTS, TOKENS, differentiated, exactly, plainly, weights
from .test_kda_gradients import assert_agrees as assert_gradients_agree
from .test_kda_gradients import same as same_gradients
from .test_kda_pool import SERVER, pool_call

OF_HEADS = ("v", "g", "beta", "A_log", "dt_bias", "initial_state")


def check_gradients(args: dict[str, Any]) -> dict[str, Tensor]:
    of = weights(args)
    found = differentiated(args, of)
    assert_gradients_agree(args, of, found)
    return found


@contextmanager
def in_segments(length: int) -> Iterator[None]:
    """Sequences are split into segments of this many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_passes, "chunks_per_segment", lambda *_, **__: length)
        patch.setattr(chunk_passes, "chunks_per_start", lambda *_, **__: length)
        patch.setattr(launch, "num_sms", lambda _: 10**6)
        for one in (chunk._chunk, chunk.BACKWARD, chunk._pool):
            patch.setattr(one, "ready", {})
        yield


# -- agreement


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize(
    "case",
    [
        Case(SMALL, (66,), group=2),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case(PACKED, (70, 0, 3), group=4, lead=2, tail=3),
                Case(PLAIN, (130,), group=8),
                Case(replace(WIDE_V, dim_v=256), (70,), group=1),
                Case(replace(PACKED, dim_v=192), (70, 0, 3)),
            )
        ),
    ],
    ids=["small", "packed", "eight heads", "V of 256", "V of 192"],
)
def test_results_of_cases(device: str, case: Case):
    args = case.arguments(device)
    assert_agrees(args, *run(args))


@pytest.mark.everywhere
@pytest.mark.slow
@examples(4)
@given(data=st.data())
def test_agrees_with_the_reference(device: str, data: st.DataObject):
    args = data.draw(cases(device)).arguments(device)
    assert_agrees(args, *run(args))


@pytest.mark.everywhere
@pytest.mark.slow
@examples(4)
@given(data=st.data())
def test_gradients_agree_with_the_reference(device: str, data: st.DataObject):
    check_gradients(data.draw(cases(device)).arguments(device))


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize(
    "case",
    [
        Case(SMALL, (70,), group=2),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case(PACKED, (70, 0, 3), group=4, lead=2, tail=3),
                Case(PLAIN, (66,), group=1, gates="weak"),
                Case(PLAIN, (66,), group=8),
                Case(WIDE_V, (64, 0, 3), group=3),
                Case(DECAYS, (65, 3), scale=0.3, negative=True),
                Case(replace(WIDE_V, dim_v=256), (70,), group=1),
                Case(replace(PACKED, dim_v=192), (70, 0, 3)),
            )
        ),
    ],
    ids=["small", "packed", "one head", "eight heads", "wide V", "decays", "V of 256", "V of 192"],
)
def test_gradients_of_cases(device: str, case: Case):
    check_gradients(case.arguments(device))


@pytest.mark.parametrize("dim_v", [pytest.param(64, marks=pytest.mark.slow), 192])
def test_gradients_by_the_kernels_for_sm_90a(dim_v: int):
    """Whose prepare and adjoint_pass have no records of KDA's."""
    kind = replace(PACKED, dim_k=64, dim_v=dim_v)
    with cute_attn.emulated("sm_90a"):
        check_gradients(Case(kind, (66, 0, 3), group=2, lead=1).arguments("cpu"))


@pytest.mark.everywhere
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_initial_states_in_16_bits_are_converted(device: str, dtype: torch.dtype):
    args = Case(SMALL, (70,)).arguments(device)
    args["initial_state"] = args["initial_state"].to(dtype)
    whole = args | {"initial_state": args["initial_state"].float()}
    assert same(args, run(args), run(whole))
    of = weights(args)
    found, expected = differentiated(args, of), differentiated(whole, of)
    expected["initial_state"] = expected["initial_state"].to(dtype)
    assert same_gradients(found, expected)


@pytest.mark.everywhere
@pytest.mark.slow
@pytest.mark.parametrize("gates", GATES)
def test_gates_of_any_kind(device: str, gates: str):
    for kind, lengths in ((PLAIN, (130,)), (DECAYS, (64, 0, 70)), (WIDE_V, (129, 1))):
        args = Case(kind, lengths, gates=gates, alike=gates == "weak", seed=3).arguments(device)
        assert_agrees(args, *run(args))
        check_gradients(args)


@pytest.mark.everywhere
@pytest.mark.slow
@pytest.mark.parametrize("gate", ["a few", 0.0, -1e-6, -5.0, -20.0, -1000.0, -math.inf])
def test_gates_of_any_size(device: str, gate: float | str):
    """Each token has the gate, or a few tokens have it among small gates."""
    args = Case(DECAYS, (66,), seed=6).arguments(device)
    if gate == "a few":
        args["g"].fill_(-0.01)
        args["g"][:, [5, 17, 50]] = -1000.0
    else:
        args["g"].fill_(gate)
    assert_agrees(args, *run(args))
    found = check_gradients(args)
    if gate in (-1000.0, -math.inf):  # nothing is left of the past
        assert found["g"].abs().max() < 1e-30


@pytest.mark.everywhere
@pytest.mark.slow
@pytest.mark.parametrize("kind", [PLAIN, SMALL], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_the_norm_takes_rows_of_any_length(device: str, kind: Any, size: float):
    args = Case(kind, (66,), seed=5).arguments(device)
    for name in ("q", "k"):
        args[name] *= size
    check_gradients(args)


@pytest.mark.everywhere
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_over_many_draws(device: str, dtype: torch.dtype):
    """The error rule for all draws together, of all gradients."""
    kind = replace(PLAIN, dtype=dtype, dim_k=64, dim_v=64)
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for seed in range(16):
        gates = ("usual", "weak", "strong", "mixed")[seed % 4]
        case = Case(kind, (200,), gates=gates, negative=seed % 8 > 3, seed=seed)
        args = case.arguments(device)
        of = weights(args, seed)
        found, exact, plain = differentiated(args, of), exactly(args, of), plainly(args, of)
        for name, true, other in zip(INPUTS, exact, plain, strict=True):
            if name not in found:
                continue
            x = found[name].view(true.shape)
            size = true.norm().item() ** 2
            for sums, y in ((ours, x), (theirs, other.to(x.dtype))):
                error = (y.double() - true).norm().item() ** 2
                sums[name] = sums.get(name, 0.0) + error / size
    for name in ours:
        assert ours[name] <= 4 * theirs[name], f"{name}: {(ours[name] / theirs[name]) ** 0.5:.2f}"


@pytest.mark.everywhere
@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_sequences_in_segments(device: str, data: st.DataObject):
    args = data.draw(cases(device, [PACKED, SMALL])).arguments(device)
    with in_segments(data.draw(st.integers(1, 3))):
        assert_agrees(args, *run(args))
        check_gradients(args)


@pytest.mark.everywhere
@pytest.mark.slow
@pytest.mark.parametrize("kind", [PLAIN, SMALL], ids=["bfloat16", "float16"])
def test_kda_with_equal_gates_agrees(device: str, kind: Any):
    """KDA's kernels, with each head's gate given to all channels. Their dg is summed over the
    channels."""
    args = Case(kind, (130,), seed=8).arguments(device)
    channels = args["q"].shape[-1]
    of_kda = args | {"g": args["g"].unsqueeze(-1).expand(*args["g"].shape, channels)}
    if "dt_bias" in args:
        of_kda["dt_bias"] = args["dt_bias"].repeat_interleave(channels)
    of = weights(args)
    eps = torch.finfo(args["q"].dtype).eps
    for x, y in zip(run(args), run(of_kda), strict=True):
        assert x is not None and y is not None
        assert (x.float() - y.float()).norm() <= 4 * eps * y.float().norm()
    found, kda = differentiated(args, of), differentiated(of_kda, of)
    kda["g"] = kda["g"].float().sum(-1)
    if "dt_bias" in kda:
        kda["dt_bias"] = kda["dt_bias"].view(-1, channels).sum(-1)
    for name, x in found.items():
        assert (x.float() - kda[name]).norm() <= 8 * eps * kda[name].norm(), name


# -- exact properties


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_no_schedule_changes_a_bit(arch: str):
    """Under any schedule of warps and CTAs, and with any number of SMs; tokens of no sequence have
    no gradient."""
    args = Case(PACKED, (66, 0, 3), lead=2, tail=3, group=3, gates="mixed").arguments("cpu")
    of = weights(args)
    results = []
    for num_sms, schedule, seed in ((4, "fair", 0), (3, "random", 3)):
        emulator = Emulator(num_sms=num_sms, schedule=schedule, seed=seed)
        with cute_attn.emulated(arch, emulator):
            results.append(differentiated(args, of))
        assert not emulator.report.findings, emulator.report
    assert same_gradients(*results)
    assert_gradients_agree(args, of, results[0])
    for name in TOKENS:
        x = results[0][name]
        assert not x[:, :2].any() and not x[:, -3:].any()


@pytest.mark.everywhere
@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_repeated_runs_are_bitwise_equal(device: str, data: st.DataObject):
    args = data.draw(cases(device)).arguments(device)
    of = weights(args)
    assert same(args, run(args), run(args))
    assert same_gradients(differentiated(args, of), differentiated(args, of))


@pytest.mark.everywhere
@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_layouts_do_not_matter(device: str, data: st.DataObject):
    case = replace(data.draw(cases(device)), layout="contiguous")
    args = case.arguments(device)
    of = weights(args)
    first = differentiated(args, of)
    for layout in ("heads_first", "projection", "misaligned"):
        assert same_gradients(
            first, differentiated(replace(case, layout=layout).arguments(device), of)
        )


@pytest.mark.everywhere
@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_grouped_heads_are_repeated_heads(device: str, data: st.DataObject):
    """To the last bit for what each value head has of its own; q and k get the sum over a group,
    which is rounded once."""
    case = data.draw(cases(device))
    args = case.arguments(device)
    of = weights(args)
    repeated = {name: args[name].repeat_interleave(case.group, dim=2) for name in ("q", "k")}
    assert same(args, run(args), run(args, **repeated))
    grouped, single = differentiated(args, of), differentiated(args, of, **repeated)
    assert same_gradients(grouped, single, OF_HEADS)
    for name in ("q", "k"):
        parts = single[name].double().unflatten(2, (case.heads, case.group))
        rounding = torch.finfo(args[name].dtype).eps * parts.abs().sum(3) + 1e-6
        assert ((grouped[name].double() - parts.sum(3)).abs() <= rounding).all()


@pytest.mark.everywhere
@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_packed_sequences_are_sequences_alone(device: str, data: st.DataObject):
    """Packed with others, packed alone, and as a batch of one."""
    case = data.draw(cases(device, [DECAYS, PACKED, WIDE_V]))
    args = case.arguments(device)
    of = weights(args)
    together = differentiated(args, of)
    whole = run(args)
    names = (*TOKENS, "initial_state")
    for n, (_, rows) in enumerate(spans(args)):
        one = tokens_of(args, rows)
        if case.kind.initial:
            one["initial_state"] = args["initial_state"][n : n + 1]
        length = one["q"].shape[1]
        one["cu_seqlens"] = torch.tensor([0, length]).to(args["cu_seqlens"])
        alone = {name: x[:, rows] for name, x in together.items() if name in TOKENS}
        if case.kind.initial:
            alone["initial_state"] = together["initial_state"][n : n + 1]
        of_one = {"do": of["do"][:, rows], "dfinal_state": of["dfinal_state"][n : n + 1]}
        assert same(one, (whole[0][:, rows], whole[1][n : n + 1]), run(one))
        assert same_gradients(alone, differentiated(one, of_one), names)
        del one["cu_seqlens"]
        assert same_gradients(alone, differentiated(one, of_one), names)


@pytest.mark.everywhere
@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_what_has_no_effect_has_no_gradient_and_changes_none(device: str, data: st.DataObject):
    """Tokens behind the last one whose output counts."""
    case = replace(data.draw(cases(device, [PLAIN, SMALL])), layout="contiguous")
    args = case.arguments(device) | {"output_final_state": False}
    cut = data.draw(st.integers(1, case.lengths[0]))
    of = weights(args)
    of["do"][:, cut:] = 0.0
    found = differentiated(args, of)
    assert not any(found[name][:, cut:].any() for name in TOKENS)
    other = replace(case, seed=case.seed + 1).arguments(device)
    mixed = args | {
        name: torch.cat([args[name][:, :cut], other[name][:, cut:]], dim=1) for name in TOKENS
    }
    assert same_gradients(found, differentiated(mixed, of), (*TOKENS, "initial_state"))


@pytest.mark.everywhere
@pytest.mark.slow
def test_linear_in_v(device: str):
    """From a state of 0, doubled values give doubled results, to the last bit."""
    args = Case(replace(PACKED, initial=False), (70, 3)).arguments(device)
    o, state = run(args)
    twice_o, twice_state = run(args, v=2 * args["v"])
    assert torch.equal(valid(args, twice_o), 2 * valid(args, o))
    assert state is not None and twice_state is not None
    assert torch.equal(twice_state, 2 * state)


# -- a server's pool


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize(
    ("dtype", "segments"),
    [
        (torch.bfloat16, 0),
        pytest.param(torch.float32, 0, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1, marks=pytest.mark.slow),
    ],
)
def test_states_in_a_pool(device: str, dtype: torch.dtype, segments: int):
    args = Case(SERVER, (70, 0, 130, 3), group=2).arguments(device)
    call = pool_call(args, dtype=dtype, without_slot=(3,), fresh=(2,), null_slot=True)
    if not segments:
        call.check()
        return
    with in_segments(segments):
        call.check()


# -- the cases of flash-linear-attention's own tests


class Theirs(NamedTuple):
    """A case of its tests/ops/test_gdn.py.

    Attributes:
        normalizer: divides the log decays; masked is the share of tokens without decay.
        norm, gate, sigmoid: whether the kernel computes the norms of q and k, the decay from a
            gate's input, and the sigmoid of beta.
        bias, negative: with a dt_bias, and with allow_neg_eigval.
        lengths: of packed sequences, in place of B and T.
    """

    B: int
    T: int
    H: int
    HV: int
    D: int
    scale: float | None = None
    normalizer: float = 1.0
    masked: float = 0.0
    norm: bool = False
    gate: bool = False
    bias: bool = False
    sigmoid: bool = False
    negative: bool = False
    v_first: bool = False
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        flags = (n for n in self._fields if getattr(self, n) is True)
        shape = self.lengths or (self.B, self.T)
        sizes = *shape, f"{self.H}/{self.HV}", self.D, self.normalizer, self.masked
        return "-".join(map(str, (*sizes, *flags, str(self.dtype).removeprefix("torch."))))

    def arguments(self) -> dict[str, Any]:
        """The distributions of its tests: q, k and v are positive, beta is 0.5 to 0.73."""
        generator = torch.Generator().manual_seed(42)
        tokens = (1, sum(self.lengths)) if self.lengths else (self.B, self.T)
        sequences = len(self.lengths) or self.B
        of_heads = *tokens, self.HV

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        q, k = (uniform(*tokens, self.H, self.D).to(self.dtype) for _ in range(2))
        if not self.norm:
            q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x) for x in (q, k))
        g = torch.nn.functional.logsigmoid(uniform(*of_heads)) / self.normalizer
        found: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": uniform(*of_heads, self.D).to(self.dtype),
            "g": normal(*of_heads) if self.gate else g * (uniform(*of_heads) > self.masked),
            "beta": normal(*of_heads) if self.sigmoid else uniform(*of_heads).sigmoid(),
            "initial_state": torch.zeros(sequences, self.HV, self.D, self.D),
        }
        if self.lengths:
            found["initial_state"].normal_(generator=generator)
            if not self.gate:
                found["initial_state"] = found["initial_state"].to(self.dtype)
        if self.gate:
            found["A_log"] = normal(self.HV)
            if self.bias:
                found["dt_bias"] = normal(self.HV)
        found = {name: x.cuda() for name, x in found.items()}
        if self.lengths:
            starts = [0, *itertools.accumulate(self.lengths)]
            found["cu_seqlens"] = torch.tensor(starts, device="cuda")
        return found | {
            "scale": self.scale,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": self.norm,
            "use_gate_in_kernel": self.gate,
            "use_beta_sigmoid_in_kernel": self.sigmoid,
            "allow_neg_eigval": self.negative,
            "state_v_first": self.v_first,
        }


BF16, F32 = torch.bfloat16, torch.float32
MIXED = 256, 244, 500
LONG_MIXED = 101, 202, 902, 1802, 1089
CHUNKED = [
    # test_chunk
    Theirs(4, 1024, 4, 4, 128, 0.1, masked=1.0),
    Theirs(2, 75, 4, 4, 64, 1, 0.01),
    Theirs(2, 1000, 3, 3, 64, 0.1, masked=0.5),
    Theirs(4, 1024, 4, 4, 128, 0.1, norm=True),
    Theirs(2, 1500, 4, 4, 128, 0.1, 10),
    Theirs(4, 2048, 8, 8, 64, 0.1),
    Theirs(2, 256, 2, 4, 64, 1),
    Theirs(2, 512, 2, 8, 64, 1, 0.1, norm=True),
    Theirs(2, 1024, 4, 8, 128, 0.1),
    # test_chunk_beta_sigmoid_in_kernel
    Theirs(3, 1024, 4, 4, 128, 0.1, norm=True, sigmoid=True, negative=True),
    # test_chunk_state_v_first
    Theirs(1, 63, 1, 1, 64, 1, v_first=True),
    # test_chunk_gate_in_kernel, and its form with grouped heads
    Theirs(2, 75, 4, 4, 64, 1, norm=True, gate=True, bias=True),
    Theirs(2, 512, 1, 4, 64, 0.1, norm=True, gate=True),
    # test_chunk_varlen
    Theirs(0, 0, 2, 8, 64, lengths=MIXED),
    Theirs(0, 0, 4, 4, 64, gate=True, bias=True, norm=True, lengths=MIXED),
]
MORE_CHUNKED = [
    Theirs(2, 500, 4, 4, 64, 1, sigmoid=True),
    Theirs(2, 1024, 4, 8, 128, 0.1, sigmoid=True, negative=True),
    Theirs(4, 2048, 8, 8, 64, 0.1, norm=True, sigmoid=True),
    Theirs(3, 1024, 4, 4, 128, 0.1, v_first=True),
    Theirs(4, 2048, 8, 8, 64, 0.1, v_first=True),
    Theirs(2, 1000, 3, 3, 64, 0.1, gate=True, bias=True),
    Theirs(4, 1024, 4, 4, 128, 0.1, norm=True, gate=True),
    Theirs(4, 2048, 8, 8, 64, 0.1, gate=True, bias=True),
    Theirs(2, 256, 2, 4, 64, 1, norm=True, gate=True, bias=True),
    Theirs(2, 512, 2, 8, 64, 1, norm=True, gate=True, bias=True),
    Theirs(2, 1024, 4, 8, 128, 0.1, norm=True, gate=True, bias=True),
    Theirs(0, 0, 4, 4, 64, lengths=MIXED),
    Theirs(0, 0, 4, 4, 64, masked=0.5, lengths=MIXED),
    Theirs(0, 0, 2, 4, 64, lengths=MIXED),
    Theirs(0, 0, 4, 4, 64, gate=True, norm=True, lengths=MIXED),
    # test_flash_qla_chunk, and its forms with packed sequences and states of V first
    *(Theirs(*shape, 128, norm=True, dtype=dtype) for shape, dtype in (
        ((1, 1024, 4, 4), BF16), ((2, 2048, 8, 8), BF16), ((1, 4096, 16, 16), BF16),
        ((1, 1024, 4, 4), torch.float16), ((2, 2048, 8, 8), torch.float16),
        ((1, 1024, 2, 8), BF16), ((2, 2048, 4, 16), BF16),
    )),
    Theirs(0, 0, 4, 4, 128, norm=True, lengths=MIXED, dtype=BF16),
    Theirs(0, 0, 8, 8, 128, norm=True, lengths=(100, 200, 900, 800), dtype=BF16),
    Theirs(0, 0, 16, 16, 128, norm=True, lengths=LONG_MIXED, dtype=BF16),
    Theirs(1, 1024, 4, 4, 128, norm=True, v_first=True, dtype=BF16),
    Theirs(2, 2048, 8, 8, 128, norm=True, v_first=True, dtype=BF16),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CHUNKED, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_CHUNKED)], ids=str
)
def test_the_cases_of_flash_linear_attention(case: Theirs):
    args = case.arguments()
    rules = kda_chunk_reference(**definition(bounded(args))), plain(args)
    o, state = run(args)
    assert state is not None
    assert_no_worse(o, *(x.o for x in reversed(rules)), "o")
    assert_no_worse(state, *(x.states.final_state for x in reversed(rules)), "final state")
    of = weights(args)
    found = differentiated(args, of)
    exact, less = chunk_gradients_in_float64(args, of), plainly(args, of)
    # As its tests: a part of the largest value.
    of_g = 0.02 * exact.dg.norm() + 1e-3 * (args["k"].double() * exact.dk).norm()
    for name, true, theirs in zip(INPUTS, exact, less, strict=True):
        if name not in found:
            continue
        if name in ("g", "A_log", "dt_bias"):
            error, size = (found[name].double() - true.view_as(found[name])).norm(), true.norm()
            granted = 4 * (theirs.double() - true).norm()
            bound = of_g if name == "g" else torch.maximum(0.02 * size, granted)
            assert error <= bound, f"{name}: {error:.3e} of {size:.3e}, granted {bound:.3e}"
        else:
            assert_no_worse(found[name], theirs.view(true.shape), true, name)


def chunk_gradients_in_float64(args: dict[str, Any], of: dict[str, Tensor]) -> Any:
    """The gradients by chunks in float64: the reference goes token by token, which takes long."""
    from cute_attn.reference.gated_delta_rule import gated_delta_rule_chunk_gradients

    given = {name: x for name, x in bounded(args).items() if name != "output_final_state"}
    return gated_delta_rule_chunk_gradients(**given, **of)


RECURRENT = [
    # test_fused_recurrent, and its form with states of V first
    Theirs(1, 63, 1, 1, 64, 1, norm=True, dtype=F32),
    Theirs(2, 1000, 2, 8, 128, 1, 0.1, norm=True, dtype=F32),
    Theirs(3, 1024, 2, 2, 128, 0.1, norm=True, v_first=True, dtype=F32),
    Theirs(4, 1024, 3, 3, 128, 1, 10, norm=True, dtype=F32),
    Theirs(4, 2048, 4, 4, 64, 0.1, norm=True, v_first=True, dtype=F32),
    Theirs(2, 1024, 4, 4, 128, 1, 0.1, norm=True),
    Theirs(2, 1024, 4, 8, 128, 1, 10, norm=True),
    # test_fused_recurrent_gate_in_kernel, and its form with packed sequences
    Theirs(1, 64, 1, 1, 64, 1, norm=True, gate=True, dtype=F32),
    Theirs(2, 256, 2, 2, 64, 1, norm=True, gate=True, bias=True, dtype=F32),
    Theirs(2, 512, 2, 4, 64, 0.1, norm=True, gate=True, bias=True),
    Theirs(3, 1000, 2, 8, 128, 1, norm=True, gate=True),
    Theirs(4, 1024, 4, 4, 128, 0.1, norm=True, gate=True, bias=True),
    Theirs(0, 0, 2, 2, 64, norm=True, gate=True, bias=True, lengths=(15, 85, 200)),
    Theirs(0, 0, 2, 4, 64, norm=True, gate=True, lengths=MIXED),
    Theirs(0, 0, 4, 4, 128, norm=True, gate=True, bias=True, lengths=(15, 85, 200, 900, 800)),
    # test_fused_recurrent_beta_sigmoid_in_kernel
    Theirs(1, 64, 1, 1, 64, 1, norm=True, sigmoid=True, dtype=F32),
    Theirs(2, 512, 2, 4, 64, 0.1, norm=True, sigmoid=True, negative=True),
    Theirs(3, 1000, 2, 8, 128, 1, norm=True, sigmoid=True, negative=True),
    Theirs(4, 1024, 4, 4, 128, 0.1, norm=True, sigmoid=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_the_recurrent_cases_of_flash_linear_attention(case: Theirs):
    args = case.arguments()
    args["initial_state"].normal_()
    with torch.no_grad():
        o, state = cute_attn.fused_recurrent_gated_delta_rule(**args)
    rules = (
        kda_chunk_reference(**definition(bounded(args))),
        kda_reference(**definition(args), dtype=torch.float32),
    )
    assert state is not None
    assert_no_worse(o, rules[1].o.to(o.dtype), rules[0].o, "o")
    assert_no_worse(state, rules[1].final_state, rules[0].states.final_state, "final state")
