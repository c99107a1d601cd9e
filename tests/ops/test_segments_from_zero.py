"""Segments that start from a state of zero, where the state before them has decayed: agreement with
float64 on both sides of the bound, for heads that take this start beside heads that do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import launch
from cute_attn.emulator import Emulator
from cute_attn.ops.gated_delta_rule import chunk as gated_chunk
from cute_attn.ops.kda import chunk, chunk_passes, chunk_pool
from cute_attn.reference.gated_delta_rule import (
    gated_delta_rule_chunk_reference,
    gated_delta_rule_reference,
)
from cute_attn.reference.kda import kda_chunk_reference, kda_reference
from tests.sweeps import slow

CHUNK = 64
NEGLIGIBLE = -40.0  # base 2; `kernels.delta.chunk.starts`
FLAGS = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


@contextmanager
def starts_every(chunks: int, exact: int) -> Iterator[list[torch.Tensor]]:
    """Segments have `chunks` chunks where they start from zero, else `exact`. Yields the matrices
    of segments, NaN where no kernel has written: a head that starts from zero has no others."""
    made: list[torch.Tensor] = []

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        x = torch.full(*args, math.nan, **options)
        if x.dim() == 5:
            made.append(x)
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_passes, "chunks_per_segment", lambda *_, **__: exact)
        patch.setattr(chunk_passes, "chunks_per_start", lambda *_, **__: chunks)
        patch.setattr(chunk_passes, "_empty", empty)
        patch.setattr(launch, "num_sms", lambda _: 10**6)
        for one in (chunk._chunk, chunk_pool._pool, gated_chunk._chunk, gated_chunk._pool):
            patch.setattr(one, "ready", {})
        yield made


def inputs(
    per_channel: bool, log2_of_chunk: list[float], lengths: list[int], dim: int = 64
) -> dict[str, Any]:
    """Arguments with a head for each element of `log2_of_chunk`, the logarithm of a chunk's
    decay. K and V are `dim`."""
    torch.manual_seed(len(lengths) + sum(lengths))
    tokens, heads = sum(lengths), len(log2_of_chunk)
    g = torch.tensor(log2_of_chunk) * (math.log(2.0) / CHUNK)
    g = g.expand(1, tokens, heads).contiguous()
    if per_channel:
        g = g[..., None].repeat(1, 1, 1, dim)
    x: dict[str, Any] = {
        "q": torch.randn(1, tokens, heads, dim).bfloat16(),
        "k": torch.randn(1, tokens, heads, dim).bfloat16(),
        "v": torch.randn(1, tokens, heads, dim).bfloat16(),
        "g": g,
        "beta": torch.rand(1, tokens, heads).logit(),
        "initial_state": 100.0 * torch.randn(len(lengths), heads, dim, dim),
    }
    if len(lengths) > 1:
        x["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return x


def check(x: dict[str, Any], made: list[torch.Tensor], from_zero: list[bool]) -> None:
    """Compare with float64: the error is at most twice the error of plain PyTorch. `from_zero` says
    which heads start from zero."""
    per_channel = x["g"].dim() == 4
    call: Callable[..., Any] = (
        cute_attn.chunk_kda if per_channel else cute_attn.chunk_gated_delta_rule
    )
    with cute_attn.emulated("sm_90a", Emulator()), torch.inference_mode():
        ours = call(**x, **FLAGS, output_final_state=True)
    states = made[0]
    assert [bool(states[:, :, head].isnan().all()) for head in range(len(from_zero))] == from_zero
    reference, chunked = (
        (kda_reference, kda_chunk_reference)
        if per_channel
        else (gated_delta_rule_reference, gated_delta_rule_chunk_reference)
    )
    exact = reference(**x, **FLAGS)
    plain = chunked(**x, **FLAGS, dtype=torch.float32, stage_dtype=torch.bfloat16)
    tail = slice(-CHUNK, None)  # tokens whose results the initial state does not dominate
    for mine, theirs, right in (
        (ours[0], plain.o.bfloat16(), exact.o),
        (ours[0][:, tail], plain.o[:, tail].bfloat16(), exact.o[:, tail]),
        (ours[1], plain.states.final_state, exact.final_state),
    ):
        error = (mine.double() - right).norm()
        assert error <= 2 * (theirs.double() - right).norm() + 1e-12 * right.norm()


@pytest.mark.parametrize(
    ("per_channel", "lengths"),
    [
        (False, [5 * CHUNK - 3]),
        slow(True, [3 * CHUNK - 3]),  # two heads
        slow(True, [5 * CHUNK - 3]),
        slow(False, [0, 130, 4 * CHUNK, 1, 70]),
        slow(True, [0, 130, 4 * CHUNK, 1, 70]),
    ],
)
def test_heads_on_both_sides_of_the_bound(per_channel: bool, lengths: list[int]) -> None:
    """Two chunks may warm a segment up: each needs half of the bound."""
    per_chunk = [-200.0, NEGLIGIBLE / 2 - 0.1, NEGLIGIBLE / 2 + 0.1, -0.1]
    from_zero = [True, True, False, False]
    few = slice(1, 3) if sum(lengths) < 4 * CHUNK else slice(None)
    x = inputs(per_channel, per_chunk[few], lengths)
    with starts_every(2, 3 if len(per_chunk[few]) > 2 else 2) as made:
        check(x, made, from_zero[few])


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("lengths", [[5 * CHUNK - 3], [0, 130, 4 * CHUNK, 1, 70]], ids=str)
def test_two_ctas_that_share_copies(per_channel: bool, lengths: list[int]) -> None:
    """At K = V = 128, the two CTAs of a value head are a cluster."""
    x = inputs(per_channel, [-200.0, -0.1], lengths, 128)
    with starts_every(2, 2) as made:
        check(x, made, [True, False])


@pytest.mark.slow
def test_a_bound_that_holds_for_each_channel_alone_is_no_bound() -> None:
    """Corrections move a state between channels. So each token's weakest channel counts."""
    x = inputs(True, [-200.0, -200.0, -200.0], [4 * CHUNK])
    x["g"][:, :, 1, 5] = -0.001  # one weak channel among strong ones
    x["g"][:, ::2, 2, :32] = 0.0  # half of the channels in turn
    x["g"][:, 1::2, 2, 32:] = 0.0
    with starts_every(2, 2) as made:
        check(x, made, [True, False, False])


