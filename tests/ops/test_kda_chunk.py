"""chunk_kda agrees with the float64 reference, and has exact properties.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule, where
the sweeps are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import cute_attn
import cute_attn.cache
from cute_attn import launch
from cute_attn.emulation import Emulation
from cute_attn.emulator import Emulator
from cute_attn.kernels.delta.chunk import heuristics
from cute_attn.ops.kda import chunk, chunk_passes
from cute_attn.reference.kda import kda_reference

from .kda_cases import (
    DECAYS,
    FULL,
    GATES,
    ONE_BETA,
    PACKED,
    PLAIN,
    SMALL,
    SOME,
    SOME_MODULAR,
    WIDE_K,
    WIDE_V,
    Case,
    Kind,
    assert_agrees,
    assert_no_worse,
    cases,
    definition,
    examples,
    give_one_beta,
    plain,
    reference,
    run,
    run_all,
    same,
    spans,
    tokens_of,
    valid,
    warm,
)

STAGE_BY_STAGE = {"return_intermediate_states": True}
PATHS = {"fused": {}, "modular": STAGE_BY_STAGE}
# In `make test` the modular path has tests of its own stages, which are bit for bit what it is
# (`test_kda_stages.py`): here it runs under all schedules.
MOSTLY_FUSED = ["fused", pytest.param("modular", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", autouse=True)
def compiled_beforehand() -> None:
    """Compile what the usual sweep on a GPU can draw with all cores, not one at a time."""
    if not torch.cuda.is_available():
        return
    arch = cute_attn.cache.current_arch()
    cute_attn.warmup(
        request
        for kinds, path in ((SOME, "fused"), (SOME_MODULAR, "modular"))
        for kind in kinds
        for request in kind.requests(arch, **PATHS[path])
    )


# -- agreement


@pytest.mark.everywhere
@pytest.mark.parametrize("path", MOSTLY_FUSED)
@examples(3)
@given(data=st.data())
def test_agrees_with_the_reference(device: str, path: str, data: st.DataObject):
    case = data.draw(cases(device, SOME if path == "fused" else SOME_MODULAR))
    args = case.arguments(device)
    assert_agrees(args, *run(args, **PATHS[path]))


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize("gates", GATES)
def test_gates_of_any_size(device: str, gates: str):
    for kind, lengths in ((PLAIN, (130,)), (DECAYS, (64, 0, 70)), (WIDE_V, (129, 1))):
        args = Case(kind, lengths, gates=gates, alike=gates == "weak", seed=3).arguments(device)
        assert_agrees(args, *run(args))


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        pytest.param(DECAYS, "fused", id="bfloat16-fused"),
        pytest.param(DECAYS, "modular", id="bfloat16-modular", marks=pytest.mark.slow),
        pytest.param(WIDE_K, "fused", id="float16-fused", marks=pytest.mark.slow),
        pytest.param(WIDE_K, "modular", id="float16-modular", marks=pytest.mark.slow),
    ],
)
def test_small_gates_behind_large_ones_count(device: str, kind: Kind, path: str):
    """In one chunk: a decay is of its own gates, however large the sum of those before it."""
    args = Case(kind, (64,), seed=6).arguments(device)
    large, small = (-1e6, -0.01) if kind.gate == "none" else (1e4, -3.0)
    args["g"].fill_(small)
    args["g"][:, :50] = large
    args["g"][:, 55] = large
    assert_agrees(args, *run(args, **PATHS[path]))


@pytest.mark.everywhere
@pytest.mark.parametrize("path", MOSTLY_FUSED)
def test_a_long_memory_does_not_drift(device: str, path: str):
    """Decays of a chunk that float32 holds nearly exactly. Roundings of the state's elements
    average out over its columns, but errors of a decay add up."""
    args = Case(DECAYS, (6 * 64,), group=1).arguments(device)
    args["g"] = -(torch.arange(1.0, 129.0, device=device) * 2.0**-30).expand(args["g"].shape)
    args["beta"].zero_()
    args["initial_state"].abs_().add_(1.0)
    _, state = run(args, **PATHS[path])
    states = state, plain(args).states.final_state, reference(args).final_state
    assert_no_worse(*(x.double().mean(-1) for x in states), "mean of columns")


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize("path", MOSTLY_FUSED)
@pytest.mark.parametrize(
    ("kind", "scale", "size"),
    [(PACKED, 2.0**-60, 1e18), (PACKED, -(2.0**60), 1e-3), (SMALL, 2.0**-10, 1.0)],
    ids=["small", "large", "small, float16"],
)
def test_scales_up_to_the_limits(device: str, kind: Kind, scale: float, size: float, path: str):
    """Beside rows of q of any length, which the norm makes a factor of."""
    args = Case(kind, (100,), scale=scale, seed=9).arguments(device)
    args["q"] *= size
    assert_agrees(args, *run(args, **PATHS[path]))


@pytest.mark.everywhere
@pytest.mark.parametrize("path", MOSTLY_FUSED)
@pytest.mark.parametrize(("dtype", "beta"), ONE_BETA)
def test_one_beta_for_tokens_with_similar_keys(
    device: str, dtype: torch.dtype, beta: float, path: str
):
    """An error that is the same for all tokens does not cancel where their corrections do."""
    args = Case(replace(DECAYS, dtype=dtype), (256,), group=1).arguments(device)
    give_one_beta(args, beta)
    assert_agrees(args, *run(args, **PATHS[path]))


@pytest.mark.slow
@pytest.mark.everywhere
def test_one_beta_in_segments(device: str):
    args = Case(DECAYS, (256,), group=1).arguments(device)
    give_one_beta(args, 0.998)
    in_segments(args, 1)


@pytest.mark.everywhere
@pytest.mark.in_turn("gates")
@pytest.mark.parametrize("path", MOSTLY_FUSED)
@pytest.mark.parametrize("size", [1e10, 1e18, 1e-18])
@pytest.mark.parametrize("gates", ["usual", "extreme"])
def test_the_norm_takes_rows_of_any_length(device: str, size: float, gates: str, path: str):
    """Up to where the sum of squares leaves float32, and beside rows of the usual length."""
    args = Case(PACKED, (100, 30), gates=gates, seed=8).arguments(device)
    args["q"][:, ::3] *= size
    args["k"][:, ::2] *= size
    assert_agrees(args, *run(args, **PATHS[path]))


@pytest.mark.everywhere
@examples(1)
@given(seed=st.integers(0, 2**31))
def test_gates_above_zero(device: str, seed: int):
    """Sums of gates within a chunk stay in range."""
    args = Case(DECAYS, (100, 70), seed=seed).arguments(device)
    generator = torch.Generator().manual_seed(seed)
    gates = 0.05 * torch.rand(args["g"].shape, generator=generator) - 0.02
    args["g"].copy_(torch.where(args["g"].isnan(), args["g"], gates.to(device)))
    assert_agrees(args, *run(args))


@pytest.mark.everywhere(quick=False)
@examples(2)
@given(data=st.data())
def test_states_at_the_start_of_chunks(device: str, data: st.DataObject):
    case = data.draw(cases(device, [PLAIN, PACKED, SMALL] if FULL else [PACKED, SMALL]))
    args = case.arguments(device)
    o, state, h = run_all(args)
    exact, theirs = reference(args), plain(args)
    count = exact.h.shape[1]
    if "cu_seqlens" in args:
        sequences = len(args["cu_seqlens"]) - 1
        assert h.shape[1] == args["q"].shape[1] // 64 + sequences
        counted = run_all(args, cu_seqlens_cpu=args["cu_seqlens"].cpu())
        assert counted[2].shape[1] == count
        assert torch.equal(counted[2], h[:, :count])
        assert same(args, counted, (o, state))
    assert h.dtype == o.dtype
    assert_no_worse(h[:, :count], theirs.states.h, exact.h, "h")
    assert_agrees(args | {"output_final_state": True}, o, state)


@pytest.mark.slow
@pytest.mark.everywhere
@examples(3)
@given(data=st.data())
def test_sequences_in_segments(device: str, data: st.DataObject):
    case = data.draw(cases(device, [PLAIN, DECAYS, SMALL, WIDE_V] if FULL else [PACKED, SMALL]))
    assume(any(case.lengths))  # without a token nothing is split
    in_segments(case.arguments(device), data.draw(st.integers(1, 3)))


@pytest.mark.slow
@pytest.mark.everywhere
def test_many_segments(device: str):
    in_segments(Case(SMALL, (450,), gates="weak", alike=True).arguments(device), 1)
    in_segments(Case(PACKED, (0, 330, 1, 130), group=1, gates="weak").arguments(device), 1)


@pytest.fixture
def split_setting() -> Iterator[Callable[[str], None]]:
    """Sets CUTE_ATTN_KDA_SPLIT, where 4 heads have blocks enough, and one is worth 3 segments."""
    free = {kind: x._replace(step=0.0, kernels=0.0) for kind, x in heuristics.SEGMENT_TIMES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "num_sms", lambda _: 11)
        patch.setattr(heuristics, "FEWEST_CHUNKS_OF_A_SEGMENT", 1)
        patch.setattr(heuristics, "SEGMENT_TIMES", free)

        def set_to(value: str) -> None:
            patch.setenv("CUTE_ATTN_KDA_SPLIT", value)
            cute_attn.reload_settings()

        yield set_to
    cute_attn.reload_settings()


@pytest.mark.everywhere(quick=False)
def test_a_setting_forbids_splitting(device: str, split_setting: Callable[[str], None]):
    """So that a sequence's bits are the same whatever else is in the call."""
    length = 260
    args = Case(PACKED, (length, 0, 70), group=1, gates="weak").arguments(device)
    alone = tokens_of(args, slice(0, length)) | {"cu_seqlens": args["cu_seqlens"][:2]}
    alone["initial_state"] = args["initial_state"][:1]
    many = {name: torch.cat([alone[name]] * 4, dim=2) for name in ("q", "k", "v", "g", "beta")}
    many["initial_state"] = torch.cat([alone["initial_state"]] * 4, dim=1)
    many |= {"A_log": args["A_log"].repeat(4), "dt_bias": args["dt_bias"].repeat(4)}

    def results() -> list[tuple[torch.Tensor, torch.Tensor]]:
        """By itself, beside other sequences, and beside other heads."""
        (o, state), (o_many, state_many) = run(args), run(alone | many)
        return [
            run(alone), (o[:, :length], state[:1]), (o_many[:, :, :1], state_many[:, :1])
        ]  # fmt: skip

    split_setting("0")
    first, *others = results()
    for other in others:
        assert same(alone, first, other)
    split_setting("1")
    first, among, many_heads = results()
    assert not same(alone, first, many_heads)
    assert_agrees(alone, *first)
    assert_agrees(alone, *among)


