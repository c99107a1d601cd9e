"""kda_decode as servers call it: slots from a column of a block table, slot 0 as padding, sequences
without a state yet, packed sequences, and a tensor for drafted states.

The pool holds NaN where a call must not read, and must keep its bits where a call must not write.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.reference.kda import KdaRecords, kda_decode_reference

from .kda_decode_cases import (
    NO_GATE,
    POSITIONS,
    RECORDS,
    WITH_RECORDS,
    Case,
    Kernel,
    copied,
)
from .lightning_cases import assert_no_worse

MANY = Kernel(64, 64, multi_token=True)
TOKENS = ("q", "k", "v", "g", "beta", "out")


@dataclass(frozen=True)
class Served:
    """A call of a server.

    Attributes:
        lengths: of packed sequences; None for `[B, T, ...]`, or `[B, ...]` where the kernel is so.
        slot_dtype: dtype of state_indices.
        column: state_indices is a part of a wider table.
        null_slot: slot 0 is padding.
        fresh: some sequences have no state yet.
        drafts: the states after tokens go to a tensor of their own.
    """

    kernel: Kernel
    lengths: tuple[int, ...] | None = None
    slot_dtype: torch.dtype = torch.int32
    column: bool = False
    null_slot: bool = False
    fresh: bool = False
    drafts: bool = False
    index: torch.dtype = torch.int32

    def arguments(self, device: str, seed: int = 0) -> dict[str, Any]:
        lengths = self.lengths
        many = self.kernel.multi_token
        batch = 4 if lengths is None else len(lengths)
        tokens = (3 if many else 1) if lengths is None else max(lengths)
        padded = 1 if self.kernel.slots in ("indexed", "positions", "records") else 0
        # One slot more than are named, which holds NaN.
        case = Case(self.kernel, batch=batch, tokens=tokens, seed=seed, padded=padded)
        args = case.inputs(device)
        if lengths is not None:
            for name in TOKENS:
                rows = [x[:length] for x, length in zip(args[name], lengths, strict=True)]
                rows.append(torch.full_like(args[name][0, :1], math.nan))  # of no sequence
                args[name] = torch.cat(rows).unsqueeze(0)
            offsets = [0, *itertools.accumulate(lengths)]
            args["cu_seqlens"] = torch.tensor(offsets, dtype=self.index, device=device)
        state = args["state"]
        if "state_indices" in args:
            indices = args["state_indices"]
            if self.null_slot:  # the pool's first slot is nobody's
                indices = torch.where(indices < 0, 0, indices + 1)
                state = torch.cat([torch.full_like(state[:1], math.nan), state])
                args["pad_slot_id"] = 0
                for name in RECORDS:
                    if name in args:
                        args[name] = torch.cat([torch.zeros_like(args[name][:1]), args[name]])
            indices = indices.to(self.slot_dtype)
            if self.column:
                width = 1 if indices.dim() == 1 else indices.shape[1]
                table = torch.full((batch, width + 2), 10**6, dtype=self.slot_dtype, device=device)
                table[:, :width] = indices.reshape(batch, width)
                indices = table[:, :width] if indices.dim() == 2 else table[:, 0]
            args["state_indices"] = indices
        args["state"] = state
        if self.fresh:
            flags = torch.arange(batch, device=device) % 2 == 0
            args["has_initial_state"] = flags
            slots = args.get("state_indices")
            if self.kernel.slots in ("batch", "indexed"):
                named = torch.arange(batch, device=device) if slots is None else slots.long()
                args["state"] = state.clone()
                args["state"][named[~flags & (named >= 0)]] = math.nan
        if self.drafts:
            shape = (batch + 2, max(tokens, 4), *state.shape[1:])
            args["draft_states"] = torch.full(shape, math.nan, dtype=state.dtype, device=device)
            order = torch.randperm(batch + 2, generator=torch.Generator().manual_seed(seed))
            args["draft_indices"] = order[:batch].to(device, torch.int32)
        return args


def run(args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One call; the tensors that the call has written, by name. The arguments stay as they are."""
    written = ("state", *RECORDS, "draft_states")
    args = args | {name: copied(args[name]) for name in written if name in args}
    args["out"] = torch.full_like(args["out"], math.nan)
    o = cute_attn.kda_decode(**args)
    assert o is args["out"]
    return {"o": o} | {name: args[name] for name in written if name in args}