@pytest.mark.parametrize("per_channel", [slow(False), slow(True)])
def test_beta_that_does_not_contract(per_channel: bool) -> None:
    """With beta above 2 or below 0 a token may amplify a state."""
    x = inputs(per_channel, [-30.0] * 4, [4 * CHUNK])
    x["beta"] = x["beta"].sigmoid()
    x["beta"][:, :, 1] = 1.9
    x["beta"][:, 100, 2] = 2.1
    x["beta"][:, 120, 3] = -0.1
    with starts_every(2, 2) as made, pytest.MonkeyPatch.context() as patch:
        patch.setitem(FLAGS, "use_beta_sigmoid_in_kernel", False)
        check(x, made, [True, True, False, False])


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_chunk_of_weak_gates(per_channel: bool) -> None:
    """Before a boundary it needs a longer warm-up, elsewhere it does not matter."""
    x = inputs(per_channel, [-200.0, -200.0, -200.0], [18 * CHUNK])
    weak = [slice(0, 4 * CHUNK), slice(7 * CHUNK, 8 * CHUNK), slice(6 * CHUNK, 8 * CHUNK)]
    for head, where in enumerate(weak):
        x["g"][:, where, head] = -0.001
    with starts_every(8, 5) as made:
        check(x, made, [True, True, False])


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
def test_without_the_norm_no_segment_starts_from_zero(per_channel: bool) -> None:
    x = inputs(per_channel, [-200.0], [4 * CHUNK])
    x["k"] = x["k"] / x["k"].norm(dim=-1, keepdim=True)
    with starts_every(2, 2) as made, pytest.MonkeyPatch.context() as patch:
        patch.setitem(FLAGS, "use_qk_l2norm_in_kernel", False)
        check(x, made, [False])


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
def test_checkpoints_in_a_pool(per_channel: bool) -> None:
    """A warm-up stores no checkpoint, and the pool's initial state is read once."""
    x = inputs(per_channel, [-200.0, -25.0], [5 * CHUNK + 9])
    initial = x.pop("initial_state")
    pool = torch.full((7, 2, 64, 64), math.nan)
    pool[3] = initial[0]
    call: Callable[..., Any] = (
        cute_attn.chunk_kda if per_channel else cute_attn.chunk_gated_delta_rule
    )
    with starts_every(2, 3), cute_attn.emulated("sm_90a", Emulator()), torch.inference_mode():
        call(
            **x,
            **FLAGS,
            initial_state=pool,
            state_indices=torch.tensor([3], dtype=torch.int32),
            checkpoint_indices=torch.tensor([[0, 1, 2, 4, 5]], dtype=torch.int32),
            checkpoint_interval=CHUNK,
            output_final_state=True,
        )
    reference = kda_reference if per_channel else gated_delta_rule_reference
    for slot, chunks in zip((0, 1, 2, 4, 5), range(1, 6), strict=True):
        first = {name: x[name][:, : chunks * CHUNK] for name in ("q", "k", "v", "g", "beta")}
        right = reference(**first, **FLAGS, initial_state=initial).final_state[0]
        assert (pool[slot].double() - right).norm() <= 2.0**-7 * right.norm()
    right = reference(**x, **FLAGS, initial_state=initial).final_state[0]
    assert (pool[3].double() - right).norm() <= 2.0**-7 * right.norm()
    assert pool[6].isnan().all()