@pytest.mark.parametrize(
    ("path", "arch"),
    [
        ("fused", "sm_90a"),
        pytest.param("fused", "sm_100a", marks=pytest.mark.slow),
        pytest.param("modular", "sm_90a", marks=pytest.mark.slow),
        pytest.param("modular", "sm_100a", marks=pytest.mark.slow),
        pytest.param("segments", "sm_90a", marks=pytest.mark.slow),
        pytest.param("segments", "sm_100a", marks=pytest.mark.slow),
    ],
)
def test_no_schedule_changes_a_bit(path: str, arch: str):
    """The result is the same under any schedule of warps and CTAs, and with any number of SMs."""
    kind = DECAYS if path == "modular" else PACKED  # of which `test_kda_stages` has the kernels
    args = Case(kind, (70, 0, 130), gates="strong").arguments("cpu")
    results = []
    for num_sms, schedule, seed in (
        (4, "fair", 0), (2, "adversarial", 1), (7, "random", 2),
        *([(3, "random", 3)] if FULL else []),
    ):  # fmt: skip
        emulator = Emulator(num_sms=num_sms, schedule=schedule, seed=seed)
        with cute_attn.emulated(arch, emulator), pytest.MonkeyPatch.context() as patch:
            if path == "segments":
                patch.setattr(chunk_passes, "chunks_per_segment", lambda *_, **__: 1)
                patch.setattr(chunk_passes, "chunks_per_start", lambda *_, **__: 1)
                patch.setattr(launch, "num_sms", lambda _: 10**6)
            results.append(run(args, **PATHS.get(path, {})))
        assert len(emulator.report.launches) == {"fused": 2, "modular": 4, "segments": 4}[path]
        assert not emulator.report.findings, emulator.report
    assert all(same(args, results[0], other) for other in results[1:])
    assert_agrees(args, *results[0])


