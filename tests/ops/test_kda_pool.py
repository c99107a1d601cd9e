"""chunk_kda on a server's pool of states, which it reads and writes in place.

A pool holds NaN but for the states that a call starts from, and what the call does not name must
keep its bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn
from cute_attn import launch
from cute_attn.cache.specfile import plan_file
from cute_attn.emulation import Emulation
from cute_attn.emulator import Emulator
from cute_attn.ops.kda import chunk_passes, chunk_pool

from .kda_cases import (
    BF16,
    DECAYS,
    FP32,
    PACKED,
    PLAIN,
    SMALL,
    WIDE_V,
    Case,
    Kind,
    assert_no_worse,
    cases,
    examples,
    function_of,
    give_one_beta,
    plain,
    poisoned_outputs,
    reference,
    run,
    spans,
    tokens_of,
    valid,
    warm,
)

# As vLLM and SGLang call it, with small heads, which take the least time.
SERVER = Kind(
    dim_k=64, dim_v=64, gate_dtype=FP32, beta_dtype=FP32, gate="none", sigmoid=False,
    index=torch.int32, v_first=True,
)  # fmt: skip

NO_SLOT = (-1, -(2**31), 2**31 - 1)  # the last is past every pool


@dataclass
class PoolCall:
    """A call on a pool, and the ordinary call with the same sequences.

    Attributes:
        args: of the ordinary call; its initial_state is 0 where a sequence has no slot, or no state
            yet.
        memory: what the pool is a view of: there is other memory between its slots.
        taken: sequence, tokens and slot of each checkpoint that a sequence is long enough for.
    """

    args: dict[str, Any]
    memory: torch.Tensor
    pool: torch.Tensor
    indices: torch.Tensor
    checkpoints: torch.Tensor
    interval: int
    taken: list[tuple[int, int, int]]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def named(self) -> list[int]:
        """The sequences with a slot."""
        slots = range(int("pad_slot_id" in self.more), len(self.pool))
        return [n for n, i in enumerate(self.indices.tolist()) if i in slots]

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of chunk_kda."""
        return self.args | {
            "initial_state": self.pool,
            "output_final_state": True,
            "state_indices": self.indices,
            "checkpoint_indices": self.checkpoints,
            "checkpoint_interval": self.interval,
            **self.more,
        }

    def run(self, **changes: Any) -> torch.Tensor:
        with torch.no_grad(), poisoned_outputs():
            o, final_state = function_of(self.args)(**self.given | changes)
        assert final_state is self.pool
        return o

    def check(self, **changes: Any) -> torch.Tensor:
        """Run it, and compare o, final states, checkpoints and all other memory."""
        before = self.memory.clone()
        o = self.run(**changes)
        args, pool = self.args, self.pool
        exact, theirs = reference(args), plain(args)
        assert o.dtype == args["q"].dtype and o.shape == args["v"].shape and o.is_contiguous()
        assert_no_worse(*(valid(args, x) for x in (o, theirs.o, exact.o)), "o")
        final = pool[self.indices[self.named].long()]
        at = torch.tensor(self.named, device=final.device, dtype=torch.long)
        states = (x[at] for x in (theirs.states.final_state, exact.final_state))
        assert_no_worse(final, *states, "final state")
        for n, tokens, slot in self.taken:
            batch, rows = spans(args)[n]
            rows = slice(rows.start or 0, (rows.start or 0) + tokens)
            one = {name: args[name][batch : batch + 1] for name in ("q", "k", "v", "g", "beta")}
            one = tokens_of(args | one, rows) | {"initial_state": args["initial_state"][n : n + 1]}
            one.pop("cu_seqlens", None)
            assert_no_worse(
                pool[slot : slot + 1],
                plain(one).states.final_state,
                reference(one).final_state,
                f"checkpoint of sequence {n} after {tokens} tokens",
            )
        written = [self.indices[n].item() for n in self.named]
        written += [slot for _, _, slot in self.taken]
        then = before.as_strided(pool.shape, pool.stride())
        then[written] = pool[written]
        assert torch.equal(before.view(torch.int8), self.memory.view(torch.int8))
        return o


