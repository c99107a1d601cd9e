"""Operators on GPUs other than sm_90 and sm_100, which the tests of each operator cover, emulated.

Kernels of KDA differ there: `mma.sync` in place of `wgmma`, copies by cp.async before sm_90, and
less shared memory on sm_86, sm_89 and sm_120. `make test` runs what differs most; the rest of the
product of operators and architectures is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import cute_attn
from cute_attn import launch
from cute_attn.emulator import Emulator
from cute_attn.ops.kda import chunk
from cute_attn.reference.attention import (
    attention_gradients,
    attention_gradients_in_low_precision,
    attention_in_low_precision,
    attention_reference,
)

from . import kda_cases, kda_decode_cases, lightning_cases, test_kda_recurrent
from .attention_cases import is_known
from .test_kda_gradients import assert_agrees as assert_gradients_agree
from .test_kda_gradients import differentiated, weights

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_103a", "sm_120a")


@contextmanager
def segments_of_a_chunk() -> Iterator[None]:
    """As where few long sequences are to fill a large GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk, "chunks_per_segment", lambda **_: 1)
        patch.setattr(launch, "num_sms", lambda _: 10**6)
        yield


def chunk_kda() -> None:
    args = kda_cases.Case(kda_cases.PACKED, (70, 0, 130), gates="strong").arguments("cpu")
    kda_cases.assert_agrees(args, *kda_cases.run(args))


def chunk_kda_in_segments() -> None:
    with segments_of_a_chunk():
        chunk_kda()


def chunk_kda_by_stages() -> None:
    args = kda_cases.Case(kda_cases.SMALL, (70,)).arguments("cpu")
    kda_cases.assert_agrees(args, *kda_cases.run(args, return_intermediate_states=True))


def gradients(dim: int) -> None:
    kind = kda_cases.SMALL if dim == 64 else kda_cases.PACKED
    args = kda_cases.Case(kind, (70,), gates="usual").arguments("cpu")
    of = weights(args)
    assert_gradients_agree(args, of, differentiated(args, of))


def fused_recurrent_kda() -> None:
    for kernel in test_kda_recurrent.EMULATED[:2]:
        args = test_kda_recurrent.Case(kernel).inputs("cpu")
        test_kda_recurrent.assert_agrees(args, test_kda_recurrent.run(args))


def kda_decode() -> None:
    for slots in ("indexed", "records"):
        kernel = kda_decode_cases.Kernel(slots=slots, multi_token=slots == "records")
        args = kda_decode_cases.Case(kernel, padded=1, tokens=2).inputs("cpu")
        kda_decode_cases.assert_agrees(args, kda_decode_cases.run(args))


def lightning_attn_decode() -> None:
    for tokens, records in ((None, None), (3, 2)):
        case = lightning_cases.Case(tokens=tokens, records=records, slots=5, padded=1)
        args = case.inputs("cpu")
        lightning_cases.assert_agrees(args, *lightning_cases.run(args))


def flash_attn_func() -> None:
    """Forward and backward, causal, GQA."""
    q, k, v = (torch.randn(1, 130, n, 256).to(torch.bfloat16) for n in (2, 1, 1))
    do = torch.randn_like(q)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = cute_attn.flash_attn_func(*leaves, causal=True)
    found = torch.autograd.grad(o, leaves, do)
    exact = attention_reference(q, k, v, causal=True)[0].detach()
    plain = attention_in_low_precision(q, k, v, causal=True)[0].detach()
    kda_cases.assert_no_worse(o.detach(), plain, exact, "o")
    exact_gradients = attention_gradients(q, k, v, do, causal=True)
    plain_gradients = attention_gradients_in_low_precision(q, k, v, do, causal=True)
    for name, ours in zip(("dq", "dk", "dv"), found, strict=True):
        theirs, true = (getattr(x, name) for x in (plain_gradients, exact_gradients))
        kda_cases.assert_no_worse(ours, theirs.detach(), true, name)


def flash_attn_combine() -> None:
    o, lse = torch.randn(3, 2, 9, 2, 128), torch.randn(3, 2, 9, 2)
    exact, plain = (
        ((lse.to(dtype) - lse.to(dtype).logsumexp(0)).exp()[..., None] * o.to(dtype)).sum(0)
        for dtype in (torch.float64, torch.float32)
    )
    out, _ = cute_attn.flash_attn_combine(o, lse)
    kda_cases.assert_no_worse(out, plain, exact)


CALLS: dict[str, Callable[[], None]] = {
    "chunk_kda": chunk_kda,
    "chunk_kda in segments": chunk_kda_in_segments,
    "chunk_kda by stages": chunk_kda_by_stages,
    "gradients, K = 64": lambda: gradients(64),
    "gradients, K = 128": lambda: gradients(128),
    "fused_recurrent_kda": fused_recurrent_kda,
    "kda_decode": kda_decode,
    "lightning_attn_decode": lightning_attn_decode,
    "flash_attn_combine": flash_attn_combine,
    "flash_attn_func": flash_attn_func,
}
# The first are refused, see test_kda_arguments.py: their shared memory is too small.
NOT_THERE = {("gradients, K = 128", arch) for arch in ("sm_86", "sm_89")} | {
    ("flash_attn_func", arch) for arch in ARCHS if arch != "sm_103a"
}
IN_MAKE_TEST = {
    ("chunk_kda", "sm_80"),
    ("fused_recurrent_kda", "sm_80"),
    ("kda_decode", "sm_120a"),
    ("lightning_attn_decode", "sm_89"),
    ("flash_attn_combine", "sm_86"),
}
CASES = [
    pytest.param(name, arch, marks=() if (name, arch) in IN_MAKE_TEST else pytest.mark.slow)
    for name in CALLS
    for arch in ARCHS
    if (name, arch) not in NOT_THERE
]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_agrees_with_the_reference(name: str, arch: str):
    torch.manual_seed(0)
    emulator = Emulator(schedule="random", seed=1)
    with cute_attn.emulated(arch, emulator):
        CALLS[name]()
    assert emulator.report.launches
    assert all(map(is_known, emulator.report.findings)), emulator.report