def in_segments(args: dict[str, Any], length: int) -> None:
    """Agreement where segments have this many chunks."""
    asked: list[dict[str, Any]] = []

    def chunks_per_segment(kind: str, **sizes: Any) -> int:
        asked.append(sizes | {"kind": kind})
        return length

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_passes, "chunks_per_segment", chunks_per_segment)
        patch.setattr(chunk_passes, "chunks_per_start", lambda *_, **__: length)
        patch.setattr(launch, "num_sms", lambda _: 10**6)
        patch.setattr(chunk._chunk, "ready", {})
        assert_agrees(args, *run(args))
    (sizes,) = asked
    batch, tokens, heads, dim = args["v"].shape
    dim_k = args["k"].shape[-1]
    kind = sizes.pop("kind")
    assert kind == "channel" or (kind == "shared" and dim_k % 128 == dim % 128 == 0)
    packed = "cu_seqlens" in args
    sequences = len(args["cu_seqlens"]) - 1 if packed else batch
    assert sizes == {
        "sequences": sequences, "tokens": tokens, "heads": heads, "head_dim_k": dim_k,
        "head_dim_v": dim, "packed": packed, "num_sms": 10**6,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(8192,), (5000, 0, 1, 3000)], ids=str)
def test_long_sequences_are_split(lengths: tuple[int, ...]):
    kind = PLAIN if len(lengths) == 1 else PACKED
    args = Case(kind, lengths, heads=1, group=2).arguments("cuda")
    assert_agrees(args, *run(args))