def pool_call(
    args: dict[str, Any],
    *,
    dtype: torch.dtype = FP32,
    without_slot: tuple[int, ...] = (),
    interval: int = 64,
    columns: int = 2,
    fresh: tuple[int, ...] = (),
    null_slot: bool = False,
    slots_of_table: torch.dtype | None = None,
) -> PoolCall:
    """A call on a pool with the sequences of `args`; those `without_slot` are padding, and those
    `fresh` have no state yet. With null_slot, slot 0 is padding; with slots_of_table, indices are a
    column of a table of this dtype."""
    device = args["q"].device
    initial = args["initial_state"].to(dtype)
    args = args | {"initial_state": initial.float(), "output_final_state": True}
    sequences, elements = len(initial), initial[0].numel()
    taken: list[tuple[int, int, int]] = []
    slots = 2 * (sequences * (1 + columns) + 2)
    generator = torch.Generator().manual_seed(sequences)
    order = torch.randperm(slots, generator=generator).tolist()
    no_slot = NO_SLOT
    if null_slot:
        order.remove(0)
        no_slot = (0, *NO_SLOT[1:])
    checkpoints = torch.empty(sequences, columns, dtype=torch.int32)
    for n, (_, rows) in enumerate(spans(args)):
        length = args["q"][0, rows].shape[0]
        for i in range(columns):
            at = (i + 1) * interval
            if (n + i) % 4 == 3:
                checkpoints[n, i] = no_slot[n % 3]
                continue
            checkpoints[n, i] = slot = order.pop()
            if at <= length:
                taken.append((n, at, slot))
    memory = torch.full((slots, elements + 64), math.nan, dtype=dtype)
    pool = memory[:, :elements].unflatten(1, initial.shape[1:])
    indices = torch.empty(sequences, dtype=torch.int32)
    for n in range(sequences):
        if n in without_slot:
            indices[n] = no_slot[n % 3]
            args["initial_state"][n] = 0
            continue
        indices[n] = slot = order.pop()
        if n in fresh:
            args["initial_state"][n] = 0
        else:
            pool[slot] = initial[n].cpu()
    memory, indices = memory.to(device), indices.to(device)
    pool = memory[:, :elements].unflatten(1, initial.shape[1:])
    more: dict[str, Any] = {"pad_slot_id": 0} if null_slot else {}
    if fresh:
        flags = [n not in fresh for n in range(sequences)]
        more["has_initial_state"] = torch.tensor(flags, device=device)
    if slots_of_table is not None:
        table = torch.full((sequences, 3), 10**6, dtype=slots_of_table, device=device)
        table[:, 1] = indices
        indices = table[:, 1]
    return PoolCall(args, memory, pool, indices, checkpoints.to(device), interval, taken, more)


@contextmanager
def in_segments(length: int) -> Iterator[None]:
    """Sequences are split into segments of this many chunks; with 0 they are whole."""
    with pytest.MonkeyPatch.context() as patch:
        if length:
            patch.setattr(chunk_passes, "chunks_per_segment", lambda *_, **__: length)
            patch.setattr(chunk_passes, "chunks_per_start", lambda *_, **__: length)
            patch.setattr(launch, "num_sms", lambda _: 10**6)
        patch.setattr(chunk_pool._pool, "ready", {})
        yield


# -- results


@pytest.mark.parametrize(
    ("arch", "length"),
    [
        ("sm_90a", 0),
        pytest.param("sm_90a", 1, marks=pytest.mark.slow),
        pytest.param("sm_80", 0, marks=pytest.mark.slow),
        pytest.param("sm_80", 2, marks=pytest.mark.slow),
    ],
)
def test_packed_sequences(arch: str, length: int):
    """One that ends with a chunk, an index past the pool, padding, and an empty one."""
    args = Case(SERVER, (130, 64, 70, 1, 0), group=1, gates="weak").arguments("cpu")
    call = pool_call(args, without_slot=(2, 3))
    assert call.indices[2:4].tolist() == [2**31 - 1, -1]
    assert [at for *at, _ in call.taken] == [[0, 64], [0, 128], [1, 64], [2, 64]]
    emulator = Emulator(schedule="adversarial", seed=length)
    with cute_attn.emulated(arch, emulator), in_segments(length):
        call.check()
    assert len(emulator.report.launches) == (4 if length else 2)
    assert not emulator.report.findings, emulator.report