def reference(args: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    args = {name: x for name, x in args.items() if name != "out"}
    given = [args.pop(name, None) for name in RECORDS]
    args["records"] = None if given[0] is None else KdaRecords(*given)
    found = kda_decode_reference(**args, dtype=dtype)
    o = found.o if dtype == torch.float64 else found.o.to(args["q"].dtype)
    results = {"o": o, "state": found.state}
    if found.draft_states is not None:
        results["draft_states"] = found.draft_states
    if found.records is not None:
        results |= dict(zip(RECORDS, found.records, strict=True))
    return results


def assert_agrees(args: dict[str, Any], results: dict[str, torch.Tensor]) -> None:
    """By the error rule where the reference has a number; NaN and the arguments' bits elsewhere."""
    exact, plain = reference(args, torch.float64), reference(args, torch.float32)
    for name, x in results.items():
        known = ~exact[name].isnan()
        assert known.any(), name
        assert torch.equal(known, ~x.isnan()), name
        assert_no_worse(x[known], plain[name][known], exact[name][known])


# A multi-token kernel, a packed kernel or a layout is compiled for each.
CALLS = {
    "decode in vLLM": Served(Kernel(64, 64), column=True, null_slot=True),
    "verify in vLLM": Served(POSITIONS, (3, 1, 0, 2), column=True, null_slot=True),
    "verify in SGLang": Served(MANY, (2, 4, 0, 1), drafts=True),
    "mixed batch": Served(MANY, (1, 5, 0, 1, 2), torch.int64, fresh=True, index=torch.int64),
    "int64 column, fresh": Served(
        Kernel(64, 64, state_dtype=torch.bfloat16), None, torch.int64, column=True, fresh=True
    ),
    "drafts of equal length": Served(
        replace(MANY, slots="batch", state_v_first=False, state_dtype=torch.bfloat16),
        drafts=True,
    ),
    "drafts, fresh, int64": Served(
        MANY, None, torch.int64, column=True, null_slot=True, fresh=True, drafts=True
    ),
    "positions, int64, without counts": Served(
        replace(POSITIONS, accepted=False), (4, 2, 3), torch.int64, null_slot=True
    ),
    "records": Served(WITH_RECORDS, None, torch.int64, column=True, null_slot=True),
    "packed without indices": Served(replace(NO_GATE, slots="batch"), (2, 0, 1), fresh=True),
}
QUICK = ("decode in vLLM", "verify in vLLM", "verify in SGLang")
each_call = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CALLS]
)


@pytest.mark.everywhere
@each_call
def test_agrees_with_the_reference(device: str, name: str):
    for seed in range(2):
        args = CALLS[name].arguments(device, seed)
        assert_agrees(args, run(args))


@pytest.mark.slow
@pytest.mark.everywhere
@each_call
def test_slots_may_be_given_in_any_way(device: str, name: str):
    """Bitwise: as int32, contiguous, with negative padding, and states of 0 in the pool."""
    args = CALLS[name].arguments(device)
    results = run(args)
    plain = dict(args)
    if "state_indices" in args:
        indices = args["state_indices"].to(torch.int32).contiguous()
        if plain.pop("pad_slot_id", -1) == 0:
            indices = torch.where(indices == 0, -1, indices)
        plain["state_indices"] = indices
    flags = plain.pop("has_initial_state", None)
    if flags is not None and CALLS[name].kernel.slots in ("batch", "indexed"):
        named = args.get("state_indices", torch.arange(len(flags), device=device)).long()
        plain["state"] = args["state"].clone()
        plain["state"][named[~flags & (named >= 0)]] = 0
    elif flags is not None:
        return
    expected = run(plain)
    lengths = torch.diff(args["cu_seqlens"]) if "cu_seqlens" in args else args["q"].new_ones(1)
    empty = lengths == 0
    for key, x in results.items():
        if key == "state" and flags is not None:
            if CALLS[name].drafts:
                continue  # not written: NaN and 0 stay
            changed = named[(named >= 0) & ~(empty & ~flags)] if empty.any() else named[named >= 0]
            assert torch.equal(x[changed], expected[key][changed])
        else:
            assert torch.equal(x.nan_to_num(7.0), expected[key].nan_to_num(7.0)), key


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["verify in vLLM", "verify in SGLang", "mixed batch"])
def test_packed_sequences_are_sequences_alone_bitwise(device: str, name: str):
    args = CALLS[name].arguments(device)
    results = run(args)
    offsets = args["cu_seqlens"].tolist()
    of_sequences = ("state_indices", "num_accepted_tokens", "has_initial_state", "draft_indices")
    alone = {key: x for key, x in args.items() if key != "cu_seqlens"}
    state, drafts = args["state"], args.get("draft_states")
    for b, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue
        one = alone | {key: args[key][:, start:end] for key in TOKENS}
        one |= {key: args[key][b : b + 1].clone() for key in of_sequences if key in args}
        one["state"] = state
        if drafts is not None:
            one["draft_states"] = drafts
        found = run(one)
        state, drafts = found["state"], found.get("draft_states")
        assert torch.equal(found["o"], results["o"][:, start:end])
    assert torch.equal(state.nan_to_num(7.0), results["state"].nan_to_num(7.0))
    if drafts is not None:
        assert torch.equal(drafts.nan_to_num(7.0), results["draft_states"].nan_to_num(7.0))


@pytest.mark.slow
@pytest.mark.everywhere
def test_data_out_of_bounds_is_stored_nowhere(device: str):
    """Rows past draft_states, tokens past its states or past the positions, and int64 indices whose
    lower half is a slot."""
    args = CALLS["verify in SGLang"].arguments(device)
    args["draft_indices"][0] = args["draft_states"].shape[0]
    args["draft_indices"][1] = -1
    results = run(args)
    assert not torch.equal(results["o"][0, 0], results["o"][0, 1])
    kept = args["draft_indices"][3]
    others = torch.arange(args["draft_states"].shape[0]) != kept.cpu()
    assert results["draft_states"][others].isnan().all()
    args["draft_states"] = args["draft_states"][:, :1]
    assert not run(args)["draft_states"][kept, 0].isnan().any()

    call = CALLS["mixed batch"]
    args = call.arguments(device)
    far = args["state_indices"].clone()
    far[0] += 2**32
    results = run(args | {"state_indices": far})
    assert not results["o"][0, 0].any()
    far[0] = -1
    expected = run(args | {"state_indices": far})
    for key in ("o", "state"):
        assert torch.equal(results[key].nan_to_num(7.0), expected[key].nan_to_num(7.0))