@pytest.mark.everywhere
@pytest.mark.parametrize("path", MOSTLY_FUSED)
@examples(2)
@given(data=st.data())
def test_chunks_are_tokens_in_turn(device: str, path: str, data: st.DataObject):
    """The results differ by no more than the error rule allows for both."""
    of = SOME_MODULAR if path == "modular" else SOME if FULL else [PACKED]
    args = data.draw(cases(device, of)).arguments(device) | {"output_final_state": True}
    options = {"safe_gate"}
    results = run(args, **PATHS[path])
    with torch.no_grad():
        in_turn = cute_attn.fused_recurrent_kda(
            **{name: x for name, x in args.items() if name not in options}
        )
    exact = reference(args)
    by_chunks = plain(args)
    by_tokens = kda_reference(**definition(args), dtype=torch.float32)
    for name, ours, other, right, *theirs in (
        ("o", results[0], in_turn[0], exact.o, by_chunks.o, by_tokens.o),
        (
            "final state", results[1], in_turn[1], exact.final_state,
            by_chunks.states.final_state, by_tokens.final_state,
        ),
    ):  # fmt: skip
        if name == "o":
            ours, other, right, *theirs = (valid(args, x) for x in (ours, other, right, *theirs))
        granted = sum((x.to(ours.dtype).double() - right).norm() for x in theirs)
        floor = 2 * torch.finfo(torch.float32).eps * right.norm()
        assert (ours.double() - other.double()).norm() <= 2 * granted + floor, name


# -- exact properties


@pytest.mark.slow  # other schedules have the same bits, too
@pytest.mark.everywhere
@examples(1)
@given(data=st.data())
def test_repeated_runs_are_bitwise_equal(device: str, data: st.DataObject):
    args = data.draw(cases(device)).arguments(device)
    assert same(args, run(args), run(args))


@pytest.mark.slow  # later calls have other layouts, too
@pytest.mark.everywhere
@examples(1)
@given(data=st.data())
def test_layouts_do_not_matter(device: str, data: st.DataObject):
    case = replace(data.draw(cases(device)), layout="contiguous")
    args = case.arguments(device)
    first = run(args)
    for layout in ("heads_first", "projection", "misaligned"):
        assert same(args, first, run(replace(case, layout=layout).arguments(device)))