@pytest.mark.parametrize(
    ("arch", "length", "dtype"),
    [
        ("sm_90a", 0, torch.int32),
        pytest.param("sm_90a", 1, torch.int64, marks=pytest.mark.slow),
        pytest.param("sm_80", 0, torch.int64, marks=pytest.mark.slow),
    ],
)
def test_slots_and_new_sequences_as_vllm_gives_them(arch: str, length: int, dtype: torch.dtype):
    """Slots are a column of the block table, slot 0 is padding, and the slots of new sequences hold
    NaN. The output goes to the caller's memory."""
    args = Case(SERVER, (130, 64, 70, 1, 0), group=1, gates="weak").arguments("cpu")
    call = pool_call(args, without_slot=(3,), fresh=(1, 2), null_slot=True, slots_of_table=dtype)
    assert call.indices[3] == 0 and call.indices.stride(0) == 3
    out = torch.full(args["v"].shape, math.nan, dtype=args["v"].dtype)
    emulator = Emulator(schedule="adversarial", seed=length)
    with cute_attn.emulated(arch, emulator), in_segments(length):
        assert call.check(out=out) is out
    assert not emulator.report.findings, emulator.report


@pytest.mark.slow
def test_slots_past_int32_are_padding():
    """Also where their lower half is a slot."""
    with cute_attn.emulated("sm_90a", Emulator()):
        call = pool_call(Case(SERVER, (3, 5), group=1).arguments("cpu"), columns=1)
        call.indices = call.indices.long()
        call.indices[1] += 2**32
        call.args["initial_state"][1] = 0
        call.check()


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1])
def test_one_beta_for_tokens_with_similar_keys(length: int):
    """SERVER's q and k are normalised in the kernel, which changes no unit vector."""
    args = Case(SERVER, (256,), group=1).arguments("cpu")
    give_one_beta(args, 0.998)
    with cute_attn.emulated("sm_90a", Emulator()), in_segments(length):
        pool_call(args).check()


@pytest.mark.slow
@pytest.mark.everywhere
@examples(4)
@given(data=st.data())
def test_a_pool_holds_what_an_ordinary_call_returns(device: str, data: st.DataObject):
    """To the last bit, for any options: dense and packed, whole and in segments."""
    kinds = [PLAIN, PACKED, DECAYS, SMALL, SERVER, replace(WIDE_V, initial=True)]
    case = data.draw(cases(device, kinds))
    assume(any(case.lengths))
    args = case.arguments(device)
    dtype = data.draw(st.sampled_from((FP32, BF16)))
    sequences = len(args["initial_state"])
    some = st.sets(st.integers(0, sequences - 1), max_size=sequences - 1)
    without = data.draw(some)
    call = pool_call(
        args,
        dtype=dtype,
        without_slot=tuple(without),
        interval=data.draw(st.sampled_from((64, 128))),
        columns=data.draw(st.integers(1, 3)),
        fresh=tuple(data.draw(some)),
        null_slot=data.draw(st.booleans()),
        slots_of_table=data.draw(st.sampled_from((None, torch.int32, torch.int64))),
    )
    with in_segments(data.draw(st.integers(0, 3))):
        o = call.check()
        with in_segments_of_chunk_kda():
            expected_o, expected = run(call.args)
    assert torch.equal(valid(args, o), valid(args, expected_o))
    got = call.pool[call.indices[call.named].long()]
    assert torch.equal(got, expected[call.named].to(dtype))


@contextmanager
def in_segments_of_chunk_kda() -> Iterator[None]:
    """The ordinary call is split as the call on a pool is."""
    from cute_attn.ops.kda import chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk._chunk, "ready", {})
        yield


