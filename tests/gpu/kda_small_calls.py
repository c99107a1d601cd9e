"""Small calls of the KDA operators, for `tests.gpu.small_calls`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import torch

import cute_attn
from cute_attn.kernels.delta.chunk.spec import CHUNK
from cute_attn.ops import kda
from cute_attn.ops.kda.chunk_spans import chain
from tests.gpu.named_calls import LENGTHS, Group, Named, differentiate, on_device
from tests.ops import kda_cases, kda_decode_cases, test_kda_stages_backward
from tests.ops.kda_calls import OPERATORS
from tests.ops.test_kda_gradients import INPUTS as KDA_INPUTS
from tests.ops.test_kda_gradients import weights
from tests.ops.test_kda_pool import SERVER, pool_call

CHUNK_KDA = {
    "dense": (kda_cases.PLAIN, (sum(LENGTHS),)),
    "packed": (kda_cases.PACKED, LENGTHS),
    "float16, K = V = 64": (kda_cases.SMALL, (sum(LENGTHS),)),
}
LONG = 33 * CHUNK  # so long a sequence is split, with one head
DECODE = {
    "slots": kda_decode_cases.Kernel(),
    "several tokens, positions": kda_decode_cases.Kernel(multi_token=True, slots="positions"),
    "several tokens, records": kda_decode_cases.Kernel(multi_token=True, slots="records"),
}


def by_tokens(device: str) -> Iterator[Named]:
    for name, kernel in DECODE.items():
        decode = kda_decode_cases.Case(kernel, tokens=3 if kernel.multi_token else 1)
        given = decode.inputs(device)
        yield f"kda_decode, {name}", lambda given=given: cute_attn.kda_decode(**given)
    recurrent = on_device(OPERATORS["fused_recurrent_kda"].arguments(), device)
    yield "fused_recurrent_kda", lambda: cute_attn.fused_recurrent_kda(**recurrent)


def chunk_kda(device: str) -> Iterator[Named]:
    for name, (kind, lengths) in CHUNK_KDA.items():
        case = kda_cases.Case(kind=kind, lengths=lengths, heads=2)
        for modular in (False, True):
            given = case.arguments(device) | {"return_intermediate_states": modular}
            path = "modular" if modular else "fused"
            yield (
                f"chunk_kda, {name}, {path}",
                torch.inference_mode()(lambda given=given: cute_attn.chunk_kda(**given)),
            )
    long = kda_cases.Case(lengths=(LONG,), heads=1, group=1).arguments(device)
    yield "chunk_kda, split", torch.inference_mode()(lambda: cute_attn.chunk_kda(**long))
    pool = pool_call(kda_cases.Case(SERVER, LENGTHS, heads=2).arguments(device)).given
    yield "chunk_kda, pool", torch.inference_mode()(lambda: cute_attn.chunk_kda(**pool))
    moves, states = (torch.randn(1, 2, 2, rows, 128, device=device) for rows in (256, 128))
    steps = torch.tensor([[(0, 0), (1, 1)]], dtype=torch.int32, device=device)
    for start in (states, None):
        yield "transitions of spans", lambda start=start: chain(start, moves, steps, states)


def kda_gradients(device: str) -> Iterator[Named]:
    recompute = on_device(OPERATORS["kda_recompute_w_u"].arguments(), device)
    yield "kda_recompute_w_u", lambda: kda.kda_recompute_w_u(**recompute)
    for name, (kind, lengths) in CHUNK_KDA.items():
        given = kda_cases.Case(kind=kind, lengths=lengths, heads=2).arguments(device)
        title = f"gradients of chunk_kda, {name}"
        yield title, differentiate(cute_attn.chunk_kda, given, KDA_INPUTS)
    long = kda_cases.Case(lengths=(LONG,), heads=1, group=1).arguments(device)
    title = "gradients of chunk_kda, split"
    yield title, differentiate(cute_attn.chunk_kda, long, KDA_INPUTS)

    stages = test_kda_stages_backward
    given = kda_cases.Case(stages.FEW, (sum(LENGTHS),), heads=2).arguments(device)

    def modular() -> None:
        with mock.patch.object(stages, "poisoned_outputs", nullcontext):
            stages.put_together(given, weights(given))

    yield "gradients of chunk_kda, modular", modular


CALLS: dict[str, Group] = {
    "by_tokens": by_tokens,
    "chunk_kda": chunk_kda,
    "kda_gradients": kda_gradients,
}