@pytest.mark.everywhere
@examples(2)
@given(data=st.data())
def test_grouped_heads_are_repeated_heads(device: str, data: st.DataObject):
    case = data.draw(cases(device))
    args = case.arguments(device)
    repeated = {name: args[name].repeat_interleave(case.group, dim=2) for name in ("q", "k")}
    assert same(args, run(args), run(args, **repeated))


@pytest.mark.everywhere
@examples(2)
@given(data=st.data())
def test_packed_sequences_are_sequences_alone(device: str, data: st.DataObject):
    """Packed with others, packed alone, and as a batch of one."""
    case = data.draw(cases(device, [DECAYS, PACKED, WIDE_V]))
    args = case.arguments(device)
    o, state = run(args)
    for n, (_, rows) in enumerate(spans(args)):
        one = tokens_of(args, rows)
        if case.kind.initial:
            one["initial_state"] = args["initial_state"][n : n + 1]
        length = one["q"].shape[1]
        one["cu_seqlens"] = torch.tensor([0, length]).to(args["cu_seqlens"])
        alone = (o[:, rows], state[n : n + 1])
        assert same(one, alone, run(one))
        del one["cu_seqlens"]
        assert same(one, alone, run(one))


@pytest.mark.everywhere(quick=False)
@examples(2)
@given(data=st.data())
def test_later_tokens_do_not_matter(device: str, data: st.DataObject):
    """Later tokens change no bit of earlier results, nor does their absence."""
    case = replace(data.draw(cases(device, [PLAIN, SMALL])), layout="contiguous")
    args = case.arguments(device)
    o, _ = run(args)
    cut = data.draw(st.integers(1, case.lengths[0]))
    other = tokens_of(replace(case, seed=case.seed + 1).arguments(device), slice(cut, None))
    head = tokens_of(args, slice(0, cut))
    names = ("q", "k", "v", "g", "beta")
    mixed = args | {name: torch.cat([head[name], other[name]], dim=1) for name in names}
    for changed in (head, mixed):
        assert torch.equal(run(changed)[0][:, :cut], o[:, :cut])


@pytest.mark.slow  # first and last states are compared with the reference, too
@pytest.mark.everywhere
@examples(2)
@given(data=st.data())
def test_two_runs_chained_through_the_state_are_one(device: str, data: st.DataObject):
    """To the last bit where a chunk ends at the cut."""
    case = data.draw(cases(device, [PLAIN, SMALL]))
    case = replace(case, layout="contiguous")
    args = case.arguments(device)
    tokens = case.lengths[0]
    whole = run(args)
    cut = data.draw(
        st.integers(0, tokens) | st.sampled_from((0, 64, 128)).map(lambda n: min(n, tokens))
    )
    o_first, state = run(tokens_of(args, slice(0, cut)))
    o_rest, state = run(tokens_of(args, slice(cut, None)) | {"initial_state": state})
    chained = (torch.cat([o_first, o_rest], dim=1), state)
    if cut % 64 == 0:
        assert same(args, whole, chained)
    else:
        assert_agrees(args, *chained)


@pytest.mark.slow  # heads beside other heads have the same bits, too
@pytest.mark.everywhere
@examples(1)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_permuting_heads_permutes_the_result(device: str, data: st.DataObject, random: Any):
    case = data.draw(cases(device))
    args = case.arguments(device)
    order = list(range(case.heads))
    random.shuffle(order)
    order_v = [h * case.group + i for h in order for i in range(case.group)]
    permuted = {name: args[name][:, :, order] for name in ("q", "k")}
    permuted |= {name: args[name][:, :, order_v] for name in ("v", "g", "beta")}
    for name in ("initial_state", "A_log", "dt_bias"):
        if name in args:
            x = args[name]
            if name == "dt_bias":
                x = x.view(case.heads_v, -1)
            permuted[name] = x[:, order_v] if name == "initial_state" else x[order_v]
    o, state = run(args)
    expected = (o[:, :, order_v], None if state is None else state[:, order_v])
    assert same(args, expected, run(args, **permuted))