@pytest.mark.parametrize("arch", ["sm_90a"])
def test_later_calls_only_launch(arch: str, monkeypatch: pytest.MonkeyPatch):
    """With other lengths and slots, and after what is refused."""
    with cute_attn.emulated(arch, Emulator()), warm():
        pool_call(Case(SERVER, (40, 3), group=1).arguments("cpu")).run()
        with monkeypatch.context() as patch:
            patch.setattr(chunk_pool._pool, "_first_call", None)
            patch.setattr(launch, "get_for", None)
            call = pool_call(Case(SERVER, (0, 65, 2), group=1, seed=1).arguments("cpu"))
            call.check()
        q = call.args["q"]
        shared = torch.zeros(call.pool.nbytes + q.nbytes, dtype=torch.uint8)
        pool = shared[: call.pool.nbytes].view(FP32).view(call.pool.shape)
        before = call.memory.clone()
        rest = shared[call.pool.nbytes - 16 : call.pool.nbytes - 16 + q.nbytes]
        for name, bad, message in (
            ("state_indices", call.indices[:2], "state_indices has shape"),
            ("state_indices", call.indices.float(), "state_indices has dtype"),
            ("has_initial_state", call.indices, "has_initial_state has dtype"),
            ("pad_slot_id", 2, "pad_slot_id is 2, must be 0, or negative"),
            ("checkpoint_indices", call.checkpoints[:2], "checkpoint_indices has shape"),
            ("initial_state", call.pool.half(), "initial_state has dtype"),
            ("initial_state", call.pool[:, :, :32], "initial_state has shape"),
            ("initial_state", call.pool.mT, "initial_state has strides"),
            ("initial_state", call.pool[:1].expand(9, -1, -1, -1), "initial_state is expanded"),
            ("initial_state", call.memory.flatten()[1:], "initial_state has shape"),
            ("checkpoint_interval", 65, "checkpoint_interval is 65, must be"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                call.run(**{name: bad})
        for name in ("q", "v"):
            overlapping = {"initial_state": pool, name: rest.view(q.dtype).view(q.shape)}
            with pytest.raises(ValueError, match=f"initial_state overlaps {name} in memory"):
                call.run(**overlapping)
        assert torch.equal(before.view(torch.int8), call.memory.view(torch.int8))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(8192,), (5000, 0, 1, 3000)], ids=str)
def test_long_sequences_are_split(lengths: tuple[int, ...]):
    kind = PLAIN if len(lengths) == 1 else PACKED
    args = Case(kind, lengths, heads=1, group=2).arguments("cuda")
    pool_call(args, without_slot=(2,) if len(lengths) > 1 else (), interval=1024).check()


@pytest.mark.gpu
def test_a_cuda_graph_follows_slots_and_lengths():
    case = Case(PACKED, (300, 70, 0, 100), group=2)
    call = pool_call(case.arguments("cuda"), without_slot=(1,))
    other = pool_call(replace(case, lengths=(70, 300, 100, 0), seed=1).arguments("cuda"))
    other.run(output_final_state=True)
    args = call.args | {
        "initial_state": call.pool,
        "state_indices": call.indices,
        "checkpoint_indices": call.checkpoints,
    }
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        o, _ = cute_attn.chunk_kda(**args)
    fresh = pool_call(replace(case, lengths=(70, 300, 100, 0), seed=1).arguments("cuda"))
    expected = fresh.run()
    for name, x in fresh.args.items():
        if isinstance(x, torch.Tensor) and name != "initial_state":
            args[name].copy_(x)
    again = pool_call(replace(case, lengths=(70, 300, 100, 0), seed=1).arguments("cuda"))
    call.memory.copy_(again.memory)
    call.indices.copy_(again.indices)
    call.checkpoints.copy_(again.checkpoints)
    graph.replay()
    assert torch.equal(valid(fresh.args, o), valid(fresh.args, expected))
    assert torch.equal(call.memory.view(torch.int8), fresh.memory.view(torch.int8))


# -- arguments


def small(**more: Any) -> dict[str, Any]:
    """A good call."""
    rows = {name: torch.zeros(1, 5, 2, 64, dtype=BF16) for name in "qkvg"}
    return {
        **rows,
        "beta": torch.zeros(1, 5, 2, dtype=BF16),
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "initial_state": torch.zeros(4, 2, 64, 64),
        "state_indices": torch.tensor([3, 0], dtype=torch.int32),
        **more,
    }


def test_good_calls_on_the_cpu_are_refused_for_the_device_alone():
    checkpoints = torch.zeros(2, 0, dtype=torch.int32)
    for more in (
        {},
        {"disable_recompute": True, "output_final_state": True},
        {"initial_state": torch.zeros(4, 2, 64, 64, dtype=BF16), "safe_gate": True},
        {"checkpoint_indices": checkpoints, "checkpoint_interval": 128},
        {"checkpoint_interval": 3},  # ignored
        {"checkpoint_indices": checkpoints, "checkpoint_interval": 2**31 - 64},
        {"cu_seqlens": None, "state_indices": torch.zeros(1, dtype=torch.int32)},
        {"cu_seqlens_cpu": torch.tensor([0, 2, 5])},
    ):
        with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
            cute_attn.chunk_kda(**small(**more))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"initial_state": None}, ValueError, "initial_state is None, must be the pool"),
        ({"initial_state": torch.zeros(0, 2, 64, 64)}, ValueError, "initial_state has 0 slots"),
        (
            {"state_indices": None, "checkpoint_indices": torch.zeros(2, 1, dtype=torch.int32)},
            ValueError,
            "checkpoint_indices is given without state_indices",
        ),
        ({"state_indices": [0, 1]}, TypeError, "state_indices must be a torch.Tensor"),
        ({"state_indices": torch.zeros(2)}, TypeError, "state_indices has dtype torch.float32"),
        (
            {"state_indices": None, "has_initial_state": torch.ones(2) > 0},
            ValueError,
            "has_initial_state is given without state_indices",
        ),
        (
            {"state_indices": None, "out": torch.zeros(1, 5, 2, 64, dtype=BF16)},
            ValueError,
            "out is given without state_indices",
        ),
        ({"has_initial_state": torch.ones(3) > 0}, ValueError, "has_initial_state has shape"),
        ({"has_initial_state": torch.ones(2)}, TypeError, "has_initial_state has dtype"),
        ({"pad_slot_id": 3}, ValueError, "pad_slot_id is 3, must be 0, or negative"),
        ({"pad_slot_id": 0.0}, TypeError, "pad_slot_id must be an int, got float"),
        ({"out": torch.zeros(1, 5, 2, 64)}, TypeError, "out has dtype torch.float32"),
        ({"out": torch.zeros(1, 5, 2, 128, dtype=BF16)[..., ::2]}, ValueError, "out has strides"),
        ({"out": torch.zeros(1, 4, 2, 64, dtype=BF16)}, ValueError, "out has shape"),
        (
            {"state_indices": torch.zeros(3, dtype=torch.int32)},
            ValueError,
            r"state_indices has shape \[3\], must be \[N\], here \[2\]",
        ),
        (
            {"initial_state": torch.zeros(4, 3, 64, 64)},
            ValueError,
            r"initial_state has shape \[4, 3, 64, 64\], must be \[slots, HV, K, V\]",
        ),
        ({"initial_state": torch.zeros(4, 2, 64, 64).half()}, TypeError, "initial_state has dtyp"),
        ({"initial_state": torch.zeros(4, 2, 64, 65)[..., 1:]}, ValueError, "has strides"),
        (
            {"initial_state": torch.zeros(4 * 2 * 64 * 64 + 1)[1:].view(4, 2, 64, 64)},
            ValueError,
            "initial_state starts at address .*, must be 16-byte aligned",
        ),
        (
            {"checkpoint_indices": torch.zeros(3, 1, dtype=torch.int32)},
            ValueError,
            "checkpoint_indices has shape",
        ),
        (
            {
                "checkpoint_indices": torch.zeros(2, 1, dtype=torch.int32),
                "checkpoint_interval": 100,
            },
            ValueError,
            "checkpoint_interval is 100, must be a multiple of 64 from 64 to 2147483584",
        ),
        (
            {
                "checkpoint_indices": torch.zeros(2, 1, dtype=torch.int32),
                "checkpoint_interval": 2**38,
            },
            ValueError,
            "checkpoint_interval is 274877906944, must be a multiple of 64",
        ),
        ({"checkpoint_interval": 64.0}, TypeError, "checkpoint_interval must be an int"),
        ({"output_final_state": "no"}, TypeError, "output_final_state must be a bool"),
        ({"cu_seqlens_cpu": torch.tensor([0, 2, 6])}, ValueError, r"cu_seqlens_cpu\[2\] is 6"),
        ({"scale": "1"}, TypeError, "scale must be"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str):
    with cute_attn.emulated("sm_90a"), pytest.raises(error, match=message):
        cute_attn.chunk_kda(**small(**changes))


def test_states_of_chunks_are_for_calls_without_a_pool():
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="return_intermediate_states is True, must be False with"),
    ):
        cute_attn.chunk_kda(**small(return_intermediate_states=True))