@pytest.mark.everywhere
@examples(1)
@given(data=st.data())
def test_what_is_ignored_changes_nothing(device: str, data: st.DataObject):
    case = data.draw(cases(device, [DECAYS]))
    args = case.arguments(device)
    first = run(args)
    heads, dim = args["g"].shape[2:]
    ignored = {
        "A_log": torch.randn(heads, device=device),
        "dt_bias": torch.randn(heads, dim, device=device),
        "lower_bound": -1.0,
        "safe_gate": True,
    }
    assert same(args, first, run(args, **ignored))


@pytest.mark.slow  # another kernel; calls that follow one another have both, too
@pytest.mark.everywhere
def test_offsets_may_be_of_either_size(device: str):
    args = Case(DECAYS, (70, 3)).arguments(device)
    assert same(args, run(args), run(args, cu_seqlens=args["cu_seqlens"].int()))


@pytest.mark.everywhere
def test_states_in_bfloat16_are_converted(device: str):
    args = Case(PLAIN, (70,)).arguments(device)
    args["initial_state"] = args["initial_state"].bfloat16()
    assert_agrees(args, *run(args))


@pytest.mark.slow  # test_no_schedule_changes_a_bit has an empty sequence, too
@pytest.mark.everywhere
def test_sequences_without_tokens_keep_their_state(device: str):
    args = Case(PACKED, (0, 5, 0), tail=3).arguments(device)
    _, state = run(args)
    assert torch.equal(state[[0, 2]], args["initial_state"][[0, 2]])
    _, zero = run(Case(WIDE_V, (0, 5, 0), tail=3).arguments(device))  # without a state to begin
    assert zero[1].any() and not zero[[0, 2]].any()


@pytest.mark.everywhere
def test_many_short_sequences(device: str):
    lengths = tuple((n * n) % 5 for n in range(70))
    args = Case(PACKED, lengths, group=1).arguments(device)
    assert_agrees(args, *run(args))


@pytest.mark.everywhere
def test_tensors_beyond_two_to_the_31_elements(device: str):
    """Two batches that lie further apart than 32 bits can say. Memory not touched costs none."""
    if device == "cuda":
        pytest.skip("memory on a GPU costs even where it is not touched")
    args = Case(PLAIN, (70,) * 2).arguments(device)
    far = dict(args)
    for name in ("q", "k", "v", "g"):
        x = args[name]
        apart = 2**31 + 2**16
        memory = torch.empty(apart + x[0].numel(), dtype=x.dtype)
        far[name] = memory.as_strided(x.shape, (apart, *x.stride()[1:]))
        far[name].copy_(x)
    assert same(args, run(args), run(far))


# -- the operator


@pytest.mark.everywhere
@pytest.mark.parametrize("path", MOSTLY_FUSED)
def test_the_registered_operator_is_well_behaved(device: str, path: str):
    args = Case(PACKED, (5, 6), group=1).arguments(device)
    positional = tuple(args.pop(name) for name in ("q", "k", "v", "g", "beta"))
    # No token is left out here: all of a result is defined, so that runs can be compared.
    torch.library.opcheck(torch.ops.cute_attn.chunk_kda.default, positional, args | PATHS[path])


@pytest.mark.everywhere
def test_compiled_code_calls_the_kernels(device: str):
    args = Case(PLAIN, (70,)).arguments(device)
    tensors = {name: x for name, x in args.items() if isinstance(x, torch.Tensor)}
    rest = {name: x for name, x in args.items() if name not in tensors}

    def layer(tensors: dict[str, torch.Tensor]) -> Any:
        o, state = cute_attn.chunk_kda(**tensors, **rest)
        return o, state

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        result = compiled(tensors)
    assert same(args, run(args), result)