def test_gradients_are_refused():
    for name in ("q", "initial_state"):
        args = small()
        args[name].requires_grad_()
        with pytest.raises(NotImplementedError, match="chunk_kda with state_indices has no backwa"):
            cute_attn.chunk_kda(**args)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that calls load, which do nothing."""
    seen: list[Any] = []

    def function(_: Emulation, kernel: Any, spec: Any) -> Callable[..., None]:
        seen.append((kernel, spec))
        return lambda *_: None

    monkeypatch.setattr(Emulation, "function", function)
    return seen


def test_calls_without_tokens_launch_nothing(loaded: list[Any]):
    pool = torch.full((4, 2, 64, 64), math.nan)
    rows = {name: torch.zeros(1, 0, 2, 64, dtype=BF16) for name in "qkvg"}
    args = small(**rows, beta=torch.zeros(1, 0, 2, dtype=BF16), cu_seqlens=torch.zeros(3).int())
    with cute_attn.emulated("sm_90a"), torch.no_grad():
        o, final_state = cute_attn.chunk_kda(**args | {"initial_state": pool})
    assert o.shape == (1, 0, 2, 64) and final_state is None and not loaded


@pytest.mark.parametrize("state_v_first", [True, False])
def test_models_have_the_kernels_of_servers_calls(loaded: list[Any], state_v_first: bool):
    """For Kimi Linear, vLLM and SGLang give beta in float32 after its sigmoid, and the gate's
    input, or in older versions the gate in float32; SGLang also gives its pool. For its successors
    they give no activated input, as we recommend. Packed sequences are split, if there are few."""

    def rows(dtype: torch.dtype, *dim: int) -> torch.Tensor:
        return torch.zeros(1, 200, 2, *dim, dtype=dtype)

    pool = torch.zeros(4, 2, 128, 128)
    inputs = {name: rows(BF16, 128) for name in "qkv"}
    activated = inputs | {"g": rows(FP32, 128), "beta": rows(FP32)}
    common = {
        "cu_seqlens": torch.tensor([0, 200], dtype=torch.int32),
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": state_v_first,
    }
    slots = {"initial_state": pool, "state_indices": torch.tensor([2], dtype=torch.int32)}
    checkpoints = {"checkpoint_indices": torch.zeros(1, 2, dtype=torch.int32)}
    calls: list[dict[str, Any]] = [
        activated | common | {"initial_state": pool[:1], "output_final_state": True},
        activated | common | slots,
    ]
    if state_v_first:
        ours = inputs | {
            "g": rows(BF16, 128),
            "beta": rows(BF16),
            "A_log": torch.zeros(2),
            "dt_bias": torch.zeros(2 * 128),
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
        }
        gated = ours | {"beta": rows(FP32), "use_beta_sigmoid_in_kernel": False}
        calls += [
            activated | common | slots | checkpoints,
            gated | common | {"initial_state": pool[:1], "output_final_state": True},
            gated | common | slots,
            gated | common | slots | checkpoints,
        ]
        for bound in ({}, {"lower_bound": -5.0}):
            calls += [ours | common | slots | bound, ours | common | slots | bound | checkpoints]
    with cute_attn.emulated("sm_90a"), torch.no_grad(), in_segments(1), in_segments_of_chunk_kda():
        for call in calls:
            cute_attn.chunk_kda(**call)
        if state_v_first:
            cute_attn.kda_decode(
                *(activated[name][0, :3] for name in ("q", "k", "v", "g", "beta")),
                pool,
                use_gate_in_kernel=False,
                use_beta_sigmoid_in_kernel=False,
                state_indices=torch.tensor([1, 2, -1], dtype=torch.int32),
            )
            # Speculative decoding as vLLM does it, with a slot for each position.
            cute_attn.kda_decode(
                *(ours[name][:, :2] for name in ("q", "k", "v", "g", "beta")),
                pool,
                A_log=ours["A_log"],
                dt_bias=ours["dt_bias"],
                lower_bound=-5.0,
                state_indices=torch.tensor([[1, 2, 3]], dtype=torch.int32),
                num_accepted_tokens=torch.tensor([2], dtype=torch.int32),
            )
    models = Path(cute_attn.__file__).parent / "models" / "serving.toml"
    built = set(plan_file(models, "sm_90a"))
    assert len(loaded) == 7 * len(calls) + 2 * state_v_first
    missing = [(kernel.name, spec) for kernel, spec in loaded if (kernel, spec) not in built]
    assert not missing


def test_models_have_the_kernels_of_our_layers_in_servers(loaded: list[Any]):
    """The calls of `integrations.vllm_kda` and `vllm_gated_delta_rule`, with slots in a column and
    contiguous, and of `sglang_kda` and `sglang_gated_delta_rule`."""

    def rows(*dim: int) -> torch.Tensor:
        return torch.zeros(1, 6, 2, *dim, dtype=BF16)

    tokens = {name: rows(128) for name in "qkvg"} | {"beta": rows()}
    of_gate = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2 * 128), "pad_slot_id": 0}
    pool = torch.zeros(4, 2, 128, 128)
    table = torch.zeros(2, 9, dtype=torch.int32)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    prefill = tokens | of_gate | {
        "initial_state": pool,
        "cu_seqlens": offsets,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
    }  # fmt: skip
    decode = {name: x[0, :2] for name, x in tokens.items()} | of_gate | {"state": pool}
    verify = tokens | of_gate | {"state": pool, "cu_seqlens": offsets}
    drafts = {
        "draft_states": torch.zeros(2, 4, 2, 128, 128),
        "draft_indices": torch.zeros(2, dtype=torch.int32),
    }
    flags = torch.ones(2, dtype=torch.bool)
    channels = torch.zeros(3 * 2 * 128, 4)
    conv_state = torch.zeros(4, len(channels), 6, dtype=BF16)
    kda = cute_attn.chunk_kda, cute_attn.kda_decode, {}, channels
    gdn = (
        cute_attn.chunk_gated_delta_rule,
        cute_attn.gated_delta_rule_decode,
        {"g": rows(), "dt_bias": torch.zeros(2, dtype=BF16)},
        channels.to(BF16),
    )
    with cute_attn.emulated("sm_90a"), torch.no_grad(), in_segments(1):
        for chunk, step, other, conv_weight in (kda, gdn):
            conv = {"conv_state": conv_state, "conv_weight": conv_weight}
            g = {"g": other["g"][0, :2]} if other else {}
            slots_of_vllm = table, table.clone()[:, :4].contiguous()
            pools = (pool, pool.to(BF16)) if other else (pool,)
            for slots, states in itertools.product(slots_of_vllm, pools):
                one = slots[:, 0] if slots is table else slots[:, 0].contiguous()
                of_prefill, state = {"initial_state": states}, {"state": states}
                chunk(**prefill | other | of_prefill, state_indices=one, has_initial_state=flags)
                step(**decode | other | g | state, **conv, state_indices=one)
                step(
                    **verify | other | state,
                    **conv,
                    state_indices=slots[:, :4],
                    num_accepted_tokens=torch.ones(2, dtype=torch.int32),
                )
            step(**decode | other | g, state_indices=one)
            step(**verify | other, **drafts, state_indices=one)
        cute_attn.chunk_kda(**prefill, state_indices=one)
        activated = {
            "g": rows().float(),
            "beta": rows().float(),
            "use_gate_in_kernel": False,
            "use_beta_sigmoid_in_kernel": False,
            "pad_slot_id": -1,
        }
        cute_attn.chunk_gated_delta_rule(**prefill | activated, state_indices=one)
    models = Path(cute_attn.__file__).parent / "models" / "serving.toml"
    built = set(plan_file(models, "sm_90a"))
    steps = {kernel.name for kernel, _ in loaded}
    assert steps >= {"kda_decode", "kda_prepare"}
    missing = [(kernel.name, spec) for kernel, spec in loaded if (kernel, spec) not in built]
    assert not missing


def test_schema_names_what_is_written():
    schema = torch.ops.cute_attn.chunk_kda_in_pool.default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["initial_state", "out"]
    assert not any(a.alias_info for a in torch.ops.cute_attn.chunk_kda.default._schema.arguments)


@pytest.mark.slow
def test_it_is_one_operator_to_the_compiler():
    graphs = []

    def capture(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(**args: Any) -> torch.Tensor:
        return cute_attn.chunk_kda(**args)[0] * 2

    with pytest.raises(ValueError, match="q is on cpu"):  # traced, then run on what it is given
        torch.compile(step, fullgraph=True, backend=capture)(**small())
    (graph,) = graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any("cute_attn.chunk_kda_in_pool" in target for target in calls), calls


def test_the_fake_implementation_has_a_contiguous_result():
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        v = torch.zeros(1, 2, 5, 64, dtype=BF16).transpose(1, 2)
        o, _ = cute_attn.chunk_kda(**small(v=v))
    assert o.shape == (1, 5, 2, 64) and o.is_contiguous()