@pytest.mark.gpu
def test_a_cuda_graph_follows_its_inputs():
    args = Case(PACKED, (100, 0, 70, 300), group=2).arguments("cuda")
    expected = run(args)
    other = Case(PACKED, (70, 300, 100, 0), group=2, seed=1).arguments("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        cute_attn.chunk_kda(**args)
        with torch.cuda.graph(graph):
            captured = cute_attn.chunk_kda(**args)
    graph.replay()
    assert same(args, expected, captured)
    for name, x in other.items():
        if isinstance(x, torch.Tensor):
            args[name].copy_(x)
    graph.replay()
    assert same(other, run(other), captured)


@pytest.mark.everywhere
@pytest.mark.parametrize("path", ["fused", pytest.param("modular", marks=pytest.mark.slow)])
def test_later_calls_only_launch(device: str, path: str, monkeypatch: pytest.MonkeyPatch):
    """With other lengths, numbers of sequences and layouts, and after what is refused."""
    options = PATHS[path]

    def case(lengths: tuple[int, ...], **more: Any) -> dict[str, Any]:
        args = Case(replace(PACKED, index=None), lengths, **more).arguments(device)
        return args | {"dt_bias": args["dt_bias"].flatten(), "A_log": args["A_log"].view(1, -1, 1)}

    with warm():
        first = case((70,))
        expected = run(first, **options)
        with monkeypatch.context() as patch:  # no check, no look-up of a kernel
            patch.setattr(chunk._chunk, "_first_call", None)
            patch.setattr(launch, "get_for", None)
            assert same(first, expected, run(first, **options))
            longer = case((130, 130), layout="projection", seed=1)
            assert_agrees(longer, *run(longer, **options))
        for layout in ("misaligned", "heads_first"):
            moved = case((70,), layout=layout)
            moved["initial_state"] = moved["initial_state"].mT.contiguous().mT
            assert same(first, expected, run(moved, **options))
        for name, bad, message in (
            ("k", first["k"][:, 1:], "k has shape"),
            ("v", first["v"][:, 1:], "v has shape"),
            ("g", first["g"][..., :64], "g has shape"),
            ("beta", first["beta"][:, :, :1], "beta has shape"),
            ("initial_state", first["initial_state"].repeat(2, 1, 1, 1), "initial_state has shape"),
            ("initial_state", first["initial_state"][:, :, :64], "initial_state has shape"),
            ("A_log", first["A_log"][:, :1], "A_log has shape"),
            ("dt_bias", first["dt_bias"][1:], "dt_bias has shape"),
            ("scale", "1", "scale must be"),
            ("lower_bound", float("nan"), "lower_bound is nan"),
            ("allow_neg_eigval", None, "allow_neg_eigval must be"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                run(first, **options, **{name: bad})
        assert same(first, expected, run(first, **options))
        empty = tokens_of(first, slice(0, 0))
        assert torch.equal(run(empty, **options)[1], first["initial_state"])


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("path", ["fused", "modular"])
def test_later_calls_with_packed_sequences(device: str, path: str):
    options = PATHS[path]
    with warm():
        first = Case(PACKED, (70, 3)).arguments(device)
        expected = run(first, **options)
        cpu = first["cu_seqlens"].cpu()
        assert same(first, expected, run(first, **options, cu_seqlens_cpu=cpu))
        other = Case(PACKED, (0, 1, 65, 5), lead=2, seed=1).arguments(device)
        assert_agrees(other, *run(other, **options))
        strided = torch.stack([first["cu_seqlens"]] * 2, dim=1)[:, 0]
        assert same(first, expected, run(first, **options, cu_seqlens=strided))
        wide = first["cu_seqlens"].long()
        assert same(first, expected, run(first, **options, cu_seqlens=wide))
        with pytest.raises(ValueError, match=r"cu_seqlens_cpu\[2\] is 74, must be at most T, 73"):
            run(first, **options, cu_seqlens_cpu=torch.tensor([0, 70, 74]))
        with pytest.raises(ValueError, match="initial_state has shape"):
            run(first, **options, cu_seqlens=torch.tensor([0, 1, 2, 73]).to(first["cu_seqlens"]))
        with pytest.raises(ValueError, match="cu_seqlens has shape"):
            run(first, **options, cu_seqlens=first["cu_seqlens"][None])
        doubled = {name: torch.cat([first[name]] * 2) for name in ("q", "k", "v", "g", "beta")}
        with pytest.raises(ValueError, match="there are 2 batches"):
            run(first, **options, **doubled)


BAD = {
    "q-dtype": ("q", lambda x: x.half()),
    "q-strides": ("q", lambda x: torch.cat([x, x], dim=-1)[..., ::2]),
    "q-address": ("q", lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)),
    "q-rank": ("q", lambda x: x[0]),
    "k-tokens": ("k", lambda x: x[:, 1:]),
    "k-heads": ("k", lambda x: torch.cat([x, x], dim=2)),
    "k-dim": ("k", lambda x: x[..., :64]),
    "g-heads": ("g", lambda x: x[:, :, :1]),
    "g-batch": ("g", lambda x: torch.cat([x, x])),
    "g-dtype": ("g", lambda x: x.double()),
    "beta-tokens": ("beta", lambda x: x[:, 1:]),
    "beta-heads": ("beta", lambda x: x[:, :, :1]),
    "beta-dtype": ("beta", lambda x: x.double()),
    "A_log-heads": ("A_log", lambda x: x[:1]),
    "A_log-dtype": ("A_log", lambda x: x.double()),
    "dt_bias-heads": ("dt_bias", lambda x: x[:1]),
    "dt_bias-strides": ("dt_bias", lambda x: torch.cat([x, x], dim=-1)[..., :128]),
    "v-dtype": ("v", lambda x: x.half()),
    "v-strides": ("v", lambda x: torch.cat([x, x], dim=-1)[..., ::2]),
    "v-address": ("v", lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)),
    "v-heads": ("v", lambda x: x[:, :, :1]),
    "v-dim": ("v", lambda x: x[..., :64]),
    "initial_state-heads": ("initial_state", lambda x: x[:, :1]),
    "initial_state-dtype": ("initial_state", lambda x: x.double()),
    "initial_state-layout": ("initial_state", lambda x: x.mT),
    "cu_seqlens-dtype": ("cu_seqlens", lambda x: x.long()),
    "cu_seqlens-strides": ("cu_seqlens", lambda x: torch.stack([x, x], dim=1)[:, 0]),
}


@pytest.fixture(scope="module")
def recorded() -> tuple[dict[str, Any], Emulator, list[tuple[Any, tuple[Any, ...]]]]:
    """A call's arguments, the emulator that it ran on, and what it gave to each kernel."""
    args = Case(PACKED, (5, 60)).arguments("cpu")
    args["dt_bias"] = args["dt_bias"].view(args["g"].shape[2:])
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    load = Emulation.function

    def recording(self: Emulation, kernel: Any, spec: Any) -> Any:
        function = load(self, kernel, spec)

        def call(*arguments: Any) -> None:
            calls.append((function, arguments))
            function(*arguments)

        return call

    with (
        pytest.MonkeyPatch.context() as patch,
        cute_attn.emulated("sm_90a", Emulator()) as emulator,
    ):
        patch.setattr(Emulation, "function", recording)
        run(args)
    assert len(emulator.report.launches) == len(calls) == 2
    return args, emulator, calls


@pytest.mark.parametrize("bad", BAD)
def test_the_compiled_host_code_refuses_what_the_warm_path_leaves_to_it(
    recorded: tuple[dict[str, Any], Emulator, list[tuple[Any, tuple[Any, ...]]]], bad: str
):
    """On a GPU the operator's own checks run only once a kernel's host code has refused."""
    args, emulator, calls = recorded
    name, change = BAD[bad]
    refused = 0
    for function, arguments in calls:
        changed = tuple(change(x) if x is args[name] else x for x in arguments)
        if all(x is y for x, y in zip(arguments, changed, strict=True)):
            continue
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            function(*changed)
        refused += 1
    assert refused == (2 if name == "cu_seqlens" else 1)
    assert len(emulator.report.launches) == len(calls)


def test_what_the_checks_let_pass_reaches_every_kernel():
    """The tokens of no sequence hold NaN in these tests: results do too, or what was there."""
    args = Case(PACKED, (5, 60), lead=3, tail=9).arguments("cpu")
    with cute_attn.emulated("sm_90a", Emulator()):
        o, _ = run(args)
    assert o[:, :3].isnan().all() and o[:, -9:].isnan().all()
    assert not valid(args, o).isnan().any()
